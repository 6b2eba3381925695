"""Linear compression for Hopper in Gluon, the second of two launches: `compression_user.py` makes the user's part.

`candidate_kernel` computes `out[b] = weight_cand @ cand[b] + user_part[index[b]]`. Its blocks are persistent: two
consumers of 64 rows each, which share every block of `cand`, and a producer. To read less from L2, a block keeps its
rows of the weight for life and as many of their columns as there is room for in shared memory. Where the number of row
tiles is odd, the last one is a *tail*: some blocks do only tails, of two candidates at a time, with the weight's 64
rows in shared memory.

The tensor cores do not wait for a tile to be stored: a consumer rounds it, which takes half the registers of the
accumulators, and stores it under the first products of the next tile. The user's part of that one is loaded under the
following products. Both are done in parts, between the products, for these run dry after two steps.

With IS_USER it is `candidate_kernel` itself that makes the user's part: for many users, since blocks of two consumers
read less than those of `user_part_kernel`; these are more, which counts where users are few.

A consumer may not skip a phase of a barrier (it would take the phase before for the one it waits for), so in tail
blocks each consumer sees and releases the other's stages too.

Shape letters: U users, B candidates, K contracted features, D embedding size, M outputs. Tiles: ROWS = 64 rows, COLS
columns, STEP columns of the weight per stage, STEPS stages of K per tile, of which only the first LAST columns of the
last one count.
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
from ikbo_recsys.kernels._gluon._compression_tiles import (
    ROWS,
    accumulator_layout,
    advance,
    as_float,
    fragment_layout,
    from_fragments,
    pack,
    part_columns,
    part_of,
    side_by_side,
    store_fragments,
    unpack,
)


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
    LENGTH: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    RING: gl.constexpr,
    TAIL_RESIDENT: gl.constexpr,
):
    """Start the product of step k, of the first LENGTH of its features."""
    if WHICH == 1:
        stage, phase = pass_over(full, empty, stage, phase, is_tail, STAGES)
    _, pair, ring = ring_slot(k, ring, STEPS, RESIDENT, RING)
    slot = gl.where(is_tail, tail_slot(k, stage, TAIL_RESIDENT), 2 * pair + WHICH)
    mbarrier.wait(full.index(stage), phase)
    cand = cand_bufs.index(stage).reshape([cand_bufs.shape[2], cand_bufs.shape[3]]).slice(0, LENGTH, dim=0)
    weight = weight_bufs.index(slot).slice(0, LENGTH, dim=1)
    acc = warpgroup_mma(weight, cand, acc, use_acc=k > 0, is_async=True)
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
    bias_ptr,
    M,
    num_users,
    batch,
    tail_blocks,
    weight_bufs,
    cand_bufs,
    weight_full,
    full,
    empty,
    HAS_USER: gl.constexpr,
    IS_USER: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    COL_TILES: gl.constexpr,
    LAST: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    RING: gl.constexpr,
    TAIL_RESIDENT: gl.constexpr,
):
    STEP: gl.constexpr = cand_bufs.shape[2]
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
    before_place = before_b.to(gl.int64)
    before = pack(gl.zeros((ROWS, COLS), gl.float32, layout=layout), out_desc.dtype)
    mbarrier.wait(weight_full.index(0), 0)
    for unit in range(first, units, step):
        b = unit // COL_TILES * per_unit + own
        u = b.to(gl.int64)
        if HAS_USER:
            u = user_of(index_ptr, b, batch, num_users)
        place = ((u * ROW_TILES + row_tile) * COL_TILES + unit % COL_TILES) * (PARTS * SIZE)
        acc = gl.zeros((ROWS, COLS), gl.float32, layout=layout)
        previous = gl.to_tensor(0)
        fragments = ()
        for k in gl.static_range(2 * PARTS):
            if k < STEPS:
                step_k = gl.to_tensor(k)
                acc, stage, phase, ring = start_step(
                    WHICH, acc, step_k, stage, phase, ring, is_tail, weight_bufs, cand_bufs, full, empty,
                    LAST if k == STEPS - 1 else STEP, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT,
                )  # fmt: skip
            if k < PARTS:
                if IS_USER:
                    store_fragments(before, user_ptr + before_place, before_b < batch, offsets, k, PARTS)
                else:
                    store_part(before, out_desc, out_buf, before_b, row, before_col, k, PARTS)
            elif HAS_USER:
                if k == PARTS:
                    wait_for_primary_grid()
                part = gl.load(user_ptr + place + (k - PARTS) * SIZE + offsets)
                fragments = fragments + (from_fragments(part, WIDTH),)  # type: ignore[assignment]
            if k < STEPS:
                acc, stage, phase, previous = finish_step(
                    WHICH, acc, step_k, stage, phase, previous, is_tail, full, empty, STAGES
                )
        for k in range(2 * PARTS, STEPS - 1):
            acc, stage, phase, ring = start_step(
                WHICH, acc, k, stage, phase, ring, is_tail, weight_bufs, cand_bufs, full, empty,
                STEP, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT,
            )  # fmt: skip
            acc, stage, phase, previous = finish_step(
                WHICH, acc, k, stage, phase, previous, is_tail, full, empty, STAGES
            )
        if STEPS > 2 * PARTS:
            step_k = gl.to_tensor(STEPS - 1)
            acc, stage, phase, ring = start_step(
                WHICH, acc, step_k, stage, phase, ring, is_tail, weight_bufs, cand_bufs, full, empty,
                LAST, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT,
            )  # fmt: skip
            acc, stage, phase, previous = finish_step(
                WHICH, acc, step_k, stage, phase, previous, is_tail, full, empty, STAGES
            )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(previous))
        if HAS_USER:
            acc += as_float(side_by_side(fragments, 0, PARTS), out_desc.dtype)
        if HAS_BIAS:
            rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            acc += gl.load(bias_ptr + rows, mask=rows < M, other=0.0).to(gl.float32)[:, None]
        before = pack(acc, out_desc.dtype)
        before_b = b
        before_col = unit % COL_TILES * COLS
        before_place = place
    for part in gl.static_range(PARTS):
        if IS_USER:
            store_fragments(before, user_ptr + before_place, before_b < batch, offsets, part, PARTS)
        else:
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
    do_not_specialize=["M", "num_users", "batch", "tail_blocks"],
    # Read one entry at a time: its alignment changes nothing.
    do_not_specialize_on_alignment=["index_ptr", "bias_ptr"],
)
def candidate_kernel(
    weight_desc,
    cand_desc,
    out_desc,
    user_ptr,
    index_ptr,
    bias_ptr,
    M,
    num_users,
    batch,
    tail_blocks,
    HAS_USER: gl.constexpr,
    IS_USER: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    COL_TILES: gl.constexpr,
    LAST: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    RING: gl.constexpr,
    TAIL_RESIDENT: gl.constexpr,
    WEIGHT_BUFFERS: gl.constexpr,
):
    """`weight_cand @ cand[b] (+ user_part[index[b]]) (+ bias)`; `_compression_hopper.py` has the rules for the sizes.

    With HAS_USER `user_ptr` is the user's part, with IS_USER it is where that is written to, instead of `out_desc`.
    """
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
    if IS_USER:
        # The next kernel may take the multiprocessors that this grid leaves free; it waits before it reads the result.
        launch_dependent_grid()
    # fmt: off
    gl.warp_specialize([
        (candidate_consumer, (0, out_desc, out_bufs, user_ptr, index_ptr, bias_ptr, M, num_users, batch,
                              tail_blocks, weight_bufs, cand_bufs, weight_full, full, empty,
                              HAS_USER, IS_USER, HAS_BIAS, ROW_TILES, COL_TILES, LAST,
                              STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT)),
        (candidate_consumer, (1, out_desc, out_bufs, user_ptr, index_ptr, bias_ptr, M, num_users, batch,
                              tail_blocks, weight_bufs, cand_bufs, weight_full, full, empty,
                              HAS_USER, IS_USER, HAS_BIAS, ROW_TILES, COL_TILES, LAST,
                              STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT)),
        (candidate_producer, (weight_desc, cand_desc, batch, tail_blocks,
                              weight_bufs, cand_bufs, weight_full, full, empty,
                              ROW_TILES, COL_TILES, STEPS, STAGES, RESIDENT, RING, TAIL_RESIDENT)),
    ], [4, 1], [240, 24])
    # fmt: on
