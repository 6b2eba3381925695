"""Launch of the Hopper linear compression kernels: sizes, TMA descriptors, and the reasons why a call cannot take them.

Shape letters: U users, B candidates, Ku/Kc features, D embedding size, M outputs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikbo_recsys.kernels._launch import TMA_ALIGNMENT, cdiv, device_guard, is_tma_ready, multiprocessors
from ikbo_recsys.kernels._plan import Launch

ROWS = 64
USER_STEP, USER_STAGES = 64, 4
STEP, STAGES = 32, 6
WEIGHT_BUFFERS = 28
"""Blocks of 64 x 32 of the weight: what 227 KiB of shared memory have room for beside 6 stages of 32 x 256 and the
output."""


class CandidateSizes(NamedTuple):
    """How `candidate_kernel` divides K and its weight buffers; the names are those of its arguments."""

    steps: int
    resident: int
    ring: int
    tail_resident: int
    weight_buffers: int


@functools.lru_cache(maxsize=1024)
def candidate_sizes(features: int, row_tiles: int) -> CandidateSizes:
    """Pair blocks keep every third step of the weight for life as far as the buffers go; the ring holds the other
    steps.

    In any 6 steps (as many as there are stages) at most 4 are not multiples of 3, so a ring of 4 is enough when all
    multiples stay; else it has to be 6. Tail blocks have half the rows: they keep all, or all but a ring of 6.
    """
    steps = cdiv(features, STEP)
    resident, ring = cdiv(steps, 3), 4
    if 2 * (resident + ring) > WEIGHT_BUFFERS:
        ring = STAGES
        resident = min(resident, WEIGHT_BUFFERS // 2 - ring)
    tail_resident = steps if steps <= WEIGHT_BUFFERS else WEIGHT_BUFFERS - STAGES
    buffers = 2 * (resident + ring) if row_tiles > 1 else 0
    if row_tiles % 2:
        buffers = max(buffers, tail_resident + (0 if tail_resident == steps else STAGES))
    return CandidateSizes(steps, resident, ring, tail_resident, buffers)


def grid(batch: int, row_tiles: int, col_tiles: int, most: int) -> tuple[int, int]:
    """`(blocks, tail blocks)` of `candidate_kernel`, at most `most` blocks.

    Tail blocks take two candidates while pair blocks take one, so with one tail block for every `row_tiles` blocks
    all of them go through the batch at the same pace, and a candidate's rows are read from memory once and from L2 by
    the others. Away from that ratio they drift apart: at 132 blocks and 7 row tiles, 19 tail blocks (rounded up: late
    ones would end late) took 0.363 ms where 18 took 0.487 and 21 took 0.386 to 0.407 (H200, default case of the
    benchmark, fp16).
    """
    pairs = row_tiles // 2
    pair_units = batch * col_tiles
    tail_units = cdiv(batch, 2) * col_tiles if row_tiles % 2 else 0
    blocks = min(most, pairs * pair_units + tail_units)
    if tail_units == 0 or pairs == 0:
        return blocks, blocks if tail_units else 0
    return blocks, max(1, min(cdiv(blocks, row_tiles), tail_units, blocks - pairs))


def type_refusal(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot take a dtype, or None."""
    if dtype in (torch.float16, torch.bfloat16):
        return None
    return f"the kernel takes float16 and bfloat16, not {dtype}"


def refusal(user: Tensor, cand: Tensor) -> str | None:
    """Why the kernels cannot take the call, or None. Device, library and empty tensors are looked at elsewhere."""
    for name, tensor in (("user", user), ("cand", cand)):
        if not is_tma_ready(tensor):
            return f"{name} is not aligned to {TMA_ALIGNMENT} bytes in its base and its strides {tensor.stride()}"
    return type_refusal(cand.dtype)


def compression_linear(
    user_UKD: Tensor,
    cand_BKD: Tensor,
    weight_user_MK: Tensor,
    weight_cand_MK: Tensor,
    to_user_B: Tensor,
    bias_M: Tensor | None,
) -> Tensor:
    """The operator; both parts of the weight aligned for TMA."""
    tensors = (user_UKD, cand_BKD, weight_user_MK, weight_cand_MK)
    bias_alignment = None if bias_M is None else bias_M.data_ptr() % TMA_ALIGNMENT
    facts = (cand_BKD.dtype, to_user_B.dtype, cand_BKD.device, bias_alignment)
    key = (facts, *(t.shape for t in tensors), *(t.stride() for t in tensors))
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _Plan(facts, *tensors)
    return plan(user_UKD, cand_BKD, weight_user_MK, weight_cand_MK, to_user_B, bias_M)


_MOST_PLANS = 1024
_plans: dict[Any, _Plan] = {}


