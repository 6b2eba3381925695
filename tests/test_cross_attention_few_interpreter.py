"""All gradients in one pass, for users with few query rows, on the CPU in Triton's interpreter, against fp64.

See `test_cross_attention_interpreter.py`. fp16 only: of the types that the kernel takes, the interpreter multiplies no
other right.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import twins
from tests.processes import INTERPRETED, interpreted, run_interpreted
from tests.test_cross_attention_interpreter import FULL, JAGGED, LENGTHS, make_problem

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ROWS, TOLERANCE = 16, 1e-3
EVERYTHING = (True, True, True)
SUBSETS = [(True, False, False), (False, True, False), (False, False, True), (False, True, True), (True, False, True)]


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


class Call:
    """A call with tiles of 16 rows and 16 keys, its gradients, and what they are in fp64."""

    def __init__(self, *sizes: Any, grad_lse: bool = False, **how: Any) -> None:
        from ikbo_recsys.kernels import _attention_launch as launch

        self.problem, self.wide, self.to_user, self.lengths, self.valid = make_problem(
            *sizes, **how, dtype=torch.float16
        )
        self.out, self.lse = launch.Forward(self.problem, True)(self.problem)
        self.grad = torch.randn(*self.out.shape[:-1], 2 * self.out.shape[-1]).half()[..., 1 : 1 + self.out.shape[-1]]
        # Rows without keys have an infinite log-sum-exp, and no gradient of it.
        has_keys = (self.lengths[self.to_user] > 0)[:, None, None]
        self.grad_lse = torch.randn(self.lse.shape).transpose(0, 1).contiguous().transpose(0, 1) * has_keys
        if not grad_lse:
            self.grad_lse = None

    def gradients(self, needs: tuple[bool, bool, bool] = EVERYTHING) -> tuple[Tensor | None, ...]:
        from ikbo_recsys.kernels import _attention_backward_launch as launch

        run = launch.BackwardFew(self.problem, self.grad, needs, self.grad_lse is not None)
        return run(self.problem, self.out, self.lse, self.grad, self.grad_lse)

    def expected(self) -> tuple[Tensor, ...]:
        exact = [x.detach().requires_grad_() for x in self.wide]
        scale = self.problem.scale
        loss = (twins.cross_attention(*exact, self.to_user, self.lengths, scale) * self.grad.double()).sum()
        if self.grad_lse is not None:
            lse = twins.log_sum_exp(*exact[:2], self.to_user, self.lengths, scale)
            loss = loss + (lse.masked_fill(lse.isinf(), 0) * self.grad_lse).sum()
        dq, dk, dv = torch.autograd.grad(loss, exact)
        return (dq, dk[self.valid], dv[self.valid]) if self.problem.layout == JAGGED else (dq, dk, dv)

    def check(
        self, needs: tuple[bool, bool, bool] = EVERYTHING, tolerance: float = TOLERANCE
    ) -> tuple[Tensor | None, ...]:
        found, expected = self.gradients(needs), self.expected()
        for need, got, want in zip(needs, found, expected, strict=True):
            assert (got is not None) == need
            if got is not None:
                assert got.shape == want.shape
                # One key has weight 1 whatever its score: dq and dk are exactly 0, and what remains is the rounding of
                # dv's size.
                allowed = tolerance * float(want.norm().clamp_min(expected[2].norm()))
                assert float((got.double() - want).norm()) <= allowed
        if self.problem.layout == LENGTHS:
            padding = [x[~self.valid] for x in found[1:] if x is not None]
            assert all(torch.equal(x, torch.zeros_like(x)) for x in padding)
        return found


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from ikbo_recsys.kernels import _attention_launch as launch

    monkeypatch.setattr(launch.Problem, "tile", lambda *_: launch.AttentionTile(ROWS, 16, 4, 2))


# User 1 has no history. Users without candidates, with one, with a full tile, a row more, and with many rows.
COUNTS = [1, 5, 0, ROWS, ROWS + 1, 50, 3]


@interpreted
@pytest.mark.parametrize("layout", [FULL, LENGTHS, JAGGED])
@pytest.mark.parametrize("size", [8, 40, 64, 104, 128])
def test_against_fp64(layout: int, size: int) -> None:
    how = {"layout": layout, "shuffled": size in (40, 64), "counts": COUNTS, "grad_lse": size in (64, 128)}
    Call(7, sum(COUNTS), 1, 37, (2, 2), size, index_dtype=torch.int32 if size == 104 else torch.int64, **how).check()


@interpreted
@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ((1, 1, 1, 1, (1, 1), 8), [1]),
        ((3, 9, 3, 16, (2, 2), 16), [5, 0, 4]),  # 15 rows, 12 rows; whole blocks of keys
        ((3, 9, 4, 33, (2, 2), 16), [4, 0, 5]),  # a full tile, a candidate more
        ((4, 12, 2, 19, (4, 2), 24), [4, 3, 5, 0]),  # 16 packed rows, 12, 20
        ((3, 5, 1, 40, (6, 2), 16), [3, 2, 0]),  # groups of 3: no whole number of them fits a tile
        ((2, 3, 1, 20, (40, 2), 8), [1, 2]),  # groups larger than a tile
        ((2, 0, 3, 20, (1, 1), 8), [0, 0]),
    ],
)
@pytest.mark.parametrize("layout", [LENGTHS, JAGGED])
def test_packed_rows(sizes: tuple, counts: list[int], layout: int) -> None:
    for shuffled in (False, True):
        Call(*sizes, layout=layout, shuffled=shuffled, counts=counts, scale=-0.3, grad_lse=shuffled).check()


@interpreted
@pytest.mark.parametrize("needs", SUBSETS)
@pytest.mark.parametrize("grad_lse", [False, True])
def test_only_the_gradients_asked_for(needs: tuple[bool, bool, bool], grad_lse: bool) -> None:
    """With the same bits as where all are."""
    how = {"layout": LENGTHS, "shuffled": True, "counts": [9, 3, 6], "grad_lse": grad_lse}
    call = Call(3, 18, 2, 37, (2, 1), 24, **how)
    for some, every in zip(call.check(needs), call.gradients(), strict=True):
        assert some is None or torch.equal(some, every)


@interpreted
@pytest.mark.parametrize("counts", [[4, 2, 1], [40, 2, 30]])
def test_large_logits(counts: list[int]) -> None:
    """Where the log-sum-exp is far below zero, a row of zeros has an infinite weight, as a key behind the end has."""
    from ikbo_recsys.kernels import _attention_launch as launch

    call = Call(3, sum(counts), 1, 37, (1, 1), 16, layout=LENGTHS, shuffled=False, counts=counts)
    key = torch.randn(3, 37, 1, 16).abs().half().masked_fill(~call.valid[:, :, None, None], float("nan"))
    problem = replace(call.problem, query=-8 * torch.randn_like(call.problem.query).abs(), key=key, scale=4.0)
    call.problem, call.wide = problem, [problem.query.double(), key.nan_to_num(0).double(), call.wide[2]]
    call.out, call.lse = launch.Forward(problem, True)(problem)
    assert float(call.lse[call.lse.isfinite()].max()) < -100
    # The rounding of scores of that size.
    call.check(tolerance=5e-3)


@interpreted
@pytest.mark.parametrize("bad", [-3, 2**31 - 1])
def test_wrong_offsets_stay_inside(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hangs, and nothing is written outside."""
    from ikbo_recsys.kernels._launch import Room

    call = Call(3, 7, 2, 19, (1, 1), 16, layout=JAGGED, shuffled=False)
    around: list[Tensor] = []

    def surrounded(room: Any) -> Tensor:
        """A gradient between zeros."""
        shape = room._size
        memory = torch.zeros((3 * math.prod(shape[:-1]), shape[-1]), dtype=room._dtype)
        before, inside, behind = memory.chunk(3)
        around.extend((before, behind))
        return inside.view(shape)

    monkeypatch.setattr(Room, "__call__", surrounded)
    offsets, kv = call.problem.offsets.clone(), call.problem.kv.clone()
    offsets[1], kv[2] = bad, bad
    for wrong in (offsets, offsets.flip(0)):
        call.problem = replace(call.problem, offsets=wrong, kv=kv)
        call.gradients()
    assert len(around) == 2 * 2 * 3
    assert not any(bool(x.any()) for x in around)


