"""Launch of the Hopper kernel for the gradient of a weight: tiles, splits, and why a call cannot take it.

Shape letters: B batch rows, M/K rows and columns of the weight, D embedding size, S splits of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ikbo_recsys.kernels._launch import TMA_ALIGNMENT, Room, cdiv, device_guard, is_tma_ready, multiprocessors
from ikbo_recsys.kernels._plan import Launch
from ikbo_recsys.kernels._tma import TensorLayout, launch

ROWS, STEP = 128, 64
STAGES = {256: 4, 128: 6, 64: 6}
"""Stages of (128 + columns) x 64 elements of two bytes, by columns: what 227 KiB of shared memory have room for."""
FEWEST_STEPS = 16
"""Steps of a split below which filling and draining the stages takes as long as the work between."""


def refusal(grad: Tensor, x: Tensor) -> str | None:
    """Why the kernel cannot take the call, or None. Device and library are looked at elsewhere."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"the kernel takes float16 and bfloat16, not {x.dtype}"
    for name, tensor in (("the gradient", grad), ("the input", x)):
        if not is_tma_ready(tensor):
            return f"{name} is not aligned to {TMA_ALIGNMENT} bytes in its base and its strides {tensor.stride()}"
    return None


def columns(number: int) -> int:
    """Columns of a tile, for so many in all."""
    return 256 if number > 128 else 128 if number > 64 else 64


def is_transposed(num_m: int, num_k: int) -> bool:
    """Whether the tiles' rows are K and their columns M: where that leaves less of them empty.

    433 x 866 takes 4 x 4 tiles of 128 x 256 one way and 7 x 2 the other.
    """
    straight = cdiv(num_m, ROWS) * cdiv(num_k, columns(num_k)) * columns(num_k)
    transposed = cdiv(num_k, ROWS) * cdiv(num_m, columns(num_m)) * columns(num_m)
    return transposed < straight


def splits(tiles: int, steps: int, blocks: int) -> int:
    """Into how many parts the sum goes: as many as all multiprocessors can work on at once."""
    return max(1, min(blocks // tiles, steps // FEWEST_STEPS))


class OuterSum:
    """`sum_b grad[b] @ x[b].T` in fp32, `[M, K]`, for calls that differ from this one in contents and addresses only.

    The parts of the sum are added in a fixed order: the result does not change between runs.
    """

    def __init__(self, grad_BMD: Tensor, x_BKD: Tensor) -> None:
        from ikbo_recsys.kernels._gluon.outer_sum import outer_sum_kernel

        batch, num_m, size = grad_BMD.shape
        num_k = x_BKD.shape[1]
        self._transposed = is_transposed(num_m, num_k)
        rows, cols = (x_BKD, grad_BMD) if self._transposed else (grad_BMD, x_BKD)
        width = columns(cols.shape[1])
        row_tiles, col_tiles = cdiv(rows.shape[1], ROWS), cdiv(cols.shape[1], width)
        steps_per_row = cdiv(size, STEP)
        steps = batch * steps_per_row
        parts = splits(row_tiles * col_tiles, steps, multiprocessors(x_BKD.device))
        self._partial, self._parts = Room((parts, rows.shape[1], cols.shape[1]), torch.float32, x_BKD.device), parts
        self._numbers = (rows.shape[1], cols.shape[1], steps, cdiv(steps, parts), row_tiles, col_tiles)
        self._layouts = (TensorLayout.of(rows, (1, ROWS // 2, STEP)), TensorLayout.of(cols, (1, width, STEP)))
        self._launch = Launch(
            outer_sum_kernel,
            (x_BKD.dtype, x_BKD.get_device(), width),
            parts * row_tiles * col_tiles,
            {"STEPS_PER_ROW": steps_per_row, "STAGES": STAGES[width]},
            num_warps=4,
        )

    def __call__(self, grad_BMD: Tensor, x_BKD: Tensor) -> Tensor:
        bases = (x_BKD, grad_BMD) if self._transposed else (grad_BMD, x_BKD)
        with device_guard(x_BKD):
            partial = self._partial()
            launch(self._launch, self._layouts, bases, (partial, *self._numbers))
        out = partial[0] if self._parts == 1 else partial.sum(0)
        return out.t() if self._transposed else out
