"""What the pass found and did: the accounts, as objects, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ikbo_recsys.transforms.builder import packet_name

Sizes = Mapping[Any, int]
"""Values for the dynamic sizes (by their sympy symbols); those not named have the example's."""

_COUNTED = frozenset(
    f"aten.{name}"
    for name in (
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "mv", "dot", "addmv", "bilinear"),
        *(
            "scaled_dot_product_attention",
            "conv1d",
            "conv2d",
            "convolution",
            "conv3d",
            "outer",
            "multi_head_attention_forward",
        ),
        *("_transformer_encoder_layer_fwd", "_native_multi_head_attention", "gru", "lstm", "rnn_tanh", "rnn_relu"),
    )
) | {"ikbo.linear", "ikbo.compression_linear", "ikbo.cross_attention", "ikbo.dot_interaction"}
"""Operators with arithmetic that `FlopCounterMode` counts (matmuls, convolutions, attention)."""


@dataclass
class Gpu:
    """Peak rates of a GPU, from its data sheet: dense bf16 matmuls in FLOP/s, memory in byte/s."""

    flops: float
    bandwidth: float


GPUS = {
    "h200": Gpu(989e12, 4.8e12),
    "h100": Gpu(989e12, 3.35e12),
    "a100": Gpu(312e12, 2.04e12),
    "l40s": Gpu(362e12, 0.864e12),
    "l4": Gpu(121e12, 0.3e12),
}


@dataclass
class Broadcast:
    """A place where rows are copied."""

    operator: str
    where: str
    index: str
    source_rows: int
    rows: int
    bytes: int


@dataclass
class Entry:
    """What became of one operator.

    Attributes:
        outcome: "sunk" (it runs on compact rows), "split" (part of it does), "replaced" (by an operator of this
            library), "left" (on whole rows though an operand was compact) or "same" (nothing about it is compact).
        flops_before, flops_after, savable: matmul arithmetic at the sizes of the example.
    """

    node: str
    operator: str
    where: str
    module: str
    outcome: str = "same"
    reason: str = ""
    flops_before: int = 0
    flops_after: int = 0
    savable: int = 0


_UNKNOWN_SIZE = 4096
"""Stands for a size that only the data knows (the number of ids of a jagged feature)."""


class Ledger:
    """Collects during the walk; `close` turns it into entries."""

    def __init__(self) -> None:
        self.broadcasts: list[Broadcast] = []
        self.savable: dict[Node, Callable[[Sizes], float]] = {}
        self.reasons: dict[Node, str] = {}
        self.replaced: dict[Node, str] = {}
        self.source_symbols: set[Any] = set()
        self.result_symbols: set[Any] = set()
        self._old: Node | None = None

    def begin(self, node: Node, savable: Callable[[Sizes], float] | None) -> None:
        self._old = node
        if savable is not None:
            self.savable[node] = savable

    def left(self, reason: str) -> None:
        if self._old is not None:
            self.reasons.setdefault(self._old, reason)

    def replaced_by(self, operator: str) -> None:
        if self._old is not None:
            self.replaced[self._old] = operator

    def broadcast(self, index: str, source_rows: Any, rows: Any) -> None:
        """The current operator replicates rows."""
        for size, symbols in ((source_rows, self.source_symbols), (rows, self.result_symbols)):
            if isinstance(size, torch.SymInt):
                symbols.update(size.node.expr.free_symbols)
        if self._old is None or any(
            b.where == where(self._old) and b.operator == _short(self._old) for b in self.broadcasts[-1:]
        ):
            return
        val = self._old.meta.get("val")
        size = val.numel() * val.element_size() if isinstance(val, torch.Tensor) else 0
        entry = Broadcast(_short(self._old), where(self._old), index, hint(source_rows), hint(rows), hint(size))
        self.broadcasts.append(entry)


