"""Linear compression for Hopper in Gluon: two launches, the user's part and the candidates'.

`user_part_kernel` writes `weight_user @ user[u] (+ bias)` in *fragment order*: the order in which the accumulators of
the second kernel lie in its registers, so that they start from it by plain 8-byte loads, without shared memory or an
epilogue.

`candidate_kernel` computes `out[b] = weight_cand @ cand[b] + user_part[index[b]]`. Its blocks are persistent: a group
of two or three consumers of 64 rows each, which share every block of `cand`, and a producer. What bounds it is the
traffic from L2, so a block keeps its rows of the weight for life and some of their columns in shared memory. Where the
row tiles are one more than whole groups, the last one is a *tail*: some blocks do only tails, of as many candidates at
a time as a group has consumers, with the weight's 64 rows in shared memory.

A consumer may not skip a phase of a barrier (it would take the phase before for the one it waits for), so in tail
blocks each consumer sees and releases the others' stages too.

With three consumers a thread has 160 registers, and of those the assembler gives one instruction at most 128: products
are 128 columns wide there instead of 256.

Shape letters: U users, B candidates, K contracted features, D embedding size, M outputs. Tiles: ROWS = 64 rows, COLS
columns, STEP columns of the weight per stage, STEPS stages of K per tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ikbo_recsys.kernels._gluon._compat import launch_dependent_grid, tma_load, tma_store, wait_for_primary_grid

ROWS = gl.constexpr(64)


# ---- fragment order -------------------------------------------------------------------------------------------------
# A 64 x COLS accumulator tile in memory:
# (warp 4, block of 8 columns, row in 8, pair of columns 4, row half 2, column 2).


@gluon.constexpr_function
def fragment_layout(cols):
    """Which elements of the tile's memory a thread holds: runs of four, a warp's runs adjacent."""
    blocks = (cols // 8).bit_length() - 1
    registers = [[1], [2]] + [[128 << i] for i in range(blocks)]
    lanes = [[4 << i] for i in range(5)]
    warps = [[128 << blocks], [256 << blocks]]
    return gl.DistributedLinearLayout(
        reg_bases=registers, lane_bases=lanes, warp_bases=warps, block_bases=[], shape=[64 * cols]
    )


@gluon.constexpr_function
def accumulator_layout(cols, widest=256):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, min(cols, widest), 16])


@gluon.jit
def from_fragments(fragments, COLS: gl.constexpr):
    """A loaded tile as an accumulator; no data moves."""
    tile = fragments.reshape([4, COLS // 8, 8, 4, 2, 2]).permute([0, 4, 2, 1, 3, 5]).reshape([ROWS, COLS])
    return gl.convert_layout(tile, accumulator_layout(COLS), assert_trivial=True)


@gluon.jit
def to_fragments(acc, COLS: gl.constexpr):
    """The inverse of `from_fragments`."""
    fragments = acc.reshape([4, 2, 8, COLS // 8, 4, 2]).permute([0, 3, 2, 4, 1, 5]).reshape([ROWS * COLS])
    return gl.convert_layout(fragments, fragment_layout(COLS), assert_trivial=True)


@gluon.jit
def advance(stage, phase, by, STAGES: gl.constexpr):
    stage += by
    wraps = stage >= STAGES
    return gl.where(wraps, stage - STAGES, stage), gl.where(wraps, phase ^ 1, phase)


# ---- the user's part -----------------------------------------------------------------------------------------------


@gluon.jit
def user_consumer(
    weight_bufs,
    user_bufs,
    full,
    empty,
    bias_ptr,
    out_ptr,
    M,
    tiles,
    ROW_TILES: gl.constexpr,
    COL_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    STEP: gl.constexpr = user_bufs.shape[2]
    COLS: gl.constexpr = user_bufs.shape[3]
    layout: gl.constexpr = accumulator_layout(COLS)
    offsets = gl.arange(0, ROWS * COLS, layout=fragment_layout(COLS))
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros((ROWS, COLS), gl.float32, layout=layout)
        previous = gl.to_tensor(0)
        for k in range(0, STEPS):
            mbarrier.wait(full.index(stage), phase)
            user = user_bufs.index(stage).reshape([STEP, COLS])
            acc = warpgroup_mma(weight_bufs.index(stage), user, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(previous), pred=k > 0)
            previous = stage + 0
            stage, phase = advance(stage, phase, 1, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(previous))
        if HAS_BIAS:
            rows = tile % ROW_TILES * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            acc += gl.load(bias_ptr + rows, mask=rows < M, other=0.0).to(gl.float32)[:, None]
        u = tile // (ROW_TILES * COL_TILES)
        place = (u.to(gl.int64) * ROW_TILES + tile % ROW_TILES) * COL_TILES + tile // ROW_TILES % COL_TILES
        values = to_fragments(acc, COLS).to(out_ptr.dtype.element_ty)
        gl.store(out_ptr + place * (ROWS * COLS) + offsets, values)


@gluon.jit
def user_producer(
    weight_desc,
    user_desc,
    weight_bufs,
    user_bufs,
    full,
    empty,
    tiles,
    ROW_TILES: gl.constexpr,
    COL_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    STEP: gl.constexpr = user_bufs.shape[2]
    COLS: gl.constexpr = user_bufs.shape[3]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = tile % ROW_TILES * ROWS
        col = tile // ROW_TILES % COL_TILES * COLS
        u = tile // (ROW_TILES * COL_TILES)
        for k in range(0, STEPS):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), (ROWS + COLS) * STEP * 2)
            tma_load(weight_desc, [row, k * STEP], full.index(stage), weight_bufs.index(stage))
            tma_load(user_desc, [u, k * STEP, col], full.index(stage), user_bufs.index(stage))
            stage, phase = advance(stage, phase, 1, STAGES)


@gluon.jit(do_not_specialize=["tiles"])
def user_part_kernel(
    weight_desc,
    user_desc,
    bias_ptr,
    out_ptr,
    M,
    tiles,
    ROW_TILES: gl.constexpr,
    COL_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """`weight_user @ user[u] (+ bias)` in fragment order, `[U, ROW_TILES, COL_TILES, 64 * COLS]`.

    `tiles` is `U * ROW_TILES * COL_TILES`.
    """
    weight_bufs = gl.allocate_shared_memory(weight_desc.dtype, [STAGES] + weight_desc.block_shape, weight_desc.layout)
    user_bufs = gl.allocate_shared_memory(user_desc.dtype, [STAGES] + user_desc.block_shape, user_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    # The next kernel may take the multiprocessors that this grid leaves free; it waits before it reads `out`.
    launch_dependent_grid()
    # fmt: off
    gl.warp_specialize([
        (user_consumer, (weight_bufs, user_bufs, full, empty, bias_ptr, out_ptr, M, tiles,
                         ROW_TILES, COL_TILES, STEPS, STAGES, HAS_BIAS)),
        (user_producer, (weight_desc, user_desc, weight_bufs, user_bufs, full, empty, tiles,
                         ROW_TILES, COL_TILES, STEPS, STAGES)),
    ], [1], [24])
    # fmt: on


# ---- the candidates' part ------------------------------------------------------------------------------------------


@gluon.jit
def role(tail_blocks, ROW_TILES: gl.constexpr, GROUP: gl.constexpr):
    """`(is_tail, first, step, row tile)`: this block takes units `first, first + step, ...` of its row tiles.

    Tail blocks are spread evenly over the grid: they load more than the others, and neighbours share a way to L2.
    """
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    tail = block * tail_blocks // blocks
    is_tail = (block + 1) * tail_blocks // blocks > tail
    GROUPS: gl.constexpr = ROW_TILES // GROUP
    if GROUPS == 0:
        return is_tail, tail, tail_blocks, gl.to_tensor(0)
    group = (block - tail) % GROUPS
    first = gl.where(is_tail, tail, (block - tail) // GROUPS)
    step = gl.where(is_tail, tail_blocks, (blocks - tail_blocks - group + GROUPS - 1) // GROUPS)
    return is_tail, first, step, gl.where(is_tail, ROW_TILES - 1, GROUP * group)


@gluon.jit
def ring_slot(k, ring, RESIDENT: gl.constexpr, RING: gl.constexpr):
    """`(stays, group of weight buffers, next ring)` of step k in a group's block: every third step's weight stays for
    life."""
    stays = (k % 3 == 0) & (k // 3 < RESIDENT)
    following = gl.where(ring == RING - 1, 0, ring + 1)
    return stays, gl.where(stays, k // 3, RESIDENT + ring), gl.where(stays, ring, following)


@gluon.jit
def tail_slot(k, stage, TAIL_RESIDENT: gl.constexpr):
    """The weight buffer of step k in a tail block: the first ones stay, the others go with the stage."""
    return gl.where(k < TAIL_RESIDENT, k, TAIL_RESIDENT + stage)


@gluon.jit
def pass_over(full, empty, stage, phase, is_tail, TIMES: gl.constexpr, STAGES: gl.constexpr):
    """In a tail block, see the stages of other consumers filled and let them go."""
    for _ in gl.static_range(TIMES):
        mbarrier.wait(full.index(stage), phase, pred=is_tail)
        mbarrier.arrive(empty.index(stage), pred=is_tail)
        stage, phase = advance(stage, phase, is_tail.to(gl.int32), STAGES)
    return stage, phase


@gluon.jit
def halves(tile):
    """The left and the right half of a tile's columns; no data moves."""
    HALF: gl.constexpr = tile.shape[1] // 2
    left, right = tile.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
    layout: gl.constexpr = accumulator_layout(HALF)
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def whole(left, right):
    """The inverse of `halves`, for products half as wide as the tile; no data moves."""
    HALF: gl.constexpr = left.shape[1]
    tile = gl.join(left, right).permute([0, 2, 1]).reshape([ROWS, 2 * HALF])
    return gl.convert_layout(tile, accumulator_layout(2 * HALF, HALF), assert_trivial=True)


