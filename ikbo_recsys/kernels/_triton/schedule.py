"""The tile schedule of target attention: which query rows a program takes, decided on the device.

The query rows of one user are adjacent once candidates are grouped (or looked up through a permutation that groups
them), so a tile of `ROWS` rows packs several candidates of one user, whatever the number of seeds. How many tiles a
user has is data; the grid may only depend on shapes. Two ways around that:

- `tile_of_slot` needs no table, nor do the kernels that have its search in them. User u owns the slots from
  `offsets[u] * seeds // ROWS + u` on. These are disjoint, since `floor(end / R) - floor(start / R) + 1 >=
  ceil((end - start) / R)`, and a program finds its user by bisection. At most U of the `B * seeds // ROWS + U` slots
  are empty and their programs leave at once.
- `fill_tile_table` writes a dense table, longest histories first, for the persistent kernel: it walks the table with a
  fixed stride, and empty or badly ordered entries would leave some multiprocessors idle.

Both have a second form, `_both`, in which users have query rows of their own (the same number each) beside those of
their candidates: those are the rows of a tensor of their own, user * rows per user + row.

Rows are *packed rows*: candidate place in grouped order * seeds + seed. Letters: U users, B candidates, R rows per
tile.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

TILE_FIELDS = 4
"""int32 entries per tile: first packed row, end of the user's packed rows, first key row (jagged) or user (padded),
key rows."""


@triton.jit
def clamped_offset(offsets_ptr, user, upper):
    """`offsets[user]` within `[0, upper]`: a wrong value must not lead outside the tensors."""
    return tl.minimum(tl.maximum(tl.load(offsets_ptr + user), 0), upper).to(tl.int32)


@triton.jit
def narrowed(low, high, middle, offset, slot, num_items, scale, own_tiles, ROWS: tl.constexpr):
    """`(low, high)`, narrowed down towards the last user whose slots begin at or before this one.

    User u owns the slots from `offsets[u] * scale // ROWS + (own_tiles + 1) * u` on; `offset` is that of `middle`. The
    loop around this stands in the kernels, and so do its loads: of an index that a function of its own reads,
    TorchInductor takes it that what is stored at places found with it is stored into the index itself.
    """
    base = tl.minimum(tl.maximum(offset, 0), num_items).to(tl.int32) * scale // ROWS + middle * (own_tiles + 1)
    is_right = base <= slot
    return tl.where(is_right, middle, low), tl.where(is_right, high, middle - 1)


@triton.jit
def tile_of_user(user, start, end, slot, num_items, scale, ROWS: tl.constexpr):
    """`(first row, end row)` of a slot of this user, whose items are `start:end`, in rows of `scale` per item; first >=
    end where the slot is empty."""
    start = tl.minimum(tl.maximum(start, 0), num_items).to(tl.int32) * scale
    end = tl.minimum(tl.maximum(end, 0), num_items).to(tl.int32) * scale
    return start + (slot - start // ROWS - user) * ROWS, end


@triton.jit
def tile_of_user_both(user, start, end, slot, num_items, scale, user_scale, own_tiles, ROWS: tl.constexpr):
    """`(is it a tile of the user's own rows, first row, end row)`: `tile_of_user` with the `own_tiles` tiles of the
    user's `user_scale` own rows before those of its candidates, so that they run together and share keys in L2."""
    start = tl.minimum(tl.maximum(start, 0), num_items).to(tl.int32) * scale
    end = tl.minimum(tl.maximum(end, 0), num_items).to(tl.int32) * scale
    tile = slot - start // ROWS - user * (own_tiles + 1)
    is_own = tile < own_tiles
    first = tl.where(is_own, user * user_scale + tile * ROWS, start + (tile - own_tiles) * ROWS)
    end = tl.where(is_own, (user + 1) * user_scale, end)
    # Offsets that do not begin at 0 leave slots before the first user's.
    return is_own, tl.where(tile < 0, end, first), end


@triton.jit
def tile_of_slot(offsets_ptr, slot, num_users, num_items, scale, ROWS: tl.constexpr):
    """`(user, first row, end row)` of a slot: the search and `tile_of_user` in one."""
    low = 0
    high = num_users - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = narrowed(low, high, middle, tl.load(offsets_ptr + middle), slot, num_items, scale, 0, ROWS)
    first, end = tile_of_user(
        low, tl.load(offsets_ptr + low), tl.load(offsets_ptr + low + 1), slot, num_items, scale, ROWS
    )
    return low, first, end


@triton.jit
def key_range(kv_ptr, user, capacity, KV_LAYOUT: tl.constexpr):
    """`(first row, row count)` of a user's history; the first row is 0 in padded layouts.

    KV_LAYOUT: 0 padded and full, 1 padded with lengths, 2 jagged with offsets. `capacity` is T, or the rows of all
    users.
    """
    if KV_LAYOUT == 0:
        return 0, capacity
    elif KV_LAYOUT == 1:
        return 0, clamped_offset(kv_ptr, user, capacity)
    else:
        start = clamped_offset(kv_ptr, user, capacity)
        return start, tl.maximum(clamped_offset(kv_ptr, user + 1, capacity) - start, 0)


