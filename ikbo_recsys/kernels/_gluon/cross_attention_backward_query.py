"""Target attention, gradient of the query, for Hopper: persistent and warp-specialized. Device code only.

Letters: N packed query rows (candidates * seeds), H query heads, D head size, U users, T history rows.

The mirror image of `cross_attention_backward.py`: a consumer owns 64 query rows, whose dq stays in registers while the
producer streams the user's keys and values past them, 64 at a time, from the last block to the first. It walks the tile
table of the forward kernel. The first scores of an item are computed behind the last product of the one before. Delta,
which both kernels need, is made in passing: this one runs first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ikbo_recsys.kernels._gluon._attention_parts import (
    advance,
    item_of,
    load_rows,
    read_tile,
    row_places,
    row_pointers,
    store_rows,
    turn_pass,
    turn_wait,
    zero_rows,
)
from ikbo_recsys.kernels._gluon._compat import tma_load, wait_for_primary_grid

BLOCK_KEYS = 64


@gluon.jit
def _load_history(k_desc, v_desc, k_buf, v_buf, barrier, where, row, head, D: gl.constexpr, JAGGED: gl.constexpr):
    mbarrier.expect(barrier, 2 * 64 * D * 2)
    if JAGGED:
        tma_load(k_desc, [0, where + row, head, 0], barrier, k_buf)
        tma_load(v_desc, [0, where + row, head, 0], barrier, v_buf)
    else:
        tma_load(k_desc, [where, row, head, 0], barrier, k_buf)
        tma_load(v_desc, [where, row, head, 0], barrier, v_buf)


@gluon.jit
def _keys_producer(
    q_desc, uq_desc, g_desc, ug_desc, k_desc, v_desc, q_bufs, g_bufs, k_bufs, v_bufs, q_full, q_empty, full, empty,
    landed, table_ptr, items, permutation_ptr, heads, group, seeds,
    D: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr, PERMUTED: gl.constexpr,
):  # fmt: skip
    qs = 0
    qp = 0
    stage = 0
    phase = 0
    tail_phase = 0
    for turn in range(gl.program_id(0), items, gl.num_programs(0)):
        item = item_of(turn, items)
        row, end, where, keys = read_tile(table_ptr, item, heads)
        head = item % heads
        for i in gl.static_range(2):
            mbarrier.wait(q_empty.index(qs * 2 + i), qp ^ 1)
            mbarrier.expect(q_full.index(qs * 2 + i), 2 * 64 * D * 2)
            load_rows(
                q_desc, g_desc, uq_desc, ug_desc, permutation_ptr, row, i * 64, end, head, seeds,
                q_full.index(qs * 2 + i), q_bufs.index(qs * 2 + i), g_bufs.index(qs * 2 + i),
                PERMUTED,
            )  # fmt: skip
        qs, qp = advance(qs, qp, 2)
        blocks = gl.maximum((keys + 63) // 64, 1)
        for j in range(blocks):
            first = (blocks - 1 - j) * 64
            k_buf = k_bufs.index(stage)
            v_buf = v_bufs.index(stage)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            if first + 64 <= keys:
                _load_history(k_desc, v_desc, k_buf, v_buf, full.index(stage), where, first, head // group, D, JAGGED)
            else:
                # Keys behind the user's last get ds = 0, but 0 * NaN is NaN. Their values only meet ds, which is
                # selected.
                _load_history(k_desc, v_desc, k_buf, v_buf, landed, where, first, head // group, D, JAGGED)
                mbarrier.wait(landed, tail_phase)
                tail_phase ^= 1
                zero_rows(k_buf.reshape([64, D]), keys - first, 64, D)
                fence_async_shared()
                mbarrier.arrive(full.index(stage), count=1)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _row_lse(lse_ptr, permutation_ptr, row, end, head, heads, seeds, mma: gl.constexpr, PERMUTED: gl.constexpr):
    """Log-sum-exp (base 2) of 64 rows; weights 2^-inf = 0 for rows that do not exist."""
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    valid = rows < end
    at = row_places(permutation_ptr, rows, valid, seeds, PERMUTED).to(gl.int64) * heads + head
    return gl.load(lse_ptr + at, mask=valid, other=float("inf")) * 1.4426950408889634


@gluon.jit
def _row_results(
    out_ptr, permutation_ptr, row, end, head, heads, seeds, D: gl.constexpr, HEAD_SIZE: gl.constexpr,
    PERMUTED: gl.constexpr,
):  # fmt: skip
    """64 rows of the output, zeros for rows that do not exist: 16 bytes a thread, and in each warp the 16 rows that are
    its own in a product."""
    lanes: gl.constexpr = 256 // D
    layout: gl.constexpr = gl.BlockedLayout([16 // lanes, 8], [lanes, 32 // lanes], [4, 1], [1, 0])
    pointers, mask = row_pointers(
        out_ptr, permutation_ptr, row, end, head, heads, seeds, layout, D, HEAD_SIZE, PERMUTED
    )  # fmt: skip
    return gl.load(pointers, mask=mask, other=0.0)


@gluon.jit
def _row_delta(
    delta_ptr, permutation_ptr, out, g_buf, row, end, head, heads, seeds, mma: gl.constexpr, D: gl.constexpr,
    PERMUTED: gl.constexpr, GRAD_LSE: gl.constexpr,
):  # fmt: skip
    """delta = sum(out * g) of 64 rows, less the gradient of the log-sum-exp, where `delta_ptr` holds one. Kept there,
    for dk and dv."""
    grad = g_buf.reshape([64, D]).load(out.type.layout)
    delta = gl.convert_layout(gl.sum(out.to(gl.float32) * grad.to(gl.float32), 1), gl.SliceLayout(1, mma))
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    valid = rows < end
    at = row_places(permutation_ptr, rows, valid, seeds, PERMUTED).to(gl.int64) * heads + head
    if GRAD_LSE:
        delta -= gl.load(delta_ptr + at, mask=valid, other=0.0)
    gl.store(delta_ptr + at, delta, mask=valid)
    return delta


@gluon.jit
def _lse_of_either(
    lse_ptr, ulse_ptr, permutation_ptr, row, skip, end, head, heads, seeds, mma: gl.constexpr, PERMUTED: gl.constexpr
):
    """`_row_lse` of a tile's rows from the `skip`-th on, candidates' or users'."""
    if ulse_ptr is None:
        lse2 = _row_lse(lse_ptr, permutation_ptr, row + skip, end, head, heads, seeds, mma, PERMUTED)
    else:
        if row < 0:
            lse2 = _row_lse(ulse_ptr, permutation_ptr, ~row + skip, end, head, heads, seeds, mma, False)
        else:
            lse2 = _row_lse(lse_ptr, permutation_ptr, row + skip, end, head, heads, seeds, mma, PERMUTED)
    return lse2