@gluon.jit
def load_halves(pointer, COLS: gl.constexpr):
    """The two halves of a tile in fragment order, each in that order itself."""
    RUN: gl.constexpr = ROWS * COLS // 8
    offsets = gl.arange(0, ROWS * COLS // 2, layout=fragment_layout(COLS // 2))
    pointer += offsets + offsets // RUN * RUN
    return gl.load(pointer), gl.load(pointer + RUN)


@gluon.jit
def store_columns(tile, out_desc, out_buf, b, row, col):
    """Store a tile through one buffer of 64 columns."""
    if tile.shape[1] > out_desc.block_shape[2]:
        left, right = halves(tile)
        store_columns(left, out_desc, out_buf, b, row, col)
        store_columns(right, out_desc, out_buf, b, row, col + tile.shape[1] // 2)
    else:
        tma.store_wait(0)
        out_buf.reshape([ROWS, tile.shape[1]]).store(tile)
        fence_async_shared()
        tma_store(out_desc, [b, row, col], out_buf)


@gluon.jit
def user_of(index_ptr, b, batch, num_users):
    """The user of candidate b. Past the end it is anyone's, and an index outside `[0, U)` is clamped."""
    u = gl.load(index_ptr + gl.minimum(b, batch - 1))
    return gl.minimum(gl.maximum(u, 0), num_users - 1).to(gl.int32)


@gluon.jit
def tile_of(u, unit, ROW_TILES: gl.constexpr, COL_TILES: gl.constexpr, SIZE: gl.constexpr):
    """Where a user's tile for a unit begins, from that of user 0 and column tile 0 on."""
    return u.to(gl.int64) * (ROW_TILES * COL_TILES * SIZE) + unit % COL_TILES * SIZE


@gluon.jit
def candidate_consumer(
    WHICH: gl.constexpr,
    GROUP: gl.constexpr,
    out_desc,
    out_bufs,
    user_ptr,
    index_ptr,
    num_users,
    batch,
    tail_blocks,
    weight_bufs,
    cand_bufs,
    weight_full,
    full,
    empty,
    ROW_TILES: gl.constexpr,
    COL_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    RING: gl.constexpr,
    TAIL_RESIDENT: gl.constexpr,
):
    STEP: gl.constexpr = cand_bufs.shape[2]
    COLS: gl.constexpr = cand_bufs.shape[3]
    SIZE: gl.constexpr = ROWS * COLS
    offsets = gl.arange(0, SIZE, layout=fragment_layout(COLS))
    is_tail, first, step, row_tile = role(tail_blocks, ROW_TILES, GROUP)
    row_tile = gl.where(is_tail, row_tile, row_tile + WHICH)
    per_unit = gl.where(is_tail, GROUP, 1)
    own = gl.where(is_tail, WHICH, 0)
    units = (batch + per_unit - 1) // per_unit * COL_TILES
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    ring = gl.to_tensor(0)
    user_tiles = user_ptr + row_tile * (COL_TILES * SIZE)
    u = user_of(index_ptr, first // COL_TILES * per_unit + own, batch, num_users)
    wait_for_primary_grid()
    if GROUP == 2:
        fragments = gl.load(user_tiles + tile_of(u, first, ROW_TILES, COL_TILES, SIZE) + offsets)
    mbarrier.wait(weight_full.index(0), 0)
    for unit in range(first, units, step):
        if GROUP == 2:
            acc = from_fragments(fragments.to(gl.float32), COLS)
        else:
            left, right = load_halves(user_tiles + tile_of(u, unit, ROW_TILES, COL_TILES, SIZE), COLS)
            left = from_fragments(left.to(gl.float32), COLS // 2)
            acc = whole(left, from_fragments(right.to(gl.float32), COLS // 2))
        if GROUP == 2:
            u = user_of(index_ptr, (unit + step) // COL_TILES * per_unit + own, batch, num_users)
        previous = gl.to_tensor(0)
        for k in range(0, STEPS):
            stage, phase = pass_over(full, empty, stage, phase, is_tail, WHICH, STAGES)
            _, group, ring = ring_slot(k, ring, RESIDENT, RING)
            slot = gl.where(is_tail, tail_slot(k, stage, TAIL_RESIDENT), GROUP * group + WHICH)
            mbarrier.wait(full.index(stage), phase)
            cand = cand_bufs.index(stage).reshape([STEP, COLS])
            acc = warpgroup_mma(weight_bufs.index(slot), cand, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(previous), pred=k > 0)
            previous = stage + 0
            stage, phase = advance(stage, phase, 1, STAGES)
            stage, phase = pass_over(full, empty, stage, phase, is_tail, GROUP - 1 - WHICH, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(previous))
        # With two consumers the user's tile of the next unit arrives while the second half of this one is stored.
        # (Loaded before the first half, it would find all registers taken and spill.) With three there is no room, and
        # two others are at work meanwhile.
        b = unit // COL_TILES * per_unit + own
        col = unit % COL_TILES * COLS
        left, right = halves(acc.to(out_desc.dtype))
        store_columns(left, out_desc, out_bufs.index(WHICH), b, row_tile * ROWS, col)
        if GROUP == 2:
            fragments = gl.load(user_tiles + tile_of(u, unit + step, ROW_TILES, COL_TILES, SIZE) + offsets)
        else:
            u = user_of(index_ptr, (unit + step) // COL_TILES * per_unit + own, batch, num_users)
        store_columns(right, out_desc, out_bufs.index(WHICH), b, row_tile * ROWS, col + COLS // 2)
    tma.store_wait(0)


@gluon.jit
def candidate_producer(
    GROUP: gl.constexpr,
    weight_desc,
    cand_desc,
    batch,
    tail_blocks,
    weight_bufs,
    cand_bufs,
    weight_full,
    full,
    empty,
    ROW_TILES: gl.constexpr,
    COL_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    RING: gl.constexpr,
    TAIL_RESIDENT: gl.constexpr,
):
    STEP: gl.constexpr = cand_bufs.shape[2]
    COLS: gl.constexpr = cand_bufs.shape[3]
    WEIGHT_BYTES: gl.constexpr = ROWS * STEP * 2
    CAND_BYTES: gl.constexpr = COLS * STEP * 2
    is_tail, first, step, row_tile = role(tail_blocks, ROW_TILES, GROUP)
    row = row_tile * ROWS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    if is_tail:
        mbarrier.expect(weight_full.index(0), TAIL_RESIDENT * WEIGHT_BYTES)
        for k in range(0, TAIL_RESIDENT):
            tma_load(weight_desc, [row, k * STEP], weight_full.index(0), weight_bufs.index(k))
        for unit in range(first, (batch + GROUP - 1) // GROUP * COL_TILES, step):
            col = unit % COL_TILES * COLS
            for k in range(0, STEPS):
                for which in gl.static_range(GROUP):
                    mbarrier.wait(empty.index(stage), phase)
                    if k < TAIL_RESIDENT:
                        mbarrier.expect(full.index(stage), CAND_BYTES)
                    else:
                        mbarrier.expect(full.index(stage), WEIGHT_BYTES + CAND_BYTES)
                        slot = tail_slot(k, stage, TAIL_RESIDENT)
                        tma_load(weight_desc, [row, k * STEP], full.index(stage), weight_bufs.index(slot))
                    b = unit // COL_TILES * GROUP + which
                    tma_load(cand_desc, [b, k * STEP, col], full.index(stage), cand_bufs.index(stage))
                    stage, phase = advance(stage, phase, 1, STAGES)
    else:
        mbarrier.expect(weight_full.index(0), RESIDENT * GROUP * WEIGHT_BYTES)
        for i in range(0, RESIDENT):
            for which in gl.static_range(GROUP):
                slot = weight_bufs.index(GROUP * i + which)
                tma_load(weight_desc, [row + which * ROWS, 3 * i * STEP], weight_full.index(0), slot)
        ring = gl.to_tensor(0)
        for unit in range(first, batch * COL_TILES, step):
            col = unit % COL_TILES * COLS
            for k in range(0, STEPS):
                stays, group, ring = ring_slot(k, ring, RESIDENT, RING)
                mbarrier.wait(empty.index(stage), phase)
                if stays:
                    mbarrier.expect(full.index(stage), CAND_BYTES)
                else:
                    mbarrier.expect(full.index(stage), GROUP * WEIGHT_BYTES + CAND_BYTES)
                    for which in gl.static_range(GROUP):
                        slot = weight_bufs.index(GROUP * group + which)
                        tma_load(weight_desc, [row + which * ROWS, k * STEP], full.index(stage), slot)
                tma_load(cand_desc, [unit // COL_TILES, k * STEP, col], full.index(stage), cand_bufs.index(stage))
                stage, phase = advance(stage, phase, 1, STAGES)


@gluon.jit(
    do_not_specialize=["num_users", "batch", "tail_blocks"],
    # Read one entry at a time: its alignment changes nothing.
    do_not_specialize_on_alignment=["index_ptr"],
)
def candidate_kernel(
    weight_desc,
    cand_desc,
    out_desc,
    user_ptr,
    index_ptr,
    num_users,
    batch,
    tail_blocks,
    ROW_TILES: gl.constexpr,
    COL_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    RING: gl.constexpr,
    TAIL_RESIDENT: gl.constexpr,
    WEIGHT_BUFFERS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """`weight_cand @ cand[b] + user_part[index[b]]`; see the top of the file, and `_compression_hopper.py` for the
    sizes."""
    weight_bufs = gl.allocate_shared_memory(
        weight_desc.dtype, [WEIGHT_BUFFERS] + weight_desc.block_shape, weight_desc.layout
    )
    cand_bufs = gl.allocate_shared_memory(cand_desc.dtype, [STAGES] + cand_desc.block_shape, cand_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [GROUP] + out_desc.block_shape, out_desc.layout)
    weight_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(weight_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUP)
    # fmt: off
    if GROUP == 2:
        gl.warp_specialize([
            (candidate_consumer, (0, 2, out_desc, out_bufs, user_ptr, index_ptr, num_users, batch, tail_blocks,
                                  weight_bufs, cand_bufs, weight_full, full, empty,
                                  ROW_TILES, COL_TILES, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT)),
            (candidate_consumer, (1, 2, out_desc, out_bufs, user_ptr, index_ptr, num_users, batch, tail_blocks,
                                  weight_bufs, cand_bufs, weight_full, full, empty,
                                  ROW_TILES, COL_TILES, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT)),
            (candidate_producer, (2, weight_desc, cand_desc, batch, tail_blocks,
                                  weight_bufs, cand_bufs, weight_full, full, empty,
                                  ROW_TILES, COL_TILES, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (candidate_consumer, (0, 3, out_desc, out_bufs, user_ptr, index_ptr, num_users, batch, tail_blocks,
                                  weight_bufs, cand_bufs, weight_full, full, empty,
                                  ROW_TILES, COL_TILES, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT)),
            (candidate_consumer, (1, 3, out_desc, out_bufs, user_ptr, index_ptr, num_users, batch, tail_blocks,
                                  weight_bufs, cand_bufs, weight_full, full, empty,
                                  ROW_TILES, COL_TILES, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT)),
            (candidate_consumer, (2, 3, out_desc, out_bufs, user_ptr, index_ptr, num_users, batch, tail_blocks,
                                  weight_bufs, cand_bufs, weight_full, full, empty,
                                  ROW_TILES, COL_TILES, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT)),
            (candidate_producer, (3, weight_desc, cand_desc, batch, tail_blocks,
                                  weight_bufs, cand_bufs, weight_full, full, empty,
                                  ROW_TILES, COL_TILES, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT)),
        ], [4, 4, 1], [160, 160, 24])
    # fmt: on
