"""The user's part of linear compression for Hopper in Gluon, in fragment order (`_compression_tiles.py`).

One consumer of 64 rows to a block: many blocks, for few users. For many, `compression_linear.py` has the other way.

Shape letters: U users, K contracted features, M outputs. Tiles: ROWS = 64 rows, COLS columns, STEP features per stage,
STEPS stages of K per tile.
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
    fragment_layout,
    pack,
    part_columns,
    store_fragments,
)


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
            store_fragments(pairs, out_ptr + place * (ROWS * COLS // 2), True, offsets, part, COLS // WIDTH)


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
