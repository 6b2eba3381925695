"""Launch of the Hopper linear compression kernels: sizes, TMA descriptors, and the reasons why a call cannot take them.

Shape letters: U users, B candidates, Ku/Kc features, D embedding size, M outputs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ikbo_recsys.kernels import _tuning
from ikbo_recsys.kernels._launch import TMA_ALIGNMENT, Room, cdiv, is_tma_ready, multiprocessors
from ikbo_recsys.kernels._plan import Launch
from ikbo_recsys.kernels._tma import TensorLayout

ROWS = 64
USER_STEP, USER_STRIP = 64, 64
USER_WEIGHTS, USER_STRIPS = 10, 16
"""Buffers of the user's part, of ROWS x USER_STEP of the weight and of USER_STEP x USER_STRIP of `user`: 4 stages of
tiles of 256 columns, 8 of 128, 10 of 64, which are 160 to 192 KB under way."""
STEP = 32
STAGES = {256: 6, 128: 8, 64: 12}
"""Of STEP x columns elements of `cand`, by columns: steps of narrow tiles take less time, and have as long to wait."""
SHARED_MEMORY = 226 << 10
"""Of a block, without its barriers."""
WEIGHT_BYTES = ROWS * STEP * 2
TAIL_UNIT = 1.13
"""A tail block's unit takes so many times as long as a pair's: as many products, and the rows of two candidates come
from L2 for them. At 7 row tiles and 132 blocks it gives 21 tail blocks. Least time took, of 20 to 25, 21 at D = 256 and
20 at D = 128, and of 15 to 21, 21 at D = 64 (H200, Kc = 866; `IKBO_TUNE=1` measures a call's own shape)."""
MANY_TILES = 8
"""Of the user's part, for each multiprocessor: with more, its kernel is bound by L2 and not by its number of blocks."""


class CandidateSizes(NamedTuple):
    """How `candidate_kernel` divides K and its weight buffers; the names are those of its arguments."""

    last: int
    steps: int
    resident: int
    ring: int
    tail_resident: int
    weight_buffers: int


@functools.lru_cache(maxsize=1024)
def candidate_sizes(features: int, row_tiles: int, cols: int) -> CandidateSizes:
    """As many steps' weights as there is room for stay in shared memory for life, evenly spread; a ring holds those of
    the others that can be in flight.

    A pair's blocks have two row tiles, tail blocks one: they keep all of it, or all but a ring of one for each stage.
    """
    steps, stages = cdiv(features, STEP), STAGES[cols]
    # A product takes 16 features at a time.
    last = 16 if 0 < features % STEP <= 16 else STEP
    most = (SHARED_MEMORY - stages * STEP * cols * 2 - 2 * ROWS * part_columns(cols) * 2) // WEIGHT_BYTES

    def ring(resident: int) -> int:
        """Of any `stages` steps in a row, how many are not among the resident ones."""
        return cdiv(stages * (steps - resident), steps)

    resident = next(n for n in range(min(steps, most // 2), -1, -1) if 2 * (n + ring(n)) <= most)
    tail_resident = steps if steps <= most else most - stages
    buffers = 2 * (resident + ring(resident)) if row_tiles >= 2 else 0
    if row_tiles % 2:
        buffers = max(buffers, tail_resident + (0 if tail_resident == steps else stages))
    return CandidateSizes(last, steps, resident, ring(resident), tail_resident, buffers)


def grid(batch: int, row_tiles: int, col_tiles: int, most: int, more_tails: int = 0) -> tuple[int, int]:
    """`(blocks, tail blocks)` of `candidate_kernel`, at most `most` blocks; `more_tails` than the rule says.

    A pair's unit is one candidate, a tail's two. All blocks should go through the batch at the same pace: then a
    candidate's rows are read from memory once, and from L2 by the others; blocks that drift apart read them again.
    """
    pairs = row_tiles // 2
    tail_units = cdiv(batch, 2) * col_tiles if row_tiles % 2 else 0
    blocks = min(most, pairs * batch * col_tiles + tail_units)
    if tail_units == 0 or pairs == 0:
        return blocks, blocks if tail_units else 0
    tails = round(blocks / (1 + 2 * pairs / TAIL_UNIT)) + more_tails
    return blocks, max(1, min(tails, tail_units, blocks - pairs))


class Choice(NamedTuple):
    """What `_tuning.py` chooses from."""

    more_tails: int = 0


def choices(row_tiles: int) -> list[Choice]:
    """Other numbers of tail blocks than the rule says; what it says first."""
    return [Choice(more) for more in ((0, -2, -1, 1, 2) if row_tiles % 2 and row_tiles > 1 else (0,))]


def columns(size: int) -> int:
    """Columns of a tile."""
    return 256 if size > 128 else 128 if size > 64 else 64


def part_columns(cols: int) -> int:
    """Columns of a tile that are stored or loaded at a time."""
    return min(64, cols // 2)


def part_shape(weight_MK: Tensor, user_UKD: Tensor) -> tuple[int, int]:
    """Of the user's part in fragment order: its tiles, and the pairs of columns in one."""
    num_users, _, size = user_UKD.shape
    cols = columns(size)
    return num_users * cdiv(weight_MK.shape[0], ROWS) * cdiv(size, cols), ROWS * cols // 2


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
    most = (multiprocessors(cand.device) - 1) * 2 * ROWS
    if num_m > most:
        return f"the kernel gives each group of outputs a multiprocessor of its own: {num_m} are more than {most}"
    for name, tensor in (("user", user), ("cand", cand)):
        if not is_tma_ready(tensor):
            return f"{name} is not aligned to {TMA_ALIGNMENT} bytes in its base and its strides {tensor.stride()}"
    return type_refusal(cand.dtype)


def tile_strips(tiles: int, cols: int, most: int) -> int:
    """Strips of USER_STRIP columns in a tile of the user's part, where there would be `tiles` of `cols` columns: as few
    as keep the number of tiles at most `most`, the number of multiprocessors, or all of them.

    A block loads alone what its tile needs: where tiles are few, more and narrower ones load at the same time.
    """
    return next(n for n in (1, 2, 4) if n * USER_STRIP >= cols or tiles * cols <= most * n * USER_STRIP)


class UserPart:
    """`weight @ user[u] (+ bias)` in fragment order, for calls that differ in contents and addresses only.

    Args:
        weight_MK, user_UKD: as `refusal` asks for; the weight aligned for TMA.
        bias_M: of any alignment.
    """

    def __init__(self, weight_MK: Tensor, user_UKD: Tensor, bias_M: Tensor | None) -> None:
        from ikbo_recsys.kernels._gluon.compression_user import user_part_kernel

        _, features, size = user_UKD.shape
        num_m, cols = weight_MK.shape[0], columns(size)
        shape = part_shape(weight_MK, user_UKD)
        self._part, most = Room(shape, torch.int32, user_UKD.device), multiprocessors(user_UKD.device)
        strips = tile_strips(shape[0], cols, most)
        tiles = shape[0] * cols // (strips * USER_STRIP)
        # M is specialized on as Triton does: whether it is 1 or divisible by 16.
        facts = (bias_M is None or bias_M.data_ptr() % 16 == 0, num_m == 1, num_m % 16 == 0)
        key = (user_UKD.dtype, user_UKD.get_device(), *facts)
        # None depends on the number of users: another one compiles nothing.
        constants = {
            "ROW_TILES": cdiv(num_m, ROWS),
            "COLS": cols,
            "COL_TILES": cdiv(size, cols),
            "STEPS": cdiv(features, USER_STEP),
            "WEIGHT_BUFFERS": USER_WEIGHTS,
            "USER_BUFFERS": USER_STRIPS,
            "HAS_BIAS": bias_M is not None,
        }
        self._numbers = (num_m, tiles, strips)
        self._layouts = (
            TensorLayout.of(weight_MK, (ROWS, USER_STEP)),
            TensorLayout.of(user_UKD, (1, USER_STEP, USER_STRIP)),
        )
        self._launch = Launch(user_part_kernel, key, min(most, tiles), constants, num_warps=4)

    def __call__(self, weight: Tensor, user: Tensor, bias: Tensor | None) -> Tensor:
        part = self._part()
        self._launch((weight, user, part if bias is None else bias, part, *self._numbers), self._layouts)
        return part


class CandidatePart:
    """`weight @ cand[b] (+ user_part[to_user[b]])`, for calls that differ in contents and addresses only.

    Args:
        weight_MK, cand_BKD: as `refusal` asks for; the weight aligned for TMA.
        num_users, to_user_B: of any alignment; None where no user's part is added.
        more_tails: of `Choice`.
    """

    def __init__(
        self,
        weight_MK: Tensor,
        cand_BKD: Tensor,
        num_users: int = 0,
        to_user_B: Tensor | None = None,
        more_tails: int = 0,
    ) -> None:
        shape = (cand_BKD.shape[0], weight_MK.shape[0], cand_BKD.shape[2])
        self._out = Room(shape, cand_BKD.dtype, cand_BKD.device)
        self._numbers, self._layouts, self._launch = _product(weight_MK, cand_BKD, num_users, to_user_B, more_tails)

    def __call__(
        self, weight: Tensor, cand: Tensor, part: Tensor | None = None, to_user: Tensor | None = None
    ) -> Tensor:
        out = self._out()
        # An absent one is never read: any pointer stands for it.
        pointers = (out if part is None else part, out if to_user is None else to_user, out)
        self._launch((weight, cand, out, *pointers, *self._numbers), self._layouts)
        return out


class ManyUsers:
    """`UserPart` by `candidate_kernel`."""

    def __init__(self, weight_MK: Tensor, user_UKD: Tensor, bias_M: Tensor | None) -> None:
        self._part = Room(part_shape(weight_MK, user_UKD), torch.int32, user_UKD.device)
        self._numbers, self._layouts, self._launch = _product(weight_MK, user_UKD, is_user=True, bias_M=bias_M)

    def __call__(self, weight: Tensor, user: Tensor, bias: Tensor | None) -> Tensor:
        part = self._part()
        # Nothing is stored by the third descriptor: any tensor that one can be made of stands for it.
        pointers = (part, part, part if bias is None else bias)
        self._launch((weight, user, user, *pointers, *self._numbers), self._layouts)
        return part


def _product(
    weight_MK: Tensor,
    x_BKD: Tensor,
    num_users: int = 0,
    to_user_B: Tensor | None = None,
    more_tails: int = 0,
    *,
    is_user: bool = False,
    bias_M: Tensor | None = None,
) -> tuple[tuple[int, ...], tuple[TensorLayout, ...], Launch]:
    """Of `candidate_kernel`: the numbers of a launch, its descriptors, and the launch."""
    from ikbo_recsys.kernels._gluon.compression_linear import candidate_kernel

    batch, features, size = x_BKD.shape
    num_m, cols = weight_MK.shape[0], columns(size)
    row_tiles, col_tiles = cdiv(num_m, ROWS), cdiv(size, cols)
    sizes = candidate_sizes(features, row_tiles, cols)
    blocks, tail_blocks = grid(batch, row_tiles, col_tiles, multiprocessors(x_BKD.device), more_tails)
    constants = {
        "HAS_USER": to_user_B is not None,
        "IS_USER": is_user,
        "HAS_BIAS": bias_M is not None,
        "ROW_TILES": row_tiles,
        "COL_TILES": col_tiles,
        "STAGES": STAGES[cols],
        **{name.upper(): number for name, number in sizes._asdict().items()},
    }
    box = (1, ROWS, part_columns(cols))
    out = TensorLayout.of(x_BKD, box) if is_user else TensorLayout((batch, num_m, size), (num_m * size, size, 1), box)
    layouts = (TensorLayout.of(weight_MK, (ROWS, STEP)), TensorLayout.of(x_BKD, (1, STEP, cols)), out)
    key = (x_BKD.dtype, x_BKD.get_device(), cols, None if to_user_B is None else to_user_B.dtype)
    # Without a user's part there is no kernel before it that lets it begin early.
    return (
        (num_m, num_users, batch, tail_blocks),
        layouts,
        Launch(candidate_kernel, key, blocks, constants, num_warps=4, launch_pdl=to_user_B is not None),
    )


class Forward:
    """The two launches of calls that differ from this one in contents and addresses only."""

    def __init__(
        self,
        user: Tensor,
        cand: Tensor,
        weights: tuple[Tensor, Tensor],
        to_user: Tensor,
        bias: Tensor | None,
        choice: Choice,
    ) -> None:
        many = part_shape(weights[0], user)[0] > MANY_TILES * multiprocessors(user.device)
        self._user = (ManyUsers if many else UserPart)(weights[0], user, bias)
        self._cand = CandidatePart(weights[1], cand, user.shape[0], to_user, choice.more_tails)

    def __call__(
        self, user: Tensor, cand: Tensor, weights: tuple[Tensor, Tensor], to_user: Tensor, bias: Tensor | None
    ) -> Tensor:
        return self._cand(weights[1], cand, self._user(weights[0], user, bias), to_user)


def forward_launches(
    user: Tensor, cand: Tensor, weights: tuple[Tensor, Tensor], to_user: Tensor, bias: Tensor | None
) -> Forward:
    """The launches for a call, chosen by measurement where that was asked for."""

    def made(choice: Choice) -> Forward:
        return Forward(user, cand, weights, to_user, bias, choice)

    options = choices(cdiv(weights[0].shape[0], ROWS))
    shape = (user.shape, cand.shape, weights[0].shape[0], cand.dtype, cand.get_device())
    best = _tuning.fastest(
        "compression_linear",
        shape,
        options,
        lambda choice: functools.partial(made(choice), user, cand, weights, to_user, bias),
    )
    return made(best)
