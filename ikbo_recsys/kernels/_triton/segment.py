"""Sums over the candidates of each user in portable Triton: the adjoint of the broadcast.

One program adds up a block of columns over the rows of one user (or a part of them), in the order of the index and in
fp32, so the result does not change between runs, whatever the order of the candidates.

Shape letters: U users, B candidates, X columns, S splits of a user's rows.
"""

import triton
import triton.language as tl


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
