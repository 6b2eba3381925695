"""The producer warp of the Hopper attention forward kernel: query rows, keys and values into shared memory. Device code
only.

Letters: D head size, KEYS keys of a block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from ikbo_recsys.kernels._gluon._attention_parts import (
    add_candidates,
    advance,
    ask_places,
    gather_rows,
    load_rows,
    read_tile,
    zero_rows,
)
from ikbo_recsys.kernels._gluon._attention_shares import announce, blocks_of, turn_of, turn_step, turns
from ikbo_recsys.kernels._gluon._compat import tma_load


@gluon.jit
def _load_block(
    desc, full, empty, bufs, where, row, head, stage, phase, KEYS: gl.constexpr, D: gl.constexpr, JAGGED: gl.constexpr
):
    """Fill a stage with KEYS rows of a user's keys or values, from `row` on."""
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), KEYS * D * 2)
    if JAGGED:
        tma_load(desc, [0, where + row, head, 0], full.index(stage), bufs.index(stage))
    else:
        tma_load(desc, [where, row, head, 0], full.index(stage), bufs.index(stage))


@gluon.jit
def _load_values(
    desc, full, empty, landed, bufs, where, row, left, head, stage, phase, tail_phase,
    KEYS: gl.constexpr, D: gl.constexpr, JAGGED: gl.constexpr,
):  # fmt: skip
    """`_load_block`, but rows from `left` on become zeros. Returns the phase of `landed`.

    Rows behind the user's last are padding or another user's: their weights are 0, but 0 * NaN is NaN.
    """
    if left >= KEYS:
        _load_block(desc, full, empty, bufs, where, row, head, stage, phase, KEYS, D, JAGGED)
    else:
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(landed, KEYS * D * 2)
        if JAGGED:
            tma_load(desc, [0, where + row, head, 0], landed, bufs.index(stage))
        else:
            tma_load(desc, [where, row, head, 0], landed, bufs.index(stage))
        mbarrier.wait(landed, tail_phase)
        zero_rows(bufs.index(stage).reshape([KEYS, D]), left, KEYS, D)
        fence_async_shared()
        mbarrier.arrive(full.index(stage), count=1)
        tail_phase ^= 1
    return tail_phase


