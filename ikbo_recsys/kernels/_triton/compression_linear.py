"""Linear compression in portable Triton: one batched GEMM kernel, used for the user's part, the candidates' and the
gradients.

`mix` computes `out[b] = weight @ x[b] (+ user[index[b]]) (+ bias)`: with neither addend it is the user's part or the
gradient of the inputs, with the looked-up user part it is the operator. `outer_sum` is the gradient of the weight.

Shape letters: U users, B batch rows, K contracted features, D embedding size, M outputs, S splits of the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ikbo_recsys.kernels import _launch, _tiles
from ikbo_recsys.kernels._plan import Launch, is_traced

# Positions of the arguments in do_not_specialize.
_MIX_FREE, _OUTER_FREE = (9,), (6, 7)


@triton.jit
def _tile_of_block(tiles_m, tiles_d):
    """(batch row, row tile, column tile): the row tiles of one batch row are neighbours, so that they share x[b] in
    L2."""
    block = tl.program_id(0)
    per_batch = tiles_m * tiles_d
    tile = block % per_batch
    return (block // per_batch).to(tl.int64), tile % tiles_m, tile // tiles_m


@triton.jit(do_not_specialize=["num_users"])
def mix_kernel(
    weight_ptr,
    x_ptr,
    user_ptr,
    index_ptr,
    bias_ptr,
    out_ptr,
    M,
    K,
    D,
    num_users,
    weight_stride_m,
    weight_stride_k,
    x_stride_b,
    x_stride_k,
    x_stride_d,
    out_stride_b,
    out_stride_m,
    tiles_m,
    tiles_d,
    HAS_USER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One [ROWS, COLS] tile of out[b]; `user` is fp32 and contiguous [U, M, D], `out` contiguous along D.

    With WEIGHT_PADDED the weight has columns of zeros up to a multiple of STEP, so that its loads need no mask: a mask
    that ends in the middle of 16 bytes makes them loads of single elements.
    """
    b, tile_m, tile_d = _tile_of_block(tiles_m, tiles_d)
    rows = tile_m * ROWS + tl.arange(0, ROWS)
    cols = tile_d * COLS + tl.arange(0, COLS)
    steps = tl.arange(0, STEP)
    # Rows past M read row M - 1: the loads need no mask for them, the store has it. (Columns past D do not read column
    # D - 1: a minimum along the contiguous dimension hides from the compiler that it is contiguous.)
    weight_ptrs = weight_ptr + tl.minimum(rows, M - 1)[:, None] * weight_stride_m + steps[None, :] * weight_stride_k
    x_ptrs = x_ptr + b * x_stride_b + steps[:, None] * x_stride_k + cols[None, :] * x_stride_d
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for k in range(0, K, STEP):
        inside = steps < K - k
        weight = tl.load(weight_ptrs) if WEIGHT_PADDED else tl.load(weight_ptrs, mask=inside[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=inside[:, None] & (cols < D)[None, :], other=0.0)
        acc = tl.dot(weight, x, acc, input_precision=PRECISION)
        weight_ptrs += STEP * weight_stride_k
        x_ptrs += STEP * x_stride_k
    inside = (rows < M)[:, None] & (cols < D)[None, :]
    if HAS_USER:
        u = tl.load(index_ptr + b).to(tl.int64)
        u = tl.minimum(tl.maximum(u, 0), num_users - 1)
        acc += tl.load(user_ptr + (u * M + rows[:, None]) * D + cols[None, :], mask=inside, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + b * out_stride_b + rows[:, None] * out_stride_m + cols[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["batch", "per_split"])
def outer_sum_kernel(
    grad_ptr,
    x_ptr,
    out_ptr,
    M,
    K,
    D,
    batch,
    per_split,
    grad_stride_b,
    grad_stride_m,
    grad_stride_d,
    x_stride_b,
    x_stride_k,
    x_stride_d,
    tiles_m,
    tiles_k,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One [ROWS, COLS] tile of `sum_b grad[b] @ x[b].T` over the batch rows of one split; `out` is fp32 [S, M, K]."""
    block = tl.program_id(0)
    tile_m = block % tiles_m
    tile_k = block // tiles_m % tiles_k
    split = (block // (tiles_m * tiles_k)).to(tl.int64)
    rows = tile_m * ROWS + tl.arange(0, ROWS)
    cols = tile_k * COLS + tl.arange(0, COLS)
    steps = tl.arange(0, STEP)
    grad_rows = grad_ptr + tl.minimum(rows, M - 1)[:, None] * grad_stride_m
    x_cols = x_ptr + tl.minimum(cols, K - 1)[None, :] * x_stride_k
    first = split * per_split
    last = tl.minimum(first + per_split, batch)
    steps_per_row = tl.cdiv(D, STEP)
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for i in range(0, (last - first) * steps_per_row):
        b = first + i // steps_per_row
        d = i % steps_per_row * STEP + steps
        grad = tl.load(grad_rows + b * grad_stride_b + d[None, :] * grad_stride_d, mask=d[None, :] < D, other=0.0)
        x = tl.load(x_cols + b * x_stride_b + d[:, None] * x_stride_d, mask=d[:, None] < D, other=0.0)
        acc = tl.dot(grad, x, acc, input_precision=PRECISION)
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    tl.store(out_ptr + (split * M + rows[:, None]) * K + cols[None, :], acc, mask=inside)


def mix(
    weight_MK: Tensor,
    x_BKD: Tensor,
    out_dtype: torch.dtype,
    user_UMD: Tensor | None = None,
    to_user_B: Tensor | None = None,
    bias_M: Tensor | None = None,
    *,
    weight_padded: bool = False,
) -> Tensor:
    """`weight @ x[b] (+ user[to_user[b]]) (+ bias)` as `[B, M, D]`.

    `weight` and `x` have any strides; `user` is fp32 and contiguous. With `weight_padded` the weight has
    columns of zeros up to a multiple of 64.
    """
    batch, num_k, size = x_BKD.shape
    num_m = weight_MK.shape[0]
    out_BMD = torch.empty((batch, num_m, size), dtype=out_dtype, device=x_BKD.device)
    tile = _tiles.mix_tile(num_m, size, num_k, x_BKD.element_size())
    tiles_m, tiles_d = triton.cdiv(num_m, tile.rows), triton.cdiv(size, tile.cols)
    arguments = (
        weight_MK,
        x_BKD,
        out_BMD if user_UMD is None else user_UMD,
        out_BMD if to_user_B is None else to_user_B,
        out_BMD if bias_M is None else bias_M,
        out_BMD,
        num_m,
        num_k,
        size,
        0 if user_UMD is None else user_UMD.shape[0],
        *weight_MK.stride(),
        *x_BKD.stride(),
        *out_BMD.stride()[:2],
        tiles_m,
        tiles_d,
    )
    constants = {
        "HAS_USER": user_UMD is not None,
        "HAS_BIAS": bias_M is not None,
        "WEIGHT_PADDED": weight_padded,
        "PRECISION": _launch.input_precision(x_BKD.dtype),
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "STEP": tile.step,
    }
    key = () if is_traced() else _launch.specialization(arguments, _MIX_FREE)
    launch = Launch(mix_kernel, key, batch * tiles_m * tiles_d, constants, num_warps=tile.warps, num_stages=tile.stages)
    with _launch.device_guard(x_BKD):
        launch(arguments)
    return out_BMD


def outer_sum(grad_BMD: Tensor, x_BKD: Tensor) -> Tensor:
    """`sum_b grad[b] @ x[b].T` in fp32, `[M, K]`: the gradient of a weight that both batches share.

    The batch is split to fill the GPU, and the splits are added in a fixed order: the result does not change between
    runs.
    """
    batch, num_m, size = grad_BMD.shape
    num_k = x_BKD.shape[1]
    tile = _tiles.outer_tile(num_m, num_k, x_BKD.element_size())
    tiles_m, tiles_k = triton.cdiv(num_m, tile.rows), triton.cdiv(num_k, tile.cols)
    splits = _tiles.splits(tiles_m * tiles_k, batch, _launch.multiprocessors(x_BKD.device))
    partial_SMK = torch.empty((splits, num_m, num_k), dtype=torch.float32, device=x_BKD.device)
    arguments = (
        grad_BMD,
        x_BKD,
        partial_SMK,
        num_m,
        num_k,
        size,
        batch,
        triton.cdiv(batch, splits),
        *grad_BMD.stride(),
        *x_BKD.stride(),
        tiles_m,
        tiles_k,
    )
    constants = {
        "PRECISION": _launch.input_precision(x_BKD.dtype),
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "STEP": tile.step,
    }
    key = () if is_traced() else _launch.specialization(arguments, _OUTER_FREE)
    launch = Launch(
        outer_sum_kernel, key, splits * tiles_m * tiles_k, constants, num_warps=tile.warps, num_stages=tile.stages
    )
    with _launch.device_guard(x_BKD):
        launch(arguments)
    return partial_SMK[0] if splits == 1 else partial_SMK.sum(0)
