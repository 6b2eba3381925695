"""Linear compression for Hopper in Gluon: two launches, the user's part and the candidates'.

`user_part_kernel` writes `weight_user @ user[u] (+ bias)` in *fragment order*: the order in which the accumulators of
the second kernel lie in its registers, so that it takes them by plain 8-byte loads, without shared memory.

`candidate_kernel` computes `out[b] = weight_cand @ cand[b] + user_part[index[b]]`. Its blocks are persistent: two
consumers of 64 rows each, which share every block of `cand`, and a producer. What bounds it is the traffic from L2, so
a block keeps its rows of the weight for life and some of their columns in shared memory. Where the number of row tiles
is odd, the last one is a *tail*: some blocks do only tails, of two candidates at a time, with the weight's 64 rows in
shared memory.

The tensor cores do not wait for a tile to be stored: a consumer rounds it, which takes half the registers of the
accumulators, and stores it under the first products of the next tile. The user's part of that one is loaded under the
following products. Both are done in parts, between the products, for these run dry after two steps.

A consumer may not skip a phase of a barrier (it would take the phase before for the one it waits for), so in tail
blocks each consumer sees and releases the other's stages too.

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


# ---- tiles in registers ---------------------------------------------------------------------------------------------
# Rounded tiles are int32, two neighbouring columns in one: 16-bit values that live across a loop take a register each.
# In memory, in fragment order: (part, warp 4, block of 8 columns, row in 8, pair of columns 4, row half 2).


@gluon.constexpr_function
def part_columns(cols):
    """Columns that are stored or loaded at a time."""
    return min(64, cols // 2)


@gluon.constexpr_function
def fragment_layout(cols):
    """Which pairs of a part's memory a thread holds, by its columns: runs of two, a warp's runs adjacent."""
    blocks = (cols // 8).bit_length() - 1
    registers = [[1]] + [[64 << i] for i in range(blocks)]
    lanes = [[2 << i] for i in range(5)]
    warps = [[64 << blocks], [128 << blocks]]
    return gl.DistributedLinearLayout(
        reg_bases=registers, lane_bases=lanes, warp_bases=warps, block_bases=[], shape=[32 * cols]
    )


@gluon.constexpr_function
def accumulator_layout(cols):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, cols, 16])


@gluon.jit
def pack(tile, DTYPE: gl.constexpr):
    """A tile of accumulators, rounded: pairs `[ROWS, COLS / 2]`. No data moves between threads."""
    low, high = tile.reshape([ROWS, tile.shape[1] // 2, 2]).split()
    # Written in Triton's own operators, each pair takes four instructions more.
    TYPE: gl.constexpr = "bf16x2" if gl.bfloat16 == DTYPE else "f16x2"
    ASM: gl.constexpr = "cvt.rn." + TYPE + ".f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(pairs, DTYPE: gl.constexpr):
    """The tile of `DTYPE` that pairs hold, in the layout of accumulators. No data moves between threads."""
    COLS: gl.constexpr = 2 * pairs.shape[1]
    low = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([ROWS, COLS]), accumulator_layout(COLS), assert_trivial=True)


@gluon.jit
def as_float(pairs, DTYPE: gl.constexpr):
    """The tile that pairs hold in fp32, in the layout of accumulators. No data moves between threads."""
    COLS: gl.constexpr = 2 * pairs.shape[1]
    if gl.bfloat16 == DTYPE:  # the upper half of the bits of the same number in fp32
        low = (pairs << 16).to(gl.float32, bitcast=True)
        high = (pairs & -0x10000).to(gl.float32, bitcast=True)
    else:
        low, high = gl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=f,=f,r",
            [pairs],
            dtype=(gl.float32, gl.float32),
            is_pure=True,
            pack=1,
        )
    return gl.convert_layout(gl.join(low, high).reshape([ROWS, COLS]), accumulator_layout(COLS), assert_trivial=True)


@gluon.jit
def side_by_side(parts, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """The inverse of `part_of`, of parts FIRST to FIRST + COUNT - 1; no data moves."""
    if COUNT == 1:
        return parts[FIRST]
    else:
        left = side_by_side(parts, FIRST, COUNT // 2)
        right = side_by_side(parts, FIRST + COUNT // 2, COUNT // 2)
        return gl.join(left, right).permute([0, 2, 1]).reshape([ROWS, 2 * left.shape[1]])


@gluon.jit
def part_of(pairs, PART: gl.constexpr, PARTS: gl.constexpr):
    """One of PARTS equal blocks of columns; no data moves."""
    if PARTS == 1:
        return pairs
    else:
        left, right = pairs.reshape([ROWS, 2, pairs.shape[1] // 2]).permute([0, 2, 1]).split()
        if PART < PARTS // 2:
            return part_of(left, PART, PARTS // 2)
        else:
            return part_of(right, PART - PARTS // 2, PARTS // 2)


@gluon.jit
def from_fragments(fragments, COLS: gl.constexpr):
    """A part's loaded fragments as pairs; no data moves."""
    return fragments.reshape([4, COLS // 8, 8, 4, 2]).permute([0, 4, 2, 1, 3]).reshape([ROWS, COLS // 2])


@gluon.jit
def to_fragments(pairs, COLS: gl.constexpr):
    """The inverse of `from_fragments`."""
    fragments = pairs.reshape([4, 2, 8, COLS // 8, 4]).permute([0, 3, 2, 4, 1]).reshape([ROWS * COLS // 2])
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
    WIDTH: gl.constexpr = part_columns(COLS)
    offsets = gl.arange(0, ROWS * WIDTH // 2, layout=fragment_layout(WIDTH))
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
        pairs = pack(acc, user_bufs.dtype)
        for part in gl.static_range(COLS // WIDTH):
            part_ptr = out_ptr + place * (ROWS * COLS // 2) + part * (ROWS * WIDTH // 2)
            gl.store(part_ptr + offsets, to_fragments(part_of(pairs, part, COLS // WIDTH), WIDTH))


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
    """`weight_user @ user[u] (+ bias)` in fragment order, int32 `[U, ROW_TILES, COL_TILES, 32 * COLS]`.

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
def role(tail_blocks, ROW_TILES: gl.constexpr):
    """`(is_tail, first, step, row tile)`: this block takes units `first, first + step, ...` of its row tiles.

    Tail blocks are spread evenly over the grid: they load more than the others, and neighbours share a way to L2.
    """
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    tail = block * tail_blocks // blocks
    is_tail = (block + 1) * tail_blocks // blocks > tail
    PAIRS: gl.constexpr = ROW_TILES // 2
    if PAIRS == 0:
        return is_tail, tail, tail_blocks, gl.to_tensor(0)
    pair = (block - tail) % PAIRS
    first = gl.where(is_tail, tail, (block - tail) // PAIRS)
    step = gl.where(is_tail, tail_blocks, (blocks - tail_blocks - pair + PAIRS - 1) // PAIRS)
    return is_tail, first, step, gl.where(is_tail, ROW_TILES - 1, 2 * pair)


@gluon.jit
def ring_slot(k, ring, STEPS: gl.constexpr, RESIDENT: gl.constexpr, RING: gl.constexpr):
    """`(stays, pair of weight buffers, next ring)` of step k in a pair's block: the weights of RESIDENT of the STEPS
    steps, evenly spread, stay for life."""
    before = k * RESIDENT // STEPS
    stays = (k + 1) * RESIDENT // STEPS > before
    following = gl.where(ring == RING - 1, 0, ring + 1)
    return stays, gl.where(stays, before, RESIDENT + ring), gl.where(stays, ring, following)


@gluon.jit
def resident_step(i, STEPS: gl.constexpr, RESIDENT: gl.constexpr):
    """The step whose weight is the i-th that stays."""
    return ((i + 1) * STEPS - 1) // RESIDENT


@gluon.jit
def tail_slot(k, stage, TAIL_RESIDENT: gl.constexpr):
    """The weight buffer of step k in a tail block: the first ones stay, the others go with the stage."""
    return gl.where(k < TAIL_RESIDENT, k, TAIL_RESIDENT + stage)


@gluon.jit
def pass_over(full, empty, stage, phase, is_tail, STAGES: gl.constexpr):
    """In a tail block, see a stage of the other consumer filled and let it go."""
    mbarrier.wait(full.index(stage), phase, pred=is_tail)
    mbarrier.arrive(empty.index(stage), pred=is_tail)
    return advance(stage, phase, is_tail.to(gl.int32), STAGES)


@gluon.jit
def start_step(
    WHICH: gl.constexpr,
    acc,
    k,
    stage,
    phase,
    ring,
    is_tail,
    weight_bufs,
    cand_bufs,
    full,
    empty,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    RING: gl.constexpr,
    TAIL_RESIDENT: gl.constexpr,
):
    """Start the product of step k."""
    if WHICH == 1:
        stage, phase = pass_over(full, empty, stage, phase, is_tail, STAGES)
    _, pair, ring = ring_slot(k, ring, STEPS, RESIDENT, RING)
    slot = gl.where(is_tail, tail_slot(k, stage, TAIL_RESIDENT), 2 * pair + WHICH)
    mbarrier.wait(full.index(stage), phase)
    cand = cand_bufs.index(stage).reshape([cand_bufs.shape[2], cand_bufs.shape[3]])
    acc = warpgroup_mma(weight_bufs.index(slot), cand, acc, use_acc=k > 0, is_async=True)
    return acc, stage, phase, ring


@gluon.jit
def finish_step(WHICH: gl.constexpr, acc, k, stage, phase, previous, is_tail, full, empty, STAGES: gl.constexpr):
    """Wait for the product before that of step k, and release its stage."""
    acc = warpgroup_mma_wait(1, deps=(acc,))
    mbarrier.arrive(empty.index(previous), pred=k > 0)
    previous = stage + 0
    stage, phase = advance(stage, phase, 1, STAGES)
    if WHICH == 0:
        stage, phase = pass_over(full, empty, stage, phase, is_tail, STAGES)
    return acc, stage, phase, previous


@gluon.jit
def store_part(pairs, out_desc, out_buf, b, row, col, PART: gl.constexpr, PARTS: gl.constexpr):
    """Store one of PARTS blocks of columns of a tile. Nothing is stored of a candidate past the end."""
    tile = unpack(part_of(pairs, PART, PARTS), out_desc.dtype)
    tma.store_wait(0)
    out_buf.reshape([ROWS, tile.shape[1]]).store(tile)
    fence_async_shared()
    tma_store(out_desc, [b, row, col + PART * tile.shape[1]], out_buf)


@gluon.jit
def user_of(index_ptr, b, batch, num_users):
    """The user of candidate b. Past the end it is anyone's, and an index outside `[0, U)` is clamped."""
    u = gl.load(index_ptr + gl.minimum(b, batch - 1))
    return gl.minimum(gl.maximum(u, 0), num_users - 1).to(gl.int64)


@gluon.jit
def candidate_consumer(
    WHICH: gl.constexpr,
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
    HAS_USER: gl.constexpr,
    ROW_TILES: gl.constexpr,
    COL_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    RING: gl.constexpr,
    TAIL_RESIDENT: gl.constexpr,
):
    COLS: gl.constexpr = cand_bufs.shape[3]
    WIDTH: gl.constexpr = part_columns(COLS)
    PARTS: gl.constexpr = COLS // WIDTH
    SIZE: gl.constexpr = ROWS * WIDTH // 2
    layout: gl.constexpr = accumulator_layout(COLS)
    offsets = gl.arange(0, SIZE, layout=fragment_layout(WIDTH))
    is_tail, first, step, row_tile = role(tail_blocks, ROW_TILES)
    row_tile = gl.where(is_tail, row_tile, row_tile + WHICH)
    row = row_tile * ROWS
    per_unit = gl.where(is_tail, 2, 1)
    own = gl.where(is_tail, WHICH, 0)
    units = (batch + per_unit - 1) // per_unit * COL_TILES
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    ring = gl.to_tensor(0)
    out_buf = out_bufs.index(WHICH)
    # The tile before the first one is stored past the end.
    before_b = batch + 0
    before_col = gl.to_tensor(0)
    before = pack(gl.zeros((ROWS, COLS), gl.float32, layout=layout), out_desc.dtype)
    mbarrier.wait(weight_full.index(0), 0)
    for unit in range(first, units, step):
        b = unit // COL_TILES * per_unit + own
        if HAS_USER:
            u = user_of(index_ptr, b, batch, num_users)
            user_tile = user_ptr + ((u * ROW_TILES + row_tile) * COL_TILES + unit % COL_TILES) * (PARTS * SIZE)
        acc = gl.zeros((ROWS, COLS), gl.float32, layout=layout)
        previous = gl.to_tensor(0)
        fragments = ()
        for k in gl.static_range(2 * PARTS):
            if k < STEPS:
                step_k = gl.to_tensor(k)
                acc, stage, phase, ring = start_step(
                    WHICH, acc, step_k, stage, phase, ring, is_tail, weight_bufs, cand_bufs, full, empty,
                    STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT,
                )  # fmt: skip
            if k < PARTS:
                store_part(before, out_desc, out_buf, before_b, row, before_col, k, PARTS)
            elif HAS_USER:
                if k == PARTS:
                    wait_for_primary_grid()
                part = gl.load(user_tile + (k - PARTS) * SIZE + offsets)
                fragments = fragments + (from_fragments(part, WIDTH),)  # type: ignore[assignment]
            if k < STEPS:
                acc, stage, phase, previous = finish_step(
                    WHICH, acc, step_k, stage, phase, previous, is_tail, full, empty, STAGES
                )
        for k in range(2 * PARTS, STEPS):
            acc, stage, phase, ring = start_step(
                WHICH, acc, k, stage, phase, ring, is_tail, weight_bufs, cand_bufs, full, empty,
                STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT,
            )  # fmt: skip
            acc, stage, phase, previous = finish_step(
                WHICH, acc, k, stage, phase, previous, is_tail, full, empty, STAGES
            )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(previous))
        if HAS_USER:
            acc += as_float(side_by_side(fragments, 0, PARTS), out_desc.dtype)
        before = pack(acc, out_desc.dtype)
        before_b = b
        before_col = unit % COL_TILES * COLS
    for part in gl.static_range(PARTS):
        store_part(before, out_desc, out_buf, before_b, row, before_col, part, PARTS)
    tma.store_wait(0)


@gluon.jit
def candidate_producer(
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
    is_tail, first, step, row_tile = role(tail_blocks, ROW_TILES)
    row = row_tile * ROWS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    if is_tail:
        mbarrier.expect(weight_full.index(0), TAIL_RESIDENT * WEIGHT_BYTES)
        for k in range(0, TAIL_RESIDENT):
            tma_load(weight_desc, [row, k * STEP], weight_full.index(0), weight_bufs.index(k))
        for unit in range(first, (batch + 1) // 2 * COL_TILES, step):
            col = unit % COL_TILES * COLS
            for k in range(0, STEPS):
                for which in gl.static_range(2):
                    mbarrier.wait(empty.index(stage), phase)
                    if k < TAIL_RESIDENT:
                        mbarrier.expect(full.index(stage), CAND_BYTES)
                    else:
                        mbarrier.expect(full.index(stage), WEIGHT_BYTES + CAND_BYTES)
                        slot = tail_slot(k, stage, TAIL_RESIDENT)
                        tma_load(weight_desc, [row, k * STEP], full.index(stage), weight_bufs.index(slot))
                    b = unit // COL_TILES * 2 + which
                    tma_load(cand_desc, [b, k * STEP, col], full.index(stage), cand_bufs.index(stage))
                    stage, phase = advance(stage, phase, 1, STAGES)
    else:
        mbarrier.expect(weight_full.index(0), RESIDENT * 2 * WEIGHT_BYTES)
        for i in range(0, RESIDENT):
            k = resident_step(i, STEPS, RESIDENT)
            for which in gl.static_range(2):
                slot = weight_bufs.index(2 * i + which)
                tma_load(weight_desc, [row + which * ROWS, k * STEP], weight_full.index(0), slot)
        ring = gl.to_tensor(0)
        for unit in range(first, batch * COL_TILES, step):
            col = unit % COL_TILES * COLS
            for k in range(0, STEPS):
                stays, pair, ring = ring_slot(k, ring, STEPS, RESIDENT, RING)
                mbarrier.wait(empty.index(stage), phase)
                if stays:
                    mbarrier.expect(full.index(stage), CAND_BYTES)
                else:
                    mbarrier.expect(full.index(stage), 2 * WEIGHT_BYTES + CAND_BYTES)
                    for which in gl.static_range(2):
                        slot = weight_bufs.index(2 * pair + which)
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
    HAS_USER: gl.constexpr,
    ROW_TILES: gl.constexpr,
    COL_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    RING: gl.constexpr,
    TAIL_RESIDENT: gl.constexpr,
    WEIGHT_BUFFERS: gl.constexpr,
):
    """`weight_cand @ cand[b] (+ user_part[index[b]])`; see the top of the file, and `_compression_hopper.py` for the
    sizes."""
    weight_bufs = gl.allocate_shared_memory(
        weight_desc.dtype, [WEIGHT_BUFFERS] + weight_desc.block_shape, weight_desc.layout
    )
    cand_bufs = gl.allocate_shared_memory(cand_desc.dtype, [STAGES] + cand_desc.block_shape, cand_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_shape, out_desc.layout)
    weight_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(weight_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    # fmt: off
    gl.warp_specialize([
        (candidate_consumer, (0, out_desc, out_bufs, user_ptr, index_ptr, num_users, batch, tail_blocks,
                              weight_bufs, cand_bufs, weight_full, full, empty, HAS_USER,
                              ROW_TILES, COL_TILES, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT)),
        (candidate_consumer, (1, out_desc, out_bufs, user_ptr, index_ptr, num_users, batch, tail_blocks,
                              weight_bufs, cand_bufs, weight_full, full, empty, HAS_USER,
                              ROW_TILES, COL_TILES, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT)),
        (candidate_producer, (weight_desc, cand_desc, batch, tail_blocks,
                              weight_bufs, cand_bufs, weight_full, full, empty,
                              ROW_TILES, COL_TILES, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT)),
    ], [4, 1], [240, 24])
    # fmt: on
