"""The gradient of a weight for Hopper in Gluon: `out[r, c] = sum over b, d of rows[b, r, d] * cols[b, c, d]`.

The sum over all `B * D` is long and the result small, so blocks split the sum: each has one tile of 128 x COLS of the
result and a run of steps, and writes its part in fp32. Two consumers of 64 rows share what the producer loads for the
columns. Both operands are read as they lie, D contiguous: neither the number of rows nor that of columns has an
alignment to fulfil.

Shape letters: B batch rows, R/C rows and columns of the result, D contracted together with B. A step is STEP elements
of D of one batch row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ikbo_recsys.kernels._gluon._compat import tma_load
from ikbo_recsys.kernels._gluon._compression_tiles import ROWS, accumulator_layout, advance


@gluon.jit
def block_of(steps, per_split, row_tiles, col_tiles):
    """`(split, first row, column tile, first step, last step)` of this block.

    Neighbours have the same steps and different tiles, so that what one loads is in L2 for the others.
    """
    block = gl.program_id(0)
    split = block // (row_tiles * col_tiles)
    first = split * per_split
    tile = block % (row_tiles * col_tiles)
    return split, tile % row_tiles * (2 * ROWS), tile // row_tiles, first, gl.minimum(first + per_split, steps)


@gluon.jit
def consumer(
    WHICH: gl.constexpr,
    row_bufs,
    col_bufs,
    full,
    empty,
    out_ptr,
    R,
    C,
    steps,
    per_split,
    row_tiles,
    col_tiles,
    STAGES: gl.constexpr,
):
    COLS: gl.constexpr = col_bufs.shape[2]
    STEP: gl.constexpr = col_bufs.shape[3]
    layout: gl.constexpr = accumulator_layout(COLS)
    split, row, col_tile, first, last = block_of(steps, per_split, row_tiles, col_tiles)
    acc = gl.zeros((ROWS, COLS), gl.float32, layout=layout)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    previous = gl.to_tensor(0)
    for step in range(first, last):
        mbarrier.wait(full.index(stage), phase)
        rows = row_bufs.index(2 * stage + WHICH).reshape([ROWS, STEP])
        cols = col_bufs.index(stage).reshape([COLS, STEP]).permute((1, 0))
        acc = warpgroup_mma(rows, cols, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index(previous), pred=step > first)
        previous = stage + 0
        stage, phase = advance(stage, phase, 1, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    r = row + WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    c = col_tile * COLS + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
    places = (split * R + r).to(gl.int64)[:, None] * C + c[None, :]
    gl.store(out_ptr + places, acc, mask=(r < R)[:, None] & (c < C)[None, :])


@gluon.jit
def producer(
    row_desc,
    col_desc,
    row_bufs,
    col_bufs,
    full,
    empty,
    steps,
    per_split,
    row_tiles,
    col_tiles,
    STEPS_PER_ROW: gl.constexpr,
    STAGES: gl.constexpr,
):
    COLS: gl.constexpr = col_bufs.shape[2]
    STEP: gl.constexpr = col_bufs.shape[3]
    _split, row, col_tile, first, last = block_of(steps, per_split, row_tiles, col_tiles)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for step in range(first, last):
        b = step // STEPS_PER_ROW
        d = step % STEPS_PER_ROW * STEP
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), (2 * ROWS + COLS) * STEP * 2)
        for which in gl.static_range(2):
            tma_load(row_desc, [b, row + which * ROWS, d], full.index(stage), row_bufs.index(2 * stage + which))
        tma_load(col_desc, [b, col_tile * COLS, d], full.index(stage), col_bufs.index(stage))
        stage, phase = advance(stage, phase, 1, STAGES)


@gluon.jit(do_not_specialize=["R", "C", "steps", "per_split", "row_tiles", "col_tiles"])
def outer_sum_kernel(
    row_desc,
    col_desc,
    out_ptr,
    R,
    C,
    steps,
    per_split,
    row_tiles,
    col_tiles,
    STEPS_PER_ROW: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One tile of the result over the steps of one split; `out` is fp32 `[splits, R, C]`, contiguous.

    Descriptors: `[B, R, D]` by 64 rows and `[B, C, D]` by COLS rows, both by STEP columns. A split without steps writes
    zeros.
    """
    row_bufs = gl.allocate_shared_memory(row_desc.dtype, [2 * STAGES] + row_desc.block_shape, row_desc.layout)
    col_bufs = gl.allocate_shared_memory(col_desc.dtype, [STAGES] + col_desc.block_shape, col_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    # fmt: off
    gl.warp_specialize([
        (consumer, (0, row_bufs, col_bufs, full, empty, out_ptr, R, C,
                    steps, per_split, row_tiles, col_tiles, STAGES)),
        (consumer, (1, row_bufs, col_bufs, full, empty, out_ptr, R, C,
                    steps, per_split, row_tiles, col_tiles, STAGES)),
        (producer, (row_desc, col_desc, row_bufs, col_bufs, full, empty,
                    steps, per_split, row_tiles, col_tiles, STEPS_PER_ROW, STAGES)),
    ], [4, 1], [240, 24])
    # fmt: on
