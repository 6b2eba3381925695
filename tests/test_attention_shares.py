"""The rule by which attention calls share tiles between thread blocks, from shapes alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the launch code needs it")

from ikbo_recsys.kernels import _attention_shares as rule
from ikbo_recsys.kernels._attention_launch import FULL, JAGGED, Problem

H200 = 132


def problem(
    users: int, cands: int, rows: int, seeds: int = 64, heads: int = 2, own: int = 0, jagged: bool = False
) -> Problem:
    """A call's shapes; there is nothing behind them."""
    with torch.device("meta"):
        history = torch.empty((users * rows, heads, 128) if jagged else (users, rows, heads, 128), dtype=torch.half)
        query = torch.empty((cands, seeds, heads, 128), dtype=torch.half)
        offsets = torch.empty(users + 1, dtype=torch.int32)
        own_rows = torch.empty((users, own, heads, 128), dtype=torch.half) if own else None
    kv = offsets if jagged else None
    return Problem(query, history, history, offsets, None, kv, JAGGED if jagged else FULL, 0.1, own_rows)


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "multiprocessors", lambda device: H200)


@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize(("rows", "expected"), [(512, 0), (1024, 0), (2048, 1), (4096, 1), (8192, 1)])
def test_a_last_round_that_is_half_empty(rows: int, expected: int, jagged: bool) -> None:
    assert rule.shares(problem(32, 2048, rows, jagged=jagged), 128) == expected


def test_rounds_that_come_out_even_are_not_shared() -> None:
    assert rule.items(problem(33, 33 * 128, 8192)) == 32 * H200
    assert rule.shares(problem(33, 33 * 128, 8192), 128) == rule.WHOLE
    # One item short of that: a round that nearly all thread blocks have something to do in.
    assert rule.saved_by_last_round(32 * H200 - 1, 64, 128, H200) < 2.0


@pytest.mark.parametrize(
    ("num_items", "share"),
    # Halves; the same for every thread block; quarters, the smallest pieces; at most one piece more than there are
    # whole rounds; nothing, where an item would be on three thread blocks and there is one whole round.
    [(H200 + 66, 1 / 2), (2 * H200 + 68, 68 / H200), (5 * H200 + 10, 1 / 4), (H200 + 10, 1 / 2), (H200 + 68, 1.0)],
)
def test_what_the_last_round_takes(num_items: int, share: float) -> None:
    item, left = (rule.saved_by_last_round(n, 32, 128, H200) for n in (5 * H200 + 1, num_items))
    assert left == pytest.approx((1 - share) * item / (1 - 1 / 4))


def test_few_tiles_are_cut_into_parts() -> None:
    # 8 items over 64 blocks of keys: 16 parts fill 128 thread blocks.
    assert rule.shares(problem(1, 8, 8192), 128) == 16
    assert rule.shares(problem(2, 16, 8192), 128) == 8
    # No more parts than half the blocks, and none for a history that is read in a few microseconds.
    assert rule.shares(problem(1, 4, 2048, heads=1), 128) == 8
    assert rule.shares(problem(1, 8, 512), 128) == rule.WHOLE
    # More than half the GPU is busy as it is.
    assert rule.shares(problem(1, 80, 8192), 128) == rule.WHOLE


def test_parts_do_not_follow_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "multiprocessors", lambda device: 78)
    assert rule.shares(problem(1, 8, 8192), 128) == 16


def test_users_own_rows_are_not_shared() -> None:
    assert rule.shares(problem(1, 8, 8192, own=8), 128) == rule.WHOLE