@gluon.jit
def _results_of_either(
    out_ptr, uout_ptr, permutation_ptr, row, skip, end, head, heads, seeds, D: gl.constexpr, HEAD_SIZE: gl.constexpr,
    PERMUTED: gl.constexpr,
):  # fmt: skip
    """`_row_results` of a tile's rows from the `skip`-th on, candidates' or users'."""
    if uout_ptr is None:
        out = _row_results(out_ptr, permutation_ptr, row + skip, end, head, heads, seeds, D, HEAD_SIZE, PERMUTED)
    else:
        if row < 0:
            out = _row_results(uout_ptr, permutation_ptr, ~row + skip, end, head, heads, seeds, D, HEAD_SIZE, False)
        else:
            out = _row_results(out_ptr, permutation_ptr, row + skip, end, head, heads, seeds, D, HEAD_SIZE, PERMUTED)
    return out


@gluon.jit
def _delta_of_either(
    delta_ptr, udelta_ptr, permutation_ptr, out, g_buf, row, skip, end, head, heads, seeds, mma: gl.constexpr,
    D: gl.constexpr, PERMUTED: gl.constexpr, GRAD_LSE: gl.constexpr,
):  # fmt: skip
    """`_row_delta` of a tile's rows from the `skip`-th on, candidates' or users'."""
    if udelta_ptr is None:
        delta = _row_delta(
            delta_ptr, permutation_ptr, out, g_buf, row + skip, end, head, heads, seeds, mma, D, PERMUTED, GRAD_LSE
        )
    else:
        if row < 0:
            delta = _row_delta(
                udelta_ptr, permutation_ptr, out, g_buf, ~row + skip, end, head, heads, seeds, mma, D, False, GRAD_LSE
            )
        else:
            delta = _row_delta(
                delta_ptr, permutation_ptr, out, g_buf, row + skip, end, head, heads, seeds, mma, D, PERMUTED, GRAD_LSE
            )
    return delta


