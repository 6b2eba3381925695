"""All gradients in one pass, where users have few query rows, on a GPU: see `test_cross_attention.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ikbo_recsys import CandidateIndex, kernels
from ikbo_recsys.kernels import _attention_backward_launch as launch
from ikbo_recsys.kernels import _backend, _plan
from tests.cases import relative_error
from tests.gpu.test_cross_attention import BF16, FP16, Call, _with_gradients

USERS = 70
UNEVEN = torch.tensor([0, 60] * (USERS // 2))
"""Candidates of each user, with two heads for a key head: few rows on average, and half of the users have more."""


@pytest.fixture(autouse=True)
def one_pass(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The portable path; every test's backward passes go through the kernel, whose launches are counted."""
    runs: list[int] = []
    run: Any = launch.BackwardFew.__call__

    def counted(*given: Any) -> Any:
        runs.append(1)
        return run(*given)

    monkeypatch.setattr(launch.BackwardFew, "__call__", counted)
    _plan.forget()
    with _backend.use_backend("triton"):
        yield runs
    assert runs


def make(seeds: int, heads: tuple[int, int], size: int, counts: Tensor | None = None, **how: Any) -> Call:
    """Users with 0 to 8 candidates, or as many as `counts` says."""
    counts = torch.randint(0, 9, (USERS,)) if counts is None else counts
    call = Call(USERS, int(counts.sum()), seeds, 301, heads, size, **how)
    to_user = torch.arange(USERS).repeat_interleave(counts)
    if not how.get("grouped", True):
        to_user = to_user[torch.randperm(len(to_user))]
    to_user = to_user.cuda().to(how.get("index_dtype", torch.int64))
    call.index = CandidateIndex.from_user_ids(to_user, USERS, grouped=how.get("grouped", True))
    return call


@pytest.mark.parametrize("layout", ["full", "lengths", "jagged"])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    ("seeds", "heads", "size", "dtype"),
    [
        (1, (2, 2), 64, BF16),
        (1, (4, 2), 128, FP16),
        (5, (2, 2), 104, BF16),
        (3, (6, 2), 40, FP16),
        (7, (2, 2), 8, FP16),
    ],
)
def test_against_fp64(
    layout: str, grouped: bool, seeds: int, heads: tuple[int, int], size: int, dtype: torch.dtype
) -> None:
    make(seeds, heads, size, dtype=dtype, layout=layout, grouped=grouped).check()


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_users_with_more_rows_than_a_tile(size: int, index_dtype: torch.dtype) -> None:
    """None, one, a full tile, one more, and several tiles, where others have few."""
    counts = torch.randint(20, 60, (USERS,))
    counts[:6] = torch.tensor([0, 1, 64, 65, 128, 500])
    make(1, (2, 2), size, counts, dtype=BF16, layout="jagged", index_dtype=index_dtype).check()


@pytest.mark.parametrize("counts", [None, UNEVEN])
@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
def test_only_the_gradients_asked_for(counts: Tensor | None, needs: tuple[int, int, int]) -> None:
    call = make(1, (4, 2), 64, counts, grouped=False)
    every = call.ours()[1:]
    operands = (call.query, call.key, call.value)
    leaves = [x.detach().requires_grad_(bool(n)) for x, n in zip(operands, needs, strict=True)]
    call.run(*leaves).backward(call.grad)
    for leaf, expected, need in zip(leaves, every, needs, strict=True):
        assert (leaf.grad is not None) == bool(need)
        if need:
            assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("counts", [None, UNEVEN])
def test_gradients_are_deterministic(counts: Tensor | None) -> None:
    call = make(1, (4, 2), 128, counts, dtype=BF16)
    for first, second in zip(call.ours(), call.ours(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("counts", [None, UNEVEN])
def test_gradient_of_the_log_sum_exp(counts: Tensor | None) -> None:
    call = make(1, (4, 2), 64, counts)
    for got, want in zip(*call.gradients_with_log_sum_exp(), strict=True):
        assert relative_error(got, want) < 2e-3


def test_padding_gets_zeros() -> None:
    call = make(1, (2, 2), 64, layout="lengths")
    for grad in call.ours()[2:]:
        assert torch.equal(grad[~call.valid], torch.zeros_like(grad[~call.valid]))


def test_nothing_waits_for_the_gpu_and_new_contents_count() -> None:
    call, other = (make(1, (2, 2), 64, torch.full((USERS,), 6), grouped=False) for _ in range(2))
    call.ours()
    call.index.to_user.copy_(other.index.to_user)
    call.options["kv_lengths"].copy_(other.options["kv_lengths"])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grads = _with_gradients(call.run, (other.query, other.key, other.value), other.grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, expected in zip(grads, other.twin(torch.float64), strict=True):
        assert relative_error(got, expected) < 2e-3


def test_compiled(one_pass: list[int]) -> None:
    torch._dynamo.reset()
    call = make(1, (2, 2), 64, grouped=False)

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        to_user = call.index.to_user
        return kernels.cross_attention(query * 1.0, key, value, to_user, kv_lengths=call.options["kv_lengths"])

    operands = (call.query, call.key, call.value)
    found = _with_gradients(torch.compile(function, fullgraph=True, dynamic=True), operands, call.grad)
    assert len(one_pass) == 1
    for got, expected in zip(found, call.twin(torch.float64), strict=True):
        assert relative_error(got, expected) < 2e-3
