"""Launch of the Hopper linear compression kernels: sizes, TMA descriptors, and the reasons why a call cannot take them.

Shape letters: U users, B candidates, Ku/Kc features, D embedding size, M outputs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikbo_recsys.kernels import _tuning
from ikbo_recsys.kernels._launch import TMA_ALIGNMENT, cdiv, device_guard, is_tma_ready, multiprocessors
from ikbo_recsys.kernels._plan import Launch
from ikbo_recsys.kernels._tma import TensorLayout, launch

ROWS = 64
USER_STEP, USER_STAGES = 64, 4
STEP = 32


class Tiling(NamedTuple):
    """How a block of `candidate_kernel` uses its multiprocessor.

    Attributes:
        group: consumers of 64 rows that share what is loaded of `cand`.
        stages: of 32 x 256 elements of `cand`.
        weight_buffers: of 64 x 32 elements of the weight, for which 227 KiB of shared memory have room beside the
            stages and the output.
    """

    group: int
    stages: int
    weight_buffers: int


PAIRS, TRIPLES = Tiling(2, 6, 28), Tiling(3, 5, 30)
# Not timed yet, as TRIPLES: more stages for fewer weights that stay; what narrower columns leave room for.
_DEEPER = {256: Tiling(2, 7, 24), 128: Tiling(2, 10, 28), 64: Tiling(2, 16, 36)}


def tilings(row_tiles: int, cols: int) -> tuple[Tiling, ...]:
    """Those that a number of row tiles allows (whole groups, or one tile more) for columns of a width, the default
    first.

    Triples read less from L2, 2120 KiB for 2448 per candidate at the default case of the benchmark.
    """
    triples = (TRIPLES,) if row_tiles >= 3 and row_tiles % 3 < 2 else ()
    return (PAIRS, *triples, _DEEPER[cols])


class CandidateSizes(NamedTuple):
    """How `candidate_kernel` divides K and its weight buffers; the names are those of its arguments."""

    steps: int
    resident: int
    ring: int
    tail_resident: int
    weight_buffers: int


@functools.lru_cache(maxsize=1024)
def candidate_sizes(features: int, row_tiles: int, tiling: Tiling = PAIRS) -> CandidateSizes:
    """A group's blocks keep every third step of the weight for life as far as the buffers go; the ring holds the other
    steps.

    Of any `stages` steps in a row at least a third, rounded down, are multiples of 3: when all multiples stay, the ring
    needs room for the others, 4 of 6. Else it has one for each stage. Tail blocks have the rows of one consumer: they
    keep all, or all but a ring of one for each stage.
    """
    group, stages, most = tiling
    steps = cdiv(features, STEP)
    resident, ring = cdiv(steps, 3), stages - stages // 3
    if group * (resident + ring) > most:
        ring = stages
        resident = min(resident, most // group - ring)
    tail_resident = steps if steps <= most else most - stages
    buffers = group * (resident + ring) if row_tiles >= group else 0
    if row_tiles % group:
        buffers = max(buffers, tail_resident + (0 if tail_resident == steps else stages))
    return CandidateSizes(steps, resident, ring, tail_resident, buffers)


def grid(batch: int, row_tiles: int, col_tiles: int, most: int, group: int = 2, more_tails: int = 0) -> tuple[int, int]:
    """`(blocks, tail blocks)` of `candidate_kernel`, at most `most` blocks; `more_tails` than the rule says.

    Tail blocks take a candidate for each of their consumers while the others take one, so with one tail block for every
    `row_tiles` blocks all of them go through the batch at the same pace, and a candidate's rows are read from memory
    once and from L2 by the others. Away from that ratio they drift apart: at 132 blocks, 7 row tiles and pairs, 19 tail
    blocks (rounded up: late ones would end late) took 0.363 ms where 18 took 0.487 and 21 took 0.386 to 0.407 (H200,
    default case of the benchmark, fp16).
    """
    groups = row_tiles // group
    tail_units = cdiv(batch, group) * col_tiles if row_tiles % group else 0
    blocks = min(most, groups * batch * col_tiles + tail_units)
    if tail_units == 0 or groups == 0:
        return blocks, blocks if tail_units else 0
    return blocks, max(1, min(cdiv(blocks, row_tiles) + more_tails, tail_units, blocks - groups))


class Choice(NamedTuple):
    """What `_tuning.py` chooses from."""

    tiling: Tiling
    more_tails: int = 0


def choices(row_tiles: int, cols: int) -> list[Choice]:
    """Every tiling, and other numbers of tail blocks for the default one; the default first."""
    found = [Choice(tiling) for tiling in tilings(row_tiles, cols)]
    if row_tiles % PAIRS.group and row_tiles > 1:
        found += [Choice(PAIRS, more) for more in (-1, 1, 2)]
    return found


def columns(size: int) -> int:
    """Columns of a tile."""
    return 256 if size > 128 else 128 if size > 64 else 64


def type_refusal(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot take a dtype, or None."""
    if dtype in (torch.float16, torch.bfloat16):
        return None
    return f"the kernel takes float16 and bfloat16, not {dtype}"


def refusal(user: Tensor, cand: Tensor, num_m: int) -> str | None:
    """Why the kernels cannot take the call, or None. Device, library and empty tensors are looked at elsewhere."""
    size = cand.shape[2]
    if size * cand.element_size() % TMA_ALIGNMENT:
        return f"the result's rows of {size} elements are not multiples of {TMA_ALIGNMENT} bytes"
    most = (multiprocessors(cand.device) - 1) * PAIRS.group * ROWS
    if num_m > most:
        return f"the kernel gives each group of outputs a multiprocessor of its own: {num_m} are more than {most}"
    for name, tensor in (("user", user), ("cand", cand)):
        if not is_tma_ready(tensor):
            return f"{name} is not aligned to {TMA_ALIGNMENT} bytes in its base and its strides {tensor.stride()}"
    return type_refusal(cand.dtype)


