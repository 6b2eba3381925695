"""The Hopper attention kernel where thread blocks share tiles, in the emulator: see `test_hopper_emulated.py`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ikbo_recsys import CandidateIndex, kernels
from tests import twins
from tests.cases import relative_error
from tests.processes import INTERPRETED, interpreted, run_interpreted
from tests.test_hopper_emulated import EAGER, make_index

pytest.importorskip("triton.experimental.gluon")

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


class Call:
    """A call, its result by every way of sharing, and what it should be."""

    def __init__(self, sizes: tuple, layout: str, grouped: bool = True) -> None:
        users, cands, seeds, rows, heads, size = sizes
        self.index, self.seeds = make_index(users, cands, grouped), seeds
        lengths = torch.randint(1, rows + 1, (users,))
        lengths[users // 2] = rows if users == 1 else 0
        if layout == "full":
            lengths.fill_(rows)
        valid = torch.arange(rows) < lengths[:, None]
        self.query = torch.randn(cands, seeds, heads[0], size).half()
        history = torch.randn(users, rows, 2, heads[1], size).half()
        buffer = history.masked_fill(~valid[:, :, None, None, None], float("nan"))
        self.options: dict[str, Any] = {"kv_lengths": lengths} if layout == "lengths" else {}
        if layout == "jagged":
            buffer = buffer[valid]
            self.options = {"kv_offsets": torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))}
        self.key, self.value = buffer.unbind(-3)
        key, value = history.double().unbind(2)
        self.exact = twins.cross_attention(self.query.double(), key, value, self.index.to_user, lengths)

    def run(self, shares: int, processors: int, seed: int = 0, backwards: bool = False) -> list[torch.Tensor]:
        """out and lse."""
        from ikbo_recsys.kernels import _attention_hopper, _attention_shares, _plan
        from tests.emulator import emulated

        _plan.forget()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_attention_hopper, "shares", lambda problem, padded: shares)
            patch.setattr(_attention_shares, "has_wide_tiles", lambda problem: True)
            with emulated(seed, EAGER[seed % 3], processors, backwards) as ran, kernels.use_backend("gluon"):
                found = kernels.cross_attention(
                    self.query, self.key, self.value, self.index, return_lse=True, **self.options
                )
        assert ran == ["attention_forward_shared" if shares else "attention_forward"]
        return list(found)


# (multiprocessors, U, B, seeds, T, (H, Hkv), D). With one user the items are as many in every run: 2 beyond two rounds
# of 5, in two parts each; 6 beyond two rounds of 7, which begin and end anywhere; 1 beyond three rounds of 9, in four.
ROUNDS = [
    (5, 1, 6, 64, 300, (4, 1), 64),
    (7, 2, 10, 64, 400, (2, 2), 128),
    (5, 3, 4, 128, 300, (6, 2), 40),
    (7, 1, 61, 40, 300, (1, 1), 64),
    (9, 1, 14, 128, 500, (2, 1), 128),
    (4, 9, 30, 64, 257, (2, 1), 64),
]


LAYOUTS = ["full", "lengths", "jagged"]


def alternately(*lists: Any) -> list[tuple[Any, ...]]:
    """All combinations, grouped and not in turns."""
    return [(*x, grouped) for x, grouped in zip(itertools.product(*lists), itertools.cycle([True, False]))]


@interpreted
@pytest.mark.parametrize(("sizes", "layout", "grouped"), alternately(ROUNDS, LAYOUTS))
def test_last_round(sizes: tuple, layout: str, grouped: bool) -> None:
    """Bit by bit what it is without, whether the parts before were there in time or not."""
    processors, *rest = sizes
    call = Call(tuple(rest), layout, grouped)
    whole = call.run(0, processors)
    assert relative_error(whole[0], call.exact) < 1e-3
    for seed, backwards in ((len(layout), False), (1, True)):
        for ours, expected in zip(call.run(1, processors, seed, backwards), whole, strict=True):
            assert torch.equal(ours, expected)


@interpreted
@pytest.mark.parametrize("sizes", ROUNDS[:5])
def test_parts_of_the_last_round_are_taken_up(sizes: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would see nothing but parts computed anew."""
    from ikbo_recsys.kernels import _attention_hopper

    processors, *rest = sizes
    call = Call(tuple(rest), "full")
    flags: list[torch.Tensor] = []

    def keep(count: int, device: torch.device, value: int = 0) -> torch.Tensor:
        flags.append(torch.full((count,), value, dtype=torch.int32))
        return flags[-1]

    monkeypatch.setattr(_attention_hopper, "new_flags", keep)
    call.run(1, processors)
    # All threads of both consumers, of at least as many thread blocks as there are items.
    assert set(flags[0].tolist()) == {0, 256}
    # With flags that lie, and blocks in an order in which nothing is there yet, what is taken up is poison.
    monkeypatch.setattr(_attention_hopper, "new_flags", lambda count, device: keep(count, device, 256))
    assert call.run(1, processors, backwards=True)[0].isnan().any()


