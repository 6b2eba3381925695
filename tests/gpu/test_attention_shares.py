"""The Hopper attention kernel where thread blocks share tiles: bits, fp64, and what a GPU alone can show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ikbo_recsys import CandidateIndex, kernels
from ikbo_recsys.kernels import _attention_hopper, _attention_shares, _backend, _plan
from tests import twins
from tests.cases import relative_error

DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    why = _backend.hopper_refusal(torch.device("cuda", 0))
    if why is not None:
        pytest.skip(why)
    monkeypatch.setattr(_attention_shares, "has_wide_tiles", lambda problem: True)
    with kernels.use_backend("gluon"):
        yield
    _plan.forget()


def choose(monkeypatch: pytest.MonkeyPatch, shares: int) -> None:
    monkeypatch.setattr(_attention_hopper, "shares", lambda problem, padded: shares)
    _plan.forget()


def make(users: int, cands: int, rows: int, dtype: torch.dtype, size: int = 128) -> tuple[Any, ...]:
    """Query, key, value, index, lengths: a user without history, one with all of it."""
    query = torch.randn(cands, 64, 2, size, device="cuda", dtype=dtype)
    key, value = (torch.randn(users, rows, 2, size, device="cuda", dtype=dtype) for _ in range(2))
    index = CandidateIndex.from_user_ids(
        torch.randint(0, users, (cands,), device="cuda").sort()[0], users, grouped=True
    )
    lengths = torch.randint(rows // 2, rows + 1, (users,), device="cuda")
    if users > 1:
        lengths[0], lengths[1] = 0, rows
    return query, key, value, index, lengths


def run(given: tuple[Any, ...], query: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse."""
    first, key, value, index, lengths = given
    return kernels.cross_attention(
        first if query is None else query, key, value, index, kv_lengths=lengths, return_lse=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 104, 128])
@pytest.mark.parametrize(("users", "cands", "rows"), [(9, 300, 1100), (32, 640, 700), (3, 210, 2500), (50, 1400, 600)])
def test_last_round(users: int, cands: int, rows: int, size: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    """Bit by bit what it is without, time and again: nobody reads what is not there yet."""
    given = make(users, cands, rows, dtype, size)
    choose(monkeypatch, _attention_shares.WHOLE)
    out, lse = run(given)
    choose(monkeypatch, _attention_shares.LAST_ROUND)
    for _ in range(20):
        found = run(given)
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [2, 5, 16])
@pytest.mark.parametrize(("users", "cands", "rows", "size"), [(1, 8, 3000, 128), (3, 17, 1500, 64), (2, 30, 130, 40)])
def test_parts(
    users: int, cands: int, rows: int, size: int, cut: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = make(users, cands, rows, dtype, size)
    query, key, value, index, lengths = given
    exact = twins.cross_attention(*(x.double() for x in (query, key, value)), index.to_user, lengths)
    choose(monkeypatch, _attention_shares.WHOLE)
    whole, whole_lse = run(given)
    choose(monkeypatch, cut)
    out, lse = run(given)
    assert relative_error(out, exact) < 1.1 * relative_error(whole, exact)
    assert torch.allclose(lse, whole_lse, atol=1e-4, rtol=1e-5)
    for again in range(3):
        assert torch.equal(run(given)[0], out), again
    # A permutation of a user's candidates.
    order = torch.cat([(index.to_user == user).nonzero()[:, 0].flip(0) for user in range(users)])
    assert torch.equal(run(given, query[order])[0], out[order])


@pytest.mark.parametrize(("users", "cands", "rows", "kind"), [(1, 8, 8192, "parts"), (1, 400, 4096, "last round")])
def test_the_rule_in_a_captured_graph(users: int, cands: int, rows: int, kind: str) -> None:
    """Flags are zeroed in the graph: a replay is as good as a first run."""
    given = make(users, cands, rows, torch.float16)
    static = given[0].clone()
    run(given, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(given, static)
    for _ in range(3):
        static.copy_(torch.randn_like(static))
        expected = run(given, static)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


def test_two_streams_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread blocks that begin late make their successors begin at the beginning: never a wait, the same bits."""
    given = make(3, 210, 1500, torch.bfloat16)
    choose(monkeypatch, _attention_shares.LAST_ROUND)
    expected = run(given)[0]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(100):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(run(given)[0].eq(expected).all())
    torch.cuda.synchronize()
    assert torch.stack(found).all()
