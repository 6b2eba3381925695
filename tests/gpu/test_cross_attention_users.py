"""`cross_attention` on a GPU with query rows of the users' own and with its log-sum-exp, path by path, against fp64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ikbo_recsys import CandidateIndex, kernels
from ikbo_recsys.kernels import _backend
from tests import twins
from tests.cases import relative_error
from tests.gpu.test_cross_attention import BF16, FP16, FP32, Call, backend_of


@pytest.fixture(params=["triton", "gluon"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with backend_of(request.param, monkeypatch) as backend:
        yield backend


class BothCall(Call):
    """A `Call` in which every user has `own_rows` query rows of its own. Results: outs, lses, dq, dk, dv, user dq."""

    def __init__(self, own_rows: int, *sizes: Any, **how: Any) -> None:
        super().__init__(*sizes, **how)
        users, heads, size = sizes[0], sizes[4][0], sizes[5]
        dtype = self.query.dtype
        self.own = torch.randn(users, own_rows, heads, size, device="cuda").to(dtype)
        self.grads = [self.grad, torch.randn_like(self.own)]
        self.grads += [torch.randn(x.shape[:3], device="cuda") for x in (self.query, self.own)]

    def results(self) -> list[Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor, own: Tensor) -> Any:
            return kernels.cross_attention(q, k, v, self.index, user_query=own, return_lse=True, **self.options)

        return _with_gradients(run, (self.query, self.key, self.value, self.own), self.grads)

    def twin_results(self, dtype: torch.dtype) -> list[Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor, own: Tensor) -> list[Tensor]:
            with torch.device("cuda"):
                sides = (q, self.index.to_user.long()), (own, torch.arange(own.shape[0]))
                outs = [twins.cross_attention(x, k, v, ids, self.lengths, self.scale) for x, ids in sides]
                return outs + [twins.log_sum_exp(x, k, ids, self.lengths, self.scale) for x, ids in sides]

        operands = [x.to(dtype) for x in (self.query, *self.padded, self.own)]
        found = _with_gradients(run, operands, [x.to(dtype) for x in self.grads])
        if self.key.dim() == 3:
            found[5:7] = (x[self.valid] for x in found[5:7])
        return found

    def check(self) -> None:
        names = ("out", "user_out", "lse", "user_lse", "dq", "dk", "dv", "user dq")
        exact, theirs = self.twin_results(torch.float64), self.twin_results(self.query.dtype)
        for name, ours, torchs, true in zip(names, self.results(), theirs, exact, strict=True):
            if "lse" in name:
                assert torch.equal(ours.isinf(), true.isinf()), name
                ours, torchs, true = (x.masked_fill(true.isinf(), 0) for x in (ours, torchs, true))
            error, allowed = relative_error(ours, true), relative_error(torchs, true)
            assert error <= 1.25 * allowed + 1e-6, f"{name}: {error:.2e}, torch has {allowed:.2e}"


def _with_gradients(function: Any, operands: Any, grads: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in operands]
    results = function(*leaves)
    kept = [*results[:2], *(x.masked_fill(x.isinf(), 0) for x in results[2:])]
    gradients = torch.autograd.grad(kept, leaves, [g.to(x.dtype) for g, x in zip(grads, kept, strict=True)])
    return [*(x.detach() for x in results), *gradients]


@pytest.mark.parametrize("layout", ["full", "lengths", "jagged"])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    ("seeds", "own_rows", "dtype"), [(64, 301, FP16), (17, 5, BF16), (1, 64, FP16), (128, 130, BF16)]
)
def test_against_fp64(path: str, layout: str, grouped: bool, seeds: int, own_rows: int, dtype: torch.dtype) -> None:
    BothCall(own_rows, 5, 37, seeds, 301, (4, 2), 128, dtype=dtype, layout=layout, grouped=grouped).check()


@pytest.mark.parametrize("size", [8, 40, 64, 104])
def test_head_sizes(path: str, size: int) -> None:
    BothCall(20, 4, 50, 8, 130, (3, 3), size, layout="jagged", index_dtype=torch.int32).check()


@pytest.mark.parametrize(("size", "dtype"), [(256, FP16), (33, BF16), (64, FP32), (7, FP32)])
def test_what_only_the_portable_kernels_take(size: int, dtype: torch.dtype) -> None:
    with _backend.use_backend("triton"):
        BothCall(9, 3, 20, 5, 77, (2, 1), size, dtype=dtype, grouped=False).check()


def test_users_without_candidates_and_few_of_everything(path: str) -> None:
    BothCall(3, 70, 2, 64, 40, (2, 2), 64, layout="full").check()
    call = BothCall(1, 1, 1, 1, 5, (1, 1), 64, layout="full")
    for ours, true in zip(call.results(), call.twin_results(torch.float64), strict=True):
        assert relative_error(ours, true) < 5e-3


def test_fused_and_apart_give_the_same_rows(path: str) -> None:
    """Bitwise: a row does not depend on which rows run beside it, nor the repeated call on the first."""
    call = BothCall(150, 3, 61, 64, 300, (2, 2), 128)
    with torch.no_grad():
        options = dict(call.options)
        both = [
            kernels.cross_attention(
                call.query, call.key, call.value, call.index, user_query=call.own, return_lse=True, **options
            )
            for _ in range(2)
        ]
        alone = kernels.cross_attention(call.query, call.key, call.value, call.index, return_lse=True, **options)
        users = CandidateIndex.from_counts(torch.ones(3, dtype=torch.int64, device="cuda"), num_candidates=3)
        own = kernels.cross_attention(call.own, call.key, call.value, users, return_lse=True, **options)
    for first, second in zip(*both, strict=True):
        assert torch.equal(first, second)
    for fused, apart in zip(both[0], (alone[0], own[0], alone[1], own[1]), strict=True):
        # Log-sum-exps of rows without a key are -inf on both sides.
        assert torch.equal(fused, apart)


def test_gradients_are_deterministic(path: str) -> None:
    call = BothCall(70, 3, 61, 64, 300, (2, 2), 128)
    for first, second in zip(call.results(), call.results(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("grouped", [True, False])
def test_capture_and_replay_with_other_contents(path: str, grouped: bool) -> None:
    sizes = (4, 64, 64, 200, (2, 2), 64)
    call = BothCall(40, *sizes, grouped=grouped)
    operands = [x.clone() for x in (call.query, call.key, call.value, call.own)]

    def run() -> Any:
        q, k, v, own = operands
        return kernels.cross_attention(q, k, v, call.index, user_query=own, **call.options)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    for _ in range(2):
        other = BothCall(40, *sizes, grouped=grouped)
        for to, source in zip(operands, (other.query, other.key, other.value, other.own), strict=True):
            to.copy_(source)
        call.index.to_user.copy_(other.index.to_user)
        if grouped:
            call.index.offsets.copy_(other.index.offsets)
        call.options["kv_lengths"].copy_(other.options["kv_lengths"])
        graph.replay()
        for got, true in zip(outs, other.twin_results(torch.float64), strict=False):
            assert relative_error(got, true) < 1e-3


def test_compiled(path: str) -> None:
    """One graph for two batch sizes; a second index in the same graph, whose memory may be the first one's."""
    torch._dynamo.reset()

    def function(q: Tensor, k: Tensor, v: Tensor, own: Tensor, first: Tensor, second: Tensor) -> Any:
        results = kernels.cross_attention(q * 1.0, k, v, first, user_query=own, return_lse=True)
        again = kernels.cross_attention(q * 1.0, k, v, second)
        return [results[0] + again, *results[1:]]

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for cands in (64, 96):
        call = BothCall(33, 4, cands, 32, 200, (2, 2), 64, grouped=False, layout="full")
        other = torch.randint(0, 4, (cands,), device="cuda")

        def run(how: Any, call: BothCall = call, other: Tensor = other) -> list[Tensor]:
            def on(*operands: Tensor) -> Any:
                return how(*operands, call.index.to_user, other)

            return _with_gradients(on, (call.query, call.key, call.value, call.own), call.grads)

        for got, expected in zip(run(compiled), run(function), strict=True):
            assert relative_error(got, expected.double()) < 1e-3
        with torch.no_grad():
            inputs = (call.query, call.key, call.value, call.own, call.index.to_user, other)
            for got, expected in zip(compiled(*inputs), function(*inputs), strict=True):
                assert relative_error(got, expected.double()) < 1e-3


def test_flops_are_counted() -> None:
    import ikbo_recsys.kernels.flops  # noqa: F401

    call = BothCall(33, 4, 64, 32, 200, (2, 2), 64, layout="full")
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        kernels.cross_attention(call.query, call.key, call.value, call.index, user_query=call.own)
    assert counter.get_total_flops() == 4 * (64 * 32 + 4 * 33) * 200 * 2 * 64


def test_which_path() -> None:
    call = BothCall(600, 3, 6, 1, 300, (2, 2), 128)
    options = {"user_query": call.own, **call.options}
    choice = kernels.explain(kernels.cross_attention, call.query, call.key, call.value, call.index, **options)
    expected = "triton" if _backend.hopper_refusal(torch.device("cuda", 0)) else "gluon"
    assert choice.path == expected, str(choice)
    odd = torch.randn(3, 600, 2, 129, device="cuda", dtype=FP16)[..., 1:]
    options["user_query"] = odd
    choice = kernels.explain(kernels.cross_attention, call.query, call.key, call.value, call.index, **options)
    assert choice.path == "triton", str(choice)
    if expected == "gluon":
        assert "user_query is not aligned" in choice.refused["gluon"]
