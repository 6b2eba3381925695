"""Target attention, all gradients in one pass over the scores, for Hopper: warp-specialized. Device code only. Heads of
64 take the same steps in another kernel, `cross_attention_backward_staying.py`.

Letters: N packed query rows (candidates * seeds), H query heads, D head size, U users, T history rows.

`cross_attention_backward.py` and dq beside it: five products a step, where two kernels make seven. Each of the two
consumers puts the gradient of its scores, `ds^T [64 keys, 64 rows]`, into shared memory too, and makes half of the
columns of `ds k`, what the block's 128 keys add to dq of the 64 rows. That is added to a workspace in fp32 by every
block of keys that the user has: the order of these sums is the only thing here that is not fixed.

The workspace is one of tiles of 64 rows of one user, `[H, tiles, 2 halves of D, 64 * D / 2]`, so that rows behind the
user's last are nobody's. The inside of a tile lies as the tensor cores leave it, for additions of 16 bytes a thread:
see `add_to_tile`. The tiles of a user are the slots of `tile_of_slot` in `_triton/schedule.py`.

The consumers are half a step apart. Consumer 0, which goes first, makes dq of the step before beside each step, 1 that
of the step itself: what the other has to give has been there for half a step. There are two buffers for ds, and turns
at writing to them, as there are at the exponentials: 0 writes a step's once 1 has written the step's before, and 1 once
0 has written the same step's. Whoever writes is done with the dq of all of its steps before, and so with all but the
other buffer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ikbo_recsys.kernels._gluon._attention_parts import advance, turn_pass, turn_wait, whole_rows
from ikbo_recsys.kernels._gluon._compat import tma_load, wait_for_primary_grid
from ikbo_recsys.kernels._gluon.cross_attention_backward import (
    clamped,
    key_block,
    load_row_tile,
    of_columns,
    start_scores,
    store_keys,
)


def _add_assembly(registers: int) -> tuple[str, str]:
    """Add accumulator registers to what a thread has in half a tile, four at a time: 512 numbers of a warpgroup."""
    adds = []
    for i in range(0, registers, 4):
        four = ", ".join(f"${registers + i + j}" for j in range(4))
        adds.append(f"red.relaxed.gpu.global.add.v4.f32 [${2 * registers} + {512 * 4 * (i // 4)}], {{{four}}};")
    constraints = ["=r"] * registers + ["f"] * registers + ["l"] * registers
    return " ".join(adds), ",".join(constraints)


ADD_16 = gl.constexpr(_add_assembly(16)[0])
ADD_16_CONSTRAINTS = gl.constexpr(_add_assembly(16)[1])
ADD_32 = gl.constexpr(_add_assembly(32)[0])
ADD_32_CONSTRAINTS = gl.constexpr(_add_assembly(32)[1])


@gluon.jit
def add_to_tile(half_ptr, acc, layout: gl.constexpr, HALF: gl.constexpr):
    """Add half of the columns of dq, an accumulator `[64, HALF]`, to the workspace, in the order of the registers.

    Number `c // 8 * 512 + r // 16 * 128 + r % 8 * 16 + c % 8 // 2 * 4 + r // 8 % 2 * 2 + c % 2` of the half is that of
    row r and column c.
    """
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    # The same for all that a thread has: the assembly adds to it.
    place = half_ptr + ((row // 16 * 128 + row % 8 * 16)[:, None] + (column % 8 // 2 * 4)[None, :])
    place = place.to(gl.int64)
    if HALF == 32:
        gl.inline_asm_elementwise(ADD_16, ADD_16_CONSTRAINTS, [acc, place], dtype=gl.int32, is_pure=False, pack=16)
    else:
        gl.inline_asm_elementwise(ADD_32, ADD_32_CONSTRAINTS, [acc, place], dtype=gl.int32, is_pure=False, pack=32)


WRITING = gl.constexpr(10)
"""Of the turns at writing to the buffers for ds."""


@gluon.jit
def start_turns(WHO: gl.constexpr):
    """Before a consumer's first block: 0 has the first turn at the exponentials, and leaves that at writing to 1, who
    gives it to 0 at the beginning of each block."""
    if WHO == 0:
        turn_pass(0, WRITING)
    else:
        turn_pass(1)


@gluon.jit
def load_keys(
    k_desc, v_desc, kh_desc, k_bufs, v_bufs, kh_bufs, room, barrier, user, first_key, first, key_head,
    D: gl.constexpr, JAGGED: gl.constexpr,
):  # fmt: skip
    """Start loading the 128 keys of a block, and their values, into a room."""
    mbarrier.expect(barrier, (6 if D == 64 else 4) * 64 * D * 2)
    for i in gl.static_range(2):
        where = user
        row = first + i * 64
        if JAGGED:
            where = 0
            row += first_key
        tma_load(k_desc, [where, row, key_head, 0], barrier, k_bufs.index(room * 2 + i))
        tma_load(v_desc, [where, row, key_head, 0], barrier, v_bufs.index(room * 2 + i))
        if D == 64:
            tma_load(kh_desc, [where, row, key_head, 0], barrier, kh_bufs.index(room * 4 + i))
            tma_load(kh_desc, [where, row, key_head, D // 2], barrier, kh_bufs.index(room * 4 + 2 + i))


@gluon.jit
def load_rows(
    q_desc, g_desc, q_bufs, g_bufs, row_bufs, full, empty, landed, lse_ptr, delta_ptr, permutation_ptr, start, end,
    tiles, key_head, heads, group, seeds, stage, phase, tail_phase,
    D: gl.constexpr, STAGES: gl.constexpr, PERMUTED: gl.constexpr,
):  # fmt: skip
    """Load the tiles of query rows of a block, head by head. Returns the ring's next stage and phase, and the phase of
    `landed`."""
    for step in range(tiles * group):
        head = key_head * group + step // tiles
        tail_phase = load_row_tile(
            q_desc, g_desc, q_bufs, g_bufs, row_bufs, full, empty, landed, lse_ptr, delta_ptr, permutation_ptr,
            start + step % tiles * 64, end, head, heads, seeds, stage, phase, tail_phase,
            D, PERMUTED,
        )  # fmt: skip
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase, tail_phase


@gluon.jit
def _zero_keys(block, keys, COLUMNS: gl.constexpr):
    """Make the rows of keys that do not exist zeros: dq of all rows would have what stands there, as 0 * NaN."""
    layout: gl.constexpr = whole_rows(COLUMNS)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    block = block.reshape([64, COLUMNS])
    there = block.load(layout)
    block.store(gl.where((row < keys)[:, None], there, gl.zeros_like(there)))


@gluon.jit
def _half_of_keys(WHO: gl.constexpr, i: gl.constexpr, k_bufs, kh_bufs, room, D: gl.constexpr):
    """The half of the columns of which a consumer makes dq, of 64 keys of the block."""
    if D == 64:
        return kh_bufs.index(room * 4 + WHO * 2 + i).reshape([64, 32])
    else:
        return k_bufs.index(room * 2 + i).reshape([64, D]).slice(WHO * 64, 64, dim=1)


@gluon.jit
def _start_dq(WHO: gl.constexpr, ds_bufs, pair, k_bufs, kh_bufs, room, zero, D: gl.constexpr):
    """Half of the columns of `ds k`, of the 128 keys of the block, under way as two products."""
    dq = warpgroup_mma(
        ds_bufs.index(pair * 2).permute((1, 0)), _half_of_keys(WHO, 0, k_bufs, kh_bufs, room, D), zero,
        use_acc=False, is_async=True,
    )  # fmt: skip
    return warpgroup_mma(
        ds_bufs.index(pair * 2 + 1).permute((1, 0)), _half_of_keys(WHO, 1, k_bufs, kh_bufs, room, D), dq,
        is_async=True,
    )  # fmt: skip


@gluon.jit
def gradients(
    WHO: gl.constexpr, q_bufs, g_bufs, k_bufs, v_bufs, kh_bufs, ds_bufs, row_bufs, full, empty, tile_ptr, slots, tiles,
    group, keys_left, qk_scale, room, stage, phase,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A consumer's dk, without its scale, and dv of a block that lies in a room, and the ring's next stage and phase.

    dq is added from `tile_ptr` on, the block's first tile in the workspace. `keys_left` of the consumer's keys exist.
    """
    HALF: gl.constexpr = D // 2
    dtype: gl.constexpr = q_bufs.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wide, k_width=2)
    columns: gl.constexpr = gl.SliceLayout(0, mma)
    zero = gl.zeros((64, 64), gl.float32, layout=mma)
    zero_dq = gl.zeros((64, HALF), gl.float32, layout=half)
    dk = gl.zeros((64, D), gl.float32, layout=wide)
    dv = gl.zeros((64, D), gl.float32, layout=wide)
    total = tiles * group
    tile_ptr += WHO * 64 * HALF
    tiles_left = tiles + 0
    if total > 0:
        key = k_bufs.index(room * 2 + WHO).reshape([64, D])
        value = v_bufs.index(room * 2 + WHO).reshape([64, D])
        if keys_left < 64:
            _zero_keys(k_bufs.index(room * 2 + WHO), keys_left, D)
            if D == 64:
                _zero_keys(kh_bufs.index(room * 4 + WHO), keys_left, 32)
                _zero_keys(kh_bufs.index(room * 4 + 2 + WHO), keys_left, 32)
            fence_async_shared()
        if WHO == 1:
            # Not while 0 is in the last step of the block before: two passes, and one would be lost.
            turn_wait(1, WRITING)
            turn_pass(1, WRITING)
        mbarrier.wait(full.index(stage), phase)
        scores_t = start_scores(key, q_bufs.index(stage), zero, D)
        lse2 = row_bufs.index(stage * 2).load(columns)
        minus_delta = of_columns(row_bufs.index(stage * 2 + 1), mma)
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
            grad_weights = warpgroup_mma_wait(1, deps=(grad_weights_t,))
            grad_scores = weights * grad_weights
            if keys_left < 64:
                # In fp32: of 16 bits each would be a selection of its own.
                exists = gl.arange(0, 64, layout=gl.SliceLayout(1, mma)) < keys_left
                grad_scores = gl.where(exists[:, None], grad_scores, 0.0)
            grad_scores_16 = grad_scores.to(dtype)
            grad_scores_op = gl.convert_layout(grad_scores_16, operand)
            dk_t = warpgroup_mma(grad_scores_op, query, dk, is_async=True)
            turn_wait(WHO, WRITING)
            ds_bufs.index(step % 2 * 2 + WHO).store(grad_scores_16)
            fence_async_shared()
            turn_pass(WHO, WRITING)
            dv, _w = warpgroup_mma_wait(1, deps=(dv_t, weights_16))
            following, following_phase = advance(stage + 0, phase + 0, STAGES)
            pair = step % 2
            if WHO == 0:
                pair = pair ^ 1
            dq_t = _start_dq(WHO, ds_bufs, pair, k_bufs, kh_bufs, room, zero_dq, D)
            # Behind the last step nothing is waited for: its scores are of what the ring happens to hold, and dropped.
            mbarrier.wait(full.index(following), following_phase, pred=step + 1 < total)
            # A sum that the compiler cannot know to be WHO: it would keep the addresses of all parts of the keys.
            key = k_bufs.index(room * 2 + WHO + (step >> 30)).reshape([64, D])
            scores_t = start_scores(key, q_bufs.index(following), zero, D)
            dk, _g = warpgroup_mma_wait(3, deps=(dk_t, grad_scores_op))
            mbarrier.arrive(empty.index(stage), count=1)
            dq = warpgroup_mma_wait(1, deps=(dq_t,))
            if (WHO == 1) | (step > 0):
                add_to_tile(tile_ptr, dq, half, HALF)
                tile_ptr += 64 * D
                tiles_left -= 1
                if tiles_left == 0:
                    # The next head.
                    tiles_left = tiles + 0
                    tile_ptr += (slots - tiles).to(gl.int64) * (64 * D)
            lse2 = row_bufs.index(following * 2).load(columns)
            minus_delta = of_columns(row_bufs.index(following * 2 + 1), mma)
            scores = warpgroup_mma_wait(0, deps=(scores_t,))
            stage = following
            phase = following_phase
        if WHO == 0:
            turn_wait(0, WRITING)
            dq_t = _start_dq(0, ds_bufs, (total + 1) % 2, k_bufs, kh_bufs, room, zero_dq, D)
            turn_pass(0, WRITING)
            dq = warpgroup_mma_wait(0, deps=(dq_t,))
            add_to_tile(tile_ptr, dq, half, HALF)
    return dk, dv, stage, phase


