"""Packing the candidates of one user into tiles, with sizes that follow from shapes alone.

A tile holds up to R candidates of one user, so that what is read of the user is read once per tile and the tile's
arithmetic is one matmul. The number of tiles depends on how the candidates are spread, which is data; its bound does
not: `sum_u ceil(n_u / R) <= (B + U * (R - 1)) // R`. Using the bound keeps every size a function of U and B, so the
program exports with both dynamic, and skewed counts (one user with ten thousand candidates among a thousand with one)
cost no more than even ones.

With `R = ceil(B / (4 U - 3)) + 1` there are at most 5 U tiles, never more than (B + U) / 2, and about 1.25 B packed
rows; one user gets one tile. The sizes are plain quotients on purpose: a minimum or maximum in them, or an R that is
1 for some batch sizes, becomes a case that a compiled program is compiled again for. Where nothing is compiled again,
R is 1 if there are no more candidates than users: tiles of two would be half empty.

Shape letters: U users, B candidates, N tiles, R candidates per tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """Where each candidate goes (tile `tile_B`, place `place_B` in it) and whose each tile is (`user_N`).

    Tiles are indexed as `[N, R]` and never as `[N * R]`: a reshape between the two would ask whether R is 1, and a
    compiled program would be compiled again for the other answer.
    """

    tile_B: Tensor
    place_B: Tensor
    user_N: Tensor
    rows: int

    def to_tiles(self, x_B: Tensor) -> Tensor:
        """`[B, ...]` to `[N, R, ...]`, zeros where no candidate is."""
        empty = x_B.new_zeros((self.user_N.shape[0], self.rows, *x_B.shape[1:]))
        return empty.index_put((self.tile_B, self.place_B), x_B)

    def from_tiles(self, x_NR: Tensor) -> Tensor:
        """`[N, R, ...]` back to `[B, ...]`."""
        return x_NR[self.tile_B, self.place_B]

    def per_tile(self, x_U: Tensor) -> Tensor:
        """`[U, ...]` to `[N, ...]`: each tile's user."""
        return x_U.index_select(0, self.user_N)


def pack_candidates(to_user_B: Tensor, offsets: Tensor | None, num_users: int) -> Packing:
    """Assign candidates to tiles of their own user."""
    num_candidates = to_user_B.shape[0]
    rows = _rows_per_tile(num_candidates, num_users)
    num_tiles = (num_candidates + num_users * (rows - 1)) // rows

    to_user_B = to_user_B.long()
    order_B = torch.arange(num_candidates, device=to_user_B.device)
    if offsets is None:
        counts_U = to_user_B.new_zeros(num_users).index_add(0, to_user_B, torch.ones_like(to_user_B))
        order_B = torch.empty_like(order_B).index_copy(0, torch.argsort(to_user_B, stable=True), order_B)
    else:
        counts_U = offsets.long().diff()
    rank_B = order_B - (counts_U.cumsum(0) - counts_U).index_select(0, to_user_B)

    tiles_U = (counts_U + rows - 1) // rows
    tiles_end_U = tiles_U.cumsum(0)
    tile_B = (tiles_end_U - tiles_U).index_select(0, to_user_B) + rank_B // rows
    # Tiles past the last one in use belong to nobody; any user will do.
    all_N = torch.arange(num_tiles, device=to_user_B.device)
    user_N = torch.searchsorted(tiles_end_U, all_N, right=True).clamp(max=num_users - 1)
    return Packing(tile_B, rank_B % rows, user_N, rows)


def _rows_per_tile(num_candidates: int, num_users: int) -> int:
    """R. It may be 1 where sizes are numbers, or where 1 is a size like any other: as `ikbo_recsys.export` traces."""
    quotient = (num_candidates + 4 * num_users - 4) // (4 * num_users - 3)
    # TorchDynamo shows its symbols as integers.
    symbolic = torch.compiler.is_dynamo_compiling() or not (
        isinstance(num_candidates, int) and isinstance(num_users, int)
    )
    if symbolic and not torch.fx.experimental._config.backed_size_oblivious:
        return quotient + 1
    return torch.sym_max(quotient, 1) + torch.sym_min(num_candidates // (num_users + 1), 1)