class Forward:
    """The two launches of calls that differ from this one in contents and addresses only.

    Args:
        user_UKD, cand_BKD: as `refusal` asks for.
        weight_user_MK, weight_cand_MK: both parts of the weight, aligned for TMA.
        to_user_B, bias_M: of any alignment.
        choice: of `choices`.
    """

    def __init__(
        self,
        user_UKD: Tensor,
        cand_BKD: Tensor,
        weight_user_MK: Tensor,
        weight_cand_MK: Tensor,
        to_user_B: Tensor,
        bias_M: Tensor | None,
        choice: Choice,
    ) -> None:
        (num_users, user_features, size), (batch, features, _) = user_UKD.shape, cand_BKD.shape
        num_m = weight_user_MK.shape[0]
        cols = columns(size)
        row_tiles, col_tiles = cdiv(num_m, ROWS), cdiv(size, cols)
        self._dtype, self._device = cand_BKD.dtype, cand_BKD.device
        self._out_shape = (batch, num_m, size)
        self._part_shape = (num_users * row_tiles * col_tiles, ROWS * cols)
        most = multiprocessors(cand_BKD.device)
        shared = {"ROW_TILES": row_tiles, "COL_TILES": col_tiles}
        facts = (cand_BKD.dtype, cand_BKD.get_device(), cols)
        self._launch_user(facts, shared, user_features, num_m, bias_M, most)
        self._launch_cand(facts, shared, (num_users, batch, features), to_user_B, most, choice)
        out = TensorLayout(self._out_shape, (num_m * size, size, 1), (1, ROWS, min(64, cols // 2)))
        self._user_layouts = (
            TensorLayout.of(weight_user_MK, (ROWS, USER_STEP)),
            TensorLayout.of(user_UKD, (1, USER_STEP, cols)),
        )
        self._cand_layouts = (
            TensorLayout.of(weight_cand_MK, (ROWS, STEP)),
            TensorLayout.of(cand_BKD, (1, STEP, cols)),
            out,
        )

    def _launch_user(
        self,
        facts: tuple[Any, ...],
        shared: dict[str, int],
        features: int,
        num_m: int,
        bias: Tensor | None,
        most: int,
    ) -> None:
        from ikbo_recsys.kernels._gluon.compression_linear import user_part_kernel

        tiles = self._part_shape[0]
        # M is specialized on as Triton does: whether it is 1 or divisible by 16.
        key = (*facts, bias is None or bias.data_ptr() % 16 == 0, num_m == 1, num_m % 16 == 0)
        constants = {
            **shared,
            "STEPS": cdiv(features, USER_STEP),
            "STAGES": USER_STAGES,
            "HAS_BIAS": bias is not None,
        }
        self._user_numbers = (num_m, tiles)
        self._user_launch = Launch(user_part_kernel, key, min(most, tiles), constants, num_warps=4)

    def _launch_cand(
        self,
        facts: tuple[Any, ...],
        shared: dict[str, int],
        sizes: tuple[int, int, int],
        to_user: Tensor,
        most: int,
        choice: Choice,
    ) -> None:
        from ikbo_recsys.kernels._gluon.compression_linear import candidate_kernel

        num_users, batch, features = sizes
        tiling, row_tiles = choice.tiling, shared["ROW_TILES"]
        division = candidate_sizes(features, row_tiles, tiling)
        blocks, tail_blocks = grid(batch, row_tiles, shared["COL_TILES"], most, tiling.group, choice.more_tails)
        constants = {
            **shared,
            "STEPS": division.steps,
            "STAGES": tiling.stages,
            "RESIDENT": division.resident,
            "RING": division.ring,
            "TAIL_RESIDENT": division.tail_resident,
            "WEIGHT_BUFFERS": division.weight_buffers,
            "GROUP": tiling.group,
        }
        self._cand_numbers = (num_users, batch, tail_blocks)
        key = (*facts, to_user.dtype)
        self._cand_launch = Launch(candidate_kernel, key, blocks, constants, num_warps=4, launch_pdl=True)

    def __call__(
        self, user: Tensor, cand: Tensor, weights: tuple[Tensor, Tensor], to_user: Tensor, bias: Tensor | None
    ) -> Tensor:
        out = torch.empty(self._out_shape, dtype=self._dtype, device=self._device)
        part = torch.empty(self._part_shape, dtype=self._dtype, device=self._device)
        user_rest = (part if bias is None else bias, part, *self._user_numbers)
        with device_guard(cand):
            launch(self._user_launch, self._user_layouts, (weights[0], user), user_rest)
            cand_rest = (part, to_user, *self._cand_numbers)
            launch(self._cand_launch, self._cand_layouts, (weights[1], cand, out), cand_rest)
        return out


def forward_launches(
    user: Tensor, cand: Tensor, weights: tuple[Tensor, Tensor], to_user: Tensor, bias: Tensor | None
) -> Forward:
    """The launches for a call, chosen by measurement where that was asked for."""

    def made(choice: Choice) -> Forward:
        return Forward(user, cand, *weights, to_user, bias, choice)

    options = choices(cdiv(weights[0].shape[0], ROWS), columns(cand.shape[2]))
    shape = (user.shape, cand.shape, weights[0].shape[0], cand.dtype, cand.get_device())
    with device_guard(cand):
        best = _tuning.fastest(
            "compression_linear",
            shape,
            options,
            lambda choice: functools.partial(made(choice), user, cand, weights, to_user, bias),
        )
    return made(best)
