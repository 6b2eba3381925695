"""Calls on the stand-in GPU, and the check that a repeated one launches what a first one launches."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys import CandidateIndex
from ikbo_recsys.kernels import _plan
from tests.standin import Launch, StandIn

Call = Callable[[], Any]


def first(gpu: StandIn, call: Call) -> list[Launch]:
    _plan.forget()
    return gpu.launches(call)


def make_index(
    gpu: StandIn, users: int, batch: int, grouped: bool = True, dtype: torch.dtype = torch.int64, device: int = 0
) -> CandidateIndex:
    ids = torch.randint(0, users, (batch,), dtype=dtype)
    index = CandidateIndex.from_user_ids(ids.sort().values if grouped else ids, users, grouped=grouped)
    offsets = None if index.offsets is None else gpu.put(index.offsets, device)
    return CandidateIndex(gpu.put(index.to_user, device), users, offsets)


# (U, B, M, D, Ku, Kc)
SHAPE = (9, 40, 70, 64, 72, 40)


def make(gpu: StandIn, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE, device: int = 0) -> list[Tensor]:
    users, batch, m, d, user_k, cand_k = shape
    shapes = ((users, user_k, d), (batch, cand_k, d), (m, user_k + cand_k))
    return [gpu.randn(*shape, dtype=dtype, device=device) for shape in shapes]


def train(forward: Callable[..., Tensor], grad: Tensor, *leaves: Tensor) -> Call:
    """A call of `forward` and its backward pass."""
    wanted = [x.detach().requires_grad_() for x in leaves]
    return lambda: torch.autograd.grad(forward(*wanted), wanted, grad)


def check(gpu: StandIn, calls: dict[str, Call], launches: int | None = None) -> dict[str, list[Launch]]:
    """Every call launches the same the first time, repeated, and with the other calls in between."""
    for call in calls.values():
        # What is derived from contents (padded weights, tables of tiles) is made once, and not what is compared here.
        gpu.launches(call)
    expected = {name: first(gpu, call) for name, call in calls.items()}
    for name, found in expected.items():
        assert found, name
        assert launches is None or len(found) == launches, name
    _plan.forget()
    order = [*calls, *calls, *random.Random(7).choices(list(calls), k=4 * len(calls))]
    for name in order:
        assert gpu.launches(calls[name]) == expected[name], name
    assert [gpu.launches(call) for call in calls.values()] == list(expected.values())
    return expected


def assert_nothing_is_kept(call: Callable[[], list[weakref.ref[Any]]]) -> None:
    """Repeated calls, too, let go of all tensors that they watch."""
    for _ in range(3):
        watched = call()
        gc.collect()
        assert [watch() for watch in watched] == [None] * len(watched)
