"""`analyze`: what a model wastes on copies of user rows, and what would be saved, without changing it.

Shape letters: U users, B candidates.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from ikbo_recsys.transforms.optimize import NothingToOptimize, optimize
from ikbo_recsys.transforms.report import GPUS, Report, amount
from ikbo_recsys.transforms.tracing import batch_symbols


@dataclass
class AtRatio:
    """The costs of one request batch.

    Attributes:
        users, candidates: U and B.
        flops_before, flops_after: matmul arithmetic of the model and of the optimized program.
        repeated: the part of `flops_before` that is done more than once on equal rows.
        bytes_before, bytes_after: what the operators write, were none of them fused.
        seconds_before, seconds_after: a roofline bound at the GPU's peak rates: arithmetic or memory, whichever
            takes longer.
    """

    users: int
    candidates: int
    flops_before: int
    flops_after: int
    repeated: int
    bytes_before: int
    bytes_after: int
    seconds_before: float
    seconds_after: float


@dataclass
class Analysis:
    """The result of `analyze`: `print` it for a table, `to_json()` for a program.

    Attributes:
        inputs: every tensor input with its rate: "user" (U rows), "candidate" (B rows) or "fixed".
        report: where rows are copied; what can be sunk, split or replaced, what is left, and why.
        at: the costs at the asked ratio.
        gpu: whose peak rates `at` uses.
    """

    inputs: dict[str, str]
    report: Report
    at: AtRatio
    gpu: str

    def to_dict(self) -> dict[str, Any]:
        return {"inputs": self.inputs, "gpu": self.gpu, "at": asdict(self.at), **self.report.to_dict()}

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        at = self.at
        rates = ", ".join(f"{name} ({rate})" for name, rate in self.inputs.items())
        lines = [f"inputs: {rates}", str(self.report)]
        share = (at.flops_before - at.flops_after) / at.flops_before if at.flops_before else 0.0
        before, after = at.seconds_before * 1e6, at.seconds_after * 1e6
        lines += [
            f"at U={at.users}, B={at.candidates}:",
            f"  matmul FLOPs    {amount(at.flops_before)} -> {amount(at.flops_after)} ({share:.0%} less); "
            f"{amount(at.repeated)} are repeated",
            f"  bytes written   {amount(at.bytes_before, 'B')} -> {amount(at.bytes_after, 'B')}, were nothing fused",
            f"  {self.gpu} roofline   {before:.2f} us -> {after:.2f} us: a bound at peak rates, not a forecast",
        ]
        return "\n".join(lines)


def analyze(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    user_inputs: Iterable[str] | None = None,
    dynamic: Mapping[str, Any] | None = None,
    caller_broadcasts: bool | None = None,
    ratio: int = 64,
    users: int = 1,
    gpu: str = "h200",
) -> Analysis:
    """What a model spends on copies of user rows, and what the operators of this library would save. Nothing is
    changed.

    Args:
        model, args, kwargs, user_inputs, dynamic, caller_broadcasts: as in `optimize`.
        ratio: candidates per user to account for. Sizes that the model has fixed stay what they are.
        users: U to account for.
        gpu: one of `ikbo_recsys.transforms.report.GPUS`.

    Raises:
        ValueError: an unknown GPU, a ratio or number of users below 1, and as `optimize`.

    Example::

        >>> import torch
        >>> class Ranker(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(10, 1)
        ...
        ...     def forward(self, user, candidate, index):
        ...         return self.linear(torch.cat([user[index], candidate], 1))
        >>> example = (torch.randn(3, 6), torch.randn(24, 4), torch.arange(24) // 8)
        >>> found = analyze(Ranker(), example, ratio=64)
        >>> found.at.repeated, found.at.flops_before - found.at.flops_after
        (756, 756)
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {gpu!r}")
    if ratio < 1 or users < 1:
        raise ValueError(f"ratio and users must be at least 1, got {ratio} and {users}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingToOptimize)
        result = optimize(
            model, args, kwargs, user_inputs=user_inputs, dynamic=dynamic, caller_broadcasts=caller_broadcasts
        )
    report = result.report
    rates = _rates(result.program, report)
    sizes = {symbol: users if rate == "user" else users * ratio for symbol, rate in rates.items()}
    return Analysis(_inputs(result.program, rates), report, _costs(report, sizes, users, ratio, gpu), gpu)


def _rates(program: ExportedProgram, report: Report) -> dict[Any, str]:
    """Which dynamic batch size is the users' and which the candidates': sources of broadcasts, and their results."""
    sources, results = report.source_symbols, report.result_symbols
    rates = {}
    for symbol in batch_symbols(program).values():
        if symbol in sources and symbol not in results:
            rates[symbol] = "user"
        elif symbol in results and symbol not in sources:
            rates[symbol] = "candidate"
        else:
            rates[symbol] = "candidate" if symbol in results else "other"
    return rates


def _inputs(program: ExportedProgram, rates: Mapping[Any, str]) -> dict[str, str]:
    wanted: Sequence[str] = program.graph_signature.user_inputs  # type: ignore[assignment]
    found = {}
    for node in program.graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder" and node.name in wanted and hasattr(val, "shape"):
            first = val.shape[0] if val.dim() else 0
            found[node.name] = "fixed" if isinstance(first, int) else rates.get(first.node.expr, "other")
    return found


def _costs(report: Report, sizes: Mapping[Any, int], users: int, ratio: int, gpu: str) -> AtRatio:
    costs = report.costs_at(sizes)
    peak = GPUS[gpu]
    before = max(costs.flops_before / peak.flops, costs.bytes_before / peak.bandwidth)
    after = max(costs.flops_after / peak.flops, costs.bytes_after / peak.bandwidth)
    return AtRatio(
        users,
        users * ratio,
        costs.flops_before,
        costs.flops_after,
        round(costs.repeated),
        costs.bytes_before,
        costs.bytes_after,
        before,
        after,
    )
