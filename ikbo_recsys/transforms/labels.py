"""How much of an operator's work is done more than once: the accounts' side of the pass, separate from what it can
rewrite.

A value may be a copy of fewer rows although an operator without a rule forced it to full size; such a `Plain`
stays labelled (`blocked`), so that what could be saved is counted even where it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.fx import Node
from torch.utils import _pytree as pytree

from ikbo_recsys.transforms.builder import is_random, packet_name
from ikbo_recsys.transforms.report import evaluate, hint
from ikbo_recsys.transforms.values import Compact, Level, Pieces, Plain, Size, Value, is_tensor, levels, peel, shape

if TYPE_CHECKING:
    from ikbo_recsys.transforms.walk import Walk

Replication = tuple["Level | None", Size, Size]
"""A level (None: not replicated), the different rows and the full rows."""

_NONE: Replication = (None, 1, 1)
_OWN: Replication = (Level(None, 0, 0), 1, 1)
"""Rows of its own: a candidate's."""


def visit_nodes(value: Value, visit: Callable[[Node], Any]) -> None:
    """Call `visit` on every node that `value` is made of."""
    if isinstance(value, Plain):
        visit(value.node)
    elif isinstance(value, Compact):
        if value.level.index is not None:
            visit(value.level.index)
        visit_nodes(value.inner, visit)
    else:
        for part in value.parts:
            visit_nodes(part, visit)


def replication(value: Value, mixing: tuple[int, ...] = ()) -> Replication:
    """How often the rows of `value` are repeated, along any axis but those in `mixing`."""
    if isinstance(value, Plain):
        if value.blocked is None:
            return _NONE
        return value.blocked, value.blocked_rows, value.blocked.full
    for level, axis in levels(value):
        if axis not in mixing:
            inner = peel(value, level, axis)
            if inner is not None:
                deeper = replication(inner, mixing)
                rows, full = shape(inner)[axis], level.full
                return level, rows * deeper[1], full * deeper[2]
    return _NONE


def pieces_along(w: Walk, value: Value, axis: int) -> list[tuple[Size, Replication]]:
    """(width, replication) of the pieces along an axis that the operator mixes."""
    if isinstance(value, Pieces) and value.dim == axis:
        return [entry for part in value.parts for entry in pieces_along(w, part, axis)]
    return [(shape(value)[axis], _or_own(w, value, replication(value, (axis,))))]


def shares(w: Walk, value: Value) -> list[tuple[Size, Replication]]:
    """(size, replication) of the pieces along axes that the operator keeps."""
    if isinstance(value, Pieces):
        return [(size * shape(p)[value.dim], r) for p in value.parts for size, r in shares(w, p)]
    return [(1, _or_own(w, value, replication(value)))]


def _or_own(w: Walk, value: Value, found: Replication) -> Replication:
    return _OWN if found[0] is None and w.depends(value) else found


def savable(w: Walk, target: Any, args: Any, kwargs: Any) -> Callable[[Any], float] | None:
    """The share of an operator's arithmetic that repeats, as a function of the batch sizes; None where it has none."""
    name = packet_name(target)
    operands = [v for v in pytree.tree_leaves((args, kwargs), is_leaf=is_tensor) if is_tensor(v)]
    if name in ("aten.gru", "aten.lstm", "aten.rnn_tanh", "aten.rnn_relu"):
        history = replication(operands[0])  # the initial state is as many rows of one constant
        return None if history[0] is None else lambda sizes: _repeated(history, sizes)
    if not operands or is_random(target):
        return None
    if name in ("aten.linear", "aten.matmul", "aten.mm", "aten.bmm") and len(operands) >= 2:
        return _savable_product(w, name, operands[0], operands[1])
    if name in ("aten.addmm", "aten.baddbmm") and len(operands) == 3:
        return _savable_product(w, name, operands[1], operands[2])
    if name == "aten.tensordot":
        return _savable_product(w, name, operands[0], operands[1])
    found = [replication(v) for v in operands]
    replicated = [r for r in found if r[0] is not None]
    whole = [v for v, r in zip(operands, found, strict=True) if r[0] is None and _has_rows(w, v)]
    if not replicated or whole or len({r[0] for r in replicated}) > 1:
        return None
    return lambda sizes: _repeated(replicated[0], sizes)


def _has_rows(w: Walk, value: Value) -> bool:
    return bool(w.depends(value))


def _savable_product(w: Walk, name: str, a: Value, b: Value) -> Callable[[Any], float] | None:
    last_a, first_b = len(shape(a)) - 1, max(len(shape(b)) - 2, 0)
    if name == "aten.linear":
        first_b = 1
    contracted_a, contracted_b = pieces_along(w, a, last_a), pieces_along(w, b, first_b)
    if len(contracted_a) > 1 or len(contracted_b) > 1:
        return _share_of_pairs(_align(contracted_a, contracted_b))
    outer_a = shares(w, a)
    outer_b = shares(w, b) if name != "aten.linear" else contracted_b
    pairs = [(wa * wb, ra, rb) for wa, ra in outer_a for wb, rb in outer_b]
    return _share_of_pairs(pairs)


def _align(
    a: list[tuple[Size, Replication]], b: list[tuple[Size, Replication]]
) -> list[tuple[Size, Replication, Replication]]:
    if len(b) == 1:
        return [(width, r, b[0][1]) for width, r in a]
    if len(a) == 1:
        return [(width, a[0][1], r) for width, r in b]
    return [(wa, ra, rb) for (wa, ra), (_, rb) in zip(a, b, strict=False)]


def _share_of_pairs(pairs: list[tuple[Size, Replication, Replication]]) -> Callable[[Any], float] | None:
    def repeated(ra: Replication, rb: Replication, sizes: Any) -> float:
        # An operand without rows of its own (a weight) repeats whatever the other one repeats.
        candidates = [r for r in (ra, rb) if r[0] is not None]
        if not candidates or (len(candidates) == 2 and ra[0] != rb[0]):
            return 0.0
        return _repeated(candidates[0], sizes)

    def share(sizes: Any) -> float:
        total = sum(evaluate(width, sizes) for width, _, _ in pairs)
        return (
            sum(evaluate(width, sizes) * repeated(ra, rb, sizes) for width, ra, rb in pairs) / total if total else 0.0
        )

    replicated = [r for _, ra, rb in pairs for r in (ra, rb) if r[0] is not None and r[0] != _OWN[0]]
    return share if replicated else None


def _repeated(r: Replication, sizes: Any) -> float:
    full = evaluate(r[2], sizes)
    return max(1.0 - evaluate(r[1], sizes) / full, 0.0) if full else 0.0


def blocked(target: Any, args: Any, kwargs: Any) -> tuple[Level | None, Size]:
    """The label of a result that an operator computes on whole rows though all its rows are copies."""
    operands = [v for v in pytree.tree_leaves((args, kwargs), is_leaf=is_tensor) if is_tensor(v)]
    found = {(r[0], str(r[1]), str(r[2])): r for r in map(replication, operands) if r[0] is not None}
    if len(found) != 1 or is_random(target):
        return None, None
    level, rows, full = next(iter(found.values()))
    plain = [v for v in operands if replication(v)[0] is None]
    if level is None or level.index is None or any(hint(s) == hint(full) for v in plain for s in shape(v)):
        return None, None
    return level, rows