@dataclass
class Costs:
    """At given batch sizes: matmul arithmetic before and after, the repeated part of it, and bytes written."""

    flops_before: int = 0
    flops_after: int = 0
    repeated: float = 0.0
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass
class Report:
    """The result of an analysis or an optimization.

    Attributes:
        mode: "inside" (the model broadcasts), "caller" (the caller did, and the program gained an index input) or
            "none".
        broadcasts: where rows are copied.
        entries: one for each operator of the model that is not "same".
        flops_before, flops_after, savable: matmul arithmetic at the example's sizes: of the model, of the
            optimized program, and what is spent on rows computed more than once.
        refused: why the graph was left alone altogether, or None.
        warnings: what a reader must not overlook.
    """

    mode: str = "none"
    broadcasts: list[Broadcast] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    flops_before: int = 0
    flops_after: int = 0
    savable: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    refused: str | None = None
    warnings: list[str] = field(default_factory=list)
    source_symbols: set[Any] = field(default_factory=set, repr=False)
    result_symbols: set[Any] = field(default_factory=set, repr=False)
    costs_at: Callable[[Sizes], Costs] = field(default=lambda sizes: Costs(), repr=False)

    @property
    def changed(self) -> bool:
        """Whether anything was sunk, split or replaced."""
        return any(entry.outcome in ("sunk", "split", "replaced") for entry in self.entries)

    @property
    def saved(self) -> int:
        return self.flops_before - self.flops_after

    def count(self, outcome: str) -> int:
        return sum(entry.outcome == outcome for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("mode", "refused", "warnings")}
        numbers = ("flops_before", "flops_after", "savable", "bytes_before", "bytes_after")
        kept.update({name: getattr(self, name) for name in numbers})
        kept["broadcasts"] = [asdict(b) for b in self.broadcasts]
        kept["entries"] = [asdict(e) for e in self.entries]
        return kept

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        if self.refused is not None:
            return f"NOTHING WAS DONE: {self.refused}"
        lines = [*self.warnings, f"broadcasts: {len(self.broadcasts)} (mode: {self.mode})"]
        lines += [
            f"  {b.operator:<22} {b.source_rows} -> {b.rows} rows, {amount(b.bytes, 'B')}  {b.where}"
            for b in self.broadcasts
        ]
        for outcome in ("sunk", "split", "replaced", "left"):
            chosen = [entry for entry in self.entries if entry.outcome == outcome]
            lines.append(f"{outcome}: {len(chosen)}")
            lines += [_line(entry) for entry in chosen]
        share = self.saved / self.savable if self.savable else 0.0
        lines.append(
            f"matmul FLOPs: {amount(self.flops_before)} before, {amount(self.flops_after)} after; "
            f"{amount(self.savable)} repeated, {share:.0%} of that removed"
        )
        return "\n".join(lines)


def _line(entry: Entry) -> str:
    flops = ""
    if entry.flops_before:
        flops = f"  {amount(entry.flops_before)} -> {amount(entry.flops_after)} FLOPs"
    reason = f"  ({entry.reason})" if entry.reason else ""
    return f"  {entry.operator:<22}{flops}  {entry.where}{reason}"


def amount(number: float, unit: str = "") -> str:
    for prefix, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale:
            return f"{number / scale:.2f} {prefix}{unit}".rstrip()
    return f"{number:.0f} {unit}".rstrip()


def where(node: Node) -> str:
    """The model's source line behind a node."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    if not places:
        return ""
    own = [place for place in places if "/torch/" not in place] or places
    parts = own[-1].replace('"', "").split(", ")
    return f"{parts[0].removeprefix('File ')}:{parts[1].removeprefix('line ')}" if len(parts) > 1 else parts[0]


def _module(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _short(node: Node) -> str:
    return packet_name(node.target).removeprefix("aten.")


def hint(size: Any) -> int:
    """The example's value of a size."""
    return evaluate(size, {})


def has_hint(size: Any) -> bool:
    """Whether the example gives the size a value: not where only the data does."""
    return not isinstance(size, torch.SymInt) or bool(size.node.has_hint())


