"""Sums over the candidates of each user in portable Triton: the adjoint of the broadcast.

One program adds up a block of columns over the rows of one user (or a part of them), in the order of the index and in
fp32, so the result does not change between runs, whatever the order of the candidates.

Shape letters: U users, B candidates, X columns, S splits of a user's rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ikbo_recsys.kernels import _launch, _tiles
from ikbo_recsys.kernels._plan import Launch, is_traced

# Positions of the arguments in do_not_specialize.
_FREE = (4, 5, 9)


@triton.jit(do_not_specialize=["num_users", "batch", "splits"])
def segment_sum_kernel(
    x_ptr,
    order_ptr,
    offsets_ptr,
    out_ptr,
    num_users,
    batch,
    width,
    x_stride_b,
    blocks,
    splits,
    HAS_ORDER: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """`out[s, u, cols]`: the sum of the rows `offsets[u] + s, offsets[u] + s + splits, ...` of user u."""
    program = tl.program_id(0)
    cols = program % blocks * COLS + tl.arange(0, COLS)
    u = program // blocks % num_users
    split = program // blocks // num_users
    # Wrong offsets must not lead outside x.
    first = tl.minimum(tl.maximum(tl.load(offsets_ptr + u), 0), batch)
    last = tl.minimum(tl.maximum(tl.load(offsets_ptr + u + 1), 0), batch)
    inside = cols < width
    acc = tl.zeros((COLS,), dtype=tl.float32)
    for place in range(first + split, last, splits * UNROLL):
        for i in tl.static_range(UNROLL):
            here = place + i * splits
            row = here.to(tl.int64)
            if HAS_ORDER:
                row = tl.load(order_ptr + here, mask=here < last, other=0).to(tl.int64)
            acc += tl.load(x_ptr + row * x_stride_b + cols, mask=inside & (here < last), other=0.0).to(tl.float32)
    row = (split.to(tl.int64) * num_users + u) * width
    tl.store(out_ptr + row + cols, acc.to(out_ptr.dtype.element_ty), mask=inside)


def grouping(to_user_B: Tensor, offsets: Tensor | None, num_users: int) -> tuple[Tensor | None, Tensor]:
    """`(order, offsets)`: the candidates of user u are `order[offsets[u]:offsets[u + 1]]`; `order` is None when
    grouped."""
    if offsets is not None:
        return None, offsets
    sorted_B, order_B = torch.sort(to_user_B, stable=True)
    bounds = torch.arange(num_users + 1, dtype=to_user_B.dtype, device=to_user_B.device)
    return order_B, torch.searchsorted(sorted_B, bounds)


def segment_sum(
    x_BX: Tensor, order_B: Tensor | None, offsets: Tensor, num_users: int, out_dtype: torch.dtype
) -> Tensor:
    """`out[u] = sum of x over the candidates of user u`, `[U, X]`, zeros for a user without any.

    Args:
        x_BX: `[B, X]`; rows of any stride, columns contiguous.
        order_B, offsets: from `grouping`.
    """
    batch, width = x_BX.shape
    cols = _tiles.segment_cols(width)
    blocks = triton.cdiv(width, cols)
    splits = _tiles.segment_splits(blocks * num_users, batch, num_users, _launch.multiprocessors(x_BX.device))
    split_dtype = out_dtype if splits == 1 else torch.float32
    out_SUX = torch.empty((splits, num_users, width), dtype=split_dtype, device=x_BX.device)
    arguments = (
        x_BX,
        offsets if order_B is None else order_B,
        offsets,
        out_SUX,
        num_users,
        batch,
        width,
        x_BX.stride(0),
        blocks,
        splits,
    )
    constants = {
        "HAS_ORDER": order_B is not None,
        "COLS": cols,
        "UNROLL": 4,
    }
    key = () if is_traced() else _launch.specialization(arguments, _FREE)
    launch = Launch(segment_sum_kernel, key, blocks * num_users * splits, constants, num_warps=4)
    with _launch.device_guard(x_BX):
        launch(arguments)
    return out_SUX[0] if splits == 1 else out_SUX.sum(0).to(out_dtype)


def rows_of(x: Tensor) -> Tensor:
    """`x` as `[B, X]` with contiguous columns; a view where its strides allow one, else a copy of its own size."""
    flat = x.reshape(x.shape[0], -1)
    return flat if flat.shape[1] == 0 or flat.stride(1) == 1 else flat.contiguous()
