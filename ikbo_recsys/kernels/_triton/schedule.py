"""The tile schedule of target attention: which query rows a program takes, decided on the device.

The query rows of one user are adjacent once candidates are grouped (or looked up through a permutation that groups
them), so a tile of `ROWS` rows packs several candidates of one user, whatever the number of seeds. How many tiles a
user has is data; the grid may only depend on shapes. Two ways around that:

- `tile_of_slot` needs no table. User u owns the slots from `offsets[u] * seeds // ROWS + u` on. These are disjoint,
  since `floor(end / R) - floor(start / R) + 1 >= ceil((end - start) / R)`, and a program finds its user by bisection.
  At most U of the `B * seeds // ROWS + U` slots are empty and their programs leave at once.
- `fill_tile_table` writes a dense table, longest histories first, for the persistent kernel: it walks the table with a
  fixed stride, and empty or badly ordered entries would leave some multiprocessors idle.

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
def tile_of_slot(offsets_ptr, slot, num_users, num_items, scale, ROWS: tl.constexpr):
    """`(user, first row, end row)` of a slot, in rows of `scale` per item; first >= end where the slot is empty."""
    low = 0
    high = num_users - 1
    while low < high:
        middle = (low + high + 1) // 2
        base = clamped_offset(offsets_ptr, middle, num_items) * scale // ROWS + middle
        is_right = base <= slot
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle - 1)
    start = clamped_offset(offsets_ptr, low, num_items) * scale
    end = clamped_offset(offsets_ptr, low + 1, num_items) * scale
    return low, start + (slot - start // ROWS - low) * ROWS, end


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
    offsets_ptr, kv_ptr, user, num_users, num_items, seeds, capacity, ROWS: tl.constexpr, KV_LAYOUT: tl.constexpr
):
    """First row, end row, first key row and key row count of a block of users; zeros past the last user."""
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
    return start, end, first_key, keys, tiles


@triton.jit(do_not_specialize=["offsets_ptr", "kv_ptr", "num_users", "num_items", "seeds", "capacity", "limit"])
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
    number): each program sums those over all users, BLOCK x BLOCK comparisons at a time, so no program waits for
    another. Offsets that fall make more tiles than there can be; `limit`, the size of the table, keeps them inside.

    With CHAINED the kernel behind may start (programmatic dependent launch) and wait for this one's end by itself.
    """
    if CHAINED:
        gdc_launch_dependents()
    user = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start, end, first_key, keys, tiles = _users_block(
        offsets_ptr, kv_ptr, user, num_users, num_items, seeds, capacity, ROWS, KV_LAYOUT
    )
    place = tl.zeros([BLOCK], tl.int32)
    total = 0
    for first in range(0, num_users, BLOCK):
        other = first + tl.arange(0, BLOCK)
        _, _, _, other_keys, other_tiles = _users_block(
            offsets_ptr, kv_ptr, other, num_users, num_items, seeds, capacity, ROWS, KV_LAYOUT
        )
        longer = other_keys[None, :] > keys[:, None]
        before = longer | ((other_keys[None, :] == keys[:, None]) & (other[None, :] < user[:, None]))
        place += tl.sum(tl.where(before, other_tiles[None, :], 0), 1)
        total += tl.sum(other_tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(table_ptr, tl.minimum(total, limit))
    most = tl.max(tiles, 0)
    for first in range(0, most, STEP):
        tile = first + tl.arange(0, STEP)[None, :]
        mask = (tile < tiles[:, None]) & (place[:, None] >= 0) & (place[:, None] + tile < limit)
        entry = table_ptr + (1 + place[:, None] + tile) * 4
        tl.store(entry, start[:, None] + tile * ROWS, mask=mask)
        tl.store(entry + 1, end[:, None] + tile * 0, mask=mask)
        tl.store(entry + 2, first_key[:, None] + tile * 0, mask=mask)
        tl.store(entry + 3, keys[:, None] + tile * 0, mask=mask)
