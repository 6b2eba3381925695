"""Target attention, gradient of the query, for every GPU Triton compiles for. Device code only.

With p the attention weights, g the gradient of the output, h that of the log-sum-exp and
delta = sum_d(g * out) - h per row: `ds = p * (g v^T - delta)`, `dq = scale * ds k`.

No atomics: a program owns query rows and walks their user's keys.
"""

import triton
import triton.language as tl

from ikbo_recsys.kernels._triton.cross_attention import SIZES, history_rows, load_tile, row_pointers
from ikbo_recsys.kernels._triton.schedule import narrowed, tile_of_user


@triton.jit
def load_lse2(lse_rows, valid):
    """The log-sum-exp of rows in units of log2. Rows outside get weight 2^-inf = 0."""
    return tl.load(lse_rows, mask=valid, other=float("inf")) * 1.4426950408889634


@triton.jit
def delta_of_rows(
    grad, o_rows, grad_lse_rows, valid, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, GRAD_LSE: tl.constexpr
):
    """delta of a tile of rows, whose gradient of the output is `grad`; zeros outside."""
    out = load_tile(o_rows, valid, HEAD_SIZE, BLOCK_D, True)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    if GRAD_LSE:
        delta -= tl.load(grad_lse_rows, mask=valid, other=0.0)
    return delta


@triton.jit
def store_query_rows(
    dq_ptr, cand, seed, acc, valid, stride_b, stride_s, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Write rows of dq; `dq_ptr` points to the head, or each row's head."""
    dq_rows = row_pointers(dq_ptr, cand, seed, stride_b, stride_s)
    column = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (column < HEAD_SIZE)[None, :]
    pointers = dq_rows[:, None] + column[None, :]
    tl.store(pointers, acc.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def _query_step(
    acc,
    query,
    grad,
    lse2,
    delta,
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
    """Add one block of keys to dq (without the scale)."""
    valid = tl.arange(0, KEYS) < keys_left
    key = load_tile(k_rows, valid, HEAD_SIZE, BLOCK_D, MASKED)
    value = load_tile(v_rows, valid, HEAD_SIZE, BLOCK_D, MASKED)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * QK_SCALE
    weights = tl.exp2(scores - lse2[:, None])
    grad_weights = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
    grad_scores = weights * (grad_weights - delta[:, None])
    # A masked key is a row of zeros: whatever stands in its column of grad_scores, it adds zero to dq.
    if MASKED:
        grad_scores = tl.where(valid[None, :], grad_scores, 0.0)
    return tl.dot(grad_scores.to(key.dtype), key, acc, input_precision=PRECISION)


@triton.jit
def query_gradient(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    permutation_ptr,
    kv_ptr,
    is_own,
    is_needed,
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
    stride_gb,
    stride_gs,
    stride_gh,
    QK_SCALE: tl.constexpr,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KV_LAYOUT: tl.constexpr,
    PERMUTED: tl.constexpr,
    NEED_DQ: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    STORE_DELTA: tl.constexpr = True,
):
    """One tile of one head: the packed rows from `start` on, before `end`; `is_own` as in `attend_rows`.

    `is_needed` says whether dq is needed of this tile, None where NEED_DQ says all. The gradient of the log-sum-exp
    stands where delta is stored; without STORE_DELTA it remains there.
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
    stride_ob = seeds * HEADS * HEAD_SIZE
    stride_os = HEADS * HEAD_SIZE
    q_rows = row_pointers(q_ptr + head.to(tl.int64) * stride_qh, cand, seed, stride_qb, stride_qs)
    g_rows = row_pointers(grad_ptr + head.to(tl.int64) * stride_gh, cand, seed, stride_gb, stride_gs)
    o_rows = row_pointers(out_ptr + head * HEAD_SIZE, cand, seed, stride_ob, stride_os)
    lse_rows = row_pointers(lse_ptr + head, cand, seed, seeds * HEADS, HEADS)
    delta_rows = row_pointers(delta_ptr + head, cand, seed, seeds * HEADS, HEADS)

    grad = load_tile(g_rows, valid, HEAD_SIZE, BLOCK_D, True)
    delta = delta_of_rows(grad, o_rows, delta_rows, valid, HEAD_SIZE, BLOCK_D, GRAD_LSE)
    if STORE_DELTA:
        tl.store(delta_rows, delta, mask=valid)
    if NEED_DQ:
        query = load_tile(q_rows, valid, HEAD_SIZE, BLOCK_D, True)
        lse2 = load_lse2(lse_rows, valid)
        num_keys, k_rows, v_rows, k_step, v_step = history_rows(
            k_ptr, v_ptr, kv_ptr, user, head // GROUP, capacity, stride_ku, stride_kt, stride_kh, stride_vu, stride_vt,
            stride_vh,
            KEYS, KV_LAYOUT,
        )  # fmt: skip
        if is_needed is not None:
            num_keys = tl.where(is_needed, num_keys, 0)
            valid = valid & is_needed
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        full = num_keys // KEYS
        for _ in range(full):
            acc = _query_step(
                acc,
                query,
                grad,
                lse2,
                delta,
                k_rows,
                v_rows,
                KEYS,
                QK_SCALE,
                HEAD_SIZE,
                BLOCK_D,
                KEYS,
                False,
                PRECISION,
            )
            k_rows += k_step
            v_rows += v_step
        left = num_keys - full * KEYS
        if left > 0:
            acc = _query_step(
                acc, query, grad, lse2, delta, k_rows, v_rows, left, QK_SCALE, HEAD_SIZE, BLOCK_D, KEYS, True, PRECISION
            )
        store_query_rows(
            dq_ptr + head * HEAD_SIZE, cand, seed, acc * SCALE, valid, stride_ob, stride_os, HEAD_SIZE, BLOCK_D
        )


@triton.jit(do_not_specialize=SIZES)
def attention_backward_query(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
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
    stride_gb,
    stride_gs,
    stride_gh,
    QK_SCALE: tl.constexpr,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KV_LAYOUT: tl.constexpr,
    PERMUTED: tl.constexpr,
    NEED_DQ: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write delta `[B, S, H]`, and dq `[B, S, H, D]` if NEED_DQ. `out`, `lse`, `delta`, `dq` are contiguous; the
    rest strided.

    With GRAD_LSE the gradient of the log-sum-exp stands in `delta_ptr`: d lse / d score is p, as delta's factor is.
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
    query_gradient(
        q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, permutation_ptr, kv_ptr, None, None, user,
        head, start, end, seeds, capacity, stride_qb, stride_qs, stride_qh, stride_ku, stride_kt, stride_kh, stride_vu,
        stride_vt, stride_vh, stride_gb, stride_gs, stride_gh,
        QK_SCALE, SCALE, HEADS, GROUP, HEAD_SIZE, BLOCK_D, ROWS, KEYS, KV_LAYOUT, PERMUTED, NEED_DQ, GRAD_LSE,
        PRECISION,
    )  # fmt: skip
