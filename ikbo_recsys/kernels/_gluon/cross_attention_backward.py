"""Target attention, gradients of keys and values, for Hopper: warp-specialized. Device code only.

Letters: N packed query rows (candidates * seeds), H query heads, D head size, U users, T history rows.

A block owns 128 keys of one user and one key head: 64 for each of two consumers, whose dk and dv stay in registers
while the producer streams all of the user's query rows past them, 64 at a time, together with the rows' gradient,
log-sum-exp and delta. No atomics, and a fixed order of summation. The consumers take turns at the exponentials: in step
with each other both would want those, and then the tensor cores, at the same time. Scores are computed transposed,
`[64 keys, 64 rows]`: p and ds are then the left operands of `dv += p g` and `dk += ds q` as they come out of the
matmul, and rows of keys that do not exist harm only themselves.
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
    row_places,
    turn_pass,
    turn_wait,
    whole_row,
    whole_rows,
    zero_rows,
)
from ikbo_recsys.kernels._gluon._compat import tma_load, wait_for_primary_grid

CONSUMER_KEYS = 64
BLOCK_KEYS = 2 * CONSUMER_KEYS
BLOCK_ROWS = 64


@gluon.jit
def clamped(pointer, position, upper):
    return gl.minimum(gl.maximum(gl.load(pointer + position), 0), upper).to(gl.int32)


@gluon.jit
def key_block(kv_ptr, slot, num_users, capacity, KV_LAYOUT: gl.constexpr):
    """`(user, user's first key row, block's first row, rows to write, rows that count)`, the last three relative to the
    second.

    The slots of jagged keys are those of `tile_of_slot` in `_triton/schedule.py`.
    """
    if KV_LAYOUT == 2:
        low = 0 * slot
        high = num_users - 1
        while low < high:
            middle = (low + high + 1) // 2
            base = clamped(kv_ptr, middle, capacity) // 128 + middle
            is_right = base <= slot
            low = gl.where(is_right, middle, low)
            high = gl.where(is_right, high, middle - 1)
        start = clamped(kv_ptr, low, capacity)
        keys = gl.maximum(clamped(kv_ptr, low + 1, capacity) - start, 0)
        return low, start, (slot - start // 128 - low) * 128, keys, keys
    else:
        blocks = (capacity + 127) // 128
        user = slot // blocks
        keys = capacity
        if KV_LAYOUT == 1:
            keys = clamped(kv_ptr, user, capacity)
        return user, 0 * slot, (slot - user * blocks) * 128, capacity, keys


@gluon.jit
def _row_facts(
    lse_ptr, delta_ptr, permutation_ptr, row, end, head, heads, seeds, layout: gl.constexpr, PERMUTED: gl.constexpr
):
    """Log-sum-exp (base 2) and delta of 64 rows; weights 2^-inf = 0 for rows past the user's last."""
    rows = row + gl.arange(0, 64, layout=layout)
    valid = rows < end
    at = row_places(permutation_ptr, rows, valid, seeds, PERMUTED).to(gl.int64) * heads + head
    lse2 = gl.load(lse_ptr + at, mask=valid, other=float("inf")) * 1.4426950408889634
    return lse2, gl.load(delta_ptr + at, mask=valid, other=0.0)