class _Plan:
    """The two launches of calls whose tensors have the same shapes, strides and dtypes: found out once."""

    def __init__(
        self, facts: tuple[Any, ...], user: Tensor, cand: Tensor, weight_user: Tensor, weight_cand: Tensor
    ) -> None:
        from ikbo_recsys.kernels._gluon.compression_linear import candidate_kernel, user_part_kernel

        (num_users, user_features, size), (batch, features, _) = user.shape, cand.shape
        num_m, most = weight_user.shape[0], multiprocessors(cand.device)
        cols = 256 if size > 128 else 128 if size > 64 else 64
        row_tiles, col_tiles = cdiv(num_m, ROWS), cdiv(size, cols)
        tiles = num_users * row_tiles * col_tiles
        self._dtype, self._device = cand.dtype, cand.device
        self._out_shape, self._part_shape = (batch, num_m, size), (tiles, ROWS * cols)
        has_bias = facts[-1] is not None
        # M is specialized on as Triton does: whether it is 1 or divisible by 16.
        self._user_launch = Launch(
            user_part_kernel,
            (*facts[:-1], facts[-1] == 0, num_m == 1, num_m % 16 == 0, cols),
            min(most, tiles),
            {
                "ROW_TILES": row_tiles,
                "COL_TILES": col_tiles,
                "STEPS": cdiv(user_features, USER_STEP),
                "STAGES": USER_STAGES,
                "HAS_BIAS": has_bias,
            },
            num_warps=4,
        )
        self._user_numbers = (num_m, tiles)
        sizes = candidate_sizes(features, row_tiles)
        blocks, tail_blocks = grid(batch, row_tiles, col_tiles, most)
        self._cand_launch = Launch(
            candidate_kernel,
            (*facts[:-1], cols),
            blocks,
            {
                "ROW_TILES": row_tiles,
                "COL_TILES": col_tiles,
                "STEPS": sizes.steps,
                "STAGES": STAGES,
                "RESIDENT": sizes.resident,
                "RING": sizes.ring,
                "TAIL_RESIDENT": sizes.tail_resident,
                "WEIGHT_BUFFERS": sizes.weight_buffers,
            },
            num_warps=4,
            launch_pdl=True,
        )
        self._cand_numbers = (num_users, batch, tail_blocks)
        self._weight_user, self._user = _View(weight_user, (ROWS, USER_STEP)), _View(user, (1, USER_STEP, cols))
        self._weight_cand, self._cand = _View(weight_cand, (ROWS, STEP)), _View(cand, (1, STEP, cols))
        self._out = _View(torch.empty(self._out_shape, dtype=cand.dtype, device="meta"), (1, ROWS, min(64, cols // 2)))

    def __call__(
        self,
        user: Tensor,
        cand: Tensor,
        weight_user: Tensor,
        weight_cand: Tensor,
        to_user: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        out = torch.empty(self._out_shape, dtype=self._dtype, device=self._device)
        part = torch.empty(self._part_shape, dtype=self._dtype, device=self._device)
        with device_guard(cand):
            _launch(
                self._user_launch,
                (self._weight_user.of(weight_user), self._user.of(user)),
                (part if bias is None else bias, part, *self._user_numbers),
            )
            _launch(
                self._cand_launch,
                (self._weight_cand.of(weight_cand), self._cand.of(cand), self._out.of(out)),
                (part, to_user, *self._cand_numbers),
            )
        return out


class _Descriptor:
    """What a compiled kernel's launcher reads of a TMA descriptor. Triton's own class checks and converts all of it
    anew."""

    __slots__ = ("base", "box", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, base: Tensor, view: _View) -> None:
        self.base, self.shape, self.strides, self.box = base, view.shape, view.strides, view.box

    def checked(self) -> Any:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        element = gl.float16 if self.base.dtype is torch.float16 else gl.bfloat16
        layout = gl.NVMMASharedLayout.get_default_for(self.box, element)
        return TensorDescriptor(self.base, self.shape, self.strides, self.box, layout)


class _View:
    """Shape, strides and box under which tensors of one layout become descriptors."""

    def __init__(self, tensor: Tensor, box: tuple[int, ...]) -> None:
        outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        self.shape, self.box = list(tensor.shape), list(box)
        # The stride of a dimension of size 1 is never used, but has to be aligned.
        self.strides = [TMA_ALIGNMENT if n == 1 else stride for n, stride in outer] + [1]

    def of(self, base: Tensor) -> _Descriptor:
        return _Descriptor(base, self)


def _launch(launch: Launch, descriptors: tuple[_Descriptor, ...], rest: tuple[Any, ...]) -> None:
    launch((*descriptors, *rest), lambda: (*(d.checked() for d in descriptors), *rest))
