"""Target attention, all gradients in one pass over keys and values, where users have few query rows. Device code only.

With p, g, delta and ds as in `cross_attention_backward.py`: `dv = p^T g`, `dk = scale * ds^T q`, `dq = scale * ds k`.

A program takes one user and one key head. Where all query rows that attend to it fit a tile, they stay on chip while
the keys stream by: a block of keys is read once, its dk and dv are whole at once, and dq is summed in registers. A user
with more rows than a tile (how many it has is data) is done by the steps of the two kernels, one after the other, by
PARTS programs, of which the others' users need one. No atomics either way, and every sum has a fixed order.
"""

import triton
import triton.language as tl

from ikbo_recsys.kernels._triton.cross_attention import SIZES, history_rows, load_tile, row_pointers
from ikbo_recsys.kernels._triton.cross_attention_backward import (
    first_history_row,
    grad_scores_of_keys,
    key_value_gradient,
    places_of_rows,
    store_history_rows,
    weights_of_keys,
)
from ikbo_recsys.kernels._triton.cross_attention_backward_query import (
    delta_of_rows,
    load_lse2,
    query_gradient,
    store_query_rows,
)
from ikbo_recsys.kernels._triton.schedule import clamped_offset, key_range


@triton.jit
def _one_pass(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    grad_ptr,
    lse_ptr,
    grad_lse_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    permutation_ptr,
    kv_ptr,
    user,
    key_head,
    start,
    end,
    rows_out,
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
    NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A user whose packed rows `start:end` of a key head's group, row * GROUP + member, are at most ROWS."""
    packed = tl.arange(0, ROWS)
    row = start + packed // GROUP
    head = key_head * GROUP + packed % GROUP
    valid = row < end
    cand, seed = places_of_rows(permutation_ptr, row, valid, seeds, PERMUTED)
    q_rows = row_pointers(q_ptr + head.to(tl.int64) * stride_qh, cand, seed, stride_qb, stride_qs)
    g_rows = row_pointers(grad_ptr + head.to(tl.int64) * stride_gh, cand, seed, stride_gb, stride_gs)
    query = load_tile(q_rows, valid, HEAD_SIZE, BLOCK_D, True)
    grad = load_tile(g_rows, valid, HEAD_SIZE, BLOCK_D, True)
    lse2 = load_lse2(row_pointers(lse_ptr + head, cand, seed, seeds * HEADS, HEADS), valid)
    stride_ob = seeds * HEADS * HEAD_SIZE
    stride_os = HEADS * HEAD_SIZE
    if NEED_DQ or NEED_DK:
        o_rows = row_pointers(out_ptr + head * HEAD_SIZE, cand, seed, stride_ob, stride_os)
        grad_lse_rows = row_pointers(grad_lse_ptr + head, cand, seed, seeds * HEADS, HEADS)
        delta = delta_of_rows(grad, o_rows, grad_lse_rows, valid, HEAD_SIZE, BLOCK_D, GRAD_LSE)

    num_keys, k_rows, v_rows, k_step, v_step = history_rows(
        k_ptr, v_ptr, kv_ptr, user, key_head, capacity, stride_ku, stride_kt, stride_kh, stride_vu, stride_vt,
        stride_vh,
        KEYS, KV_LAYOUT,
    )  # fmt: skip
    # Without rows there is nothing to read: only zeros are written.
    num_keys = tl.where(start < end, num_keys, 0)
    out_row = first_history_row(kv_ptr, user, capacity, KV_LAYOUT)
    heads_size: tl.constexpr = HEADS // GROUP * HEAD_SIZE
    dk_ptr += key_head * HEAD_SIZE
    dv_ptr += key_head * HEAD_SIZE
    # Transposed, [D, ROWS]: with few rows it is the heads' columns that fill a matmul's longer side.
    dq = tl.zeros([BLOCK_D, ROWS], tl.float32)
    none = tl.zeros([KEYS, BLOCK_D], tl.float32)
    for first in range(0, num_keys, KEYS):
        keys = first + tl.arange(0, KEYS)
        counts = keys < num_keys
        key = load_tile(k_rows, counts, HEAD_SIZE, BLOCK_D, True)
        weights = weights_of_keys(key, query, lse2, QK_SCALE, PRECISION)
        if NEED_DV:
            dv = tl.dot(weights.to(grad.dtype), grad, input_precision=PRECISION)
            store_history_rows(dv_ptr, out_row, keys, dv, counts, rows_out, heads_size, HEAD_SIZE, BLOCK_D)
        if NEED_DQ or NEED_DK:
            value = load_tile(v_rows, counts, HEAD_SIZE, BLOCK_D, True)
            grad_scores = grad_scores_of_keys(weights, value, grad, delta, PRECISION)
            if NEED_DK:
                dk = tl.dot(grad_scores.to(query.dtype), query, input_precision=PRECISION) * SCALE
                store_history_rows(dk_ptr, out_row, keys, dk, counts, rows_out, heads_size, HEAD_SIZE, BLOCK_D)
            if NEED_DQ:
                # A key that does not count is a row of zeros here, and adds zero unless its weight is infinite.
                grad_scores = tl.where(counts[:, None], grad_scores, 0.0)
                dq = tl.dot(tl.trans(key), grad_scores.to(key.dtype), dq, input_precision=PRECISION)
        k_rows += k_step
        v_rows += v_step
    for first in range((num_keys + KEYS - 1) // KEYS * KEYS, rows_out, KEYS):
        keys = first + tl.arange(0, KEYS)
        if NEED_DK:
            store_history_rows(dk_ptr, out_row, keys, none, keys < 0, rows_out, heads_size, HEAD_SIZE, BLOCK_D)
        if NEED_DV:
            store_history_rows(dv_ptr, out_row, keys, none, keys < 0, rows_out, heads_size, HEAD_SIZE, BLOCK_D)
    if NEED_DQ:
        dq = tl.trans(dq) * SCALE
        store_query_rows(dq_ptr + head * HEAD_SIZE, cand, seed, dq, valid, stride_ob, stride_os, HEAD_SIZE, BLOCK_D)


@triton.jit
def _two_passes(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    grad_ptr,
    lse_ptr,
    grad_lse_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    offsets_ptr,
    permutation_ptr,
    kv_ptr,
    part,
    user,
    key_head,
    start,
    end,
    rows_out,
    num_keys,
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
    NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A part of a user with more rows: every PARTS-th tile of rows of dq, then every PARTS-th block of keys of dk and
    dv.

    Both make delta. Handed over in memory it would have to be waited for, which `tl.debug_barrier` does not do on AMD.
    """
    if NEED_DQ:
        for member in range(GROUP):
            for first in range(start + part * ROWS, end, PARTS * ROWS):
                query_gradient(
                    q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, lse_ptr, grad_lse_ptr, dq_ptr, permutation_ptr, kv_ptr,
                    None, None, user, key_head * GROUP + member, first, end, seeds, capacity, stride_qb, stride_qs,
                    stride_qh, stride_ku, stride_kt, stride_kh, stride_vu, stride_vt, stride_vh, stride_gb, stride_gs,
                    stride_gh,
                    QK_SCALE, SCALE, HEADS, GROUP, HEAD_SIZE, BLOCK_D, ROWS, KEYS, KV_LAYOUT, PERMUTED, True,
                    GRAD_LSE, PRECISION, False,
                )  # fmt: skip
    if NEED_DK or NEED_DV:
        for first in range(part * KEYS, rows_out, PARTS * KEYS):
            key_value_gradient(
                q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, grad_lse_ptr, dk_ptr, dv_ptr, offsets_ptr, permutation_ptr,
                kv_ptr, None, None, None, None, user, first, rows_out, num_keys, tl.zeros([], tl.int32), key_head,
                num_cands, seeds, None, capacity, 0, stride_qb, stride_qs, stride_qh, stride_ku, stride_kt, stride_kh,
                stride_vu, stride_vt, stride_vh, stride_gb, stride_gs, stride_gh, None, None, None, None, None, None,
                QK_SCALE, SCALE, HEADS, GROUP, HEAD_SIZE, BLOCK_D, ROWS, KEYS, 1, KV_LAYOUT, PERMUTED, NEED_DK, NEED_DV,
                PRECISION, out_ptr, GRAD_LSE,
            )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def attention_backward_few(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    grad_ptr,
    lse_ptr,
    grad_lse_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    offsets_ptr,
    permutation_ptr,
    kv_ptr,
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
    NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write dq `[B, S, H, D]`, dk and dv in the shape of k and v, contiguous, those that are needed.

    `out`, `lse` and, read with GRAD_LSE only, `grad_lse` are contiguous, the rest strided.
    """
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    programs = tl.num_programs(0) // PARTS
    part = tl.program_id(0) // programs
    user = tl.program_id(0) % programs // KEY_HEADS
    key_head = tl.program_id(0) % KEY_HEADS
    start = clamped_offset(offsets_ptr, user, num_cands) * seeds
    end = clamped_offset(offsets_ptr, user + 1, num_cands) * seeds
    _, num_keys = key_range(kv_ptr, user, capacity, KV_LAYOUT)
    rows_out = capacity
    if KV_LAYOUT == 2:
        rows_out = num_keys
    if end - start <= ROWS // GROUP:
        if part > 0:
            return
        _one_pass(
            q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, lse_ptr, grad_lse_ptr, dq_ptr, dk_ptr, dv_ptr, permutation_ptr,
            kv_ptr, user, key_head, start, end, rows_out, seeds, capacity, stride_qb, stride_qs, stride_qh, stride_ku,
            stride_kt, stride_kh, stride_vu, stride_vt, stride_vh, stride_gb, stride_gs, stride_gh,
            QK_SCALE, SCALE, HEADS, GROUP, HEAD_SIZE, BLOCK_D, ROWS, KEYS, KV_LAYOUT, PERMUTED, NEED_DQ, NEED_DK,
            NEED_DV, GRAD_LSE, PRECISION,
        )  # fmt: skip
    else:
        _two_passes(
            q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, lse_ptr, grad_lse_ptr, dq_ptr, dk_ptr, dv_ptr, offsets_ptr,
            permutation_ptr, kv_ptr, part, user, key_head, start, end, rows_out, num_keys, num_cands, seeds, capacity,
            stride_qb, stride_qs, stride_qh, stride_ku, stride_kt, stride_kh, stride_vu, stride_vt, stride_vh,
            stride_gb, stride_gs, stride_gh,
            QK_SCALE, SCALE, HEADS, GROUP, HEAD_SIZE, BLOCK_D, ROWS, KEYS, KV_LAYOUT, PERMUTED, NEED_DQ, NEED_DK,
            NEED_DV, GRAD_LSE, PRECISION, PARTS,
        )  # fmt: skip
