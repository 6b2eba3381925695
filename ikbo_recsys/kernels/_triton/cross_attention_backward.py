"""Target attention, gradients of keys and values, for every GPU Triton compiles for. Device code only.

With p the attention weights, g the gradient of the output and delta as `cross_attention_backward_query.py` writes it:
`dv = p^T g`, `ds = p * (g v^T - delta)`, `dk = scale * ds^T q`.

No atomics: a program owns keys and walks all the query rows of their user. Every sum has a fixed order.
"""

import triton
import triton.language as tl

from ikbo_recsys.kernels._triton.cross_attention import SIZES, load_tile, row_pointers
from ikbo_recsys.kernels._triton.cross_attention_backward_query import delta_of_rows, load_lse2
from ikbo_recsys.kernels._triton.schedule import clamped_offset, key_range, tile_of_slot


@triton.jit
def key_block(kv_ptr, slot, num_users, capacity, KEYS: tl.constexpr, KV_LAYOUT: tl.constexpr):
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
def first_history_row(kv_ptr, user, capacity, KV_LAYOUT: tl.constexpr):
    """Where a user's rows begin in contiguous gradients of keys and values, counted over all users."""
    if KV_LAYOUT == 2:
        return tl.zeros([], tl.int64) + clamped_offset(kv_ptr, user, capacity)
    else:
        return user.to(tl.int64) * capacity


