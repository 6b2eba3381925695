"""What the attention kernels for Hopper share: turns, rings, tiles, rows in and out. Device code only.

Each kernel has a second form, `_both`, in which users have query rows of their own, in a tensor of their own: arguments
that begin with u are theirs, and None in the first form. A tile of own rows has `~row`, a negative number, for its row.

Letters: N packed query rows (candidates * seeds), H query heads, D head size.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from ikbo_recsys.kernels._gluon._compat import eights, tma_load


def _rescale_assembly(registers: int) -> tuple[str, str]:
    """Multiply `registers` accumulator registers by their row's factor, unless the whole warp's factors are 1.

    A row of the accumulator lies in every other pair of registers, so two factors cover a thread, and each is asked
    about for itself: it is eight rows' of a warp.
    """
    factor = [f"${2 * registers + i}" for i in range(registers)]
    rows = []
    for first in (0, 2):
        of_row = [i for i in range(registers) if i // 2 % 2 == first // 2]
        multiply = " ".join(f"mul.f32 ${i}, ${i}, {factor[i]};" for i in of_row)
        rows.append(
            f"setp.neu.f32 p, {factor[first]}, 0f3F800000; vote.sync.any.pred p, p, 0xffffffff; "
            f"@!p bra SKIP{first}; {multiply} SKIP{first}: "
        )
    constraints = ["=f"] * registers + [str(i) for i in range(registers)] + ["f"] * registers
    return "{ .reg .pred p; " + " ".join(rows) + "}", ",".join(constraints)


RESCALE_32 = gl.constexpr(_rescale_assembly(32)[0])
RESCALE_32_CONSTRAINTS = gl.constexpr(_rescale_assembly(32)[1])
RESCALE_64 = gl.constexpr(_rescale_assembly(64)[0])
RESCALE_64_CONSTRAINTS = gl.constexpr(_rescale_assembly(64)[1])


def _pass_behind(barrier: int) -> str:
    """Arrive at a hardware barrier once four sums of weights are there: they are not less than 0, or not numbers."""
    return (
        "{ .reg .pred p; .reg .f32 s, t; add.f32 s, $0, $1; add.f32 t, $2, $3; add.f32 s, s, t; "
        f"setp.geu.f32 p, s, 0f00000000; @p bar.arrive {barrier}, 256; }}"
    )


PASS_BEHIND_0 = gl.constexpr(_pass_behind(9))
PASS_BEHIND_1 = gl.constexpr(_pass_behind(8))


@gluon.jit
def rescale(acc, factor, D: gl.constexpr):
    """`acc * factor` for an accumulator `[64, D]` and a factor of its layout, skipped where it changes nothing."""
    if D == 64:
        return gl.inline_asm_elementwise(
            RESCALE_32, RESCALE_32_CONSTRAINTS, [acc, factor], dtype=gl.float32, is_pure=True, pack=32
        )
    else:
        return gl.inline_asm_elementwise(
            RESCALE_64, RESCALE_64_CONSTRAINTS, [acc, factor], dtype=gl.float32, is_pure=True, pack=64
        )


@gluon.jit
def turn_wait(WHO: gl.constexpr):
    if WHO == 0:
        gl.inline_asm_elementwise(
            "bar.sync 8, 256; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "bar.sync 9, 256; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def turn_pass(WHO: gl.constexpr):
    if WHO == 0:
        gl.inline_asm_elementwise(
            "bar.arrive 9, 256; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "bar.arrive 8, 256; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def turn_pass_behind(WHO: gl.constexpr, sums):
    """`turn_pass` behind partial sums `[64, 8]` of weights, which it returns: a condition that always holds is what
    keeps the assembler from passing the turn on before they are there."""
    if WHO == 0:
        return gl.inline_asm_elementwise(
            PASS_BEHIND_0, "=f,=f,=f,=f,0,1,2,3", [sums], dtype=gl.float32, is_pure=False, pack=4
        )
    else:
        return gl.inline_asm_elementwise(
            PASS_BEHIND_1, "=f,=f,=f,=f,0,1,2,3", [sums], dtype=gl.float32, is_pure=False, pack=4
        )


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def item_of(turn, items):
    """The item of a turn. Thread blocks walk the items in rounds, every second one backwards: the longest come first,
    and nobody is to have the longest of each round. The last whole round is a backward one, since what may be left
    behind it is the first blocks'."""
    step = gl.num_programs(0)
    number = turn // step
    behind = items // step - 1 - number
    is_backwards = (behind >= 0) & (behind % 2 == 0)
    return gl.where(is_backwards, (2 * number + 1) * step - 1 - turn, turn)


