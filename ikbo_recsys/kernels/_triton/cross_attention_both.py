"""Target attention with query rows of the users' own beside those of their candidates, in one launch. Device code only.

The kernels of `cross_attention.py`, `cross_attention_backward_query.py` and `cross_attention_backward.py` over two
tensors of query rows: `[B, S, H, D]` of the candidates and `[U, X, H, D]` of the users (X rows each, `user_seeds`).
Arguments that begin with u are the users'. Both kinds of rows read the same keys, and dk and dv are one sum over both.
"""

import triton
import triton.language as tl

from ikbo_recsys.kernels._triton.cross_attention import SIZES, attend_rows
from ikbo_recsys.kernels._triton.cross_attention_backward import key_block, key_value_gradient
from ikbo_recsys.kernels._triton.cross_attention_backward_query import query_gradient
from ikbo_recsys.kernels._triton.schedule import narrowed, tile_of_user_both


@triton.jit(do_not_specialize=SIZES)
def attention_forward_both(
    q_ptr,
    uq_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    uout_ptr,
    lse_ptr,
    ulse_ptr,
    offsets_ptr,
    permutation_ptr,
    kv_ptr,
    num_users,
    num_cands,
    seeds,
    capacity,
    user_seeds,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_ku,
    stride_kt,
    stride_kh,
    stride_vu,
    stride_vt,
    stride_vh,
    stride_uqb,
    stride_uqs,
    stride_uqh,
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
    """`attention_forward` over both kinds of rows, each tile of one kind."""
    head = tl.program_id(0) % HEADS
    slot = tl.program_id(0) // HEADS
    own_tiles = (user_seeds + ROWS - 1) // ROWS
    user = 0
    high = num_users - 1
    while user < high:
        middle = (user + high + 1) // 2
        offset = tl.load(offsets_ptr + middle)
        user, high = narrowed(user, high, middle, offset, slot, num_cands, seeds, own_tiles, ROWS)
    start, end = tl.load(offsets_ptr + user), tl.load(offsets_ptr + user + 1)
    is_own, start, end = tile_of_user_both(user, start, end, slot, num_cands, seeds, user_seeds, own_tiles, ROWS)
    if start >= end:
        return
    if is_own:
        q_ptr, out_ptr, lse_ptr = uq_ptr, uout_ptr, ulse_ptr
    attend_rows(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, permutation_ptr, kv_ptr, is_own, user, head, start, end,
        tl.where(is_own, user_seeds, seeds), capacity, tl.where(is_own, stride_uqb, stride_qb),
        tl.where(is_own, stride_uqs, stride_qs), tl.where(is_own, stride_uqh, stride_qh), stride_ku, stride_kt,
        stride_kh, stride_vu, stride_vt, stride_vh,
        QK_SCALE, HEADS, GROUP, HEAD_SIZE, BLOCK_D, ROWS, KEYS, KV_LAYOUT, PERMUTED, STORE_LSE, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def attention_backward_query_both(
    q_ptr,
    uq_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    uout_ptr,
    grad_ptr,
    ugrad_ptr,
    lse_ptr,
    ulse_ptr,
    delta_ptr,
    udelta_ptr,
    dq_ptr,
    udq_ptr,
    offsets_ptr,
    permutation_ptr,
    kv_ptr,
    num_users,
    num_cands,
    seeds,
    capacity,
    user_seeds,
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
    stride_uqb,
    stride_uqs,
    stride_uqh,
    stride_ugb,
    stride_ugs,
    stride_ugh,
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
    NEED_USER_DQ: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`attention_backward_query` over both kinds of rows; delta for both, dq for those that need it."""
    head = tl.program_id(0) % HEADS
    slot = tl.program_id(0) // HEADS
    own_tiles = (user_seeds + ROWS - 1) // ROWS
    user = 0
    high = num_users - 1
    while user < high:
        middle = (user + high + 1) // 2
        offset = tl.load(offsets_ptr + middle)
        user, high = narrowed(user, high, middle, offset, slot, num_cands, seeds, own_tiles, ROWS)
    start, end = tl.load(offsets_ptr + user), tl.load(offsets_ptr + user + 1)
    is_own, start, end = tile_of_user_both(user, start, end, slot, num_cands, seeds, user_seeds, own_tiles, ROWS)
    if start >= end:
        return
    if is_own:
        q_ptr, out_ptr, grad_ptr = uq_ptr, uout_ptr, ugrad_ptr
        lse_ptr, delta_ptr = ulse_ptr, udelta_ptr
    is_needed = None
    if NEED_DQ and NEED_USER_DQ:
        if is_own:
            dq_ptr = udq_ptr
    elif NEED_DQ:
        is_needed = is_own == 0
    elif NEED_USER_DQ:
        is_needed = is_own
        dq_ptr = udq_ptr
    query_gradient(
        q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, permutation_ptr, kv_ptr, is_own, is_needed,
        user, head, start, end, tl.where(is_own, user_seeds, seeds), capacity,
        tl.where(is_own, stride_uqb, stride_qb), tl.where(is_own, stride_uqs, stride_qs),
        tl.where(is_own, stride_uqh, stride_qh), stride_ku, stride_kt, stride_kh, stride_vu, stride_vt, stride_vh,
        tl.where(is_own, stride_ugb, stride_gb), tl.where(is_own, stride_ugs, stride_gs),
        tl.where(is_own, stride_ugh, stride_gh),
        QK_SCALE, SCALE, HEADS, GROUP, HEAD_SIZE, BLOCK_D, ROWS, KEYS, KV_LAYOUT, PERMUTED, NEED_DQ or NEED_USER_DQ,
        GRAD_LSE, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def attention_backward_key_value_both(
    q_ptr,
    uq_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    ugrad_ptr,
    lse_ptr,
    ulse_ptr,
    delta_ptr,
    udelta_ptr,
    dk_ptr,
    dv_ptr,
    offsets_ptr,
    permutation_ptr,
    kv_ptr,
    num_users,
    num_cands,
    seeds,
    capacity,
    user_seeds,
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
    stride_uqb,
    stride_uqs,
    stride_uqh,
    stride_ugb,
    stride_ugs,
    stride_ugh,
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
    """`attention_backward_key_value` over both kinds of rows: per split and head the candidates', then the user's."""
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    split = tl.program_id(0) % SPLITS
    key_head = tl.program_id(0) // SPLITS % KEY_HEADS
    slot = tl.program_id(0) // (SPLITS * KEY_HEADS)
    user, first, rows_out, num_keys = key_block(kv_ptr, slot, num_users, capacity, KEYS, KV_LAYOUT)
    if first >= rows_out:
        return
    key_value_gradient(
        q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, offsets_ptr, permutation_ptr, kv_ptr,
        uq_ptr, ugrad_ptr, ulse_ptr, udelta_ptr, user, first, rows_out, num_keys, split, key_head, num_cands, seeds,
        user_seeds, capacity, split_stride, stride_qb, stride_qs, stride_qh, stride_ku, stride_kt, stride_kh,
        stride_vu, stride_vt, stride_vh, stride_gb, stride_gs, stride_gh, stride_uqb, stride_uqs, stride_uqh,
        stride_ugb, stride_ugs, stride_ugh,
        QK_SCALE, SCALE, HEADS, GROUP, HEAD_SIZE, BLOCK_D, ROWS, KEYS, SPLITS, KV_LAYOUT, PERMUTED, NEED_DK, NEED_DV,
        PRECISION,
    )  # fmt: skip
