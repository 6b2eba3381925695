"""Hopper attention forward where blocks share tiles: who takes which blocks of keys, and what is handed on. Device code
only.

An item is a tile of 128 query rows and a head; its blocks of keys are walked from the last to the first. Three ways,
by the constexpr SHARES:
- 0: every item by one thread block, in rounds.
- 1: the items of the last round, which are too few for all thread blocks, are cut. A thread block takes a part before
  or between its whole items, keeps the accumulator, maxima and sums in memory, and a later one takes the item up from
  there at its own end. The steps are those of an uncut item, in the same order: so are the bits. Nobody waits: a part
  whose predecessor is not there yet (its thread block began late) begins at the beginning.
- n > 1: every item is cut into n parts, side by side, each from its own beginning; `_triton/cross_attention_merge.py`
  merges them. For launches with fewer items than multiprocessors.

Letters: D head size, KEYS keys of a block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ikbo_recsys.kernels._gluon._attention_parts import item_of, key_blocks, read_tile, rescale
from ikbo_recsys.kernels._gluon._attention_softmax import (
    fresh_maximum,
    fresh_sums,
    mask_scores,
    partial_sums,
    row_maximum,
)

MOST_PARTS = gl.constexpr(4)
"""Parts of an item of the last round; each costs as much as reading and writing the accumulator."""

_THREADS = gl.constexpr(256)


@gluon.jit
def _cut(table_ptr, items, heads, KEYS: gl.constexpr):
    """How the last round is cut: `(turns, early turn, its item, its low, its high, late turn, its item, its low,
    unit)`.

    An item is `unit` long and a thread block takes `width` of the row of all items of the last round: so much that all
    take the same, or one part each where that leaves few parts. So a thread block has at most the end of an item, its
    late turn, the last one; and, behind or instead of it, another piece, its early turn. The pieces of an item are on
    neighbouring thread blocks, in their order, and their turns are spread over the whole rounds: each is done long
    before the next begins. Turns are -1 where there is none.
    """
    step = gl.num_programs(0)
    me = gl.program_id(0)
    rounds = items // step
    rest = items - rounds * step
    parts = gl.minimum(gl.minimum(step // gl.maximum(rest, 1), rounds + 1), MOST_PARTS)
    # An item on three thread blocks needs two whole rounds between its pieces.
    is_even = (rest * 2 > step) & (rounds > 1)
    unit = gl.where(is_even, step, parts)
    width = gl.where(is_even, rest, 1)
    low = me * width
    high = gl.minimum(low + width, rest * unit)
    late = low // unit
    late_low = low - late * unit
    has_late = (low < high) & (high >= (late + 1) * unit)
    early = gl.where(has_late, late + 1, late)
    early_low = gl.where(has_late, 0, late_low)
    early_high = high - early * unit
    holder = early * unit // width
    last_holder = ((early + 1) * unit + width - 1) // width - 1
    turn = (me - holder) * rounds // gl.maximum(last_holder - holder, 1)
    early_item = rounds * step + gl.minimum(early, gl.maximum(rest - 1, 0))
    _row, _end, _where, keys = read_tile(table_ptr, gl.where(rest > 0, early_item, 0), heads)
    blocks = key_blocks(keys, KEYS)
    # Nor a part without a single block.
    has_early = (early_low < early_high) & (early_low * blocks // unit < early_high * blocks // unit)
    turns = rounds + gl.where(has_early, 1, 0) + gl.where(has_late, 1, 0)
    early_turn = gl.where(has_early, turn, -1)
    late_turn = gl.where(has_late, turns - 1, -1)
    return turns, early_turn, early_item, early_low, early_high, late_turn, rounds * step + late, late_low, unit


@gluon.jit
def turns(table_ptr, items, heads, KEYS: gl.constexpr, SHARES: gl.constexpr):
    """`(first, end, plan)`: a thread block's turns are `range(first, end, turn_step())`, and `turn_of` says what each
    is."""
    if SHARES == 1:
        plan = _cut(table_ptr, items, heads, KEYS)
        return 0, plan[0], plan
    elif SHARES == 0:
        return gl.program_id(0), items, (items,)
    else:
        return gl.program_id(0), items * SHARES, (0,)


@gluon.jit
def turn_step(SHARES: gl.constexpr):
    if SHARES == 1:
        return 1
    else:
        return gl.num_programs(0)


@gluon.jit
def turn_of(turn, plan, SHARES: gl.constexpr):
    """`(item, low, high, unit)`: the item of a turn, and that it is its blocks from low / unit to high / unit of
    them."""
    if SHARES == 0:
        return item_of(turn, plan[0]), 0, 1, 1
    elif SHARES == 1:
        _turns, early_turn, early_item, early_low, early_high, late_turn, late_item, late_low, unit = plan
        is_early = turn == early_turn
        is_late = turn == late_turn
        whole = turn - gl.where((early_turn >= 0) & (turn > early_turn), 1, 0)
        item = gl.where(is_late, late_item, gl.program_id(0) + whole * gl.num_programs(0))
        low = gl.where(is_early, early_low, gl.where(is_late, late_low, 0))
        return gl.where(is_early, early_item, item), low, gl.where(is_early, early_high, unit), unit
    else:
        return turn // SHARES, turn % SHARES, turn % SHARES + 1, SHARES


@gluon.jit
def blocks_of(keys, low, high, unit, KEYS: gl.constexpr, SHARES: gl.constexpr):
    """`(begin, stop, blocks, keys)`: a turn's blocks in the order in which they are walked, how many its item has, and
    how many keys count: none in a part without a block, which walks one nonetheless."""
    blocks = key_blocks(keys, KEYS)
    if SHARES == 0:
        return 0, blocks, blocks, keys
    else:
        begin = low * blocks // unit
        stop = high * blocks // unit
        if SHARES > 1:
            keys = gl.where(begin < stop, keys, 0)
            begin = gl.minimum(begin, blocks - 1)
            stop = gl.maximum(stop, begin + 1)
        return begin, stop, blocks, keys


# ---- what is handed on -----------------------------------------------------------------------------------------------


@gluon.jit
def announce(flags_ptr, begins, begin):
    """In the producer: with which block a turn really begins. Tells the consumers, who look before they begin."""
    if begin > 0:
        stored = gl.atomic_add(flags_ptr + (gl.program_id(0) - 1), 0, sem="acquire", scope="gpu")
        begin = gl.where(stored == _THREADS, begin, 0)
    begins.store(begin + gl.zeros([32], gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
    return begin


@gluon.jit
def announced(begins):
    """What `announce` was told, in a consumer."""
    return gl.max(begins.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _state(state_ptr, slot, WHO: gl.constexpr, D: gl.constexpr):
    """A consumer's place in a slot: 64 rows of the accumulator, 64 maxima, 64 rows of 8 partial sums."""
    # Computed where it is needed: of what does not change in the loop over turns all addresses would be kept, in more
    # registers than there are.
    slot = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [slot], dtype=gl.int32, is_pure=False, pack=1)
    return state_ptr + (slot * 2 + WHO) * (64 * (D + 9))


