"""Merges the parts into which the Hopper attention kernel cut its items: see `_gluon/_attention_shares.py`. Device code
only.

Letters: D padded head size, R rows of a program.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit(do_not_specialize=["permutation_ptr", "heads", "seeds"])
def merge_parts(
    state_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    permutation_ptr,
    heads,
    seeds,
    D: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    PERMUTED: tl.constexpr,
    STORE_LSE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    r"""`out = sum_p 2^{m_p} acc_p / sum_p 2^{m_p} s_p` and its log-sum-exp, part after part, which makes the order
    fixed.

    State is `[items * PARTS, 2, 64 * (D + 9)]`: of each consumer of a part the accumulator `[64, D]`, the maxima `[64]`
    in units of log2, and the sums `[64, 8]`, to be added up. A program takes R rows of an item; out is contiguous
    `[N, H, HEAD_SIZE]`, lse `[N, H]`. A part without keys has the sum 0 and a maximum of -1e30: it counts nothing.
    """
    if CHAINED:
        gdc_wait()
    chunk = tl.program_id(0) % (128 // ROWS)
    item = tl.program_id(0) // (128 // ROWS)
    if item >= tl.load(table_ptr) * heads:
        return
    head = item % heads
    entry = table_ptr + (1 + item // heads) * 4
    first = tl.load(entry) + chunk * ROWS
    end = tl.load(entry + 1)
    if first >= end:
        return
    local = chunk * ROWS % 64 + tl.arange(0, ROWS)
    column = tl.arange(0, D)
    acc = tl.zeros([ROWS, D], tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    # Unrolled, so that the loads of several parts are under way at once.
    for part in tl.static_range(PARTS):
        place = state_ptr + ((item * PARTS + part) * 2 + chunk * ROWS // 64) * (64 * (D + 9))
        part_max = tl.load(place + 64 * D + local)
        sums = tl.load(place + 64 * (D + 1) + (local * 8)[:, None] + tl.arange(0, 8)[None, :])
        part_acc = tl.load(place + (local * D)[:, None] + column[None, :])
        new_max = tl.maximum(row_max, part_max)
        before = tl.exp2(row_max - new_max)
        now = tl.exp2(part_max - new_max)
        row_sum = row_sum * before + tl.sum(sums, 1) * now
        acc = acc * before[:, None] + part_acc * now[:, None]
        row_max = new_max

    row = first + tl.arange(0, ROWS)
    valid = row < end
    if PERMUTED:
        cand = row // seeds
        row = tl.load(permutation_ptr + cand, mask=valid, other=0).to(tl.int32) * seeds + row - cand * seeds
    place = row.to(tl.int64) * heads + head
    # Without a single key the sum is 0: the row is zeros, and its log-sum-exp -inf.
    acc = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    inside = valid[:, None] & (column < HEAD_SIZE)[None, :]
    tl.store((out_ptr + place * HEAD_SIZE)[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
    if STORE_LSE:
        tl.store(lse_ptr + place, (row_max + tl.log2(row_sum)) * 0.6931471805599453, mask=valid)
