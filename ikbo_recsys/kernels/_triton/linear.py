"""The linear layer over (user, candidate) in portable Triton: a GEMM whose epilogue looks the user's part up.

Shape letters: U users, B batch rows, K contracted features, M outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ikbo_recsys.kernels import _launch, _tiles
from ikbo_recsys.kernels._plan import Launch, is_traced

# Positions of the arguments in do_not_specialize.
_FREE = (6, 9)

ACTIVATION_CODES = {None: 0, "relu": 1, "gelu": 2, "silu": 3}


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of fp32 values; codes as in `ACTIVATION_CODES`."""
    if ACTIVATION == 1:
        # Not tl.maximum, which would turn NaN into 0.
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == 2:
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:
        x = x / (1 + tl.exp(-x))
    return x


@triton.jit(do_not_specialize=["B", "num_users"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    user_ptr,
    index_ptr,
    bias_ptr,
    out_ptr,
    B,
    M,
    K,
    num_users,
    x_stride_b,
    x_stride_k,
    weight_stride_m,
    weight_stride_k,
    tiles_m,
    HAS_USER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_PADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One [ROWS, COLS] tile of `act(x @ weight.T (+ user[index]) (+ bias))`; `user` is fp32 [U, M], contiguous as
    `out`."""
    block = tl.program_id(0)
    rows = (block // tiles_m).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = block % tiles_m * COLS + tl.arange(0, COLS)
    steps = tl.arange(0, STEP)
    x_ptrs = x_ptr + tl.minimum(rows, B - 1)[:, None] * x_stride_b + steps[None, :] * x_stride_k
    weight_ptrs = weight_ptr + tl.minimum(cols, M - 1)[None, :] * weight_stride_m + steps[:, None] * weight_stride_k
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for k in range(0, K, STEP):
        inside = steps < K - k
        x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs) if WEIGHT_PADDED else tl.load(weight_ptrs, mask=inside[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
        x_ptrs += STEP * x_stride_k
        weight_ptrs += STEP * weight_stride_k
    inside = (rows < B)[:, None] & (cols < M)[None, :]
    if HAS_USER:
        u = tl.load(index_ptr + rows, mask=rows < B, other=0).to(tl.int64)
        u = tl.minimum(tl.maximum(u, 0), num_users - 1)
        acc += tl.load(user_ptr + u[:, None] * M + cols[None, :], mask=inside, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < M, other=0.0).to(tl.float32)[None, :]
    out = activate(acc, ACTIVATION)
    tl.store(out_ptr + rows[:, None] * M + cols[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


def linear(
    x_BK: Tensor,
    weight_MK: Tensor,
    out_dtype: torch.dtype,
    user_UM: Tensor | None = None,
    to_user_B: Tensor | None = None,
    bias_M: Tensor | None = None,
    activation: str | None = None,
    *,
    weight_padded: bool = False,
) -> Tensor:
    """`act(x @ weight.T (+ user[to_user]) (+ bias))` as `[B, M]`; `x` and `weight` have any strides, `user` is fp32."""
    batch, num_k = x_BK.shape
    num_m = weight_MK.shape[0]
    out_BM = torch.empty((batch, num_m), dtype=out_dtype, device=x_BK.device)
    tile = _tiles.linear_tile(num_m, num_k, x_BK.element_size())
    tiles_m = triton.cdiv(num_m, tile.cols)
    arguments = (
        x_BK,
        weight_MK,
        out_BM if user_UM is None else user_UM,
        out_BM if to_user_B is None else to_user_B,
        out_BM if bias_M is None else bias_M,
        out_BM,
        batch,
        num_m,
        num_k,
        0 if user_UM is None else user_UM.shape[0],
        *x_BK.stride(),
        *weight_MK.stride(),
        tiles_m,
    )
    constants = {
        "HAS_USER": user_UM is not None,
        "HAS_BIAS": bias_M is not None,
        "WEIGHT_PADDED": weight_padded,
        "ACTIVATION": ACTIVATION_CODES[activation],
        "PRECISION": _launch.input_precision(x_BK.dtype),
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "STEP": tile.step,
    }
    key = () if is_traced() else _launch.specialization(arguments, _FREE)
    launch = Launch(
        linear_kernel,
        key,
        triton.cdiv(batch, tile.rows) * tiles_m,
        constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    with _launch.device_guard(x_BK):
        launch(arguments)
    return out_BM