@gluon.jit
def _sums(like, D: gl.constexpr):
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, like.type.layout))
    columns = gl.arange(0, 8, layout=gl.SliceLayout(0, like.type.layout))
    return 64 * (D + 1) + (rows * 8)[:, None] + columns[None, :]


@gluon.jit
def _accumulator(place, mmo: gl.constexpr, D: gl.constexpr):
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, mmo))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, mmo))
    return place + (rows * D)[:, None] + columns[None, :]


@gluon.jit
def hand_on(
    state_ptr, flags_ptr, slot, out, row_max, row_sum,
    WHO: gl.constexpr, D: gl.constexpr, mma: gl.constexpr, mmo: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """Keep a consumer's rows; where somebody goes on with them in this launch, say that they are there."""
    place = _state(state_ptr, slot, WHO, D)
    gl.store(_accumulator(place, mmo, D), out)
    gl.store(place + 64 * D + gl.arange(0, 64, layout=gl.SliceLayout(1, mma)), row_max)
    gl.store(place + _sums(row_sum, D), row_sum)
    if SHARES == 1:
        # Each thread for what it wrote itself.
        threads = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        gl.atomic_add(flags_ptr + slot + threads * 0, threads * 0 + 1, sem="release", scope="gpu")


@gluon.jit
def resumed_softmax(
    scores, block, keys, is_resumed, state_ptr, qk_scale, dtype: gl.constexpr, WHO: gl.constexpr, KEYS: gl.constexpr,
    D: gl.constexpr, mma: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """`first_softmax` at the beginning of an item, and `next_softmax` behind what was handed on: the numbers of one or
    of the other. Also gives the accumulator's factor."""
    place = _state(state_ptr, gl.maximum(gl.program_id(0) - 1, 0), WHO, D)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    old_max = gl.load(place + 64 * D + rows, mask=(rows >= 0) & is_resumed, other=0.0)
    scores = mask_scores(scores, block, keys, KEYS, mma)
    seen = row_maximum(scores, KEYS, D) * qk_scale
    row_max = gl.where(is_resumed, gl.where(seen > old_max, seen, old_max), fresh_maximum(seen))
    factor = gl.where(is_resumed, gl.exp2(old_max - row_max), 1.0)
    weights = gl.exp2(scores * qk_scale - row_max[:, None])
    fresh = fresh_sums(weights, KEYS)
    part = partial_sums(weights, KEYS)
    places = _sums(part, D)
    old_sum = gl.load(place + places, mask=(places >= 0) & is_resumed, other=0.0)
    resumed = old_sum * gl.convert_layout(factor, gl.SliceLayout(1, part.type.layout))[:, None] + part
    row_sum = gl.where(is_resumed, resumed, fresh)
    return row_max, row_sum, factor, gl.convert_layout(weights.to(dtype), operand)


@gluon.jit
def taken_up(state_ptr, is_resumed, factor, WHO: gl.constexpr, D: gl.constexpr, mmo: gl.constexpr):
    """The accumulator that a turn begins with."""
    place = _state(state_ptr, gl.maximum(gl.program_id(0) - 1, 0), WHO, D)
    of_out = gl.convert_layout(gl.where(is_resumed, factor, 1.0), gl.SliceLayout(1, mmo))[:, None]
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, mmo))
    out = gl.load(_accumulator(place, mmo, D), mask=((rows >= 0) & is_resumed)[:, None], other=0.0)
    return rescale(out, of_out.broadcast_to((64, D)), D)