@gluon.jit
def producer(
    q_desc, uq_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty, v_full, v_empty, landed,
    places, begins, flags_ptr, table_ptr, items, q_ptr, uq_ptr, permutation_ptr, heads, group, seeds, user_seeds,
    stride_qb, stride_qs, stride_qh, stride_uqb, stride_uqs, stride_uqh,
    KEYS: gl.constexpr, D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr,
    GATHER: gl.constexpr, PERMUTED: gl.constexpr, SHARES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    ks = 0
    kp = 0
    vs = 0
    vp = 0
    qs = 0
    qp = 0
    tail_phase = 0
    # The block of values still owed to the item before.
    where_v = 0
    row_v = 0
    head_v = 0
    left_v = 0
    # With GATHER the table is read an item ahead.
    where = 0
    keys = 0
    head = 0
    first_turn, end_turn, plan = turns(table_ptr, items, heads, KEYS, SHARES)
    if GATHER:  # noqa: SIM102, a compile-time and a run-time condition
        if first_turn < end_turn:
            item = turn_of(first_turn, plan, SHARES)[0]
            row, end, where, keys = read_tile(table_ptr, item, heads)
            head = item % heads
            asked = ask_places(
                places, row, end, head, permutation_ptr, uq_ptr, seeds, user_seeds, stride_qb, stride_qs, stride_qh,
                stride_uqb, stride_uqs, stride_uqh,
                PERMUTED,
            )  # fmt: skip
            if PERMUTED:
                add_candidates(places, asked, stride_qb)
            for i in range(CONSUMERS):
                gather_rows(q_ptr, uq_ptr, row, places.index(i), q_bufs.index(i), D, HEAD_SIZE)
    for turn in range(first_turn, end_turn, turn_step(SHARES)):
        item, low, high, unit = turn_of(turn, plan, SHARES)
        if not GATHER:
            row, end, where, keys = read_tile(table_ptr, item, heads)
            head = item % heads
        else:
            more = turn + turn_step(SHARES) < end_turn
            next_item = turn_of(gl.where(more, turn + turn_step(SHARES), turn), plan, SHARES)[0]
            row, end, next_where, next_keys = read_tile(table_ptr, next_item, heads)
            next_head = next_item % heads
        kv_head = head // group
        begin, stop, blocks, _ = blocks_of(keys, low, high, unit, KEYS, SHARES)
        if SHARES == 1:
            for i in gl.static_range(CONSUMERS):
                mbarrier.wait(q_empty.index(qs * CONSUMERS + i), qp ^ 1)
            begin = announce(flags_ptr, begins.index(qs), begin)
        begins_at = (blocks - 1 - begin) * KEYS
        for i in gl.static_range(CONSUMERS):
            if not GATHER:
                mbarrier.wait(q_empty.index(qs * CONSUMERS + i), qp ^ 1)
                mbarrier.expect(q_full.index(qs * CONSUMERS + i), 64 * D * 2)
                load_rows(
                    q_desc, None, uq_desc, None, permutation_ptr, row, i * 64, end, head, seeds,
                    q_full.index(qs * CONSUMERS + i), q_bufs.index(qs * CONSUMERS + i), None,
                    PERMUTED,
                )  # fmt: skip
            if i == 0:
                # Before the second consumer's rows: the first one begins earlier.
                _load_block(k_desc, k_full, k_empty, k_bufs, where, begins_at, kv_head, ks, kp, KEYS, D, JAGGED)
        if not GATHER:
            qs, qp = advance(qs, qp, 2)
        ks, kp = advance(ks, kp, STAGES)
        if turn > first_turn:
            tail_phase = _load_values(
                v_desc, v_full, v_empty, landed, v_bufs, where_v, row_v, left_v, head_v, vs, vp, tail_phase,
                KEYS, D, JAGGED,
            )  # fmt: skip
            vs, vp = advance(vs, vp, STAGES)
        if GATHER:
            # These rows were asked for during the item before: they are here by now.
            async_copy.wait_group(0)
            fence_async_shared()
            for i in gl.static_range(CONSUMERS):
                mbarrier.arrive(q_full.index(qs * CONSUMERS + i), count=1)
            qs, qp = advance(qs, qp, 2)
            asked = ask_places(
                places, row, end, next_head, permutation_ptr, uq_ptr, seeds, user_seeds, stride_qb, stride_qs,
                stride_qh, stride_uqb, stride_uqs, stride_uqh,
                PERMUTED,
            )  # fmt: skip
        # Once the rings have gone round, the consumers are about to leave the item before, and the room of the next
        # item's rows becomes free: then 64 are asked for behind each block of keys, so that the rings never run dry. An
        # item with few blocks has steps without one.
        room_at = begin + STAGES - 1
        for j in range(begin + 1, gl.maximum(stop, room_at + CONSUMERS) if GATHER else stop):
            if not GATHER or j < stop:
                first = (blocks - 1 - j) * KEYS
                _load_block(k_desc, k_full, k_empty, k_bufs, where, first, kv_head, ks, kp, KEYS, D, JAGGED)
                tail_phase = _load_values(
                    v_desc, v_full, v_empty, landed, v_bufs, where, first + KEYS, keys - first - KEYS, kv_head, vs, vp,
                    tail_phase,
                    KEYS, D, JAGGED,
                )  # fmt: skip
                ks, kp = advance(ks, kp, STAGES)
                vs, vp = advance(vs, vp, STAGES)
            if GATHER:  # noqa: SIM102, a compile-time and a run-time condition
                if more & (j >= room_at) & (j < room_at + CONSUMERS):
                    who = j - room_at
                    if PERMUTED:  # noqa: SIM102
                        if who == 0:
                            add_candidates(places, asked, stride_qb)
                    mbarrier.wait(q_empty.index(qs * CONSUMERS + who), qp ^ 1)
                    gather_rows(q_ptr, uq_ptr, row, places.index(who), q_bufs.index(qs * CONSUMERS + who), D, HEAD_SIZE)
        where_v = where + 0
        head_v = kv_head + 0
        if SHARES > 0:
            row_v = (blocks - stop) * KEYS
        left_v = keys - row_v
        if GATHER:
            where = next_where + 0
            keys = next_keys + 0
            head = next_head + 0
    if first_turn < end_turn:
        _load_values(
            v_desc, v_full, v_empty, landed, v_bufs, where_v, row_v, left_v, head_v, vs, vp, tail_phase, KEYS, D, JAGGED
        )