def evaluate(size: Any, sizes: Sizes) -> int:
    """A size at other batch sizes than the example's."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr = size.node.expr.xreplace({symbol: sympy.Integer(value) for symbol, value in sizes.items()})
    if expr.free_symbols:
        env = size.node.shape_env
        if hasattr(env, "optimization_hint"):
            return int(env.optimization_hint(expr, fallback=_UNKNOWN_SIZE))
        known = env.size_hint(expr, allow_none=True)  # PyTorch 2.11
        return _UNKNOWN_SIZE if known is None else int(known)
    return int(expr)


def node_flops(node: Node, sizes: Sizes | None = None) -> int:
    """The matmul arithmetic of a node, as `FlopCounterMode` counts it."""
    if packet_name(node.target) not in _COUNTED:
        return 0
    sizes = sizes or {}

    def meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty([evaluate(s, sizes) for s in value.shape], dtype=value.dtype, device="meta")
        return evaluate(value, sizes) if isinstance(value, torch.SymInt) else value

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = pytree.tree_map(meta, (args, kwargs))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        node.target(*args, **kwargs)  # type: ignore[operator]
    return int(counter.get_total_flops())


def node_bytes(node: Node, sizes: Sizes | None = None) -> int:
    """What a node writes; views write nothing."""
    val = node.meta.get("val")
    if node.op != "call_function" or not isinstance(val, torch.Tensor) or _is_view(node):
        return 0
    return evaluate(val.numel(), sizes or {}) * val.element_size()


def _is_view(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and any(a.alias_info is not None for a in target._schema.arguments)


def close(ledger: Ledger, old: torch.fx.Graph, new: torch.fx.Graph) -> Report:
    """The report of a walk from `old` to `new`."""
    made: dict[Node, list[Node]] = {}
    for node in new.nodes:
        origin = node.meta.get("ikbo_origin")
        if origin is not None and node.op == "call_function":
            made.setdefault(origin, []).append(node)
    report = Report(broadcasts=list(ledger.broadcasts))
    calls = [node for node in old.nodes if node.op == "call_function"]
    for node in calls:
        entry = _entry(node, made.get(node, []), ledger)
        report.flops_before += entry.flops_before
        report.flops_after += entry.flops_after
        report.savable += entry.savable
        if entry.outcome != "same":
            report.entries.append(entry)
    report.bytes_before, report.bytes_after = sum(map(node_bytes, calls)), sum(map(node_bytes, new.nodes))

    def costs_at(sizes: Sizes) -> Costs:
        return Costs(
            sum(node_flops(n, sizes) for n in calls),
            sum(node_flops(n, sizes) for n in new.nodes if n.op == "call_function"),
            sum(node_flops(n, sizes) * share(sizes) for n, share in ledger.savable.items()),
            sum(node_bytes(n, sizes) for n in calls),
            sum(node_bytes(n, sizes) for n in new.nodes),
        )

    report.costs_at = costs_at
    report.source_symbols, report.result_symbols = ledger.source_symbols, ledger.result_symbols
    return report


def _entry(node: Node, made: list[Node], ledger: Ledger) -> Entry:
    entry = Entry(node.name, _short(node), where(node), _module(node))
    entry.flops_before = node_flops(node)
    entry.flops_after = sum(map(node_flops, made))
    if node in ledger.savable:
        entry.savable = round(entry.flops_before * ledger.savable[node]({}))
    absorbed = bool(entry.flops_before) and not any(map(node_flops, made))
    copied = any(packet_name(n.target) == packet_name(node.target) and _rows(n) == _rows(node) for n in made)
    if node in ledger.replaced:
        entry.outcome, entry.reason = "replaced", ledger.replaced[node]
    elif absorbed and not is_dead(node):
        entry.outcome, entry.reason = "replaced", "by the operator that reads it"
    elif node in ledger.reasons:
        entry.outcome, entry.reason = "left", ledger.reasons[node]
        if entry.flops_after < entry.flops_before:
            entry.outcome = "split"
    elif entry.flops_before and entry.flops_after < entry.flops_before:
        entry.outcome = "sunk" if len([n for n in made if node_flops(n)]) == 1 else "split"
    elif made and not copied and not _is_view(node) and _smaller(node, made):
        entry.outcome = "sunk"
    return entry


def is_dead(node: Node) -> bool:
    return not node.users


def _rows(node: Node) -> Any:
    val = node.meta.get("val")
    return tuple(map(str, val.shape)) if isinstance(val, torch.Tensor) else None


def _smaller(node: Node, made: list[Node]) -> bool:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return False
    written = [n.meta["val"].shape for n in made if isinstance(n.meta.get("val"), torch.Tensor) and not _is_view(n)]
    return bool(written) and all(_rows(node) != tuple(map(str, s)) for s in written)