@gluon.jit
def _producer(
    q_desc, g_desc, k_desc, v_desc, q_bufs, g_bufs, k_bufs, v_bufs, row_bufs, history, full, empty, landed, lse_ptr,
    delta_ptr, permutation_ptr, user, first_key, first, start, end, key_head, heads, group, seeds,
    D: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr, PERMUTED: gl.constexpr,
):  # fmt: skip
    tiles = (end - start + 63) // 64
    if tiles > 0:
        load_keys(k_desc, v_desc, None, k_bufs, v_bufs, None, 0, history, user, first_key, first, key_head, D, JAGGED)
    stage = 0
    phase = 0
    tail_phase = 0
    load_rows(
        q_desc, g_desc, q_bufs, g_bufs, row_bufs, full, empty, landed, lse_ptr, delta_ptr, permutation_ptr, start, end,
        tiles, key_head, heads, group, seeds, stage, phase, tail_phase,
        D, STAGES, PERMUTED,
    )  # fmt: skip


@gluon.jit
def _consumer(
    WHO: gl.constexpr, q_bufs, g_bufs, k_bufs, v_bufs, ds_bufs, row_bufs, history, full, empty, dk_ptr, dv_ptr,
    work_ptr, out_row, user, first, rows_out, keys, start, end, slots, key_head, heads, group, qk_scale, scale,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    tiles = (end - start + 63) // 64
    tile_ptr = work_ptr + ((key_head * group).to(gl.int64) * slots + start // 64 + user) * (64 * D)
    start_turns(WHO)
    if tiles > 0:
        mbarrier.wait(history, 0)
    stage = 0
    phase = 0
    dk, dv, _stage, _phase = gradients(
        WHO, q_bufs, g_bufs, k_bufs, v_bufs, None, ds_bufs, row_bufs, full, empty, tile_ptr, slots, tiles, group,
        keys - first - WHO * 64, qk_scale, 0, stage, phase,
        D, STAGES,
    )  # fmt: skip
    stride = heads // group * HEAD_SIZE
    base = key_head * HEAD_SIZE
    mine = first + WHO * 64
    store_keys(dk_ptr + base, dk * scale, v_bufs.index(WHO), out_row, mine, keys, rows_out, stride, D, HEAD_SIZE, wide)
    store_keys(dv_ptr + base, dv, v_bufs.index(WHO), out_row, mine, keys, rows_out, stride, D, HEAD_SIZE, wide)


SIZES = [
    *("offsets_ptr", "permutation_ptr", "kv_ptr", "num_users", "num_cands", "seeds", "capacity", "heads", "group"),
]


@gluon.jit(do_not_specialize=SIZES)
def attention_backward_once(
    q_desc, g_desc, k_desc, v_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, work_ptr, offsets_ptr, permutation_ptr,
    kv_ptr, num_users, num_cands, seeds, capacity, heads, group, qk_scale, scale,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, KV_LAYOUT: gl.constexpr, PERMUTED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write dk and dv, contiguous in the shape of k and v, and add dq, without its scale, to the workspace.

    Descriptors: q and g (the gradient of the output) `[N, H, D]` by 64 rows, k and v `[U, T, Hkv, D]` by 64 rows (U = 1
    when jagged). lse and delta are contiguous `[N, H]`, the workspace is as the head of the file says. Grid: blocks of
    128 keys times key heads, heads fastest. With PERMUTED, 64 divides the number of seeds. Columns from HEAD_SIZE to D
    read as zeros.
    """
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
    slots = num_cands * seeds // 64 + num_users
    if KV_LAYOUT == 2:  # noqa: SIM108, only one of the two is compiled
        out_row = first_key.to(gl.int64)
    else:
        out_row = user.to(gl.int64) * capacity

    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, 64, 1, D], q_desc.layout)
    g_bufs = gl.allocate_shared_memory(dtype, [STAGES, 64, 1, D], g_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, D], v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_bufs = gl.allocate_shared_memory(dtype, [4, 64, 64], ds_layout)
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
                _consumer,
                (
                    0, q_bufs, g_bufs, k_bufs, v_bufs, ds_bufs, row_bufs, history, full, empty,
                    dk_ptr, dv_ptr, work_ptr, out_row, user, first, rows_out, keys, start, end, slots, key_head, heads,
                    group, qk_scale, scale,
                    D, HEAD_SIZE, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    1, q_bufs, g_bufs, k_bufs, v_bufs, ds_bufs, row_bufs, history, full, empty,
                    dk_ptr, dv_ptr, work_ptr, out_row, user, first, rows_out, keys, start, end, slots, key_head, heads,
                    group, qk_scale, scale,
                    D, HEAD_SIZE, STAGES,
                ),
            ),
            (
                _producer,
                (
                    q_desc, g_desc, k_desc, v_desc, q_bufs, g_bufs, k_bufs, v_bufs, row_bufs,
                    history, full, empty, landed,
                    lse_ptr, delta_ptr, permutation_ptr, user, first_key, first, start, end, key_head, heads, group,
                    seeds,
                    D, STAGES, KV_LAYOUT == 2, PERMUTED,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
