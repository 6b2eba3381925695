"""Launch of the Hopper linear compression kernels: sizes, TMA descriptors, and the reasons why a call cannot take them.

Shape letters: U users, B candidates, Ku/Kc features, D embedding size, M outputs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikbo_recsys.kernels._launch import TMA_ALIGNMENT, cdiv, device_guard, multiprocessors
from ikbo_recsys.kernels._plan import Launch

ROWS = 64
USER_STEP, USER_STAGES = 64, 4
STEP, STAGES = 32, 6
WEIGHT_BUFFERS = 28
"""Blocks of 64 x 32 of the weight: what 227 KiB of shared memory have room for beside 6 stages of 32 x 256 and the
output."""

# A stage of a tail unit loads 16 KiB for one consumer, one of a pair unit 16 to 24 KiB for two.
_TAIL_COST = 1.15


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


@functools.lru_cache(maxsize=4096)
def grid(batch: int, row_tiles: int, col_tiles: int, most: int) -> tuple[int, int]:
    """`(blocks, tail blocks)` of `candidate_kernel`, at most `most`: the division under which the slowest block ends
    first."""
    pairs = row_tiles // 2
    pair_units = batch * col_tiles
    tail_units = cdiv(batch, 2) * col_tiles if row_tiles % 2 else 0
    if tail_units == 0:
        return min(most, pairs * pair_units), 0
    if pairs == 0:
        return min(most, tail_units), min(most, tail_units)
    blocks = min(most, pairs * pair_units + tail_units)

    def slowest(tails: int) -> float:
        return max(cdiv(pair_units, (blocks - tails) // pairs), cdiv(tail_units, tails) * _TAIL_COST)

    return blocks, min(range(1, blocks - pairs + 1), key=slowest)


def refusal(user: Tensor, cand: Tensor) -> str | None:
    """Why the kernels cannot take the call, or None. Device, library and empty tensors are looked at elsewhere."""
    if cand.dtype not in (torch.float16, torch.bfloat16):
        return f"the kernel takes float16 and bfloat16, not {cand.dtype}"
    if torch.compiler.is_exporting():
        return "an exported program carries the portable kernel"
    if torch.compiler.is_compiling():
        return None
    for name, tensor in (("user", user), ("cand", cand)):
        if not _is_tma_ready(tensor):
            return f"{name} is not aligned to {TMA_ALIGNMENT} bytes in its base and its strides {tensor.stride()}"
    return None


def _is_tma_ready(tensor: Tensor) -> bool:
    if tensor.stride(-1) != 1 or tensor.data_ptr() % TMA_ALIGNMENT:
        return False
    step = TMA_ALIGNMENT // tensor.element_size()
    sizes, strides = tensor.shape[:-1], tensor.stride()[:-1]
    return all(n == 1 or (stride > 0 and stride % step == 0) for n, stride in zip(sizes, strides, strict=True))


def compression_linear(
    user_UKD: Tensor,
    cand_BKD: Tensor,
    weight_user_MK: Tensor,
    weight_cand_MK: Tensor,
    to_user_B: Tensor,
    bias_M: Tensor | None,
) -> Tensor:
    """The operator; both parts of the weight aligned for TMA."""
    from ikbo_recsys.kernels._gluon.compression_linear import candidate_kernel, user_part_kernel

    (num_users, user_features, size), (batch, features, _) = user_UKD.shape, cand_BKD.shape
    num_m, dtype, device = weight_user_MK.shape[0], cand_BKD.dtype, cand_BKD.device
    cols = 256 if size > 128 else 128 if size > 64 else 64
    row_tiles, col_tiles = cdiv(num_m, ROWS), cdiv(size, cols)
    most = multiprocessors(device)
    key = (dtype, to_user_B.dtype, device, None if bias_M is None else bias_M.data_ptr() % TMA_ALIGNMENT == 0)
    out_BMD = torch.empty((batch, num_m, size), dtype=dtype, device=device)
    tiles = num_users * row_tiles * col_tiles
    user_part = torch.empty((tiles, ROWS * cols), dtype=dtype, device=device)
    with device_guard(cand_BKD):
        # M is specialized on as Triton does: whether it is 1 or divisible by 16.
        launch = Launch(
            user_part_kernel,
            (*key, num_m == 1, num_m % 16 == 0, cols),
            min(most, tiles),
            {
                "ROW_TILES": row_tiles,
                "COL_TILES": col_tiles,
                "STEPS": cdiv(user_features, USER_STEP),
                "STAGES": USER_STAGES,
                "HAS_BIAS": bias_M is not None,
            },
            num_warps=4,
        )
        _launch(
            launch,
            ((weight_user_MK, (ROWS, USER_STEP)), (user_UKD, (1, USER_STEP, cols))),
            (user_part if bias_M is None else bias_M, user_part, num_m, tiles),
        )
        sizes = candidate_sizes(features, row_tiles)
        blocks, tail_blocks = grid(batch, row_tiles, col_tiles, most)
        launch = Launch(
            candidate_kernel,
            (*key, cols),
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
        _launch(
            launch,
            (
                (weight_cand_MK, (ROWS, STEP)),
                (cand_BKD, (1, STEP, cols)),
                (out_BMD, (1, ROWS, min(64, cols // 2))),
            ),
            (user_part, to_user_B, num_users, batch, tail_blocks),
        )
    return out_BMD


class _Descriptor:
    """What a compiled kernel's launcher reads of a TMA descriptor. Triton's own class checks and converts all of it
    anew."""

    __slots__ = ("base", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, base: Tensor) -> None:
        sizes, strides = base.shape, base.stride()
        self.base, self.shape = base, list(sizes)
        # The stride of a dimension of size 1 is never used, but has to be aligned.
        outer = zip(sizes[:-1], strides[:-1], strict=True)
        self.strides = [TMA_ALIGNMENT if n == 1 else stride for n, stride in outer] + [1]


def _launch(launch: Launch, boxes: tuple[tuple[Tensor, tuple[int, ...]], ...], rest: tuple[Any, ...]) -> None:
    """Launch with a descriptor for each (tensor, box), then the other arguments."""
    descriptors = [_Descriptor(tensor) for tensor, _ in boxes]

    def checked() -> tuple[Any, ...]:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        made = (
            TensorDescriptor(d.base, d.shape, d.strides, list(box), _layout(box, d.base.dtype))
            for d, (_, box) in zip(descriptors, boxes, strict=True)
        )
        return (*made, *rest)

    launch((*descriptors, *rest), checked)


@functools.cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for(list(box), gl.float16 if dtype is torch.float16 else gl.bfloat16)
