"""What the attention kernels for Hopper share: turns, rings, tiles, rows in and out. Device code only.

Each kernel has a second form, `_both`, in which users have query rows of their own, in a tensor of their own: arguments
that begin with u are theirs, and None in the first form. A tile of own rows has `~row`, a negative number, for its row.

Letters: N packed query rows (candidates * seeds), H query heads, D head size.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from ikbo_recsys.kernels._gluon._compat import eights, tma_load


def _rescale_assembly(registers: int) -> tuple[str, str]:
    """Multiply `registers` accumulator registers by their row's factor, unless that of all rows beside it is 1.

    A row of the accumulator lies in every other pair of registers, so two factors cover a thread, and each stands
    beside those of seven other rows in a warp.
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


@gluon.constexpr_function
def _at_barrier(action, barrier, threads=256):
    """ "sync" or "arrive" at one of the hardware's barriers."""
    return f"bar.{action} {barrier}, {threads}; mov.b32 $0, $1;"


@gluon.constexpr_function
def _arrive_once_summed(barrier, threads):
    """Arrive once four sums of weights are there: they are not less than 0, or not numbers."""
    return (
        "{ .reg .pred p; .reg .f32 s, t; add.f32 s, $0, $1; add.f32 t, $2, $3; add.f32 s, s, t; "
        f"setp.geu.f32 p, s, 0f00000000; @p bar.arrive {barrier}, {threads}; }}"
    )


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
def turn_wait(WHO: gl.constexpr, FIRST: gl.constexpr = 8):
    """Wait for a consumer's turn. Turns at different things have barriers of their own, FIRST and the one behind it."""
    gl.inline_asm_elementwise(_at_barrier("sync", FIRST + WHO), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def turn_pass(WHO: gl.constexpr, FIRST: gl.constexpr = 8):
    """Give the turn to the other consumer."""
    gl.inline_asm_elementwise(
        _at_barrier("arrive", FIRST + 1 - WHO), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def meet(WHO: gl.constexpr):
    """Wait for the other warps of a consumer: arriving at an mbarrier is one thread's, and promises nothing of them."""
    gl.inline_asm_elementwise(_at_barrier("sync", 12 + WHO, 128), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def turn_pass_behind(WHO: gl.constexpr, sums):
    """`turn_pass` behind partial sums `[64, 8]` of weights, which it returns: a condition that always holds is what
    keeps the assembler from passing the turn on before they are there."""
    return gl.inline_asm_elementwise(
        _arrive_once_summed(9 - WHO, 256), "=f,=f,=f,=f,0,1,2,3", [sums], dtype=gl.float32, is_pure=False, pack=4
    )


@gluon.jit
def hold(WHO: gl.constexpr, sums):
    """`sums`, and what comes behind stays behind them: the assembler moves a wait for a product to before the softmax
    otherwise, and the additions to behind the wait, where the exponentials do not hide them. It cannot know that
    nobody waits at these barriers, whose 128 threads all arrive."""
    return gl.inline_asm_elementwise(
        _arrive_once_summed(10 + WHO, 128), "=f,=f,=f,=f,0,1,2,3", [sums], dtype=gl.float32, is_pure=False, pack=4
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
def ask_places(
    places, row, end, head, permutation_ptr, uq_ptr, seeds, user_seeds, stride_qb, stride_qs, stride_qh, stride_uqb,
    stride_uqs, stride_uqh,
    PERMUTED: gl.constexpr,
):  # fmt: skip
    """Where the query rows of a tile lie, 64 for each consumer, in units of 8 elements as the strides are; -1 from
    `end` on.

    What is known at once goes into `places`. Permuted candidates are looked up: `add_candidates` is who waits for them.
    """
    is_candidate = row >= 0
    if uq_ptr is not None:
        row = gl.where(is_candidate, row, ~row)
        seeds = gl.where(is_candidate, seeds, user_seeds)
        stride_qb = gl.where(is_candidate, stride_qb, stride_uqb)
        stride_qs = gl.where(is_candidate, stride_qs, stride_uqs)
        stride_qh = gl.where(is_candidate, stride_qh, stride_uqh)
    CONSUMERS: gl.constexpr = places.shape[0]
    asked = ()
    for i in gl.static_range(CONSUMERS):
        cand = _ask_places(
            places.index(i), row + i * 64, end, head, is_candidate, permutation_ptr, uq_ptr, seeds, stride_qb,
            stride_qs, stride_qh, PERMUTED,
        )  # fmt: skip
        asked = asked + (cand,)  # type: ignore[assignment]
    return asked


@gluon.jit
def _ask_places(
    places, row, end, head, is_candidate, permutation_ptr, uq_ptr, seeds, stride_b, stride_s, stride_h,
    PERMUTED: gl.constexpr,
):  # fmt: skip
    rows = row + gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [1], [0]))
    cand = rows // seeds
    place = (rows - cand * seeds) * stride_s + head * stride_h
    if not PERMUTED:
        place += cand * stride_b
    elif uq_ptr is not None:
        place += gl.where(is_candidate, 0, cand * stride_b)
    places.store(gl.where(rows < end, place, -1))
    if PERMUTED:
        is_asked = rows < end
        if uq_ptr is not None:
            is_asked = is_asked & is_candidate
        cand = gl.load(permutation_ptr + cand, mask=is_asked, other=0).to(gl.int32)
    return cand


@gluon.jit
def add_candidates(places, asked, stride_qb):
    """Complete `places` with the candidates that `ask_places` gave, 0 where nothing is to be added."""
    CONSUMERS: gl.constexpr = places.shape[0]
    for i in gl.static_range(CONSUMERS):
        place = places.index(i).load(gl.BlockedLayout([2], [32], [1], [0]))
        places.index(i).store(place + asked[i] * stride_qb)


@gluon.jit
def gather_rows(q_ptr, uq_ptr, row, places, buf, D: gl.constexpr, HEAD_SIZE: gl.constexpr):
    """Start copying 64 query rows of the tile that begins with `row` from where `places` says they lie; zeros where it
    says -1."""
    if uq_ptr is not None:
        q_ptr = gl.where(row < 0, uq_ptr, q_ptr)
    # Four rows of 64 columns at once: the halves of a row are a thread's, at one address.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    place = places.load(gl.SliceLayout(1, layout))
    pointers = (q_ptr + columns)[None, :] + (place.to(gl.int64) * 8)[:, None]
    mask = (place >= 0)[:, None] & (columns < HEAD_SIZE)[None, :]
    async_copy.async_copy_global_to_shared(buf.reshape([64, D]), pointers, mask=mask)
    async_copy.commit_group()


@gluon.jit
def row_pointers(
    out_ptr, permutation_ptr, row, end, head, heads, seeds, layout: gl.constexpr, D: gl.constexpr,
    HEAD_SIZE: gl.constexpr, PERMUTED: gl.constexpr, ONCE: gl.constexpr = False,
):  # fmt: skip
    """Where 64 rows of a head lie in a contiguous `[B, S, H, D]`, each where its candidate is, and a mask of those
    before `end`. With ONCE a row is looked up by one thread (of four warps), else by each that has a part of it."""
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    valid = rows < end
    if PERMUTED and ONCE:
        asked = row + gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
        asked = row_places(permutation_ptr, asked, asked < end, seeds, PERMUTED)
        rows = gl.convert_layout(asked, gl.SliceLayout(1, layout))
    else:
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


@gluon.constexpr_function
def whole_rows(columns):
    """A layout of four warps for 16-bit values: a thread has 16 bytes, and its neighbours the rest of the row."""
    return gl.BlockedLayout([1, 8], [32 * 8 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def send_rows(
    out_ptr, permutation_ptr, tile, row, end, head, heads, seeds, D: gl.constexpr, HEAD_SIZE: gl.constexpr,
    PERMUTED: gl.constexpr,
):  # fmt: skip
    """`store_rows` of what is in shared memory `[64, D]`: 16 bytes a thread and whole rows at once, where the
    accumulator's layout has 4 bytes a thread and half sectors. Aligned, since the output is contiguous and head sizes
    are multiples of 8."""
    layout: gl.constexpr = whole_rows(D)
    # Otherwise each thread looks up its 8 rows, and for want of registers one after the other.
    pointers, mask = row_pointers(
        out_ptr, permutation_ptr, row, end, head, heads, seeds, layout, D, HEAD_SIZE, PERMUTED, True
    )  # fmt: skip
    gl.store(pointers, tile.load(layout), mask=mask)


@gluon.jit
def store_lse(lse_ptr, permutation_ptr, lse2, row, end, head, heads, seeds, mma: gl.constexpr, PERMUTED: gl.constexpr):
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    valid = rows < end
    rows = row_places(permutation_ptr, rows, valid, seeds, PERMUTED)
    gl.store(lse_ptr + rows.to(gl.int64) * heads + head, lse2 * 0.6931471805599453, mask=valid)