@gluon.jit
def load_row_tile(
    q_desc, g_desc, q_bufs, g_bufs, row_bufs, full, empty, landed, lse_ptr, delta_ptr, permutation_ptr, row, end, head,
    heads, seeds, stage, phase, tail_phase,
    D: gl.constexpr, PERMUTED: gl.constexpr,
):  # fmt: skip
    """Fill a stage with 64 query rows and what belongs to them. Returns the phase of `landed`."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    lse2, delta = _row_facts(lse_ptr, delta_ptr, permutation_ptr, row, end, head, heads, seeds, layout, PERMUTED)
    q_row = whole_row(permutation_ptr, row, end, seeds, PERMUTED)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    row_bufs.index(stage * 2).store(lse2)
    row_bufs.index(stage * 2 + 1).store(-delta)
    if row + 64 <= end:
        mbarrier.arrive(full.index(stage), count=1)
        mbarrier.expect(full.index(stage), 2 * 64 * D * 2)
        tma_load(q_desc, [q_row, head, 0], full.index(stage), q_bufs.index(stage))
        tma_load(g_desc, [q_row, head, 0], full.index(stage), g_bufs.index(stage))
    else:
        # Another user's rows: their weights are 0, but 0 * NaN is NaN.
        mbarrier.expect(landed, 2 * 64 * D * 2)
        tma_load(q_desc, [q_row, head, 0], landed, q_bufs.index(stage))
        tma_load(g_desc, [q_row, head, 0], landed, g_bufs.index(stage))
        mbarrier.wait(landed, tail_phase)
        tail_phase ^= 1
        zero_rows(q_bufs.index(stage).reshape([64, D]), end - row, 64, D)
        zero_rows(g_bufs.index(stage).reshape([64, D]), end - row, 64, D)
        fence_async_shared()
        mbarrier.arrive(full.index(stage), count=2)
    return tail_phase


@gluon.jit
def _rows_producer(
    q_desc, uq_desc, g_desc, ug_desc, k_desc, v_desc, q_bufs, g_bufs, k_bufs, v_bufs, row_bufs, history, full, empty,
    landed, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr, permutation_ptr, user, first_key, first, start, end,
    key_head, heads, group, seeds, user_seeds,
    D: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr, PERMUTED: gl.constexpr,
):  # fmt: skip
    tiles = (end - start + 63) // 64
    cand_tiles = tiles
    if user_seeds is not None:
        tiles += (user_seeds + 63) // 64
    if tiles > 0:
        mbarrier.expect(history, 4 * 64 * D * 2)
        for i in gl.static_range(2):
            if JAGGED:
                tma_load(k_desc, [0, first_key + first + i * 64, key_head, 0], history, k_bufs.index(i))
                tma_load(v_desc, [0, first_key + first + i * 64, key_head, 0], history, v_bufs.index(i))
            else:
                tma_load(k_desc, [user, first + i * 64, key_head, 0], history, k_bufs.index(i))
                tma_load(v_desc, [user, first + i * 64, key_head, 0], history, v_bufs.index(i))
    stage = 0
    phase = 0
    tail_phase = 0
    for step in range(tiles * group):
        head = key_head * group + step // tiles
        tile = step % tiles
        if user_seeds is None:
            tail_phase = load_row_tile(
                q_desc, g_desc, q_bufs, g_bufs, row_bufs, full, empty, landed, lse_ptr, delta_ptr, permutation_ptr,
                start + tile * 64, end, head, heads, seeds, stage, phase, tail_phase,
                D, PERMUTED,
            )  # fmt: skip
        else:
            if tile < cand_tiles:
                tail_phase = load_row_tile(
                    q_desc, g_desc, q_bufs, g_bufs, row_bufs, full, empty, landed, lse_ptr, delta_ptr,
                    permutation_ptr, start + tile * 64, end, head, heads, seeds, stage, phase, tail_phase,
                    D, PERMUTED,
                )  # fmt: skip
            else:
                tail_phase = load_row_tile(
                    uq_desc, ug_desc, q_bufs, g_bufs, row_bufs, full, empty, landed, ulse_ptr, udelta_ptr,
                    permutation_ptr, user * user_seeds + (tile - cand_tiles) * 64, (user + 1) * user_seeds, head,
                    heads, seeds, stage, phase, tail_phase,
                    D, False,
                )  # fmt: skip
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def store_keys(
    out_ptr, acc, block, first_row, first, keys, rows_out, stride, D: gl.constexpr, HEAD_SIZE: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Store dk or dv of a consumer's 64 keys, `[64, D]` in `layout`, by way of a block of shared memory that nobody
    else reads: 16 bytes a thread and whole rows at once, as `send_rows` does. Keys behind the user's last become zeros,
    up to `rows_out`."""
    exists = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)) < keys
    tile = block.reshape([64, D])
    tile.store(gl.where(exists[:, None], acc, 0.0).to(out_ptr.dtype.element_ty))
    rows: gl.constexpr = whole_rows(D)
    key = first + gl.arange(0, 64, layout=gl.SliceLayout(1, rows))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, rows))
    pointers = out_ptr + (first_row + key.to(gl.int64)) * stride
    mask = (key < rows_out)[:, None] & (column < HEAD_SIZE)[None, :]
    gl.store(pointers[:, None] + column[None, :], tile.load(rows), mask=mask)


@gluon.jit
def of_columns(facts, mma: gl.constexpr):
    """A number for each row of the query, as columns of the transposed scores."""
    return facts.load(gl.SliceLayout(0, mma))[None, :].broadcast_to((64, 64))


