"""Target attention, backward, for every GPU Triton compiles for. Device code only.

With p the attention weights, g the gradient of the output and delta = sum_d(g * out) per row:
`dv = p^T g`, `ds = p * (g v^T - delta)`, `dq = scale * ds k`, `dk = scale * ds^T q`.

No atomics: a program of `attention_backward_query` owns query rows and walks their user's keys; one of
`attention_backward_key_value` owns keys and walks all the query rows of their user. Every sum has a fixed order.
"""

import triton
import triton.language as tl

from ikbo_recsys.kernels._triton.cross_attention import SIZES, load_tile, row_pointers
from ikbo_recsys.kernels._triton.schedule import clamped_offset, key_range, tile_of_slot


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
    PRECISION: tl.constexpr,
):
    """Write delta `[B, S, H]`, and dq `[B, S, H, D]` if NEED_DQ. `out`, `lse`, `delta`, `dq` are contiguous; the
    rest strided."""
    head = tl.program_id(0) % HEADS
    user, start, end = tile_of_slot(offsets_ptr, tl.program_id(0) // HEADS, num_users, num_cands, seeds, ROWS)
    if start >= end:
        return
    row = start + tl.arange(0, ROWS)
    valid = row < end
    stride_ob = seeds * HEADS * HEAD_SIZE
    stride_os = HEADS * HEAD_SIZE
    q_rows = row_pointers(q_ptr + head * stride_qh, permutation_ptr, row, valid, seeds, stride_qb, stride_qs, PERMUTED)
    g_rows = row_pointers(
        grad_ptr + head * stride_gh, permutation_ptr, row, valid, seeds, stride_gb, stride_gs, PERMUTED
    )
    o_rows = row_pointers(
        out_ptr + head * HEAD_SIZE, permutation_ptr, row, valid, seeds, stride_ob, stride_os, PERMUTED
    )
    lse_rows = row_pointers(lse_ptr + head, permutation_ptr, row, valid, seeds, seeds * HEADS, HEADS, PERMUTED)
    delta_rows = row_pointers(delta_ptr + head, permutation_ptr, row, valid, seeds, seeds * HEADS, HEADS, PERMUTED)

    grad = load_tile(g_rows, valid, HEAD_SIZE, BLOCK_D, True)
    out = load_tile(o_rows, valid, HEAD_SIZE, BLOCK_D, True)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_rows, delta, mask=valid)
    if NEED_DQ:
        query = load_tile(q_rows, valid, HEAD_SIZE, BLOCK_D, True)
        # Rows outside the tile get weight 2^-inf = 0.
        lse2 = tl.load(lse_rows, mask=valid, other=float("inf")) * 1.4426950408889634
        first_key, num_keys = key_range(kv_ptr, user, capacity, KV_LAYOUT)
        key = tl.arange(0, KEYS).to(tl.int64)
        user64 = user.to(tl.int64)
        first64 = tl.zeros([], tl.int64) + first_key
        k_rows = k_ptr + user64 * stride_ku + (head // GROUP) * stride_kh + (first64 + key) * stride_kt
        v_rows = v_ptr + user64 * stride_vu + (head // GROUP) * stride_vh + (first64 + key) * stride_vt
        k_step = tl.zeros([], tl.int64) + KEYS * stride_kt
        v_step = tl.zeros([], tl.int64) + KEYS * stride_vt
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
        dq_rows = row_pointers(
            dq_ptr + head * HEAD_SIZE, permutation_ptr, row, valid, seeds, stride_ob, stride_os, PERMUTED
        )
        column = tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (column < HEAD_SIZE)[None, :]
        tl.store(dq_rows[:, None] + column[None, :], (acc * SCALE).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _key_block(kv_ptr, slot, num_users, capacity, KEYS: tl.constexpr, KV_LAYOUT: tl.constexpr):
    """`(user, first row of the block, rows to write, rows that count)`, rows relative to the user's first.

    Padded layouts write all T rows, zeros behind the user's length. Jagged ones have no padding.
    """
    if KV_LAYOUT == 2:
        user, start, end = tile_of_slot(kv_ptr, slot, num_users, capacity, 1, KEYS)
        first_key = clamped_offset(kv_ptr, user, capacity)
        return user, start - first_key, end - first_key, end - first_key
    else:
        blocks = (capacity + KEYS - 1) // KEYS
        user = slot // blocks
        _, num_keys = key_range(kv_ptr, user, capacity, KV_LAYOUT)
        return user, (slot - user * blocks) * KEYS, capacity, num_keys


@triton.jit
def _store_rows(out_ptr, first_row, rows, acc, mask_rows, heads_size, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    column = tl.arange(0, BLOCK_D)
    pointers = out_ptr + (first_row + rows.to(tl.int64)) * heads_size
    inside = mask_rows[:, None] & (column < HEAD_SIZE)[None, :]
    tl.store(pointers[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def attention_backward_key_value(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    offsets_ptr,
    permutation_ptr,
    kv_ptr,
    num_users,
    num_cands,
    seeds,
    capacity,
    split_stride,
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
    SPLITS: tl.constexpr,
    KV_LAYOUT: tl.constexpr,
    PERMUTED: tl.constexpr,
    NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write dk and dv, contiguous in the shape of k and v, with a leading SPLITS axis of partial sums.

    A split takes a consecutive share of the user's row tiles, for batches with too few keys to fill the GPU. Scores are
    computed transposed, `[KEYS, ROWS]`, so that both products take them as they come out of the matmul.
    """
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    split = tl.program_id(0) % SPLITS
    key_head = tl.program_id(0) // SPLITS % KEY_HEADS
    slot = tl.program_id(0) // (SPLITS * KEY_HEADS)
    user, first, rows_out, num_keys = _key_block(kv_ptr, slot, num_users, capacity, KEYS, KV_LAYOUT)
    if first >= rows_out:
        return
    keys = first + tl.arange(0, KEYS)
    counts = keys < num_keys
    user64 = user.to(tl.int64)
    if KV_LAYOUT == 2:
        first64 = tl.zeros([], tl.int64) + clamped_offset(kv_ptr, user, capacity)
        out_row = first64
    else:
        first64 = tl.zeros([], tl.int64)
        out_row = user64 * capacity
    key_rows = first64 + keys
    k_rows = k_ptr + user64 * stride_ku + key_head * stride_kh + key_rows * stride_kt
    v_rows = v_ptr + user64 * stride_vu + key_head * stride_vh + key_rows * stride_vt
    key = load_tile(k_rows, counts, HEAD_SIZE, BLOCK_D, True)
    value = load_tile(v_rows, counts, HEAD_SIZE, BLOCK_D, True)
    dk = tl.zeros([KEYS, BLOCK_D], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_D], tl.float32)

    start = clamped_offset(offsets_ptr, user, num_cands) * seeds
    end = clamped_offset(offsets_ptr, user + 1, num_cands) * seeds
    share = ((end - start + ROWS - 1) // ROWS + SPLITS - 1) // SPLITS * ROWS
    start += split * share
    last = tl.minimum(start + share, end)
    # Blocks of nothing but padding have nothing to sum.
    last = tl.where(first < num_keys, last, start)
    for member in range(GROUP):
        head = key_head * GROUP + member
        for row0 in range(start, last, ROWS):
            row = row0 + tl.arange(0, ROWS)
            valid = row < last
            q_rows = row_pointers(
                q_ptr + head * stride_qh, permutation_ptr, row, valid, seeds, stride_qb, stride_qs, PERMUTED
            )
            g_rows = row_pointers(
                grad_ptr + head * stride_gh, permutation_ptr, row, valid, seeds, stride_gb, stride_gs, PERMUTED
            )
            lse_rows = row_pointers(lse_ptr + head, permutation_ptr, row, valid, seeds, seeds * HEADS, HEADS, PERMUTED)
            query = load_tile(q_rows, valid, HEAD_SIZE, BLOCK_D, True)
            grad = load_tile(g_rows, valid, HEAD_SIZE, BLOCK_D, True)
            lse2 = tl.load(lse_rows, mask=valid, other=float("inf")) * 1.4426950408889634
            scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * QK_SCALE
            weights = tl.exp2(scores - lse2[None, :])
            if NEED_DV:
                dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision=PRECISION)
            if NEED_DK:
                delta_rows = row_pointers(
                    delta_ptr + head, permutation_ptr, row, valid, seeds, seeds * HEADS, HEADS, PERMUTED
                )
                delta = tl.load(delta_rows, mask=valid, other=0.0)
                grad_weights = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
                grad_scores = weights * (grad_weights - delta[None, :])
                dk = tl.dot(grad_scores.to(query.dtype), query, dk, input_precision=PRECISION)

    written = keys < rows_out
    heads_size = KEY_HEADS * HEAD_SIZE
    base = split.to(tl.int64) * split_stride + key_head * HEAD_SIZE
    if NEED_DK:
        dk = tl.where(counts[:, None], dk * SCALE, 0.0)
        _store_rows(dk_ptr + base, out_row, keys, dk, written, heads_size, HEAD_SIZE, BLOCK_D)
    if NEED_DV:
        dv = tl.where(counts[:, None], dv, 0.0)
        _store_rows(dv_ptr + base, out_row, keys, dv, written, heads_size, HEAD_SIZE, BLOCK_D)
