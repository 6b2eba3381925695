"""Target attention, all gradients in one pass over the scores, small heads, for Hopper: thread blocks that stay. Device
code only.

Letters: N packed query rows (candidates * seeds), H query heads, D head size, U users, T history rows.

The steps of `cross_attention_backward_once.py`, for heads of 64, where a block of keys is done so soon that what lies
between two of them counts: a new thread block's start, the search for its user, the first loads. So a thread block
stays, and its producer runs ahead: there is room for two blocks of keys, and the next one's rows follow those before in
the same ring. (With heads of 128 there is no such room, and the consumers have no register left for what they would
have to keep.)

Which block is next is drawn from a counter, since users differ in rows and keys. The producer finds out whose it is and
tells the consumers through shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ikbo_recsys.kernels._gluon._attention_parts import advance, meet
from ikbo_recsys.kernels._gluon._compat import wait_for_primary_grid
from ikbo_recsys.kernels._gluon.cross_attention_backward import clamped, key_block, store_keys
from ikbo_recsys.kernels._gluon.cross_attention_backward_once import gradients, load_keys, load_rows, start_turns

ROOMS = gl.constexpr(2)
"""Blocks of keys in shared memory."""
FACTS = gl.constexpr(8)
"""What the consumers are told of a block: user (-1: there is none); the user's first key row where jagged, and relative
to it the block's first row, the end of what to write and the end of what counts; tiles of query rows; their first slot;
key head."""


@gluon.jit
def _tell(fact_bufs, room, facts):
    """In the producer: store the facts of the block in a room."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(FACTS):
        fact_bufs.index(room * FACTS + i).store(facts[i] + gl.zeros([1], gl.int32, layout=layout))