@gluon.jit
def read_tile(table_ptr, item, heads):
    """First row, end of the user's rows, where the user's keys are, and how many, of an item."""
    entry = table_ptr + (1 + item // heads) * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)


@gluon.jit
def key_blocks(keys, KEYS: gl.constexpr):
    """Blocks of an item: at least one, so that items of users without keys need no paths of their own."""
    return gl.maximum((keys + KEYS - 1) // KEYS, 1)


@gluon.jit
def row_places(permutation_ptr, rows, valid, seeds, PERMUTED: gl.constexpr):
    """Where packed rows lie among the rows of a contiguous `[B, S, ...]`."""
    if PERMUTED:
        cand = rows // seeds
        rows = gl.load(permutation_ptr + cand, mask=valid, other=0).to(gl.int32) * seeds + rows - cand * seeds
    return rows


@gluon.jit
def whole_row(permutation_ptr, row, end, seeds, PERMUTED: gl.constexpr):
    """Where 64 packed rows of one candidate begin in the query and in the output."""
    if PERMUTED:
        cand = row // seeds
        row = gl.load(permutation_ptr + cand, mask=row < end, other=0).to(gl.int32) * seeds + row - cand * seeds
    return row


@gluon.jit
def _load_pair(q_desc, g_desc, place, head, barrier, q_buf, g_buf):
    tma_load(q_desc, [place, head, 0], barrier, q_buf)
    if g_desc is not None:
        tma_load(g_desc, [place, head, 0], barrier, g_buf)


@gluon.jit
def load_rows(
    q_desc, g_desc, uq_desc, ug_desc, permutation_ptr, row, skip, end, head, seeds, barrier, q_buf, g_buf,
    PERMUTED: gl.constexpr,
):  # fmt: skip
    """Start loading 64 rows of a tile, `skip` behind its first: of the query and, unless it is None, of the
    gradient."""
    if uq_desc is None:
        place = whole_row(permutation_ptr, row + skip, end, seeds, PERMUTED)
        _load_pair(q_desc, g_desc, place, head, barrier, q_buf, g_buf)
    else:
        if row < 0:
            _load_pair(uq_desc, ug_desc, ~row + skip, head, barrier, q_buf, g_buf)
        else:
            place = whole_row(permutation_ptr, row + skip, end, seeds, PERMUTED)
            _load_pair(q_desc, g_desc, place, head, barrier, q_buf, g_buf)


@gluon.jit
def zero_rows(block, first, ROWS: gl.constexpr, D: gl.constexpr):
    """Make the rows of a block in shared memory zeros, from `first` on. For a partition of one warp.

    Written out for each eight, in few instructions: this is inlined in many places. In a loop they are fewer still, but
    then the second consumer's main loop packs its weights anew.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    pieces = eights(block, ROWS, D)
    nothing = gl.zeros([8, 32], gl.int32, layout)
    # The eight in which they begin.
    if (first > 0) & (first < ROWS) & (first % 8 > 0):
        for half in gl.static_range(D // 64):
            piece = pieces.index(half * (ROWS // 8) + first // 8)
            piece.store(gl.where((rows < first % 8)[:, None], piece.load(layout), nothing))
    for i in gl.static_range(ROWS // 8):
        if first <= i * 8:
            for half in gl.static_range(D // 64):
                pieces.index(half * (ROWS // 8) + i).store(nothing)


@gluon.jit
def _gather_query(q_ptr, places, buf, row, end, head, stride_qh, D: gl.constexpr, HEAD_SIZE: gl.constexpr):
    """Start copying 64 query rows from where `places` says they lie, 8 rows at a time; zeros from `end` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [1, 1], [1, 0])
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    tile = buf.reshape([64, D])
    for i in gl.static_range(8):
        rows = row + i * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
        place = places.slice(i * 8, 8, dim=0).load(gl.SliceLayout(1, layout))
        pointers = q_ptr + (place + head * stride_qh).to(gl.int64) * 8
        mask = (rows < end)[:, None] & (columns < HEAD_SIZE)[None, :]
        async_copy.async_copy_global_to_shared(
            tile.slice(i * 8, 8, dim=0), pointers[:, None] + columns[None, :], mask=mask
        )
    async_copy.commit_group()


@gluon.jit
def gather_item(
    table_ptr, item, heads, q_ptr, uq_ptr, permutation_ptr, q_bufs, places, q_empty, stage, phase, seeds, user_seeds,
    stride_qb, stride_qs, stride_qh, stride_uqb, stride_uqs, stride_uqh,
    D: gl.constexpr, HEAD_SIZE: gl.constexpr, PERMUTED: gl.constexpr,
):  # fmt: skip
    """Start copying the query rows of both consumers for an item. Strides are in units of 8 elements."""
    row, end, _where, _keys = read_tile(table_ptr, item, heads)
    # All the look-ups at once, through shared memory: piece by piece each would wait for memory in its turn.
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    if uq_ptr is None:
        _place_rows(places, permutation_ptr, row, end, seeds, stride_qb, stride_qs, layout, PERMUTED)
    else:
        is_own = row < 0
        if is_own:
            _place_rows(places, permutation_ptr, ~row, end, user_seeds, stride_uqb, stride_uqs, layout, False)
        else:
            _place_rows(places, permutation_ptr, row, end, seeds, stride_qb, stride_qs, layout, PERMUTED)
        row = gl.where(is_own, ~row, row)
        q_ptr = gl.where(is_own, uq_ptr, q_ptr)
        stride_qh = gl.where(is_own, stride_uqh, stride_qh)
    for i in gl.static_range(2):
        mbarrier.wait(q_empty.index(stage * 2 + i), phase ^ 1)
        _gather_query(
            q_ptr, places.slice(i * 64, 64, dim=0), q_bufs.index(stage * 2 + i), row + i * 64, end, item % heads,
            stride_qh,
            D, HEAD_SIZE,
        )  # fmt: skip


@gluon.jit
def _place_rows(
    places, permutation_ptr, row, end, seeds, stride_b, stride_s, layout: gl.constexpr, PERMUTED: gl.constexpr
):
    rows = row + gl.arange(0, 128, layout=layout)
    cand = rows // seeds
    seed = rows - cand * seeds
    if PERMUTED:
        cand = gl.load(permutation_ptr + cand, mask=rows < end, other=0).to(gl.int32)
    places.store(cand * stride_b + seed * stride_s)


@gluon.jit
def row_pointers(
    out_ptr, permutation_ptr, row, end, head, heads, seeds, layout: gl.constexpr, D: gl.constexpr,
    HEAD_SIZE: gl.constexpr, PERMUTED: gl.constexpr,
):  # fmt: skip
    """Where 64 rows of a head lie in a contiguous `[B, S, H, D]`, each where its candidate is, and a mask of those
    before `end`."""
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    valid = rows < end
    rows = row_places(permutation_ptr, rows, valid, seeds, PERMUTED)
    pointers = out_ptr + (rows.to(gl.int64) * heads + head) * HEAD_SIZE
    mask = valid[:, None] & (columns < HEAD_SIZE)[None, :]
    return pointers[:, None] + columns[None, :], mask


@gluon.jit
def store_rows(
    out_ptr, permutation_ptr, out, row, end, head, heads, seeds, mma: gl.constexpr, D: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    PERMUTED: gl.constexpr,
):  # fmt: skip
    """Store the rows before `end` of 64 output rows, each to where its candidate lies."""
    pointers, mask = row_pointers(
        out_ptr, permutation_ptr, row, end, head, heads, seeds, mma, D, HEAD_SIZE, PERMUTED
    )  # fmt: skip
    gl.store(pointers, out, mask=mask)


@gluon.jit
def send_rows(
    out_ptr, permutation_ptr, tile, row, end, head, heads, seeds, D: gl.constexpr, HEAD_SIZE: gl.constexpr,
    PERMUTED: gl.constexpr,
):  # fmt: skip
    """`store_rows` of what is in shared memory `[64, D]`: 16 bytes a thread and whole rows at once, where the
    accumulator's layout has 4 bytes a thread and half sectors. Aligned, since the output is contiguous and head sizes
    are multiples of 8."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    pointers, mask = row_pointers(
        out_ptr, permutation_ptr, row, end, head, heads, seeds, layout, D, HEAD_SIZE, PERMUTED
    )  # fmt: skip
    gl.store(pointers, tile.load(layout), mask=mask)


@gluon.jit
def store_lse(lse_ptr, permutation_ptr, lse2, row, end, head, heads, seeds, mma: gl.constexpr, PERMUTED: gl.constexpr):
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    valid = rows < end
    rows = row_places(permutation_ptr, rows, valid, seeds, PERMUTED)
    gl.store(lse_ptr + rows.to(gl.int64) * heads + head, lse2 * 0.6931471805599453, mask=valid)