@gluon.jit
def start_scores(key, q_buf, zero, D: gl.constexpr):
    """The product of a block's keys with 64 query rows, under way."""
    return warpgroup_mma(key, q_buf.reshape([64, D]).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _keys_consumer(
    WHO: gl.constexpr, q_bufs, g_bufs, k_bufs, v_bufs, row_bufs, history, full, empty,
    dk_ptr, dv_ptr, out_row, first, rows_out, keys, start, end, user_seeds, key_head, key_heads, group, qk_scale, scale,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_bufs.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wide, k_width=2)
    columns: gl.constexpr = gl.SliceLayout(0, mma)
    zero = gl.zeros((64, 64), gl.float32, layout=mma)
    dk = gl.zeros((64, D), gl.float32, layout=wide)
    dv = gl.zeros((64, D), gl.float32, layout=wide)
    tiles = (end - start + 63) // 64
    if user_seeds is not None:
        tiles += (user_seeds + 63) // 64
    total = tiles * group
    stage = 0
    phase = 0
    if WHO == 1:
        turn_pass(1)
    if total > 0:
        key = k_bufs.index(WHO).reshape([64, D])
        value = v_bufs.index(WHO).reshape([64, D])
        mbarrier.wait(history, 0)
        mbarrier.wait(full.index(0), 0)
        scores_t = start_scores(key, q_bufs.index(0), zero, D)
        lse2 = row_bufs.index(0).load(columns)
        minus_delta = of_columns(row_bufs.index(1), mma)
        scores = warpgroup_mma_wait(0, deps=(scores_t,))
        for step in range(total):
            query = q_bufs.index(stage).reshape([64, D])
            grad = g_bufs.index(stage).reshape([64, D])
            turn_wait(WHO)
            # Added up from -delta on: p (dp - delta) is one multiplication.
            grad_weights_t = warpgroup_mma(value, grad.permute((1, 0)), minus_delta, is_async=True)
            weights = gl.exp2(scores * qk_scale - lse2[None, :])
            weights_16 = gl.convert_layout(weights.to(dtype), operand)
            dv_t = warpgroup_mma(weights_16, grad, dv, is_async=True)
            turn_pass(WHO)
            following, following_phase = advance(stage + 0, phase + 0, STAGES)
            if D == 64:
                # The next rows' scores are computed while these are worked on, where registers allow it.
                mbarrier.wait(full.index(following), following_phase, pred=step + 1 < total)
                scores_t = start_scores(key, q_bufs.index(following), zero, D)
                grad_weights = warpgroup_mma_wait(2, deps=(grad_weights_t,))
            else:
                grad_weights = warpgroup_mma_wait(1, deps=(grad_weights_t,))
            grad_scores = weights * grad_weights
            grad_scores_16 = gl.convert_layout(grad_scores.to(dtype), operand)
            dk_t = warpgroup_mma(grad_scores_16, query, dk, is_async=True)
            if D == 64:
                lse2 = row_bufs.index(following * 2).load(columns)
                minus_delta = of_columns(row_bufs.index(following * 2 + 1), mma)
                scores, dv, _w = warpgroup_mma_wait(1, deps=(scores_t, dv_t, weights_16))
                dk, _g = warpgroup_mma_wait(0, deps=(dk_t, grad_scores_16))
                mbarrier.arrive(empty.index(stage), count=1)
            else:
                mbarrier.wait(full.index(following), following_phase, pred=step + 1 < total)
                scores_t = start_scores(key, q_bufs.index(following), zero, D)
                dv, _w = warpgroup_mma_wait(2, deps=(dv_t, weights_16))
                dk, _g = warpgroup_mma_wait(1, deps=(dk_t, grad_scores_16))
                mbarrier.arrive(empty.index(stage), count=1)
                lse2 = row_bufs.index(following * 2).load(columns)
                minus_delta = of_columns(row_bufs.index(following * 2 + 1), mma)
                scores = warpgroup_mma_wait(0, deps=(scores_t,))
            stage = following
            phase = following_phase
    stride = key_heads * HEAD_SIZE
    base = key_head * HEAD_SIZE
    mine = first + WHO * 64
    store_keys(dk_ptr + base, dk * scale, v_bufs.index(WHO), out_row, mine, keys, rows_out, stride, D, HEAD_SIZE, wide)
    store_keys(dv_ptr + base, dv, v_bufs.index(WHO), out_row, mine, keys, rows_out, stride, D, HEAD_SIZE, wide)


@gluon.jit
def _key_value_gradient(
    q_desc, uq_desc, g_desc, ug_desc, k_desc, v_desc, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr, dk_ptr, dv_ptr,
    offsets_ptr, permutation_ptr, kv_ptr, num_users, num_cands, seeds, user_seeds, capacity, heads, group, qk_scale,
    scale,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, KV_LAYOUT: gl.constexpr, PERMUTED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """The body of both kernels."""
    dtype: gl.constexpr = k_desc.dtype
    # The kernel that writes delta may still be running, or the one behind it.
    wait_for_primary_grid()
    key_heads = heads // group
    key_head = gl.program_id(0) % key_heads
    user, first_key, first, rows_out, keys = key_block(
        kv_ptr, gl.program_id(0) // key_heads, num_users, capacity, KV_LAYOUT
    )
    # Slots without keys do nothing; blocks of nothing but padding write zeros.
    start = clamped(offsets_ptr, user, num_cands) * seeds
    end = clamped(offsets_ptr, user + 1, num_cands) * seeds
    end = gl.where(first < keys, end, start)
    if user_seeds is not None:
        end = gl.maximum(end, start)
        user_seeds = gl.where(first < keys, user_seeds, 0)
    if KV_LAYOUT == 2:  # noqa: SIM108, only one of the two is compiled
        out_row = first_key.to(gl.int64)
    else:
        out_row = user.to(gl.int64) * capacity

    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, 64, 1, D], q_desc.layout)
    g_bufs = gl.allocate_shared_memory(dtype, [STAGES, 64, 1, D], g_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, D], v_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    row_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * 2, 64], flat)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    history = gl.allocate_shared_memory(gl.int64, [1], barrier)
    landed = gl.allocate_shared_memory(gl.int64, [1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    mbarrier.init(history, count=1)
    mbarrier.init(landed, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _keys_consumer,
                (
                    0, q_bufs, g_bufs, k_bufs, v_bufs, row_bufs, history, full, empty,
                    dk_ptr, dv_ptr, out_row, first, rows_out, keys, start, end, user_seeds, key_head, key_heads, group,
                    qk_scale, scale,
                    D, HEAD_SIZE, STAGES,
                ),
            ),
            (
                _keys_consumer,
                (
                    1, q_bufs, g_bufs, k_bufs, v_bufs, row_bufs, history, full, empty,
                    dk_ptr, dv_ptr, out_row, first, rows_out, keys, start, end, user_seeds, key_head, key_heads, group,
                    qk_scale, scale,
                    D, HEAD_SIZE, STAGES,
                ),
            ),
            (
                _rows_producer,
                (
                    q_desc, uq_desc, g_desc, ug_desc, k_desc, v_desc, q_bufs, g_bufs, k_bufs, v_bufs, row_bufs,
                    history, full, empty, landed,
                    lse_ptr, ulse_ptr, delta_ptr, udelta_ptr, permutation_ptr, user, first_key, first, start, end,
                    key_head, heads, group, seeds, user_seeds,
                    D, STAGES, KV_LAYOUT == 2, PERMUTED,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


SIZES = [
    *("offsets_ptr", "permutation_ptr", "kv_ptr", "num_users", "num_cands", "seeds", "user_seeds", "capacity"),
    *("heads", "group"),
]


@gluon.jit(do_not_specialize=SIZES)
def attention_backward_key_value(
    q_desc, g_desc, k_desc, v_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, offsets_ptr, permutation_ptr, kv_ptr,
    num_users, num_cands, seeds, capacity, heads, group, qk_scale, scale,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, KV_LAYOUT: gl.constexpr, PERMUTED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write dk and dv, contiguous in the shape of k and v.

    Descriptors: q and g (the gradient of the output) `[N, H, D]` by 64 rows, k and v `[U, T, Hkv, D]` by 64 rows (U = 1
    when jagged). lse and delta are contiguous `[N, H]`. Grid: blocks of 128 keys times key heads, heads fastest. With
    PERMUTED, 64 divides the number of seeds. Columns from HEAD_SIZE to D read as zeros.
    """
    _key_value_gradient(
        q_desc, None, g_desc, None, k_desc, v_desc, lse_ptr, None, delta_ptr, None, dk_ptr, dv_ptr, offsets_ptr,
        permutation_ptr, kv_ptr, num_users, num_cands, seeds, None, capacity, heads, group, qk_scale, scale,
        D, HEAD_SIZE, STAGES, KV_LAYOUT, PERMUTED, CONSUMER_REGISTERS, PRODUCER_REGISTERS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def attention_backward_key_value_both(
    q_desc, uq_desc, g_desc, ug_desc, k_desc, v_desc, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr, dk_ptr, dv_ptr,
    offsets_ptr, permutation_ptr, kv_ptr, num_users, num_cands, seeds, user_seeds, capacity, heads, group, qk_scale,
    scale,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, KV_LAYOUT: gl.constexpr, PERMUTED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`attention_backward_key_value` over the candidates' and then the users' rows (X = `user_seeds` each) of a head.

    uq and ug are `[U * X, H, D]`, ulse and udelta as lse and delta.
    """
    _key_value_gradient(
        q_desc, uq_desc, g_desc, ug_desc, k_desc, v_desc, lse_ptr, ulse_ptr, delta_ptr, udelta_ptr, dk_ptr, dv_ptr,
        offsets_ptr, permutation_ptr, kv_ptr, num_users, num_cands, seeds, user_seeds, capacity, heads, group, qk_scale,
        scale,
        D, HEAD_SIZE, STAGES, KV_LAYOUT, PERMUTED, CONSUMER_REGISTERS, PRODUCER_REGISTERS,
    )  # fmt: skip