@gluon.jit
def _told(fact_bufs, room, number: gl.constexpr):
    """In a consumer: one of the facts of the block in a room."""
    return gl.sum(fact_bufs.index(room * FACTS + number).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _producer(
    q_desc, g_desc, k_desc, v_desc, kh_desc, q_bufs, g_bufs, k_bufs, v_bufs, kh_bufs, row_bufs, fact_bufs, full, empty,
    keys_full, keys_empty, landed, lse_ptr, delta_ptr, counter_ptr, offsets_ptr, permutation_ptr, kv_ptr, blocks,
    num_users, num_cands, seeds, capacity, heads, group,
    D: gl.constexpr, STAGES: gl.constexpr, KV_LAYOUT: gl.constexpr, PERMUTED: gl.constexpr,
):  # fmt: skip
    key_heads = heads // group
    stage = 0
    phase = 0
    tail_phase = 0
    room = 0
    room_phase = 0
    block = gl.program_id(0)
    while block < blocks:
        key_head = block % key_heads
        user, first_key, first, rows_out, keys = key_block(kv_ptr, block // key_heads, num_users, capacity, KV_LAYOUT)
        # Slots without keys do nothing; blocks of nothing but padding write zeros.
        start = clamped(offsets_ptr, user, num_cands) * seeds
        end = clamped(offsets_ptr, user + 1, num_cands) * seeds
        tiles = gl.where(first < keys, (end - start + 63) // 64, 0)
        mbarrier.wait(keys_empty.index(room), room_phase ^ 1)
        slot = start // 64 + user
        _tell(fact_bufs, room, (user, first_key, first, rows_out, keys, tiles, slot, key_head))
        mbarrier.arrive(keys_full.index(room), count=1)
        if tiles > 0:
            load_keys(
                k_desc, v_desc, kh_desc, k_bufs, v_bufs, kh_bufs, room, keys_full.index(room), user, first_key, first,
                key_head, D, KV_LAYOUT == 2,
            )  # fmt: skip
        else:
            mbarrier.arrive(keys_full.index(room), count=1)
        # Here, since the answer is waited for at once.
        block = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
        stage, phase, tail_phase = load_rows(
            q_desc, g_desc, q_bufs, g_bufs, row_bufs, full, empty, landed, lse_ptr, delta_ptr, permutation_ptr, start,
            end, tiles, key_head, heads, group, seeds, stage, phase, tail_phase,
            D, STAGES, PERMUTED,
        )  # fmt: skip
        room, room_phase = advance(room, room_phase, ROOMS)
    mbarrier.wait(keys_empty.index(room), room_phase ^ 1)
    _tell(fact_bufs, room, (-1, 0, 0, 0, 0, 0, 0, 0))
    mbarrier.arrive(keys_full.index(room), count=2)


@gluon.jit
def _consumer(
    WHO: gl.constexpr, q_bufs, g_bufs, k_bufs, v_bufs, kh_bufs, ds_bufs, row_bufs, fact_bufs, full, empty, keys_full,
    keys_empty, dk_ptr, dv_ptr, work_ptr, slots, capacity, heads, group, qk_scale, scale,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, JAGGED: gl.constexpr,
):  # fmt: skip
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    stride = heads // group * HEAD_SIZE
    stage = 0
    phase = 0
    room = 0
    room_phase = 0
    start_turns(WHO)
    mbarrier.wait(keys_full.index(0), 0)
    user = _told(fact_bufs, 0, 0)
    while user >= 0:
        mine = _told(fact_bufs, room, 2) + WHO * 64
        keys = _told(fact_bufs, room, 4)
        key_head = _told(fact_bufs, room, 7)
        slot = (key_head * group).to(gl.int64) * slots + _told(fact_bufs, room, 6)
        dk, dv, stage, phase = gradients(
            WHO, q_bufs, g_bufs, k_bufs, v_bufs, kh_bufs, ds_bufs, row_bufs, full, empty, work_ptr + slot * (64 * D),
            slots, _told(fact_bufs, room, 5), group, keys - mine, qk_scale, room, stage, phase,
            D, STAGES,
        )  # fmt: skip
        if JAGGED:  # noqa: SIM108, only one of the two is compiled
            out_row = _told(fact_bufs, room, 1).to(gl.int64)
        else:
            out_row = user.to(gl.int64) * capacity
        rows_out = _told(fact_bufs, room, 3)
        base = key_head * HEAD_SIZE
        block = v_bufs.index(room * 2 + WHO)
        store_keys(dk_ptr + base, dk * scale, block, out_row, mine, keys, rows_out, stride, D, HEAD_SIZE, wide)
        store_keys(dv_ptr + base, dv, block, out_row, mine, keys, rows_out, stride, D, HEAD_SIZE, wide)
        # What any of the four warps has read and written there comes before what is loaded next.
        fence_async_shared()
        meet(WHO)
        mbarrier.arrive(keys_empty.index(room), count=1)
        room, room_phase = advance(room, room_phase, ROOMS)
        mbarrier.wait(keys_full.index(room), room_phase)
        user = _told(fact_bufs, room, 0)


SIZES = [
    *("offsets_ptr", "permutation_ptr", "kv_ptr", "blocks", "num_users", "num_cands", "seeds", "capacity", "heads"),
    "group",
]


@gluon.jit(do_not_specialize=SIZES)
def attention_backward_staying(
    q_desc, g_desc, k_desc, v_desc, kh_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, work_ptr, counter_ptr, offsets_ptr,
    permutation_ptr, kv_ptr, blocks, num_users, num_cands, seeds, capacity, heads, group, qk_scale, scale,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, KV_LAYOUT: gl.constexpr, PERMUTED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`attention_backward_once` for padded head sizes of 64, by as many thread blocks as there are multiprocessors.

    kh is k's descriptor by half of the padded columns. `blocks` is what the other one's grid is, the counter 0.
    """
    dtype: gl.constexpr = k_desc.dtype
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, 64, 1, D], q_desc.layout)
    g_bufs = gl.allocate_shared_memory(dtype, [STAGES, 64, 1, D], g_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [ROOMS * 2, 1, 64, 1, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [ROOMS * 2, 1, 64, 1, D], v_desc.layout)
    # Keys again, by halves of their columns (the blocks of 64 keys, then the same of the other half): a half is
    # narrower than what is swizzled together.
    kh_bufs = gl.allocate_shared_memory(dtype, [ROOMS * 4, 1, 64, 1, D // 2], kh_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_bufs = gl.allocate_shared_memory(dtype, [4, 64, 64], ds_layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    row_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * 2, 64], flat)
    fact_bufs = gl.allocate_shared_memory(gl.int32, [ROOMS * FACTS, 1], flat)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    landed = gl.allocate_shared_memory(gl.int64, [1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    keys_full = gl.allocate_shared_memory(gl.int64, [ROOMS, 1], barrier)
    keys_empty = gl.allocate_shared_memory(gl.int64, [ROOMS, 1], barrier)
    mbarrier.init(landed, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(ROOMS):
        mbarrier.init(keys_full.index(i), count=2)
        mbarrier.init(keys_empty.index(i), count=2)
    slots = num_cands * seeds // 64 + num_users
    # The kernel that writes delta may still be running, or the one behind it.
    wait_for_primary_grid()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, q_bufs, g_bufs, k_bufs, v_bufs, kh_bufs, ds_bufs, row_bufs, fact_bufs, full, empty, keys_full,
                    keys_empty, dk_ptr, dv_ptr, work_ptr, slots, capacity, heads, group, qk_scale, scale,
                    D, HEAD_SIZE, STAGES, KV_LAYOUT == 2,
                ),
            ),
            (
                _consumer,
                (
                    1, q_bufs, g_bufs, k_bufs, v_bufs, kh_bufs, ds_bufs, row_bufs, fact_bufs, full, empty, keys_full,
                    keys_empty, dk_ptr, dv_ptr, work_ptr, slots, capacity, heads, group, qk_scale, scale,
                    D, HEAD_SIZE, STAGES, KV_LAYOUT == 2,
                ),
            ),
            (
                _producer,
                (
                    q_desc, g_desc, k_desc, v_desc, kh_desc, q_bufs, g_bufs, k_bufs, v_bufs, kh_bufs, row_bufs,
                    fact_bufs, full, empty, keys_full, keys_empty, landed, lse_ptr, delta_ptr, counter_ptr, offsets_ptr,
                    permutation_ptr, kv_ptr, blocks, num_users, num_cands, seeds, capacity, heads, group,
                    D, STAGES, KV_LAYOUT, PERMUTED,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
