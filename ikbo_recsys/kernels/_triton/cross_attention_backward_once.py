"""Target attention: what comes before and behind the kernel for all gradients in one pass. Device code only.

Letters: N packed query rows (candidates * seeds), H query heads. The workspace is that of
`_gluon/cross_attention_backward_once.py`, `[H, tiles, 64 rows * D]` in fp32, D the padded head size.
"""

import triton
import triton.language as tl

from ikbo_recsys.kernels._triton.cross_attention import load_tile
from ikbo_recsys.kernels._triton.cross_attention_backward import places_of_rows
from ikbo_recsys.kernels._triton.cross_attention_backward_query import delta_of_rows, store_query_rows
from ikbo_recsys.kernels._triton.schedule import tile_of_slot


@triton.jit(do_not_specialize=["num_rows", "heads"])
def prepare_once(
    out_ptr,
    grad_ptr,
    delta_ptr,
    work_ptr,
    counter_ptr,
    num_rows,
    heads,
    stride_gn,
    stride_gh,
    HEAD_SIZE: tl.constexpr,
    D: tl.constexpr,
    GRAD_LSE: tl.constexpr,
):
    """`delta = sum_d(g * out) - h` of 64 of the N * H rows, and zeros in one of the workspace's at least as many tiles.

    The counter of the kernel behind this one, where it has one, becomes 0, too.

    out is contiguous `[N, H, HEAD_SIZE]`, g, the gradient of it, has strides for rows and heads, delta is contiguous
    `[N, H]`. With GRAD_LSE h, the gradient of the log-sum-exp, stands where delta is stored.
    """
    if counter_ptr is not None:  # noqa: SIM102, the first is known to the compiler
        if tl.program_id(0) == 0:
            tl.store(counter_ptr, 0)
    item = tl.program_id(0).to(tl.int64) * 64 + tl.arange(0, 64)
    valid = item < num_rows.to(tl.int64) * heads
    row = item // heads
    grad = load_tile(grad_ptr + row * stride_gn + (item - row * heads) * stride_gh, valid, HEAD_SIZE, D, True)
    tile_ptr = work_ptr + tl.program_id(0).to(tl.int64) * (64 * D)
    tl.store(tile_ptr + tl.arange(0, 64 * D), tl.zeros([64 * D], tl.float32))
    delta = delta_of_rows(grad, out_ptr + item * HEAD_SIZE, delta_ptr + item, valid, HEAD_SIZE, D, GRAD_LSE)
    tl.store(delta_ptr + item, delta, mask=valid)


@triton.jit(do_not_specialize=["offsets_ptr", "permutation_ptr", "num_users", "num_cands", "seeds", "heads"])
def finish_once(
    work_ptr,
    dq_ptr,
    offsets_ptr,
    permutation_ptr,
    num_users,
    num_cands,
    seeds,
    heads,
    scale,
    HEAD_SIZE: tl.constexpr,
    D: tl.constexpr,
    PERMUTED: tl.constexpr,
):
    """dq, contiguous `[candidates, seeds, H, HEAD_SIZE]`: the workspace's rows times the scale. Grid: tiles times
    heads, heads fastest."""
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    _, row, end = tile_of_slot(offsets_ptr, slot, num_users, num_cands, seeds, 64)
    if row < end:
        slots = num_cands * seeds // 64 + num_users
        tile_ptr = work_ptr + (head.to(tl.int64) * slots + slot) * (64 * D)
        # Halves of the columns, eights of these, warps of 16 rows, rows % 8, pairs of columns, the other 8 rows, pairs.
        acc = tl.load(tile_ptr + tl.arange(0, 64 * D)).reshape([2, D // 16, 4, 8, 4, 2, 2])
        acc = acc.permute([2, 5, 3, 0, 1, 4, 6]).reshape([64, D])
        rows = row + tl.arange(0, 64)
        valid = rows < end
        cand, seed = places_of_rows(permutation_ptr, rows, valid, seeds, PERMUTED)
        stride = heads * HEAD_SIZE
        store_query_rows(
            dq_ptr + head * HEAD_SIZE, cand, seed, acc * scale, valid, seeds * stride, stride, HEAD_SIZE, D
        )
