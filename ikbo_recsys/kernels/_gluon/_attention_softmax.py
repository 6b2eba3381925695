"""One consumer's steps of the Hopper attention forward kernel: softmax, products in turn, an item's end. Device code
only.

Letters: H query heads, D head size, KEYS keys of a block. Scores are in units of log2 once scaled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from ikbo_recsys.kernels._gluon._attention_parts import (
    rescale,
    send_rows,
    store_lse,
    turn_pass,
    turn_pass_behind,
    turn_wait,
    whole_row,
)
from ikbo_recsys.kernels._gluon._compat import tma_store


@gluon.jit
def first_softmax(
    scores, block, keys, qk_scale, dtype: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, mma: gl.constexpr,
    operand: gl.constexpr,
):  # fmt: skip
    """Maximum, sum and weights of the block of keys that an item begins with: its user's last, the only one with a
    mask, unless the item is a part.

    A user without keys has no maximum: any finite one makes all weights 0.
    """
    scores = mask_scores(scores, block, keys, KEYS, mma)
    row_max = fresh_maximum(row_maximum(scores, KEYS, D) * qk_scale)
    weights = gl.exp2(scores * qk_scale - row_max[:, None])
    return row_max, fresh_sums(weights, KEYS), gl.convert_layout(weights.to(dtype), operand)


@gluon.jit
def mask_scores(scores, block, keys, KEYS: gl.constexpr, mma: gl.constexpr):
    """-inf from the user's last key on. In a branch: comparing and selecting is an eighth of the instructions between
    two items, which come from far."""
    if (block + 1) * KEYS > keys:
        column = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, mma))
        scores = gl.where((column < keys)[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def row_maximum(scores, KEYS: gl.constexpr, D: gl.constexpr):
    """`max(scores, 1)`. With small heads, of every eighth column first: four chains of comparisons in a thread instead
    of two, at whose end the exponentials wait. (With large ones the products take longer, and this order costs 1%.)"""
    if D > 64:
        return gl.max(scores, 1)
    of_columns = gl.max(scores.reshape((64, KEYS // 8, 8)), 1)
    return gl.convert_layout(gl.max(of_columns, 1), gl.SliceLayout(1, scores.type.layout))


@gluon.jit
def fresh_maximum(seen):
    return gl.where(seen == float("-inf"), -1.0e30, seen)


@gluon.jit
def fresh_sums(weights, KEYS: gl.constexpr):
    """The whole sum in the first of the 8 partial ones. Its shuffles also keep the exponentials where they are: without
    them the assembler moves all of the first softmax behind the wait for P.V."""
    none = partial_sums(gl.zeros_like(weights), KEYS)
    first = gl.arange(0, 8, layout=gl.SliceLayout(0, none.type.layout))[None, :] == 0
    whole = gl.convert_layout(gl.sum(weights, 1), gl.SliceLayout(1, none.type.layout))
    return gl.where(first, whole[:, None], none)


@gluon.jit
def partial_sums(weights, KEYS: gl.constexpr):
    """Sums of every eighth column, `[64, 8]`: each thread's own, so that nothing is shuffled until the end of an
    item."""
    return gl.sum(weights.reshape((64, KEYS // 8, 8)), 1)


@gluon.jit
def next_softmax(
    WHO: gl.constexpr, scores, row_max, row_sum, qk_scale, dtype: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    operand: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """A later block's weights, the new maximum and sums, and by what the accumulator has to be multiplied.

    Small heads take turns at the exponentials: the products are short there, so consumers that took turns at those
    would compute their exponentials at the same time, half as fast each. Without TURNS there is one consumer.
    """
    seen = row_maximum(scores, KEYS, D) * qk_scale
    new_max = gl.where(seen > row_max, seen, row_max)
    if TURNS and D == 64:
        turn_wait(WHO)
    factor = gl.exp2(row_max - new_max)
    weights = gl.exp2(scores * qk_scale - new_max[:, None])
    part = partial_sums(weights, KEYS)
    if TURNS and D == 64:
        part = turn_pass_behind(WHO, part)
    row_sum = row_sum * gl.convert_layout(factor, gl.SliceLayout(1, part.type.layout))[:, None] + part
    return new_max, row_sum, factor, gl.convert_layout(weights.to(dtype), operand)


@gluon.jit
def issue(
    WHO: gl.constexpr, query, k_buf, zero, weights, factor, v_buf, v_ready, v_phase, out, KEYS: gl.constexpr,
    D: gl.constexpr, mmo: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Start the product with keys, and the one with values behind it; with large heads in this consumer's turn on the
    tensor cores, where TURNS are taken.

    In between, while the former runs, what has been added up so far is multiplied by `factor`.
    """
    if TURNS and D > 64:
        turn_wait(WHO)
    scores = warpgroup_mma(query, k_buf.reshape([KEYS, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    of_out = gl.convert_layout(factor, gl.SliceLayout(1, mmo))[:, None]
    out = rescale(out, of_out.broadcast_to((64, D)), D)
    mbarrier.wait(v_ready, v_phase)
    out = warpgroup_mma(weights, v_buf.reshape([KEYS, D]), out, is_async=True)
    if TURNS and D > 64:
        turn_pass(WHO)
    return scores, out


@gluon.jit
def finish(
    o_desc, o_buf, out_ptr, lse_ptr, permutation_ptr, out, row_max, row_sum, first, end, head, heads, seeds,
    mma: gl.constexpr, mmo: gl.constexpr, D: gl.constexpr, HEAD_SIZE: gl.constexpr, GATHER: gl.constexpr,
    PERMUTED: gl.constexpr, STORE_LSE: gl.constexpr,
):  # fmt: skip
    """Normalise 64 rows and send them off: whole boxes by TMA, what a user's last tile has by ordinary stores. The box
    before must have been read."""
    dtype: gl.constexpr = o_desc.dtype
    whole_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, mma))
    inverse = gl.where(whole_sum > 0.0, 1.0 / whole_sum, 0.0)
    out = (out * gl.convert_layout(inverse, gl.SliceLayout(1, mmo))[:, None]).to(dtype)
    if STORE_LSE:
        lse2 = row_max + gl.log2(whole_sum)
        store_lse(lse_ptr, permutation_ptr, lse2, first, end, head, heads, seeds, mma, PERMUTED)
    # Before the branch: in it, ptxas waits for P.V before the softmax in a loop of the form with shared tiles.
    tile = o_buf.reshape([64, D])
    tile.store(out)
    if GATHER:
        send_rows(out_ptr, permutation_ptr, tile, first, end, head, heads, seeds, D, HEAD_SIZE, PERMUTED)
    else:
        if first + 64 <= end:
            fence_async_shared()
            tma_store(o_desc, [whole_row(permutation_ptr, first, end, seeds, PERMUTED), head, 0], o_buf)
        else:
            send_rows(out_ptr, permutation_ptr, tile, first, end, head, heads, seeds, D, HEAD_SIZE, PERMUTED)