@interpreted
@pytest.mark.parametrize("processors", [1, 3, 8, 16, 40])
def test_any_number_of_multiprocessors(processors: int) -> None:
    call = Call((3, 11, 64, 400, (2, 1), 64), "lengths")
    for ours, expected in zip(call.run(1, processors), call.run(0, processors), strict=True):
        assert torch.equal(ours, expected)


FEW = [(1, 2, 64, 900, (2, 1), 64), (3, 7, 40, 300, (2, 2), 104), (2, 30, 3, 129, (4, 2), 128)]


@interpreted
@pytest.mark.parametrize(("sizes", "layout", "way", "grouped"), alternately(FEW, LAYOUTS, [(2, 3), (5, 200), (3, 8)]))
def test_parts(sizes: tuple, layout: str, way: tuple[int, int], grouped: bool) -> None:
    """Users without history, and parts without a block of keys, included."""
    cut, processors = way
    call = Call(sizes, layout, grouped)
    out, lse = call.run(cut, processors)
    assert relative_error(out, call.exact) < 1e-3
    assert torch.allclose(lse, call.run(0, processors)[1], atol=1e-5, rtol=1e-5)
    for ours, again in zip(call.run(cut, processors + 1, 1), (out, lse), strict=True):
        assert torch.equal(ours, again)


@interpreted
@pytest.mark.parametrize(("shares", "processors"), [(1, 5), (3, 8)])
def test_a_permutation_of_candidates_permutes_the_bits(shares: int, processors: int) -> None:
    call = Call((2, 13, 40, 500, (2, 1), 64), "full")
    order = torch.cat([(call.index.to_user == user).nonzero()[:, 0].flip(0) for user in range(2)])
    out, lse = call.run(shares, processors)
    call.query = call.query[order]
    for ours, expected in zip(call.run(shares, processors), (out, lse), strict=True):
        assert torch.equal(ours, expected[order])


@interpreted
@pytest.mark.parametrize("cut", [1, 3])
def test_gradients(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from ikbo_recsys.kernels import _attention_hopper
    from tests.emulator import emulated

    monkeypatch.setattr(_attention_hopper, "shares", lambda problem, padded: cut)
    query, key, value = torch.randn(6, 64, 2, 64), torch.randn(1, 500, 1, 64), torch.randn(1, 500, 1, 64)
    leaves = [x.half().requires_grad_() for x in (query, key, value)]
    grad, grad_lse = torch.randn(6, 64, 2, 64).half(), torch.randn(6, 64, 2)
    index = CandidateIndex.from_counts(torch.tensor([6]))
    with emulated(cut, 0.3, 5) as ran, kernels.use_backend("gluon"):
        results = kernels.cross_attention(*leaves, index, return_lse=True)
        found = torch.autograd.grad(results, leaves, (grad, grad_lse))
    assert ran[0] == "attention_forward_shared"
    exact = [x.detach().double().requires_grad_() for x in leaves]
    scores = torch.einsum("bshd,td->bsht", exact[0], exact[1][0, :, 0]) / 8
    out = torch.einsum("bsht,td->bshd", scores.softmax(-1), exact[2][0, :, 0])
    expected = torch.autograd.grad((out, scores.logsumexp(-1)), exact, (grad.double(), grad_lse.double()))
    for ours, true in zip(found, expected, strict=True):
        assert relative_error(ours, true) < 2e-3
