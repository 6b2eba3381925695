"""Running the pass on a traced function, and comparing before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ikbo_recsys.transforms.optimize import FAILED, rewrite
from ikbo_recsys.transforms.report import Report


def trace(function: Callable[..., Any], tensors: Sequence[Tensor]) -> GraphModule:
    """The function as a graph of ATen operators as they were called, with concrete sizes."""
    return make_fx(function, pre_dispatch=True, decomposition_table={}, tracing_mode="fake")(*tensors)


def inputs_of(module: GraphModule, skip: int = 0) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "placeholder"][skip:]


def gradients(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a sum with fixed, uneven weights."""
    total = torch.zeros((), dtype=outputs[0].dtype)
    for position, out in enumerate(outputs):
        if out.requires_grad:
            total = total + (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)).sum() / (
                position + 1
            )
    if not total.requires_grad:
        return [torch.zeros_like(t) for t in wanted]
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]


def must_rewrite(module: GraphModule, skip: int = 0) -> Report:
    """Run the pass in place (the first `skip` placeholders are parameters); it may refuse, but not fail."""
    report, _ = rewrite(module, inputs_of(module, skip))
    assert FAILED not in str(report.refused), report.refused
    return report
