"""Tiles of the linear compression kernels in registers: rounded, in parts, in the order in which they lie in memory.

Rounded tiles are int32, two neighbouring columns in one: 16-bit values that live across a loop take a register each.

*Fragment order*, the order of the user's part in memory, is that in which a tile's accumulators lie in registers:
(part, warp 4, block of 8 columns, row in 8, pair of columns 4, row half 2). It is stored and loaded 8 bytes at a time,
without shared memory. A part is `part_columns` columns, so that a tile of fewer columns, but of whole parts, is one run
of the memory of the tile that it is a piece of.

A tile has ROWS = 64 rows and COLS columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ikbo_recsys.kernels._gluon._compat import reinterpret

ROWS = gl.constexpr(64)


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
def beside(blocks, i, COUNT: gl.constexpr):
    """The i-th COUNT of the blocks `[N, 1, K, 64]`, of 16-bit values that TMA swizzles by 128 bytes, as one block of
    COUNT * 64 columns: it lies in memory as its blocks of 64 do, one after the other."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape: gl.constexpr = [blocks.shape[0] // COUNT, blocks.shape[2], COUNT * 64]
    return reinterpret(blocks, blocks.dtype, shape, layout).index(i)


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


@gluon.jit
def store_fragments(pairs, part_ptr, is_there, offsets, PART: gl.constexpr, PARTS: gl.constexpr):
    """Store one of PARTS blocks of columns of a tile that begins at `part_ptr`, in fragment order."""
    WIDTH: gl.constexpr = 2 * pairs.shape[1] // PARTS
    SIZE: gl.constexpr = ROWS * WIDTH // 2
    fragments = to_fragments(part_of(pairs, PART, PARTS), WIDTH)
    gl.store(part_ptr + PART * SIZE + offsets, fragments, mask=offsets < gl.where(is_there, SIZE, 0))
