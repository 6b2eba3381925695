"""The rules by which attention calls on Hopper take one form of a kernel or another, from shapes alone."""

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
@pytest.mark.parametrize(
    ("users", "cands", "rows", "expected"),
    [
        # 15.5 rounds: the shared form took 260 us for 225, 440 for 417, 903 for 851, 1845 for 1706.
        *((32, 64, rows, 0) for rows in (1024, 2048, 4096, 8192)),
        # 15.7 rounds of 2560 rows on average, 4096 at most: 642 for 559.
        *((37, 55, rows, 0) for rows in (2560, 4096)),
        # 1.45 and 2.4 rounds: 97 for 114, 145 for 157.
        (6, 32, 4096, 1),
        (10, 32, 4096, 1),
    ],
)
def test_a_last_round_is_shared_where_that_gained(
    users: int, cands: int, rows: int, expected: int, jagged: bool
) -> None:
    """As measured on an H200 with two heads of 128 and 64 seeds."""
    assert rule.shares(problem(users, users * cands, rows, jagged=jagged), 128) == expected


@pytest.mark.parametrize(
    ("users", "cands", "rows", "expected"),
    # 46 us for 96, 50 for 97, 45 for 54; 44 for 33.
    [(1, 8, 8192, 16), (2, 8, 8192, 8), (1, 30, 4096, 4), (1, 8, 2048, 0)],
)
def test_few_tiles_are_cut_into_parts_where_that_gained(users: int, cands: int, rows: int, expected: int) -> None:
    assert rule.shares(problem(users, users * cands, rows), 128) == expected


@pytest.mark.parametrize(
    ("num_items", "is_shared"),
    # Up to three whole rounds, of which the last one leaves enough.
    [(H200 - 1, False), (H200, False), (H200 + 1, True), (3 * H200 + 1, True), (4 * H200 - 1, False)]
    + [(4 * H200 + 1, False), (33 * H200 + 1, False)],
)
def test_few_rounds_of_which_the_last_is_nearly_empty(num_items: int, is_shared: bool) -> None:
    assert (rule.saved_by_last_round(num_items, 64, 128, H200) > 20) == is_shared


@pytest.mark.parametrize(
    ("num_items", "share"),
    # Halves; the same for every thread block; at most one piece more than there are whole rounds; quarters, the
    # smallest pieces; nothing, where an item would be on three thread blocks and there is one whole round.
    [(H200 + 66, 1 / 2), (2 * H200 + 68, 68 / H200), (H200 + 10, 1 / 2), (3 * H200 + 10, 1 / 4), (H200 + 68, 1.0)],
)
def test_what_the_last_round_takes(num_items: int, share: float) -> None:
    """What is left of it, less a twentieth of the launch, by which the shared form is slower."""
    blocks = 32
    expected = (1 - share - num_items / H200 / 20) * blocks * 1.85
    assert rule.saved_by_last_round(num_items, blocks, 128, H200) == pytest.approx(expected)


def test_parts_are_at_most_half_as_many_as_blocks_of_keys() -> None:
    assert rule.parts(2, 12) == 6
    assert rule.parts(1, 200) == rule.MOST_PARTS
    # More than half the GPU is busy as it is.
    assert rule.parts(65, 64) == 1
    assert rule.shares(problem(1, 80, 8192), 128) == rule.WHOLE


def test_parts_do_not_follow_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "multiprocessors", lambda device: 78)
    assert rule.shares(problem(1, 8, 8192), 128) == 16


def test_users_own_rows_are_not_shared() -> None:
    assert rule.shares(problem(1, 8, 8192, own=8), 128) == rule.WHOLE
    assert rule.predicted(problem(1, 8, 8192, own=8), 128) == (rule.WHOLE, 0.0, 0.0)


@pytest.mark.parametrize(
    ("users", "cands", "seeds", "rows", "expected"),
    [
        # Users with few rows: 27 us for 30 with one seed, 23 for 26 with 300 rows, 40 for 70 with 8.
        *[(32, 64, 1, 1024, 64), (7, 300, 1, 1024, 64), (512, 8, 1, 200, 64)],
        # 512 rows and more: 34 for 37.
        *[(32, 64, 8, 1024, 128), (32, 64, 64, 512, 128)],
        # So few tiles that wide ones are cut into parts: 14 us for 32, 12 for 59.
        *[(4, 64, 1, 4096, 128), (2, 200, 1, 4096, 128)],
    ],
)
def test_users_with_few_rows_have_tiles_of_64(users: int, cands: int, seeds: int, rows: int, expected: int) -> None:
    """As measured on an H200 with 2 to 8 heads of 64 or 128."""
    from ikbo_recsys.kernels._attention_hopper import forward_tile

    call = problem(users, users * cands, rows, seeds)
    assert forward_tile(call, 128, rule.shares(call, 128)).rows == expected


ALL = (True, True, True)


@pytest.mark.parametrize(
    ("rows", "own", "needs", "expected"),
    # 857 us for 919 with 1024 rows, 2936 for 3372 with 4096; with 512, what is before and behind takes what it saves.
    [(1024, 0, ALL, True), (4096, 0, ALL, True), (512, 0, ALL, False), (1024, 0, (True, True, False), False),
     (1024, 64, ALL, False),
     # A block that is begun counts.
     (640, 0, ALL, False), (641, 0, ALL, True)],
)  # fmt: skip
def test_all_gradients_in_one_pass(rows: int, own: int, needs: tuple[bool, ...], expected: bool) -> None:
    """As measured on an H200, with 32 users of 64 candidates; never where a fixed order is asked for."""
    from ikbo_recsys.kernels._attention_backward_hopper import one_pass

    call = problem(32, 32 * 64, rows, own=own)
    assert one_pass(call, needs) is expected
    torch.use_deterministic_algorithms(True)
    try:
        assert not one_pass(call, needs)
    finally:
        torch.use_deterministic_algorithms(False)
