"""Target attention, forward, for Hopper: persistent and warp-specialized. Device code only.

Letters: N packed query rows (candidates * seeds), H query heads, D head size, U users, T history rows.

A block holds a producer warp (`_attention_producer.py`) and two consumers of 64 rows. It walks the dense tile table of
`_triton/schedule.py` (128 rows of one user per entry, H items per entry) with a fixed stride. With one consumer, of
tiles of 64 rows, two blocks share a multiprocessor: for users with few rows.
- The producer streams the user's blocks of keys and values through two rings, from the last block to the first, so that
  only the first block a consumer sees needs a mask. Keys run one block ahead of values, across items.
- The consumers take turns on the tensor cores (hardware barriers 8 and 9): while one multiplies, the other does its
  softmax. Where heads are small it is the exponentials that they take turns at.
- The last product with values of an item runs beside the first product with keys of the next: there is no gap between
  items.
- Query rows come by TMA where they are adjacent (grouped candidates, or a number of seeds that 64 divides), row by row
  otherwise.
- A row's maximum moves as soon as it is exceeded, so that its largest weight is 1, which rounding leaves alone.
  (Letting it be exceeded by up to 2^8 gives 3 to 5% more error.) The accumulator is multiplied a step late, while the
  next product with keys runs, which does not need it. Multiplying it by 1, where maxima stay, is skipped by eight rows
  of a warp at a time, which has no influence on a result.
- Where the last round would leave many blocks without work, or there is not one round, blocks share tiles:
  `_attention_shares.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ikbo_recsys.kernels._gluon._attention_parts import advance, hold, key_blocks, read_tile, turn_pass
from ikbo_recsys.kernels._gluon._attention_producer import producer
from ikbo_recsys.kernels._gluon._attention_shares import (
    announced,
    blocks_of,
    hand_on,
    resumed_softmax,
    taken_up,
    turn_of,
    turn_step,
    turns,
)
from ikbo_recsys.kernels._gluon._attention_softmax import finish, first_softmax, issue, next_softmax
from ikbo_recsys.kernels._gluon._compat import wait_for_primary_grid


@gluon.jit
def _consumer(
    WHO: gl.constexpr, o_desc, uo_desc, q_bufs, k_bufs, v_bufs, o_bufs, q_full, q_empty, k_full, k_empty, v_full,
    v_empty, begins, table_ptr, items, out_ptr, uout_ptr, lse_ptr, ulse_ptr, permutation_ptr, state_ptr, flags_ptr,
    qk_scale, heads, seeds,
    KEYS: gl.constexpr, D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr,
    PERMUTED: gl.constexpr, STORE_LSE: gl.constexpr, SHARES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = o_desc.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    mmo: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    o_buf = o_bufs.index(WHO)
    zero = gl.zeros((64, KEYS), gl.float32, layout=mma)
    first_turn, end_turn, plan = turns(table_ptr, items, heads, KEYS, SHARES)
    step = turn_step(SHARES)
    ks = 0
    kp = 0
    vs = 0
    vp = 0
    qs = 0
    qp = 0
    if WHO == 1:
        turn_pass(1)
    if first_turn < end_turn:
        item, low, high, unit = turn_of(first_turn, plan, SHARES)
        row, end, _where, keys = read_tile(table_ptr, item, heads)
        head = item % heads
        begin, stop, blocks, masked = blocks_of(keys, low, high, unit, KEYS, SHARES)
        mbarrier.wait(q_full.index(WHO), 0)
        mbarrier.wait(k_full.index(0), 0)
        query = q_bufs.index(WHO).reshape([64, D])
        scores = warpgroup_mma(
            query, k_bufs.index(0).reshape([KEYS, D]).permute((1, 0)), zero, use_acc=False, is_async=True
        )  # fmt: skip
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(0), count=1)
        ks, kp = advance(ks, kp, STAGES)
        row_max, row_sum, weights = first_softmax(
            scores, blocks - 1 - begin, masked, qk_scale, dtype, KEYS, D, mma, operand
        )
        if SHARES == 1:
            out = gl.zeros((64, D), gl.float32, layout=mmo)
        for turn in range(first_turn, end_turn, step):
            more = turn + step < end_turn
            next_item, low, high, unit = turn_of(gl.where(more, turn + step, turn), plan, SHARES)
            next_row, next_end, _w, next_keys = read_tile(table_ptr, next_item, heads)
            next_head = next_item % heads
            query = q_bufs.index(qs * CONSUMERS + WHO).reshape([64, D])
            if SHARES != 1:
                out = gl.zeros((64, D), gl.float32, layout=mmo)
            if SHARES == 0:
                stop = key_blocks(keys, KEYS)
            factor = gl.full_like(row_max, 1.0)
            for j in range(begin + 1, stop):
                mbarrier.wait(k_full.index(ks), kp)
                scores_t, out_t = issue(
                    WHO, query, k_bufs.index(ks), zero, weights, factor, v_bufs.index(vs), v_full.index(vs), vp, out,
                    KEYS, D, mmo, CONSUMERS > 1,
                )  # fmt: skip
                scores = warpgroup_mma_wait(1, deps=(scores_t,))
                mbarrier.arrive(k_empty.index(ks), count=1)
                ks, kp = advance(ks, kp, STAGES)
                row_max, row_sum, factor, weights_n = next_softmax(
                    WHO, scores, row_max, row_sum, qk_scale, dtype, KEYS, D, operand, CONSUMERS > 1
                )
                if D > 64:
                    row_sum = hold(WHO, row_sum)
                else:
                    # A wait that the assembler cannot move the next one across: without it P.V is waited for before the
                    # softmax.
                    mbarrier.wait(k_full.index(ks), kp, pred=j + 1 < stop)
                out, _kept = warpgroup_mma_wait(0, deps=(out_t, weights))
                mbarrier.arrive(v_empty.index(vs), count=1)
                vs, vp = advance(vs, vp, STAGES)
                weights = weights_n
            # The item's last product with values beside the next item's first with keys.
            mbarrier.arrive(q_empty.index(qs * CONSUMERS + WHO), count=1)
            qs, qp = advance(qs, qp, 2)
            mbarrier.wait(q_full.index(qs * CONSUMERS + WHO), qp, pred=more)
            next_begin, next_stop, next_blocks, masked = blocks_of(next_keys, low, high, unit, KEYS, SHARES)
            if SHARES == 1:
                next_begin = gl.where(more, announced(begins.index(qs)), 0)
            following = q_bufs.index(qs * CONSUMERS + WHO).reshape([64, D])
            mbarrier.wait(k_full.index(ks), kp, pred=more)
            scores_t, out_t = issue(
                WHO, following, k_bufs.index(ks), zero, weights, factor, v_bufs.index(vs), v_full.index(vs), vp, out,
                KEYS, D, mmo, CONSUMERS > 1,
            )  # fmt: skip
            scores = warpgroup_mma_wait(1, deps=(scores_t,))
            mbarrier.arrive(k_empty.index(ks), count=1, pred=more)
            ks, kp = advance(ks, kp, STAGES)
            if SHARES == 1:
                next_max, next_sum, factor_n, weights_n = resumed_softmax(
                    scores, next_blocks - 1 - next_begin, masked, next_begin > 0, state_ptr, qk_scale, dtype, WHO, KEYS,
                    D, mma, operand,
                )  # fmt: skip
            else:
                next_max, next_sum, weights_n = first_softmax(
                    scores, next_blocks - 1 - next_begin, masked, qk_scale, dtype, KEYS, D, mma, operand
                )
            if not GATHER:
                tma.store_wait(0)
            # Such a wait, again.
            mbarrier.wait(k_full.index(ks), kp, pred=more & (next_begin + 1 < next_stop))
            out, _kept = warpgroup_mma_wait(0, deps=(out_t, weights))
            mbarrier.arrive(v_empty.index(vs), count=1)
            vs, vp = advance(vs, vp, STAGES)
            if SHARES > 1:
                hand_on(state_ptr, flags_ptr, turn, out, row_max, row_sum, WHO, D, mma, mmo, SHARES)
            elif SHARES == 1:
                if stop < key_blocks(keys, KEYS):
                    hand_on(state_ptr, flags_ptr, gl.program_id(0), out, row_max, row_sum, WHO, D, mma, mmo, SHARES)
                else:
                    finish(
                        o_desc, o_buf, out_ptr, lse_ptr, permutation_ptr, out, row_max, row_sum, row + WHO * 64, end,
                        head, heads, seeds, mma, mmo, D, HEAD_SIZE, GATHER, PERMUTED, STORE_LSE,
                    )  # fmt: skip
            elif uo_desc is None:
                finish(
                    o_desc, o_buf, out_ptr, lse_ptr, permutation_ptr, out, row_max, row_sum, row + WHO * 64, end,
                    head, heads, seeds, mma, mmo, D, HEAD_SIZE, GATHER, PERMUTED, STORE_LSE,
                )  # fmt: skip
            else:
                if row < 0:
                    finish(
                        uo_desc, o_buf, uout_ptr, ulse_ptr, permutation_ptr, out, row_max, row_sum, ~row + WHO * 64,
                        end, head, heads, seeds, mma, mmo, D, HEAD_SIZE, GATHER, False, STORE_LSE,
                    )  # fmt: skip
                else:
                    finish(
                        o_desc, o_buf, out_ptr, lse_ptr, permutation_ptr, out, row_max, row_sum, row + WHO * 64, end,
                        head, heads, seeds, mma, mmo, D, HEAD_SIZE, GATHER, PERMUTED, STORE_LSE,
                    )  # fmt: skip
            row = next_row + 0
            head = next_head + 0
            end = next_end + 0
            keys = next_keys + 0
            if SHARES == 1:
                out = taken_up(state_ptr, next_begin > 0, factor_n, WHO, D, mmo)
            if SHARES > 0:
                begin = next_begin + 0
                stop = next_stop + 0
            row_max = next_max
            row_sum = next_sum
            weights = weights_n
        if not GATHER:
            tma.store_wait(0)


@gluon.jit
def _attention(
    q_desc, uq_desc, k_desc, v_desc, o_desc, uo_desc, q_ptr, uq_ptr, out_ptr, uout_ptr, lse_ptr, ulse_ptr, state_ptr,
    flags_ptr, table_ptr, permutation_ptr, qk_scale, heads, group, seeds, user_seeds, stride_qb, stride_qs, stride_qh,
    stride_uqb, stride_uqs, stride_uqh,
    KEYS: gl.constexpr, D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr,
    GATHER: gl.constexpr, PERMUTED: gl.constexpr, STORE_LSE: gl.constexpr, SHARES: gl.constexpr,
    CONSUMERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """The body of all forms."""
    dtype: gl.constexpr = k_desc.dtype
    q_bufs = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, 64, 1, D], q_desc.layout)
    o_bufs = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, 1, D], o_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, 1, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, 1, D], v_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    landed = gl.allocate_shared_memory(gl.int64, [1], barrier)
    places = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 64], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    begins = places
    if SHARES == 1:
        begins = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    mbarrier.init(landed, count=1)
    for i in gl.static_range(2 * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    # The kernel that writes the table may still be running.
    wait_for_primary_grid()
    items = gl.load(table_ptr) * heads
    # fmt: off
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consumer, (0, o_desc, uo_desc, q_bufs, k_bufs, v_bufs, o_bufs, q_full, q_empty, k_full, k_empty, v_full,
                         v_empty, begins, table_ptr, items, out_ptr, uout_ptr, lse_ptr, ulse_ptr, permutation_ptr,
                         state_ptr, flags_ptr, qk_scale, heads, seeds,
                         KEYS, D, HEAD_SIZE, STAGES, GATHER, PERMUTED, STORE_LSE, SHARES, CONSUMERS)),
            (producer, (q_desc, uq_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty,
                        v_full, v_empty, landed, places, begins, flags_ptr, table_ptr, items, q_ptr, uq_ptr,
                        permutation_ptr, heads, group, seeds, user_seeds, stride_qb, stride_qs, stride_qh, stride_uqb,
                        stride_uqs, stride_uqh,
                        KEYS, D, HEAD_SIZE, STAGES, JAGGED, GATHER, PERMUTED, SHARES, CONSUMERS)),
        ], [1], [PRODUCER_REGISTERS])
    else:
        gl.warp_specialize([
            (_consumer, (0, o_desc, uo_desc, q_bufs, k_bufs, v_bufs, o_bufs, q_full, q_empty, k_full, k_empty, v_full,
                         v_empty, begins, table_ptr, items, out_ptr, uout_ptr, lse_ptr, ulse_ptr, permutation_ptr,
                         state_ptr, flags_ptr, qk_scale, heads, seeds,
                         KEYS, D, HEAD_SIZE, STAGES, GATHER, PERMUTED, STORE_LSE, SHARES, CONSUMERS)),
            (_consumer, (1, o_desc, uo_desc, q_bufs, k_bufs, v_bufs, o_bufs, q_full, q_empty, k_full, k_empty, v_full,
                         v_empty, begins, table_ptr, items, out_ptr, uout_ptr, lse_ptr, ulse_ptr, permutation_ptr,
                         state_ptr, flags_ptr, qk_scale, heads, seeds,
                         KEYS, D, HEAD_SIZE, STAGES, GATHER, PERMUTED, STORE_LSE, SHARES, CONSUMERS)),
            (producer, (q_desc, uq_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty,
                        v_full, v_empty, landed, places, begins, flags_ptr, table_ptr, items, q_ptr, uq_ptr,
                        permutation_ptr, heads, group, seeds, user_seeds, stride_qb, stride_qs, stride_qh, stride_uqb,
                        stride_uqs, stride_uqh,
                        KEYS, D, HEAD_SIZE, STAGES, JAGGED, GATHER, PERMUTED, SHARES, CONSUMERS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    # fmt: on


SIZES = [
    *("permutation_ptr", "heads", "group", "seeds", "user_seeds", "stride_qb", "stride_qs", "stride_qh"),
    *("stride_uqb", "stride_uqs", "stride_uqh"),
]


@gluon.jit(do_not_specialize=SIZES)
def attention_forward(
    q_desc, k_desc, v_desc, o_desc, q_ptr, out_ptr, lse_ptr, table_ptr, permutation_ptr, qk_scale, heads, group, seeds,
    stride_qb, stride_qs, stride_qh,
    KEYS: gl.constexpr, D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr,
    GATHER: gl.constexpr, PERMUTED: gl.constexpr, STORE_LSE: gl.constexpr, CONSUMERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`out = softmax(q k^T * scale) v` over the tiles of the table; out is contiguous `[N, H, D]`, lse `[N, H]`,
    natural.

    Descriptors: q and o `[N, H, D]` by 64 rows, k and v `[U, T, Hkv, D]` by KEYS rows (U = 1 when jagged). With GATHER
    the query rows are copied one by one from `q_ptr`, through the permutation and with any strides, and q_desc is not
    read. `qk_scale` is scale * log2(e), and must be positive. D is the padded head size; columns from HEAD_SIZE on read
    as zeros.
    """
    _attention(
        q_desc, None, k_desc, v_desc, o_desc, None, q_ptr, None, out_ptr, None, lse_ptr, None, None, None, table_ptr,
        permutation_ptr, qk_scale, heads, group, seeds, None, stride_qb, stride_qs, stride_qh, None, None, None,
        KEYS, D, HEAD_SIZE, STAGES, JAGGED, GATHER, PERMUTED, STORE_LSE, 0, CONSUMERS, CONSUMER_REGISTERS,
        PRODUCER_REGISTERS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def attention_forward_shared(
    q_desc, k_desc, v_desc, o_desc, q_ptr, out_ptr, lse_ptr, state_ptr, flags_ptr, table_ptr, permutation_ptr, qk_scale,
    heads, group, seeds, stride_qb, stride_qs, stride_qh,
    KEYS: gl.constexpr, D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr,
    GATHER: gl.constexpr, PERMUTED: gl.constexpr, STORE_LSE: gl.constexpr, SHARES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`attention_forward` where thread blocks share tiles, in one of the two ways of `_attention_shares.py`.

    State is fp32 `[slots, 2, 64 * (D + 9)]`: with SHARES 1 there is a slot for each thread block, and a flag, 0 before
    the launch; else one for each part of each item, no flags, and nothing is written to out and lse.
    """
    _attention(
        q_desc, None, k_desc, v_desc, o_desc, None, q_ptr, None, out_ptr, None, lse_ptr, None, state_ptr, flags_ptr,
        table_ptr, permutation_ptr, qk_scale, heads, group, seeds, None, stride_qb, stride_qs, stride_qh, None, None,
        None,
        KEYS, D, HEAD_SIZE, STAGES, JAGGED, GATHER, PERMUTED, STORE_LSE, SHARES, 2, CONSUMER_REGISTERS,
        PRODUCER_REGISTERS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def attention_forward_both(
    q_desc, uq_desc, k_desc, v_desc, o_desc, uo_desc, q_ptr, uq_ptr, out_ptr, uout_ptr, lse_ptr, ulse_ptr, table_ptr,
    permutation_ptr, qk_scale, heads, group, seeds, user_seeds, stride_qb, stride_qs, stride_qh, stride_uqb,
    stride_uqs, stride_uqh,
    KEYS: gl.constexpr, D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr,
    GATHER: gl.constexpr, PERMUTED: gl.constexpr, STORE_LSE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`attention_forward` over the tiles of `fill_tile_table_both`: rows of the candidates' and of the users' queries.

    uq and uo are `[U * X, H, D]` (X own rows per user), ulse `[U * X, H]`, as q, o and lse are; with GATHER own rows
    are copied one by one as well.
    """
    _attention(
        q_desc, uq_desc, k_desc, v_desc, o_desc, uo_desc, q_ptr, uq_ptr, out_ptr, uout_ptr, lse_ptr, ulse_ptr, None,
        None, table_ptr, permutation_ptr, qk_scale, heads, group, seeds, user_seeds, stride_qb, stride_qs, stride_qh,
        stride_uqb, stride_uqs, stride_uqh,
        KEYS, D, HEAD_SIZE, STAGES, JAGGED, GATHER, PERMUTED, STORE_LSE, 0, 2, CONSUMER_REGISTERS, PRODUCER_REGISTERS,
    )  # fmt: skip