@triton.jit
def _users_block(
    offsets_ptr,
    kv_ptr,
    user,
    num_users,
    num_items,
    seeds,
    capacity,
    own_tiles,
    ROWS: tl.constexpr,
    KV_LAYOUT: tl.constexpr,
):
    """First row, end row, first key row, key row count and tiles of a block of users; zeros past the last user."""
    valid = user < num_users
    start = tl.load(offsets_ptr + user, mask=valid, other=0)
    end = tl.load(offsets_ptr + user + 1, mask=valid, other=0)
    start = (tl.minimum(tl.maximum(start, 0), num_items) * seeds).to(tl.int32)
    end = (tl.minimum(tl.maximum(end, 0), num_items) * seeds).to(tl.int32)
    if KV_LAYOUT == 0:
        first_key = user
        keys = tl.zeros_like(user) + capacity
    elif KV_LAYOUT == 1:
        first_key = user
        keys = tl.minimum(tl.maximum(tl.load(kv_ptr + user, mask=valid, other=0), 0), capacity).to(tl.int32)
    else:
        first = tl.load(kv_ptr + user, mask=valid, other=0)
        last = tl.load(kv_ptr + user + 1, mask=valid, other=0)
        first_key = tl.minimum(tl.maximum(first, 0), capacity).to(tl.int32)
        keys = tl.maximum(tl.minimum(tl.maximum(last, 0), capacity).to(tl.int32) - first_key, 0)
    tiles = tl.maximum((end - start + ROWS - 1) // ROWS, 0)
    if own_tiles is not None:
        tiles += tl.where(valid, own_tiles, 0)
    return start, end, first_key, keys, tiles


@triton.jit
def _fill_table(
    table_ptr,
    offsets_ptr,
    kv_ptr,
    num_users,
    num_items,
    seeds,
    capacity,
    user_seeds,
    limit,
    ROWS: tl.constexpr,
    KV_LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The body of both tables; `user_seeds` is None where users have no rows of their own."""
    if CHAINED:
        gdc_launch_dependents()
    own_tiles = None
    if user_seeds is not None:
        own_tiles = (user_seeds + ROWS - 1) // ROWS
    user = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start, end, first_key, keys, tiles = _users_block(
        offsets_ptr, kv_ptr, user, num_users, num_items, seeds, capacity, own_tiles, ROWS, KV_LAYOUT
    )
    # Few of its own and many others: a round of loads takes longer than the comparisons.
    OTHERS: tl.constexpr = 16 * BLOCK
    place = tl.zeros([BLOCK], tl.int32)
    total = 0
    for first in range(0, num_users, OTHERS):
        other = first + tl.arange(0, OTHERS)
        _, _, _, other_keys, other_tiles = _users_block(
            offsets_ptr, kv_ptr, other, num_users, num_items, seeds, capacity, own_tiles, ROWS, KV_LAYOUT
        )
        longer = other_keys[None, :] > keys[:, None]
        before = longer | ((other_keys[None, :] == keys[:, None]) & (other[None, :] < user[:, None]))
        # Never beyond `limit`: what offsets that fall add up to may not fit in 32 bits.
        other_tiles = other_tiles.to(tl.int64)
        place = tl.minimum(place + tl.sum(tl.where(before, other_tiles[None, :], 0), 1), limit).to(tl.int32)
        total = tl.minimum(total + tl.sum(other_tiles, 0), limit).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(table_ptr, total)
    most = tl.minimum(tl.max(tiles, 0), limit)
    for first in range(0, most, STEP):
        tile = first + tl.arange(0, STEP)[None, :]
        mask = (tile < tiles[:, None]) & (tile < limit - place[:, None])
        entry = table_ptr + (1 + place[:, None] + tile) * 4
        row = start[:, None] + tile * ROWS
        stop = end[:, None] + tile * 0
        if user_seeds is not None:
            is_own = tile < own_tiles
            row = tl.where(is_own, ~(user[:, None] * user_seeds + tile * ROWS), row - own_tiles * ROWS)
            stop = tl.where(is_own, (user[:, None] + 1) * user_seeds, stop)
        tl.store(entry, row, mask=mask)
        tl.store(entry + 1, stop, mask=mask)
        tl.store(entry + 2, first_key[:, None] + tile * 0, mask=mask)
        tl.store(entry + 3, keys[:, None] + tile * 0, mask=mask)


SIZES = ["offsets_ptr", "kv_ptr", "num_users", "num_items", "seeds", "capacity", "user_seeds", "limit"]


@triton.jit(do_not_specialize=[name for name in SIZES if name != "user_seeds"])
def fill_tile_table(
    table_ptr,
    offsets_ptr,
    kv_ptr,
    num_users,
    num_items,
    seeds,
    capacity,
    limit,
    ROWS: tl.constexpr,
    KV_LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Write the tiles of BLOCK users per program, and into the table's first entry how many tiles there are in all.

    A user's first tile comes after the tiles of every user with a longer history (or an equal one and a smaller
    number): each program sums those over all users, BLOCK of its own and 16 times as many others at a time, so no
    program waits for another. Offsets that fall make more tiles than there can be; `limit`, the size of the table,
    keeps them inside.

    With CHAINED the kernel behind may start (programmatic dependent launch) and wait for this one's end by itself.
    """
    _fill_table(
        table_ptr, offsets_ptr, kv_ptr, num_users, num_items, seeds, capacity, None, limit,
        ROWS, KV_LAYOUT, BLOCK, STEP, CHAINED,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def fill_tile_table_both(
    table_ptr,
    offsets_ptr,
    kv_ptr,
    num_users,
    num_items,
    seeds,
    capacity,
    user_seeds,
    limit,
    ROWS: tl.constexpr,
    KV_LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """`fill_tile_table` with the tiles of each user's `user_seeds` own rows before those of its candidates.

    The first field of a tile of own rows is `~row`, the bitwise complement: negative, which tells it from the others.
    """
    _fill_table(
        table_ptr, offsets_ptr, kv_ptr, num_users, num_items, seeds, capacity, user_seeds, limit,
        ROWS, KV_LAYOUT, BLOCK, STEP, CHAINED,
    )  # fmt: skip