@gluon.jit
def _rows_consumer(
    WHO: gl.constexpr, q_bufs, g_bufs, k_bufs, v_bufs, q_full, q_empty, full, empty,
    table_ptr, items, out_ptr, uout_ptr, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr, dq_ptr, udq_ptr, permutation_ptr,
    qk_scale, scale, heads, seeds,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, PERMUTED: gl.constexpr, GRAD_LSE: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_bufs.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wide, k_width=2)
    zero = gl.zeros((64, 64), gl.float32, layout=mma)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, mma))
    step = gl.num_programs(0)
    qs = 0
    qp = 0
    stage = 0
    phase = 0
    if WHO == 1:
        turn_pass(1)
    if gl.program_id(0) < items:
        item = item_of(gl.program_id(0), items)
        row, end, _where, keys = read_tile(table_ptr, item, heads)
        head = item % heads
        lse2 = _lse_of_either(
            lse_ptr, ulse_ptr, permutation_ptr, row, WHO * 64, end, head, heads, seeds, mma, PERMUTED
        )  # fmt: skip
        out = _results_of_either(
            out_ptr, uout_ptr, permutation_ptr, row, WHO * 64, end, head, heads, seeds, D, HEAD_SIZE, PERMUTED
        )  # fmt: skip
        mbarrier.wait(q_full.index(WHO), 0)
        mbarrier.wait(full.index(0), 0)
        scores_t = warpgroup_mma(
            q_bufs.index(WHO).reshape([64, D]), k_bufs.index(0).reshape([64, D]).permute((1, 0)), zero,
            use_acc=False, is_async=True
        )  # fmt: skip
        delta = _delta_of_either(
            delta_ptr, udelta_ptr, permutation_ptr, out, g_bufs.index(WHO), row, WHO * 64, end, head, heads, seeds, mma,
            D, PERMUTED, GRAD_LSE,
        )  # fmt: skip
        scores = warpgroup_mma_wait(0, deps=(scores_t,))
        for turn in range(gl.program_id(0), items, step):
            more = turn + step < items
            following = item_of(gl.where(more, turn + step, turn), items)
            next_row, next_end, _w, next_keys = read_tile(table_ptr, following, heads)
            # Behind the last item there are no rows.
            next_end = gl.where(more, next_end, 0)
            next_head = following % heads
            next_lse2 = _lse_of_either(
                lse_ptr, ulse_ptr, permutation_ptr, next_row, WHO * 64, next_end, next_head, heads, seeds, mma, PERMUTED
            )  # fmt: skip
            next_qs, next_qp = advance(qs + 0, qp + 0, 2)
            grad = g_bufs.index(qs * 2 + WHO).reshape([64, D])
            dq = gl.zeros((64, D), gl.float32, layout=wide)
            blocks = gl.maximum((keys + 63) // 64, 1)
            for j in range(blocks):
                turn_wait(WHO)
                grad_weights_t = warpgroup_mma(
                    grad, v_bufs.index(stage).reshape([64, D]).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                weights = gl.exp2(scores * qk_scale - lse2[:, None])
                # The next scores, of this item or of the next one, are computed while this step's are worked on.
                is_last = j + 1 == blocks
                from_qs = gl.where(is_last, next_qs, qs)
                next_stage, next_phase = advance(stage + 0, phase + 0, STAGES)
                mbarrier.wait(q_full.index(next_qs * 2 + WHO), next_qp, pred=is_last & more)
                mbarrier.wait(full.index(next_stage), next_phase, pred=more | (j + 1 < blocks))
                scores_t = warpgroup_mma(
                    q_bufs.index(from_qs * 2 + WHO).reshape([64, D]),
                    k_bufs.index(next_stage).reshape([64, D]).permute((1, 0)), zero, use_acc=False, is_async=True,
                )  # fmt: skip
                turn_pass(WHO)
                grad_weights = warpgroup_mma_wait(1, deps=(grad_weights_t,))
                grad_scores = weights * (grad_weights - delta[:, None])
                if (blocks - j) * 64 > keys:
                    valid = column < keys - (blocks - 1 - j) * 64
                    grad_scores = gl.where(valid[None, :], grad_scores, 0.0)
                grad_scores_16 = gl.convert_layout(grad_scores.to(dtype), operand)
                dq_t = warpgroup_mma(grad_scores_16, k_bufs.index(stage).reshape([64, D]), dq, is_async=True)
                scores, dq, _kept = warpgroup_mma_wait(0, deps=(scores_t, dq_t, grad_scores_16))
                mbarrier.arrive(empty.index(stage), count=1)
                stage = next_stage
                phase = next_phase
            mbarrier.arrive(q_empty.index(qs * 2 + WHO), count=1)
            # On their way while dq is stored.
            next_out = _results_of_either(
                out_ptr, uout_ptr, permutation_ptr, next_row, WHO * 64, next_end, next_head, heads, seeds,
                D, HEAD_SIZE, PERMUTED,
            )  # fmt: skip
            if udq_ptr is None:
                store_rows(
                    dq_ptr, permutation_ptr, (dq * scale).to(dtype), row + WHO * 64, end, head, heads, seeds,
                    wide, D, HEAD_SIZE, PERMUTED,
                )  # fmt: skip
            else:
                if row < 0:
                    store_rows(
                        udq_ptr, permutation_ptr, (dq * scale).to(dtype), ~row + WHO * 64, end, head, heads,
                        seeds,
                        wide, D, HEAD_SIZE, False,
                    )  # fmt: skip
                else:
                    store_rows(
                        dq_ptr, permutation_ptr, (dq * scale).to(dtype), row + WHO * 64, end, head, heads,
                        seeds,
                        wide, D, HEAD_SIZE, PERMUTED,
                    )  # fmt: skip
            qs = next_qs
            qp = next_qp
            row = next_row + 0
            head = next_head + 0
            end = next_end + 0
            keys = next_keys + 0
            lse2 = next_lse2
            delta = _delta_of_either(
                delta_ptr, udelta_ptr, permutation_ptr, next_out, g_bufs.index(qs * 2 + WHO), row, WHO * 64, end,
                next_head, heads, seeds, mma, D, PERMUTED, GRAD_LSE,
            )  # fmt: skip


@gluon.jit
def _query_gradient(
    q_desc, uq_desc, g_desc, ug_desc, k_desc, v_desc, out_ptr, uout_ptr, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr,
    dq_ptr, udq_ptr, table_ptr, permutation_ptr, qk_scale, scale, heads, group, seeds,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr, PERMUTED: gl.constexpr,
    GRAD_LSE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """The body of both kernels."""
    dtype: gl.constexpr = k_desc.dtype
    q_bufs = gl.allocate_shared_memory(dtype, [4, 64, 1, D], q_desc.layout)
    g_bufs = gl.allocate_shared_memory(dtype, [4, 64, 1, D], g_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 64, 1, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 64, 1, D], v_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    landed = gl.allocate_shared_memory(gl.int64, [1], barrier)
    mbarrier.init(landed, count=1)
    for i in gl.static_range(4):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    wait_for_primary_grid()
    items = gl.load(table_ptr) * heads
    gl.warp_specialize(
        [
            (
                _rows_consumer,
                (
                    0, q_bufs, g_bufs, k_bufs, v_bufs, q_full, q_empty, full, empty,
                    table_ptr, items, out_ptr, uout_ptr, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr, dq_ptr, udq_ptr,
                    permutation_ptr, qk_scale, scale, heads, seeds,
                    D, HEAD_SIZE, STAGES, PERMUTED, GRAD_LSE,
                ),
            ),
            (
                _rows_consumer,
                (
                    1, q_bufs, g_bufs, k_bufs, v_bufs, q_full, q_empty, full, empty,
                    table_ptr, items, out_ptr, uout_ptr, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr, dq_ptr, udq_ptr,
                    permutation_ptr, qk_scale, scale, heads, seeds,
                    D, HEAD_SIZE, STAGES, PERMUTED, GRAD_LSE,
                ),
            ),
            (
                _keys_producer,
                (
                    q_desc, uq_desc, g_desc, ug_desc, k_desc, v_desc, q_bufs, g_bufs, k_bufs, v_bufs, q_full,
                    q_empty, full, empty, landed,
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
    q_desc, g_desc, k_desc, v_desc, out_ptr, lse_ptr, delta_ptr, dq_ptr, table_ptr, permutation_ptr, qk_scale, scale,
    heads, group, seeds,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr, PERMUTED: gl.constexpr,
    GRAD_LSE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write dq, contiguous `[N, H, D]`, and delta `[N, H]`.

    Descriptors: q and g (the gradient of the output) `[N, H, D]` by 64 rows, k and v `[U, T, Hkv, D]` by 64 rows (U = 1
    when jagged). The output is contiguous as dq is, lse `[N, H]`. With GRAD_LSE `delta_ptr` holds the gradient of the
    log-sum-exp. With PERMUTED, 64 divides the number of seeds.
    """
    _query_gradient(
        q_desc, None, g_desc, None, k_desc, v_desc, out_ptr, None, lse_ptr, None, delta_ptr, None, dq_ptr, None,
        table_ptr, permutation_ptr, qk_scale, scale, heads, group, seeds,
        D, HEAD_SIZE, STAGES, JAGGED, PERMUTED, GRAD_LSE, CONSUMER_REGISTERS, PRODUCER_REGISTERS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def attention_backward_query_both(
    q_desc, uq_desc, g_desc, ug_desc, k_desc, v_desc, out_ptr, uout_ptr, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr,
    dq_ptr, udq_ptr, table_ptr, permutation_ptr, qk_scale, scale, heads, group, seeds,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr, PERMUTED: gl.constexpr,
    GRAD_LSE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`attention_backward_query` over the tiles of `fill_tile_table_both`: dq of candidates' and of users' rows.

    uq and ug are `[U * X, H, D]` (X own rows per user), uout, ulse, udelta and udq as out, lse, delta and dq.
    """
    _query_gradient(
        q_desc, uq_desc, g_desc, ug_desc, k_desc, v_desc, out_ptr, uout_ptr, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr,
        dq_ptr, udq_ptr, table_ptr, permutation_ptr, qk_scale, scale, heads, group, seeds,
        D, HEAD_SIZE, STAGES, JAGGED, PERMUTED, GRAD_LSE, CONSUMER_REGISTERS, PRODUCER_REGISTERS,
    )  # fmt: skip
