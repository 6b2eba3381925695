"""The portable kernels over both kinds of query rows and the gradient of the log-sum-exp, in Triton's interpreter.

As `test_cross_attention_interpreter.py`, whose inputs these are.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import twins
from tests.cases import relative_error
from tests.processes import INTERPRETED, interpreted, run_interpreted
from tests.test_cross_attention_interpreter import (
    FULL,
    JAGGED,
    LENGTHS,
    TOLERANCE,
    make_problem,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


OWN = [
    ((1, 1, 1, 1, (1, 1), 8), 1, {"layout": FULL, "shuffled": False}),
    ((3, 7, 2, 19, (2, 1), 8), 5, {"layout": FULL, "shuffled": True}),
    ((3, 7, 2, 19, (2, 1), 24), 70, {"layout": LENGTHS, "shuffled": True, "index_dtype": torch.int32}),
    ((5, 40, 3, 70, (2, 2), 48), 3, {"layout": JAGGED, "shuffled": False}),
    ((4, 9, 5, 67, (3, 1), 16), 17, {"layout": JAGGED, "shuffled": True, "scale": -0.2}),
    ((1, 400, 1, 40, (1, 1), 16), 300, {"layout": LENGTHS, "shuffled": True}),
    ((9, 2, 1, 5, (1, 1), 16), 33, {"layout": JAGGED, "shuffled": False}),
]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("sizes", "own_rows", "how"), OWN)
def test_rows_of_the_users_own(sizes: tuple, own_rows: int, how: dict, dtype: torch.dtype) -> None:
    """Forward and backward over both kinds of rows, the log-sum-exps and their gradients; users without candidates."""
    from ikbo_recsys.kernels import _attention_both_launch as launch
    from ikbo_recsys.kernels._attention_plans import backward

    problem, wide, to_user, lengths, valid = make_problem(*sizes, **how, dtype=dtype)
    own = torch.randn(own_rows, sizes[0], sizes[4][0], 2 * sizes[5]).transpose(0, 1).to(dtype)[..., sizes[5] :]
    problem = replace(problem, user_query=own)
    outs, lses = launch.Forward(problem, True)(problem)
    q, k, v, u = leaves = [x.detach().requires_grad_() for x in (*wide, own.double())]
    sides = (q, to_user), (u, torch.arange(sizes[0]))
    twin = [twins.cross_attention(x, k, v, ids, lengths, problem.scale) for x, ids in sides]
    twin += [twins.log_sum_exp(x, k, ids, lengths, problem.scale) for x, ids in sides]
    tolerance = TOLERANCE[dtype]
    for got, want in zip(outs, twin, strict=False):
        assert relative_error(got, want.detach()) < tolerance
    for got, want in zip(lses, twin[2:], strict=True):
        torch.testing.assert_close(got.double(), want.detach(), rtol=1e-5, atol=1e-5)
    grads = [torch.randn(x.shape).to(dtype) for x in twin[:2]] + [torch.randn(x.shape) for x in twin[2:]]
    for with_lse in (False, True):
        chosen = slice(0, 4 if with_lse else 2)
        kept = [x.masked_fill(x.isinf(), 0) for x in twin[chosen]]
        wide_grads = [x.double() for x in grads[chosen]]
        expected = list(torch.autograd.grad(kept, leaves, wide_grads, retain_graph=True))
        if problem.layout == JAGGED:
            expected[1:3] = (x[valid] for x in expected[1:3])
        grad_lse = tuple(grads[2:]) if with_lse else None
        (dq, du), dk, dv = backward(
            problem, outs, lses, tuple(grads[:2]), ((True, True), True, True), "triton", grad_lse
        )
        for got, want in zip((dq, dk, dv, du), expected, strict=True):
            assert float((got.double() - want).norm()) < tolerance * float(want.norm().clamp_min(expected[2].norm()))


@interpreted
@pytest.mark.parametrize(
    "needs", [((True, False), False, False), ((False, True), True, False), ((False, False), True, True)]
)
def test_only_the_gradients_of_both_kinds_of_rows_asked_for(needs: tuple) -> None:
    from ikbo_recsys.kernels import _attention_both_launch as launch
    from ikbo_recsys.kernels._attention_plans import backward

    problem, *_ = make_problem(3, 7, 2, 19, (2, 1), 16, layout=LENGTHS, shuffled=True, dtype=torch.float32)
    problem = replace(problem, user_query=torch.randn(3, 5, 2, 16))
    outs, lses = launch.Forward(problem, True)(problem)
    grads = tuple(torch.randn_like(out) for out in outs)
    everything = backward(problem, outs, lses, grads, ((True, True), True, True), "triton")
    some = backward(problem, outs, lses, grads, needs, "triton")
    flat = [(*needs[0], *needs[1:]), (*some[0], *some[1:]), (*everything[0], *everything[1:])]
    for need, got, expected in zip(*flat, strict=True):
        assert (got is not None) == need
        if need:
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


@interpreted
def test_a_gradient_of_the_log_sum_exp_alone() -> None:
    from ikbo_recsys.kernels import _attention_launch as launch
    from ikbo_recsys.kernels._attention_plans import backward

    problem, wide, to_user, lengths, _ = make_problem(
        3, 7, 2, 19, (2, 1), 16, layout=LENGTHS, shuffled=True, dtype=torch.float32
    )
    out, lse = launch.Forward(problem, True)(problem)
    grad_lse = torch.randn(2, 2, 7).permute(2, 0, 1)
    q, k, _ = leaves = [x.detach().requires_grad_() for x in wide]
    twin = twins.log_sum_exp(q, k, to_user, lengths, problem.scale)
    expected = torch.autograd.grad(twin.masked_fill(twin.isinf(), 0), leaves[:2], grad_lse.double())
    dq, dk, dv = backward(problem, out, lse, torch.zeros_like(out), (True, True, True), "triton", grad_lse)
    assert relative_error(dq, expected[0]) < 2e-6
    assert relative_error(dk, expected[1]) < 2e-6
    assert not dv.any()


@interpreted
@pytest.mark.parametrize("users", [1, 3, 70])
@pytest.mark.parametrize("own_rows", [1, 4, 9])
def test_tile_table_of_both_kinds_of_rows(users: int, own_rows: int) -> None:
    """A user's own rows, as complements, before its candidates'; users without candidates too."""
    from ikbo_recsys.kernels._attention_hopper import tile_table

    problem, _, _, lengths, _ = make_problem(
        users, 2 * users, 5, 9, (1, 1), 8, layout=JAGGED, shuffled=False, dtype=torch.float32
    )
    table = tile_table(replace(problem, user_query=torch.zeros(users, own_rows, 1, 8)), rows=4)
    starts, expected = (problem.offsets * 5).tolist(), []
    for user in sorted(range(users), key=lambda u: (-int(lengths[u]), u)):
        keys = [int(problem.kv[user]), int(lengths[user])]
        end = (user + 1) * own_rows
        expected += [[~row, end, *keys] for row in range(user * own_rows, end, 4)]
        expected += [[row, starts[user + 1], *keys] for row in range(starts[user], starts[user + 1], 4)]
    assert table[1 : 1 + int(table[0, 0])].tolist() == expected
    assert len(expected) <= table.shape[0] - 1


@interpreted
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("has_own", "return_lse"), [(True, False), (True, True), (False, True)])
def test_public_function_with_own_rows_and_log_sum_exp(
    grouped: bool, has_own: bool, return_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `kernels.cross_attention` and autograd, then as a call like one before; each with its own results."""
    from ikbo_recsys import CandidateIndex, kernels
    from ikbo_recsys.kernels import _attention_paths as paths
    from ikbo_recsys.kernels import _backend, _plan

    monkeypatch.setattr(_backend, "portable_refusal", lambda *_: None)
    _plan.forget()
    for seed in range(2):
        torch.manual_seed(seed)
        ids = torch.randint(0, 3, (9,))
        ids = ids.sort()[0] if grouped else ids
        index = CandidateIndex.from_user_ids(ids, 3, grouped=grouped)
        q, own, k, v = (torch.randn(s).requires_grad_() for s in ((9, 2, 2, 16), (3, 4, 2, 16), *[(3, 11, 1, 16)] * 2))
        lengths, user_query = torch.randint(1, 12, (3,)), own if has_own else None
        sides = [(q, ids), *([(own, torch.arange(3))] if has_own else [])]
        expected = [twins.cross_attention(x.double(), k.double(), v.double(), i, lengths) for x, i in sides]
        if return_lse:
            expected += [twins.log_sum_exp(x.double(), k.double(), i, lengths) for x, i in sides]
        tensors = (q, k, v, user_query, lengths, None)
        known = _plan.signature("cross_attention", tensors, index, None, return_lse)
        if seed == 0:
            with _backend.use_backend("triton"):
                options = {"user_query": user_query, "return_lse": return_lse}
                ours = kernels.cross_attention(q, k, v, index, kv_lengths=lengths, **options)
            rest = (index.to_user, index.offsets, lengths, None, 16**-0.5, "triton", known, user_query, return_lse)
            paths.attention(q, k, v, *rest)
        else:
            ours = _plan.recall(known).repeat(q, k, v, index, lengths, user_query)
        leaves = [q, k, v, *([own] if has_own else [])]
        grads = [torch.randn(x.shape) for x in ours]
        for got, want in zip(ours, expected, strict=True):
            assert relative_error(got.detach(), want.detach()) < 2e-6
        wanted = torch.autograd.grad(expected, leaves, [x.double() for x in grads])
        for got, want in zip(torch.autograd.grad(ours, leaves, grads), wanted, strict=True):
            assert relative_error(got, want) < 4e-6
        with torch.no_grad():
            again = _plan.recall(known).repeat(q, k, v, index, lengths, user_query) if seed else ours
        for got, want in zip(again, ours, strict=True):
            assert torch.equal(got, want)
    assert len(_plan._plans) == 1