@triton.jit
def store_history_rows(
    out_ptr,
    first_row,
    keys,
    acc,
    counts,
    rows_out,
    heads_size,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the rows `keys` of a user, those before `rows_out`: zeros where they do not count."""
    column = tl.arange(0, BLOCK_D)
    pointers = out_ptr + (first_row + keys.to(tl.int64)) * heads_size
    inside = (keys < rows_out)[:, None] & (column < HEAD_SIZE)[None, :]
    acc = tl.where(counts[:, None], acc, 0.0)
    tl.store(pointers[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def places_of_rows(permutation_ptr, row, valid, seeds, PERMUTED: tl.constexpr):
    """`(candidate, seed)` of packed rows."""
    cand = row // seeds
    seed = row - cand * seeds
    if PERMUTED:
        cand = tl.load(permutation_ptr + cand, mask=valid, other=0)
    return cand, seed


@triton.jit
def weights_of_keys(key, query, lse2, QK_SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """p of a block of keys and a tile of rows, transposed: `[KEYS, ROWS]`."""
    scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * QK_SCALE
    return tl.exp2(scores - lse2[None, :])


@triton.jit
def grad_scores_of_keys(weights, value, grad, delta, PRECISION: tl.constexpr):
    """ds of what `weights_of_keys` gives, `[KEYS, ROWS]` too."""
    grad_weights = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
    return weights * (grad_weights - delta[None, :])


@triton.jit
def _accumulate(
    dk,
    dv,
    key,
    value,
    q_ptr,
    out_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    permutation_ptr,
    start,
    end,
    split,
    is_counted,
    seeds,
    stride_qb,
    stride_qs,
    stride_gb,
    stride_gs,
    QK_SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PERMUTED: tl.constexpr,
    NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add a split's share of the packed rows `start:end` of one head to dk (without the scale) and dv.

    `out_ptr` is None where delta is known, and `delta_ptr` points to it; see `key_value_gradient`.
    """
    share = ((end - start + ROWS - 1) // ROWS + SPLITS - 1) // SPLITS * ROWS
    start += split * share
    last = tl.minimum(start + share, end)
    # Blocks of nothing but padding have nothing to sum.
    last = tl.where(is_counted, last, start)
    for row0 in range(start, last, ROWS):
        row = row0 + tl.arange(0, ROWS)
        valid = row < last
        cand, seed = places_of_rows(permutation_ptr, row, valid, seeds, PERMUTED)
        q_rows = row_pointers(q_ptr, cand, seed, stride_qb, stride_qs)
        g_rows = row_pointers(grad_ptr, cand, seed, stride_gb, stride_gs)
        lse_rows = row_pointers(lse_ptr, cand, seed, seeds * HEADS, HEADS)
        query = load_tile(q_rows, valid, HEAD_SIZE, BLOCK_D, True)
        grad = load_tile(g_rows, valid, HEAD_SIZE, BLOCK_D, True)
        lse2 = load_lse2(lse_rows, valid)
        weights = weights_of_keys(key, query, lse2, QK_SCALE, PRECISION)
        if NEED_DV:
            dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision=PRECISION)
        if NEED_DK:
            delta_rows = row_pointers(delta_ptr, cand, seed, seeds * HEADS, HEADS)
            if out_ptr is None:
                delta = tl.load(delta_rows, mask=valid, other=0.0)
            else:
                o_rows = row_pointers(out_ptr, cand, seed, seeds * HEADS * HEAD_SIZE, HEADS * HEAD_SIZE)
                delta = delta_of_rows(grad, o_rows, delta_rows, valid, HEAD_SIZE, BLOCK_D, GRAD_LSE)
            grad_scores = grad_scores_of_keys(weights, value, grad, delta, PRECISION)
            dk = tl.dot(grad_scores.to(query.dtype), query, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_value_gradient(
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
    uq_ptr,
    ugrad_ptr,
    ulse_ptr,
    udelta_ptr,
    user,
    first,
    rows_out,
    num_keys,
    split,
    key_head,
    num_cands,
    seeds,
    user_seeds,
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
    out_ptr=None,
    GRAD_LSE: tl.constexpr = False,
):
    """dk and dv of one block of keys and one key head, from a split's share of the rows that attend to it.

    `user_seeds`, and what begins with u, is None where users have no rows of their own. With the output of the
    candidates' rows in `out_ptr` their delta is computed here; what `delta_ptr` points to is then the gradient of the
    log-sum-exp, read if GRAD_LSE says that there is one.
    """
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    keys = first + tl.arange(0, KEYS)
    counts = keys < num_keys
    user64 = user.to(tl.int64)
    out_row = first_history_row(kv_ptr, user, capacity, KV_LAYOUT)
    key_rows = tl.zeros([], tl.int64) + keys
    if KV_LAYOUT == 2:
        key_rows += out_row
    key_head64 = key_head.to(tl.int64)
    k_rows = k_ptr + user64 * stride_ku + key_head64 * stride_kh + key_rows * stride_kt
    v_rows = v_ptr + user64 * stride_vu + key_head64 * stride_vh + key_rows * stride_vt
    key = load_tile(k_rows, counts, HEAD_SIZE, BLOCK_D, True)
    value = load_tile(v_rows, counts, HEAD_SIZE, BLOCK_D, True)
    dk = tl.zeros([KEYS, BLOCK_D], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_D], tl.float32)

    start = clamped_offset(offsets_ptr, user, num_cands) * seeds
    end = clamped_offset(offsets_ptr, user + 1, num_cands) * seeds
    for member in range(GROUP):
        head = key_head * GROUP + member
        head64 = head.to(tl.int64)
        out_of_head = None
        if out_ptr is not None:
            out_of_head = out_ptr + head * HEAD_SIZE
        dk, dv = _accumulate(
            dk, dv, key, value, q_ptr + head64 * stride_qh, out_of_head, grad_ptr + head64 * stride_gh, lse_ptr + head,
            delta_ptr + head, permutation_ptr, start, end, split, first < num_keys, seeds, stride_qb, stride_qs,
            stride_gb, stride_gs,
            QK_SCALE, HEADS, HEAD_SIZE, BLOCK_D, ROWS, SPLITS, PERMUTED, NEED_DK, NEED_DV, GRAD_LSE, PRECISION,
        )  # fmt: skip
        if user_seeds is not None:
            dk, dv = _accumulate(
                dk, dv, key, value, uq_ptr + head64 * stride_uqh, None, ugrad_ptr + head64 * stride_ugh,
                ulse_ptr + head, udelta_ptr + head, permutation_ptr, user * user_seeds, (user + 1) * user_seeds, split,
                first < num_keys, user_seeds, stride_uqb, stride_uqs, stride_ugb, stride_ugs,
                QK_SCALE, HEADS, HEAD_SIZE, BLOCK_D, ROWS, SPLITS, False, NEED_DK, NEED_DV, False, PRECISION,
            )  # fmt: skip

    heads_size = KEY_HEADS * HEAD_SIZE
    base = split.to(tl.int64) * split_stride + key_head * HEAD_SIZE
    if NEED_DK:
        store_history_rows(dk_ptr + base, out_row, keys, dk * SCALE, counts, rows_out, heads_size, HEAD_SIZE, BLOCK_D)
    if NEED_DV:
        store_history_rows(dv_ptr + base, out_row, keys, dv, counts, rows_out, heads_size, HEAD_SIZE, BLOCK_D)


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
    user, first, rows_out, num_keys = key_block(kv_ptr, slot, num_users, capacity, KEYS, KV_LAYOUT)
    if first >= rows_out:
        return
    key_value_gradient(
        q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, offsets_ptr, permutation_ptr, kv_ptr,
        None, None, None, None, user, first, rows_out, num_keys, split, key_head, num_cands, seeds, None, capacity,
        split_stride, stride_qb, stride_qs, stride_qh, stride_ku, stride_kt, stride_kh, stride_vu, stride_vt, stride_vh,
        stride_gb, stride_gs, stride_gh, None, None, None, None, None, None,
        QK_SCALE, SCALE, HEADS, GROUP, HEAD_SIZE, BLOCK_D, ROWS, KEYS, SPLITS, KV_LAYOUT, PERMUTED, NEED_DK, NEED_DV,
        PRECISION,
    )  # fmt: skip
