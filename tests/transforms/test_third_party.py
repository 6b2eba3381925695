"""Models that nobody here wrote, unmodified: equal results and gradients, and the arithmetic that repeats is gone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ikbo_recsys.transforms import Optimized, optimize
from tests.transforms.models import PAIRS, ModelCase, deepctr_cases, rechub_cases, torchrec_cases
from tests.transforms.probe import repeated_flops


def _available() -> list[Any]:
    found = []
    for package, cases in (
        ("torchrec", torchrec_cases),
        ("torch_rechub", rechub_cases),
        ("deepctr_torch", deepctr_cases),
    ):
        try:
            found += [pytest.param(case, id=case.name.replace(" ", "-")) for case in cases()]
        except ImportError:
            found.append(pytest.param(None, id=package, marks=pytest.mark.skip(f"{package} is not installed")))
    return found


CASES = _available()


@cache
def _optimized(name: str) -> tuple[ModelCase, nn.Module, Optimized]:
    logging.getLogger().setLevel(logging.ERROR)  # torchrec warns of tracing without strict=True
    case = next(p.values[0] for p in CASES if p.values[0] is not None and p.values[0].name == name)
    model = case.make()
    args, _, full = case.batch(3, 24)
    return case, model, optimize(model, full if case.caller else args, **case.options())


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("case", CASES)
def test_same_scores(case: ModelCase) -> None:
    case, model, optimized = _optimized(case.name)
    module = optimized.module()
    assert optimized.report.changed
    for pair in PAIRS:
        if pair in case.skip:
            continue
        args, kwargs, full = case.batch(*pair, seed=sum(pair))
        with torch.no_grad():
            torch.testing.assert_close(module(*args, **kwargs), model(*full), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_repeated_arithmetic_is_gone(case: ModelCase) -> None:
    """At 64 candidates per user: nine tenths of what the analysis counts, and of what running the model shows to
    repeat."""
    case, model, optimized = _optimized(case.name)
    args, kwargs, full = case.batch(1, 64)
    before, after = flops(lambda: model(*full)), flops(lambda: optimized.module()(*args, **kwargs))
    costs = optimized.report.costs_at(batch_sizes(case, optimized, 1, 64))
    assert abs(costs.flops_after - after) <= 0.01 * after
    assert before - after >= 0.9 * costs.repeated > 0
    repeated, total = repeated_flops(lambda: model(*full), 64)
    assert total == pytest.approx(before, rel=0.01)
    assert before - after >= 0.9 * repeated > 0


def batch_sizes(case: ModelCase, optimized: Optimized, users: int, candidates: int) -> dict[Any, int]:
    """The program's symbols for U and B."""
    values = {n.name: n.meta["val"] for n in optimized.program.graph.nodes if n.op == "placeholder"}
    if case.caller:
        user, index = values[case.users[0].replace(".", "_")].shape[0], values["to_user"].shape[0]
    else:
        name = "user_lengths" if "user_lengths" in values else "user"
        user, index = values[name].shape[1 if name == "user_lengths" else 0], values["index"].shape[0]
    return {user.node.expr: users, index.node.expr: candidates}


@pytest.mark.parametrize("case", CASES)
def test_same_gradients(case: ModelCase) -> None:
    """In training mode: batch norm takes its statistics, dropout is zero."""
    model = case.make().train()
    args, _, full = case.batch(3, 24)
    optimized = optimize(model, full if case.caller else args, **case.options())
    module = optimized.module()
    assert dict(model.named_parameters()).keys() == dict(module.named_parameters()).keys()
    args, kwargs, full = case.batch(4, 31, seed=5)
    expected, buffers = _gradients(model, lambda: model(*full))
    found, updated = _gradients(model, lambda: module(*args, **kwargs))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    for name, buffer in buffers.items():
        torch.testing.assert_close(updated[name], buffer, rtol=1e-4, atol=1e-6)


def _gradients(model: nn.Module, call: Callable[[], Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients, and buffers after the step; the buffers are put back."""
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad()
    out = call()
    (out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(saved[name])
    return gradients, after
