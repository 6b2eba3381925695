"""Which calls of the Hopper attention forward kernel gain by sharing tiles between thread blocks, and how.

The ways are those of `_gluon/_attention_shares.py`. The choice is made from shapes alone, as if every user had the same
number of candidates and as many history rows as there are on average, or at most: how many there are is known to the
device only. A choice that turns out badly costs microseconds; on the result it has no influence beyond what is said at
`parts`.

Shape letters as in `_attention_launch.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels._attention_launch import JAGGED, Problem, row_slots
from ikbo_recsys.kernels._backend import multiprocessors
from ikbo_recsys.kernels._launch import cdiv
from ikbo_recsys.kernels._plan import Launch

TILE_ROWS, BLOCK_KEYS = 128, 128
FEWEST_WIDE_ROWS = 512
"""Query rows per user, on average, from which tiles of 128 rows are the faster ones, and the backward kernels that have
them. Below, tiles of 64 rows are, unless they are so few that wide ones in parts are."""
WHOLE, LAST_ROUND = 0, 1
"""Values of SHARES; greater ones are numbers of parts."""

# A block of 128 keys for 128 rows, by padded head size: at 600 TFLOP/s of 132 multiprocessors; with 64 columns the
# exponentials count.
_BLOCK_MICROSECONDS = {64: 1.3, 128: 1.85}
# The shared form is slower than the whole one by about this part of a round, in every round. (Measured at 15 rounds it
# is 0.9 microseconds, whether items have 4 blocks or 16.)
_SLOWER = 0.05
# Whole rounds before the last one: measured gains are at 1 and 2, losses at 15, where that adds up, and where
# power sets the clock, so that what idles in the last round lets the others run faster.
_MOST_ROUNDS = 3
# Predicted savings below these are not worth it: flags are zeroed by a launch, accumulators written and read; with
# parts, by a second kernel. Both take the host 20 microseconds more. H200: with 25 and 22 predicted the last round
# saved 17 and 12; with 26 predicted parts lost 12, with 44 they saved 9.
_LEAST_SAVED = {"last round": 20.0, "parts": 35.0}
LEAST_MEASURED = 10.0
"""Predicted savings from which a way is worth timing, where that is asked for."""
_MOST_PIECES = 4
MOST_PARTS = 32
_FILLED = 128
MERGED_ROWS = 8


def has_wide_tiles(problem: Problem) -> bool:
    """Whether users have query rows enough for tiles of 128."""
    return problem.user_rows >= FEWEST_WIDE_ROWS


def items(problem: Problem) -> int:
    """Tiles times heads, were all users' candidates as many."""
    users, rows = problem.num_users, problem.query.shape[0] * problem.query.shape[1]
    return users * cdiv(cdiv(rows, users), TILE_ROWS) * problem.query.shape[2]


def key_blocks(problem: Problem) -> int:
    """Blocks of keys of a user: on average where that is known, else at most."""
    rows = cdiv(problem.capacity, problem.num_users) if problem.layout == JAGGED else problem.capacity
    return max(cdiv(rows, BLOCK_KEYS), 1)


def parts(num_items: int, blocks: int) -> int:
    """Into how many parts each item can be cut: 1 unless there are so few items that most of a GPU would be idle.

    The parts' sums are rounded one by one, so this is seen in the last bits of a result. It follows from the shapes of
    a call, not from the device nor from anything that differs between a user's candidates: a permutation of them
    permutes the result.
    """
    return max(min(_FILLED // num_items, blocks // 2, MOST_PARTS), 1)


def saved_by_last_round(num_items: int, blocks: int, padded: int, processors: int) -> float:
    """Microseconds that a launch takes less when all thread blocks share its last round, as the kernel cuts it."""
    rounds, rest = divmod(num_items, processors)
    if rest == 0 or not 0 < rounds <= _MOST_ROUNDS:
        return 0.0
    pieces = min(processors // rest, rounds + 1, _MOST_PIECES)
    share = rest / processors if 2 * rest > processors and rounds > 1 else 1 / pieces
    return (1 - share - _SLOWER * num_items / processors) * blocks * _BLOCK_MICROSECONDS[padded]


def predicted(problem: Problem, padded: int) -> tuple[int, float, float]:
    """`(way, saved, least)`: LAST_ROUND or a number of parts, how many microseconds less than WHOLE it should take, and
    from how many on it is taken."""
    if problem.user_query is not None:
        return WHOLE, 0.0, 0.0
    num_items, blocks = items(problem), key_blocks(problem)
    cut = parts(num_items, blocks)
    if cut > 1:
        return cut, (blocks - cdiv(blocks, cut)) * _BLOCK_MICROSECONDS[padded], _LEAST_SAVED["parts"]
    if not has_wide_tiles(problem):
        return WHOLE, 0.0, 0.0
    saved = saved_by_last_round(num_items, blocks, padded, multiprocessors(problem.query.device))
    return LAST_ROUND, saved, _LEAST_SAVED["last round"]


def shares(problem: Problem, padded: int) -> int:
    """What is taken: WHOLE, LAST_ROUND, or a number of parts; WHOLE with rows of the users' own."""
    way, saved, least = predicted(problem, padded)
    return way if saved >= least else WHOLE


def slots(problem: Problem) -> int:
    """How many items there can be."""
    return row_slots(problem, TILE_ROWS) * problem.query.shape[2]


def state(rows: int, padded: int, device: torch.device) -> Tensor:
    """Room for what thread blocks keep of items: see `hand_on` in `_gluon/_attention_shares.py`."""
    return torch.empty((rows, 2, 64 * (padded + 9)), dtype=torch.float32, device=device)


def new_flags(count: int, device: torch.device) -> Tensor:
    """0 for each thread block: nothing is handed on yet."""
    return torch.empty((count,), dtype=torch.int32, device=device).zero_()


class Merge:
    """The launch that merges the parts of every item."""

    def __init__(self, problem: Problem, padded: int, cut: int, store_lse: bool) -> None:
        from ikbo_recsys.kernels._triton.cross_attention_merge import merge_parts

        query = problem.query
        self._numbers = (query.shape[2], query.shape[1])
        constants: dict[str, Any] = {
            **{"D": padded, "HEAD_SIZE": query.shape[3], "PARTS": cut, "ROWS": MERGED_ROWS, "CHAINED": True},
            **{"PERMUTED": problem.permutation is not None, "STORE_LSE": store_lse},
        }
        blocks = slots(problem) * (TILE_ROWS // MERGED_ROWS)
        self._launch = Launch(merge_parts, problem.index_key(), blocks, constants, num_warps=4, launch_pdl=True)

    def __call__(self, problem: Problem, parts_of: Tensor, out: Tensor, lse: Tensor, table: Tensor) -> None:
        self._launch((parts_of, out, lse, table, problem.index_pointers()[1], *self._numbers))
