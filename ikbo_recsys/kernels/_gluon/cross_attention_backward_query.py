"""Target attention, gradient of the query, for Hopper: persistent and warp-specialized. Device code only.

Letters: N packed query rows (candidates * seeds), H query heads, D head size, U users, T history rows.

The mirror image of `cross_attention_backward.py`: a consumer owns 64 query rows, whose dq stays in registers while the
producer streams the user's keys and values past them, 64 at a time, from the last block to the first. It walks the tile
table of the forward kernel. Delta, which both kernels need, is made in passing: this one runs first.

A step has three products under way at once, so that there is work for the tensor cores whatever else is done: the
gradient of its weights, `g v^T`; what the step before adds to dq, `ds k`; and the scores of the step behind. The last
two go on from an item to the next, beside whose first step delta is made and dq is stored. So keys are kept from the
step before theirs to the step behind, values for one step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ikbo_recsys.kernels._gluon._attention_backward_rows import delta_of_either, lse_of_either, store_either
from ikbo_recsys.kernels._gluon._attention_parts import (
    advance,
    item_of,
    key_blocks,
    load_rows,
    read_tile,
    turn_pass,
    turn_wait,
    zero_rows,
)
from ikbo_recsys.kernels._gluon._compat import tma_load, wait_for_primary_grid


@gluon.jit
def _load_history(desc, buf, barrier, where, row, head, JAGGED: gl.constexpr):
    if JAGGED:
        tma_load(desc, [0, where + row, head, 0], barrier, buf)
    else:
        tma_load(desc, [where, row, head, 0], barrier, buf)


@gluon.jit
def _keys_producer(
    q_desc, uq_desc, g_desc, ug_desc, out_desc, uout_desc, k_desc, v_desc, q_bufs, g_bufs, k_bufs, v_bufs, q_full,
    q_empty, full, empty, landed, table_ptr, items, permutation_ptr, heads, group, seeds,
    D: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr, PERMUTED: gl.constexpr,
):  # fmt: skip
    """A stage holds the keys of a step, which the step before asks for, and the values of the step before.

    Halfway a step gives back its values and the keys of the step before, by the `empty` of these keys' stage.

    q and g of an item are in its slot, its output is in the other slot, between the q of the item before and of the one
    behind. The two kinds take turns in a slot, so that the number of an item's slot is the phase of both.
    """
    VALUES: gl.constexpr = STAGES - 2
    slot = 0
    # Stage 0 stands for the keys before the first, which the first step gives back.
    mbarrier.arrive(full.index(0), count=2)
    stage = 1
    phase = 0
    values = VALUES - 1
    tail_phase = 0
    v_where = 0
    v_first = 0
    v_head = 0
    for turn in range(gl.program_id(0), items, gl.num_programs(0)):
        item = item_of(turn, items)
        row, end, where, keys = read_tile(table_ptr, item, heads)
        head = item % heads
        blocks = key_blocks(keys, 64)
        # The stage that the last step of the item before gives back.
        last = stage + (STAGES - 2)
        last_phase = phase + 0
        if last >= STAGES:
            last -= STAGES
            last_phase ^= 1
        for j in range(blocks):
            first = (blocks - 1 - j) * 64
            k_buf = k_bufs.index(stage)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            # Before the first step there are no values.
            if (turn > gl.program_id(0)) | (j > 0):
                mbarrier.expect(full.index(stage), 64 * D * 2)
                _load_history(v_desc, v_bufs.index(values), full.index(stage), v_where, v_first, v_head, JAGGED)
            else:
                mbarrier.arrive(full.index(stage), count=1)
            if first + 64 <= keys:
                mbarrier.expect(full.index(stage), 64 * D * 2)
                _load_history(k_desc, k_buf, full.index(stage), where, first, head // group, JAGGED)
            else:
                # Keys behind the user's last get ds = 0, but 0 * NaN is NaN. Their values only meet ds, which is
                # selected.
                mbarrier.expect(landed, 64 * D * 2)
                _load_history(k_desc, k_buf, landed, where, first, head // group, JAGGED)
                mbarrier.wait(landed, tail_phase)
                tail_phase ^= 1
                zero_rows(k_buf.reshape([64, D]), keys - first, 64, D)
                fence_async_shared()
                mbarrier.arrive(full.index(stage), count=1)
            v_where = where + 0
            v_first = first + 0
            v_head = head // group
            values = gl.where(values + 1 == VALUES, 0, values + 1)
            stage, phase = advance(stage, phase, STAGES)
            if j == 0:
                for i in gl.static_range(2):
                    at = slot * 2 + i
                    mbarrier.wait(q_empty.index(i), slot ^ 1)
                    mbarrier.expect(q_full.index(at), 2 * 64 * D * 2)
                    load_rows(
                        q_desc, g_desc, uq_desc, ug_desc, permutation_ptr, row, i * 64, end, head, seeds,
                        q_full.index(at), q_bufs.index(at), g_bufs.index(at), PERMUTED,
                    )  # fmt: skip
            if j == gl.minimum(blocks - 1, STAGES - 3):
                # The q of the item before is not needed any more. The next keys wait for the same.
                mbarrier.wait(empty.index(last), last_phase ^ 1)
                for i in gl.static_range(2):
                    at = (slot ^ 1) * 2 + i
                    mbarrier.expect(q_full.index(at), 64 * D * 2)
                    load_rows(
                        out_desc, None, uout_desc, None, permutation_ptr, row, i * 64, end, head, seeds,
                        q_full.index(at), q_bufs.index(at), None, PERMUTED,
                    )  # fmt: skip
        slot ^= 1
    if gl.program_id(0) < items:
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.arrive(full.index(stage), count=1)
        mbarrier.expect(full.index(stage), 64 * D * 2)
        _load_history(v_desc, v_bufs.index(values), full.index(stage), v_where, v_first, v_head, JAGGED)


@gluon.jit
def _start_product(rows_buf, keys_buf, zero, D: gl.constexpr):
    """64 rows with 64 keys or values, under way."""
    return warpgroup_mma(
        rows_buf.reshape([64, D]), keys_buf.reshape([64, D]).permute((1, 0)), zero, use_acc=False, is_async=True
    )


@gluon.jit
def _start_adding(dq, adds, grad_scores_16, k_buf, D: gl.constexpr):
    """`dq += ds k`, or without `adds` `dq = ds k`, under way."""
    return warpgroup_mma(grad_scores_16, k_buf.reshape([64, D]), dq, use_acc=adds, is_async=True)


@gluon.jit
def _rows_consumer(
    WHO: gl.constexpr, q_bufs, g_bufs, k_bufs, v_bufs, q_full, q_empty, full, empty,
    table_ptr, items, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr, dq_ptr, udq_ptr, permutation_ptr, qk_scale, scale,
    heads, seeds,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, PERMUTED: gl.constexpr, GRAD_LSE: gl.constexpr,
):  # fmt: skip
    VALUES: gl.constexpr = STAGES - 2
    dtype: gl.constexpr = q_bufs.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wide, k_width=2)
    zero = gl.zeros((64, 64), gl.float32, layout=mma)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, mma))
    step = gl.num_programs(0)
    slot = 0
    before = 0
    stage = 1
    phase = 0
    values = 0
    if WHO == 1:
        turn_pass(1)
    if gl.program_id(0) < items:
        item = item_of(gl.program_id(0), items)
        row, end, _where, keys = read_tile(table_ptr, item, heads)
        head = item % heads
        lse2 = lse_of_either(
            lse_ptr, ulse_ptr, permutation_ptr, row, WHO * 64, end, head, heads, seeds, mma, PERMUTED
        )  # fmt: skip
        # What is done beside the first item's first step is nobody's: there are no rows to store.
        done_row = row * 0
        done_end = end * 0
        done_head = head * 0
        done_blocks = keys * 0
        dq = gl.zeros((64, D), gl.float32, layout=wide)
        grad_scores_16 = gl.zeros((64, 64), dtype, layout=operand)
        mbarrier.wait(q_full.index(WHO), 0)
        mbarrier.wait(full.index(1), 0)
        scores_t = _start_product(q_bufs.index(WHO), k_bufs.index(1), zero, D)
        scores = warpgroup_mma_wait(0, deps=(scores_t,))
        following = 2
        mbarrier.wait(full.index(2), 0)
        for turn in range(gl.program_id(0), items, step):
            more = turn + step < items
            blocks = key_blocks(keys, 64)
            other = slot ^ 1
            g_buf = g_bufs.index(slot * 2 + WHO)
            # An item's first step, beside the last product of the item before. The turn is passed on at once: there is
            # more to do here than exponentials.
            turn_wait(WHO)
            grad_weights_t = _start_product(g_buf, v_bufs.index(values), zero, D)
            dq_t = _start_adding(dq, done_blocks > 1, grad_scores_16, k_bufs.index(before), D)
            turn_pass(WHO)
            next_item = item_of(gl.where(more, turn + step, turn), items)
            next_row, next_end, _w, next_keys = read_tile(table_ptr, next_item, heads)
            # Behind the last item there are no rows.
            next_end = gl.where(more, next_end, 0)
            next_head = next_item % heads
            mbarrier.wait(q_full.index(other * 2 + WHO), slot)
            delta = delta_of_either(
                delta_ptr, udelta_ptr, permutation_ptr, q_bufs.index(other * 2 + WHO), g_buf, row, WHO * 64, end,
                head, heads, seeds, mma, D, PERMUTED, GRAD_LSE,
            )  # fmt: skip
            mbarrier.arrive(q_empty.index(WHO), count=1)
            is_last = blocks == 1
            mbarrier.wait(q_full.index(other * 2 + WHO), other, pred=more & is_last)
            weights = gl.exp2(scores * qk_scale - lse2[:, None])
            whose = gl.where(is_last, other, slot)
            scores_t = _start_product(q_bufs.index(whose * 2 + WHO), k_bufs.index(following), zero, D)
            grad_weights, dq, weights, _kept = warpgroup_mma_wait(
                1, deps=(grad_weights_t, dq_t, weights, grad_scores_16)
            )
            mbarrier.arrive(empty.index(before), count=1)
            grad_scores = weights * (grad_weights - delta[:, None])
            if blocks * 64 > keys:
                valid = column < keys - (blocks - 1) * 64
                grad_scores = gl.where(valid[None, :], grad_scores, 0.0)
            grad_scores_16 = gl.convert_layout(grad_scores.to(dtype), operand)
            next_lse2 = lse_of_either(
                lse_ptr, ulse_ptr, permutation_ptr, next_row, WHO * 64, next_end, next_head, heads, seeds, mma, PERMUTED
            )  # fmt: skip
            store_either(
                dq_ptr, udq_ptr, permutation_ptr, (dq * scale).to(dtype), done_row, WHO * 64, done_end, done_head,
                heads, seeds, wide, D, HEAD_SIZE, PERMUTED,
            )  # fmt: skip
            before = stage + 0
            stage = following + 0
            following, phase = advance(following, phase, STAGES)
            mbarrier.wait(full.index(following), phase, pred=more | (is_last == 0))
            values = gl.where(values + 1 == VALUES, 0, values + 1)
            scores, grad_scores_16 = warpgroup_mma_wait(0, deps=(scores_t, grad_scores_16))
            for j in range(1, blocks):
                turn_wait(WHO)
                grad_weights_t = _start_product(g_buf, v_bufs.index(values), zero, D)
                dq_t = _start_adding(dq, j > 1, grad_scores_16, k_bufs.index(before), D)
                is_last = j + 1 == blocks
                mbarrier.wait(q_full.index(other * 2 + WHO), other, pred=more & is_last)
                weights = gl.exp2(scores * qk_scale - lse2[:, None])
                # The next scores, of this item or of the next one.
                whose = gl.where(is_last, other, slot)
                scores_t = _start_product(q_bufs.index(whose * 2 + WHO), k_bufs.index(following), zero, D)
                turn_pass(WHO)
                grad_weights, dq, weights, _kept = warpgroup_mma_wait(
                    1, deps=(grad_weights_t, dq_t, weights, grad_scores_16)
                )
                mbarrier.arrive(empty.index(before), count=1)
                grad_scores = weights * (grad_weights - delta[:, None])
                grad_scores_16 = gl.convert_layout(grad_scores.to(dtype), operand)
                before = stage + 0
                stage = following + 0
                following, phase = advance(following, phase, STAGES)
                # The assembler does not move ds behind this wait: it is made while the scores are.
                mbarrier.wait(full.index(following), phase, pred=more | (is_last == 0))
                values = gl.where(values + 1 == VALUES, 0, values + 1)
                scores, grad_scores_16 = warpgroup_mma_wait(0, deps=(scores_t, grad_scores_16))
            slot = other
            done_blocks = blocks + 0
            done_row = row + 0
            done_head = head + 0
            done_end = end + 0
            row = next_row + 0
            head = next_head + 0
            end = next_end + 0
            keys = next_keys + 0
            lse2 = next_lse2
        dq_t = _start_adding(dq, done_blocks > 1, grad_scores_16, k_bufs.index(before), D)
        dq, _kept = warpgroup_mma_wait(0, deps=(dq_t, grad_scores_16))
        store_either(
            dq_ptr, udq_ptr, permutation_ptr, (dq * scale).to(dtype), done_row, WHO * 64, done_end, done_head,
            heads, seeds, wide, D, HEAD_SIZE, PERMUTED,
        )  # fmt: skip


@gluon.jit
def _query_gradient(
    q_desc, uq_desc, g_desc, ug_desc, out_desc, uout_desc, k_desc, v_desc, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr,
    dq_ptr, udq_ptr, table_ptr, permutation_ptr, qk_scale, scale, heads, group, seeds,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr, PERMUTED: gl.constexpr,
    GRAD_LSE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """The body of both kernels."""
    dtype: gl.constexpr = k_desc.dtype
    q_bufs = gl.allocate_shared_memory(dtype, [4, 64, 1, D], q_desc.layout)
    g_bufs = gl.allocate_shared_memory(dtype, [4, 64, 1, D], g_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 64, 1, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES - 2, 1, 64, 1, D], v_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    landed = gl.allocate_shared_memory(gl.int64, [1], barrier)
    mbarrier.init(landed, count=1)
    for i in gl.static_range(4):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    wait_for_primary_grid()
    items = gl.load(table_ptr) * heads
    gl.warp_specialize(
        [
            (
                _rows_consumer,
                (
                    0, q_bufs, g_bufs, k_bufs, v_bufs, q_full, q_empty, full, empty,
                    table_ptr, items, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr, dq_ptr, udq_ptr, permutation_ptr,
                    qk_scale, scale, heads, seeds,
                    D, HEAD_SIZE, STAGES, PERMUTED, GRAD_LSE,
                ),
            ),
            (
                _rows_consumer,
                (
                    1, q_bufs, g_bufs, k_bufs, v_bufs, q_full, q_empty, full, empty,
                    table_ptr, items, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr, dq_ptr, udq_ptr, permutation_ptr,
                    qk_scale, scale, heads, seeds,
                    D, HEAD_SIZE, STAGES, PERMUTED, GRAD_LSE,
                ),
            ),
            (
                _keys_producer,
                (
                    q_desc, uq_desc, g_desc, ug_desc, out_desc, uout_desc, k_desc, v_desc, q_bufs, g_bufs, k_bufs,
                    v_bufs, q_full, q_empty, full, empty, landed,
                    table_ptr, items, permutation_ptr, heads, group, seeds, D, STAGES, JAGGED, PERMUTED,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


SIZES = ["permutation_ptr", "heads", "group", "seeds"]


@gluon.jit(do_not_specialize=SIZES)
def attention_backward_query(
    q_desc, g_desc, out_desc, k_desc, v_desc, lse_ptr, delta_ptr, dq_ptr, table_ptr, permutation_ptr, qk_scale, scale,
    heads, group, seeds,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr, PERMUTED: gl.constexpr,
    GRAD_LSE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write dq, contiguous `[N, H, D]`, and delta `[N, H]`.

    Descriptors: q and g (the gradient of the output) `[N, H, D]` by 64 rows, k and v `[U, T, Hkv, D]` by 64 rows (U = 1
    when jagged), the output as q, contiguous. lse is `[N, H]`. With GRAD_LSE `delta_ptr` holds the gradient of the
    log-sum-exp. With PERMUTED, 64 divides the number of seeds.
    """
    _query_gradient(
        q_desc, None, g_desc, None, out_desc, None, k_desc, v_desc, lse_ptr, None, delta_ptr, None, dq_ptr, None,
        table_ptr, permutation_ptr, qk_scale, scale, heads, group, seeds,
        D, HEAD_SIZE, STAGES, JAGGED, PERMUTED, GRAD_LSE, CONSUMER_REGISTERS, PRODUCER_REGISTERS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def attention_backward_query_both(
    q_desc, uq_desc, g_desc, ug_desc, out_desc, uout_desc, k_desc, v_desc, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr,
    dq_ptr, udq_ptr, table_ptr, permutation_ptr, qk_scale, scale, heads, group, seeds,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr, PERMUTED: gl.constexpr,
    GRAD_LSE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`attention_backward_query` over the tiles of `fill_tile_table_both`: dq of candidates' and of users' rows.

    uq, ug and uout are `[U * X, H, D]` (X own rows per user), ulse, udelta and udq as lse, delta and dq.
    """
    _query_gradient(
        q_desc, uq_desc, g_desc, ug_desc, out_desc, uout_desc, k_desc, v_desc, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr,
        dq_ptr, udq_ptr, table_ptr, permutation_ptr, qk_scale, scale, heads, group, seeds,
        D, HEAD_SIZE, STAGES, JAGGED, PERMUTED, GRAD_LSE, CONSUMER_REGISTERS, PRODUCER_REGISTERS,
    )  # fmt: skip