@interpreted
def test_which_calls_are_done_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule, on both paths."""
    from ikbo_recsys.kernels import _attention_backward_hopper
    from ikbo_recsys.kernels import _attention_backward_launch as launch
    from ikbo_recsys.kernels._attention_plans import Backward

    def is_one_pass(problem: Any, path: str = "triton") -> bool:
        backward = Backward(problem, problem.query, problem.query, EVERYTHING, path, False)
        is_few = isinstance(backward._in_one_pass, launch.BackwardFew)
        assert (launch.few_refusal(problem) is None) == is_few
        return is_few

    problem = make_problem(64, 64, 1, 5, (4, 2), 16, layout=LENGTHS, shuffled=True, dtype=torch.float16)[0]
    assert is_one_pass(problem)
    monkeypatch.setattr(_attention_backward_hopper, "backward_refusal", lambda *_: "users have few query rows")
    assert is_one_pass(problem, "gluon")
    own = replace(problem, user_query=torch.randn(64, 2, 4, 16).half())
    assert "of their own" in str(launch.few_refusal(own))
    fewer_users = replace(problem, offsets=problem.offsets[1:], kv=problem.kv[1:], key=problem.key[1:])
    assert not is_one_pass(fewer_users)
    # 32 rows of two heads each fill a tile of 64; 33 do not.
    assert is_one_pass(replace(problem, query=torch.randn(64, 32, 4, 16).half()))
    assert not is_one_pass(replace(problem, query=torch.randn(64, 33, 4, 16).half()))
    assert not is_one_pass(replace(problem, query=problem.query.float(), key=problem.key.float()))
    wide = torch.randn(64, 5, 2, 136).half()
    assert not is_one_pass(replace(problem, query=torch.randn(64, 1, 4, 136).half(), key=wide, value=wide))


@interpreted
def test_through_the_public_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from ikbo_recsys import CandidateIndex, kernels
    from ikbo_recsys.kernels import _attention_backward_launch as launch
    from ikbo_recsys.kernels import _backend, _plan

    monkeypatch.setattr(_backend, "portable_refusal", lambda *_: None)
    _plan.forget()
    runs = []
    real = launch.BackwardFew.__call__
    monkeypatch.setattr(launch.BackwardFew, "__call__", lambda *given: runs.append(1) or real(*given))
    ids = torch.randint(0, 64, (150,)).sort()[0]
    index = CandidateIndex.from_user_ids(ids, 64, grouped=True)
    query, history = torch.randn(150, 1, 2, 16).half(), torch.randn(64, 21, 2, 2, 16).half()
    lengths = torch.randint(0, 22, (64,))
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in (query, *history.unbind(2))]
        with _backend.use_backend("triton"):
            out, lse = kernels.cross_attention(*leaves, index, kv_lengths=lengths, return_lse=True)
            found = torch.autograd.grad(out.sum() + lse[lengths[ids] > 0].sum(), leaves)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        expected_lse = twins.log_sum_exp(*exact[:2], ids, lengths)
        loss = twins.cross_attention(*exact, ids, lengths).sum() + expected_lse[lengths[ids] > 0].sum()
        for got, want in zip(found, torch.autograd.grad(loss, exact), strict=True):
            assert float((got.double() - want).norm()) < TOLERANCE * float(want.norm())
    assert len(runs) == 2
