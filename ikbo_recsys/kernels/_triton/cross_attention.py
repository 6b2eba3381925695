"""Target attention, forward, for every GPU Triton compiles for. Device code only.

Letters: B candidates, S seeds, H query heads, D head size, U users, T history rows, L rows of all users (jagged).
A program takes ROWS packed rows of one user and one head, and streams that user's keys and values past them.
"""

import triton
import triton.language as tl

from ikbo_recsys.kernels._triton.schedule import key_range, narrowed, tile_of_user

SIZES = [
    *("offsets_ptr", "permutation_ptr", "kv_ptr", "num_users", "num_cands", "seeds", "user_seeds", "capacity"),
    "split_stride",
]
"""Arguments that no kernel is compiled anew for."""


@triton.jit
def row_pointers(base_ptr, cand, seed, stride_b, stride_s):
    """Where rows lie in a `[B, S, ...]` tensor."""
    return base_ptr + cand.to(tl.int64) * stride_b + seed.to(tl.int64) * stride_s


@triton.jit
def load_tile(pointers, rows_valid, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, MASK_ROWS: tl.constexpr):
    """Load `[rows, BLOCK_D]` from one pointer per row, zeros outside."""
    column = tl.arange(0, BLOCK_D)
    pointers = pointers[:, None] + column[None, :]
    if HEAD_SIZE == BLOCK_D:
        if MASK_ROWS:
            return tl.load(pointers, mask=rows_valid[:, None], other=0.0)
        else:
            return tl.load(pointers)
    else:
        inside = column[None, :] < HEAD_SIZE
        if MASK_ROWS:
            inside = inside & rows_valid[:, None]
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _attend(
    acc,
    row_max,
    row_sum,
    query,
    k_rows,
    v_rows,
    keys_left,
    QK_SCALE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of keys: the online softmax step. Scores are kept in units of log2, so that exp2 needs no further
    factor."""
    valid = tl.arange(0, KEYS) < keys_left
    key = load_tile(k_rows, valid, HEAD_SIZE, BLOCK_D, MASKED)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if QK_SCALE < 0:
        scores = -scores
    if MASKED:
        scores = tl.where(valid[None, :], scores, float("-inf"))
    scale: tl.constexpr = QK_SCALE if QK_SCALE >= 0 else -QK_SCALE
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    value = load_tile(v_rows, valid, HEAD_SIZE, BLOCK_D, MASKED)
    acc = tl.dot(weights.to(value.dtype), value, acc * rescale[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit
def history_rows(
    k_ptr,
    v_ptr,
    kv_ptr,
    user,
    key_head,
    capacity,
    stride_ku,
    stride_kt,
    stride_kh,
    stride_vu,
    stride_vt,
    stride_vh,
    KEYS: tl.constexpr,
    KV_LAYOUT: tl.constexpr,
):
    """`(number of keys, pointers to the first KEYS rows of keys, of values, steps to the next rows of each)` of a
    user."""
    first_key, num_keys = key_range(kv_ptr, user, capacity, KV_LAYOUT)
    key = tl.arange(0, KEYS).to(tl.int64)
    user64 = user.to(tl.int64)
    first64 = tl.zeros([], tl.int64) + first_key
    key_head64 = key_head.to(tl.int64)
    k_rows = k_ptr + user64 * stride_ku + key_head64 * stride_kh + (first64 + key) * stride_kt
    v_rows = v_ptr + user64 * stride_vu + key_head64 * stride_vh + (first64 + key) * stride_vt
    k_step = (tl.zeros([], tl.int64) + KEYS) * stride_kt
    v_step = (tl.zeros([], tl.int64) + KEYS) * stride_vt
    return num_keys, k_rows, v_rows, k_step, v_step


@triton.jit
def attend_rows(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    permutation_ptr,
    kv_ptr,
    is_own,
    user,
    head,
    start,
    end,
    seeds,
    capacity,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_ku,
    stride_kt,
    stride_kh,
    stride_vu,
    stride_vt,
    stride_vh,
    QK_SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KV_LAYOUT: tl.constexpr,
    PERMUTED: tl.constexpr,
    STORE_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of one head: the packed rows from `start` on, before `end`, over their user's keys.

    `is_own` says whether they are the user's own, which are never permuted; None where there are none.
    """
    row = start + tl.arange(0, ROWS)
    valid = row < end
    cand = row // seeds
    seed = row - cand * seeds
    if PERMUTED:
        if is_own is None:
            cand = tl.load(permutation_ptr + cand, mask=valid, other=0)
        else:
            listed = tl.load(permutation_ptr + cand, mask=valid & (is_own == 0), other=0)
            cand = tl.where(is_own, cand, listed)
    q_rows = row_pointers(q_ptr + head.to(tl.int64) * stride_qh, cand, seed, stride_qb, stride_qs)
    query = load_tile(q_rows, valid, HEAD_SIZE, BLOCK_D, True)

    num_keys, k_rows, v_rows, k_step, v_step = history_rows(
        k_ptr, v_ptr, kv_ptr, user, head // GROUP, capacity, stride_ku, stride_kt, stride_kh, stride_vu, stride_vt,
        stride_vh,
        KEYS, KV_LAYOUT,
    )  # fmt: skip

    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    full = num_keys // KEYS
    for _ in range(full):
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, query, k_rows, v_rows, KEYS, QK_SCALE, HEAD_SIZE, BLOCK_D, KEYS, False, PRECISION
        )
        k_rows += k_step
        v_rows += v_step
    left = num_keys - full * KEYS
    if left > 0:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, query, k_rows, v_rows, left, QK_SCALE, HEAD_SIZE, BLOCK_D, KEYS, True, PRECISION
        )

    # Without a single key the sum is 0: the row is zeros, and its log-sum-exp -inf.
    acc = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    out_rows = row_pointers(out_ptr + head * HEAD_SIZE, cand, seed, seeds * HEADS * HEAD_SIZE, HEADS * HEAD_SIZE)
    column = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (column < HEAD_SIZE)[None, :]
    tl.store(out_rows[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
    if STORE_LSE:
        lse_rows = row_pointers(lse_ptr + head, cand, seed, seeds * HEADS, HEADS)
        tl.store(lse_rows, (row_max + tl.log2(row_sum)) * 0.6931471805599453, mask=valid)


@triton.jit(do_not_specialize=SIZES)
def attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    offsets_ptr,
    permutation_ptr,
    kv_ptr,
    num_users,
    num_cands,
    seeds,
    capacity,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_ku,
    stride_kt,
    stride_kh,
    stride_vu,
    stride_vt,
    stride_vh,
    QK_SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KV_LAYOUT: tl.constexpr,
    PERMUTED: tl.constexpr,
    STORE_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`out[b, s, h] = softmax(q k^T * scale) v`; out and lse are contiguous `[B, S, H, D]` and `[B, S, H]`, lse
    natural.

    QK_SCALE is scale * log2(e). Heads vary fastest over the grid, so that programs which run together share rows of
    keys.
    """
    head = tl.program_id(0) % HEADS
    slot = tl.program_id(0) // HEADS
    user = 0
    high = num_users - 1
    while user < high:
        middle = (user + high + 1) // 2
        offset = tl.load(offsets_ptr + middle)
        user, high = narrowed(user, high, middle, offset, slot, num_cands, seeds, 0, ROWS)
    start, end = tl.load(offsets_ptr + user), tl.load(offsets_ptr + user + 1)
    start, end = tile_of_user(user, start, end, slot, num_cands, seeds, ROWS)
    if start >= end:
        return
    attend_rows(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, permutation_ptr, kv_ptr, None, user, head, start, end, seeds,
        capacity, stride_qb, stride_qs, stride_qh, stride_ku, stride_kt, stride_kh, stride_vu, stride_vt, stride_vh,
        QK_SCALE, HEADS, GROUP, HEAD_SIZE, BLOCK_D, ROWS, KEYS, KV_LAYOUT, PERMUTED, STORE_LSE, PRECISION,
    )  # fmt: skip
