"""The user's part of linear compression for Hopper in Gluon, in fragment order (`_compression_tiles.py`).

One consumer of 64 rows to a block: many blocks, for few users. For many, `compression_linear.py` has the other way.

A place in memory belongs to a tile of COLS columns, which is what `candidate_kernel` reads. A tile that is computed has
all of them, or a half or a quarter where tiles are few: more blocks then load at the same time. Which, is an argument
and not a constant, so that another number of users compiles nothing: the kernel has a loop for each.

Shape letters: U users, K contracted features, M outputs. Tiles: ROWS = 64 rows, STRIPS strips of STRIP = 64 columns,
STEP features per stage, STEPS stages of K per tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ikbo_recsys.kernels._gluon._compat import launch_dependent_grid, tma_load
from ikbo_recsys.kernels._gluon._compression_tiles import (
    ROWS,
    accumulator_layout,
    advance,
    beside,
    fragment_layout,
    pack,
    part_columns,
    store_fragments,
)

STRIP = gl.constexpr(64)


@gluon.constexpr_function
def stages(strips, weight_bufs, user_bufs):
    """As many as there are buffers for, one of the weight and `strips` of the user each."""
    return min(weight_bufs, user_bufs // strips)


@gluon.constexpr_function
def widths(cols):
    """How many there are: of 1, 2, 4 strips, up to `cols` columns."""
    return (cols // 64).bit_length()


@gluon.jit
def consume(
    weight_bufs,
    user_bufs,
    full,
    empty,
    bias_ptr,
    out_ptr,
    M,
    tiles,
    STRIPS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    COLS: gl.constexpr,
    COL_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """The consumer, of tiles of STRIPS strips."""
    STAGES: gl.constexpr = stages(STRIPS, weight_bufs.shape[0], user_bufs.shape[0])
    SIZE: gl.constexpr = STRIPS * STRIP
    ACROSS: gl.constexpr = COL_TILES * COLS // SIZE
    # As of the tile that the place belongs to.
    WIDTH: gl.constexpr = part_columns(COLS)
    layout: gl.constexpr = accumulator_layout(SIZE)
    offsets = gl.arange(0, ROWS * WIDTH // 2, layout=fragment_layout(WIDTH))
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros((ROWS, SIZE), gl.float32, layout=layout)
        previous = gl.to_tensor(0)
        for k in range(0, STEPS):
            mbarrier.wait(full.index(stage), phase)
            user = beside(user_bufs, stage, STRIPS)
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
        u = tile // (ROW_TILES * ACROSS)
        place = (u.to(gl.int64) * ROW_TILES + tile % ROW_TILES) * ACROSS + tile // ROW_TILES % ACROSS
        pairs = pack(acc, user_bufs.dtype)
        for part in gl.static_range(SIZE // WIDTH):
            store_fragments(pairs, out_ptr + place * (ROWS * SIZE // 2), True, offsets, part, SIZE // WIDTH)


@gluon.jit
def produce(
    weight_desc,
    user_desc,
    weight_bufs,
    user_bufs,
    full,
    empty,
    tiles,
    STRIPS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    COLS: gl.constexpr,
    COL_TILES: gl.constexpr,
    STEPS: gl.constexpr,
):
    """The producer, of tiles of STRIPS strips."""
    STAGES: gl.constexpr = stages(STRIPS, weight_bufs.shape[0], user_bufs.shape[0])
    STEP: gl.constexpr = user_bufs.shape[2]
    ACROSS: gl.constexpr = COL_TILES * COLS // (STRIPS * STRIP)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = tile % ROW_TILES * ROWS
        col = tile // ROW_TILES % ACROSS * (STRIPS * STRIP)
        u = tile // (ROW_TILES * ACROSS)
        for k in range(0, STEPS):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), (ROWS + STRIPS * STRIP) * STEP * 2)
            tma_load(weight_desc, [row, k * STEP], full.index(stage), weight_bufs.index(stage))
            for i in gl.static_range(STRIPS):
                strip = user_bufs.index(stage * STRIPS + i)
                tma_load(user_desc, [u, k * STEP, col + i * STRIP], full.index(stage), strip)
            stage, phase = advance(stage, phase, 1, STAGES)


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
    strips,
    ROW_TILES: gl.constexpr,
    COLS: gl.constexpr,
    COL_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    WIDTHS: gl.constexpr = widths(COLS)
    for i in gl.static_range(WIDTHS):
        if strips == 1 << i:
            consume(
                weight_bufs, user_bufs, full, empty, bias_ptr, out_ptr, M, tiles,
                1 << i, ROW_TILES, COLS, COL_TILES, STEPS, HAS_BIAS,
            )  # fmt: skip


@gluon.jit
def user_producer(
    weight_desc,
    user_desc,
    weight_bufs,
    user_bufs,
    full,
    empty,
    tiles,
    strips,
    ROW_TILES: gl.constexpr,
    COLS: gl.constexpr,
    COL_TILES: gl.constexpr,
    STEPS: gl.constexpr,
):
    WIDTHS: gl.constexpr = widths(COLS)
    for i in gl.static_range(WIDTHS):
        if strips == 1 << i:
            produce(
                weight_desc, user_desc, weight_bufs, user_bufs, full, empty, tiles,
                1 << i, ROW_TILES, COLS, COL_TILES, STEPS,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["tiles", "strips"])
def user_part_kernel(
    weight_desc,
    user_desc,
    bias_ptr,
    out_ptr,
    M,
    tiles,
    strips,
    ROW_TILES: gl.constexpr,
    COLS: gl.constexpr,
    COL_TILES: gl.constexpr,
    STEPS: gl.constexpr,
    WEIGHT_BUFFERS: gl.constexpr,
    USER_BUFFERS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """`weight_user @ user[u] (+ bias)` in fragment order, int32 `[U, ROW_TILES, COL_TILES, 32 * COLS]`.

    A tile has `strips` strips, 1, 2 or 4, at most COLS columns; `tiles` of them make up all places.
    """
    weight_bufs = gl.allocate_shared_memory(
        weight_desc.dtype, [WEIGHT_BUFFERS] + weight_desc.block_shape, weight_desc.layout
    )
    user_bufs = gl.allocate_shared_memory(user_desc.dtype, [USER_BUFFERS] + user_desc.block_shape, user_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [WEIGHT_BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [WEIGHT_BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(WEIGHT_BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    # The next kernel may take the multiprocessors that this grid leaves free; it waits before it reads `out`.
    launch_dependent_grid()
    # fmt: off
    gl.warp_specialize([
        (user_consumer, (weight_bufs, user_bufs, full, empty, bias_ptr, out_ptr, M, tiles, strips,
                         ROW_TILES, COLS, COL_TILES, STEPS, HAS_BIAS)),
        (user_producer, (weight_desc, user_desc, weight_bufs, user_bufs, full, empty, tiles, strips,
                         ROW_TILES, COLS, COL_TILES, STEPS)),
    ], [1], [24])
    # fmt: on
