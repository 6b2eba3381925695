"""The one algebraic fact the pass rests on, and the two ways to use it.

An operator is *independent* along an output axis when output row `i` depends only on row `i` of the operands that
have that axis. Then it commutes with looking up rows along the axis (`sink`) and with cutting the axis
(`distribute`), whatever the index is. An operator's rule is therefore its axis map: for each operand, for each of
its axes, the output axis it becomes, or None where the operator mixes. Nothing is guessed from sizes that happen
to agree.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from ikbo_recsys.transforms.values import (
    Compact,
    Level,
    Pieces,
    Plain,
    Size,
    Value,
    expanded_inner,
    has_compact,
    is_static,
    levels,
    peel,
    rank,
    same,
    shape,
)

if TYPE_CHECKING:
    from ikbo_recsys.transforms.walk import Walk

aten = torch.ops.aten

AxisMap = list["int | None"]
Maps = dict[str, AxisMap]


def aligned(value: Value, out_rank: int) -> AxisMap:
    """The axis map of an operand that broadcasts against an output of rank `out_rank`."""
    return list(range(out_rank - rank(value), out_rank))


def sink(w: Walk, target: Any, bound: dict[str, Any], maps: Maps) -> Any:
    """Apply the operator to compact rows: `op(x[index], ...) = op(x, ...)[index]`. None where the operands do not
    allow it."""
    for name in maps:
        for level, axis in levels(bound[name]):
            out = maps[name][axis]
            if out is None:
                continue
            operands = {other: _peel_for(bound[other], level, _axis(maps[other], out)) for other in maps}
            if _rows_agree(operands, {other: _axis(maps[other], out) for other in maps}):
                result = w.call_bound(target, {**bound, **operands})
                return _wrap(result, lambda value, level=level, out=out: Compact(value, level, out))
    return None


def _axis(axis_map: AxisMap, out: int) -> int | None:
    return axis_map.index(out) if out in axis_map else None


def _peel_for(value: Value, level: Level, axis: int | None) -> Value | None:
    if axis is None:
        return value
    peeled = peel(value, level, axis)
    if peeled is None and same(shape(value)[axis], 1) and level.index is not None:
        return value
    if peeled is None:
        peeled = expanded_inner(value, axis)
    if peeled is None and isinstance(value, Plain) and same(shape(value)[axis], 1):
        return value
    return peeled


def _rows_agree(operands: dict[str, Any], axes: dict[str, int | None]) -> bool:
    """Whether all operands could be made compact, to equal numbers of rows (an index may serve two sources)."""
    if any(value is None for value in operands.values()):
        return False
    sizes = [shape(value)[axes[name]] for name, value in operands.items() if axes[name] is not None]  # type: ignore[index]
    sizes = [size for size in sizes if not same(size, 1)]
    return all(same(size, sizes[0]) for size in sizes)


def _wrap(result: Any, wrap: Any) -> Any:
    return tuple(wrap(value) for value in result) if isinstance(result, tuple) else wrap(result)


def distribute(w: Walk, target: Any, bound: dict[str, Any], maps: Maps) -> Any:
    """Apply the operator piece by piece: `op(cat(x, y)) = cat(op(x), op(y))`. None where no result stays compact."""
    tried: set[int] = set()
    for name in maps:
        value = bound[name]
        for axis in piece_axes(value):
            out = maps[name][axis]
            if out is None or out in tried:
                continue
            tried.add(out)
            chunks = cut_together({other: (bound[other], _axis(maps[other], out)) for other in maps})
            if chunks is None:
                continue
            results = [w.call_bound(target, {**bound, **whole_cuts(w, chunk)}) for chunk in chunks]
            if any(isinstance(result, tuple) for result in results) or not any(map(has_compact, results)):
                continue
            return concatenate(w, results, out)
    return None


def piece_axes(value: Value) -> list[int]:
    """The axes along which `value` is in pieces, outermost first."""
    if isinstance(value, Pieces):
        inner = [axis for part in value.parts for axis in piece_axes(part)]
        return [value.dim, *dict.fromkeys(inner)]
    return piece_axes(value.inner) if isinstance(value, Compact) else []


class Cut:
    """Rows `start:stop` of `value` along `axis`, not taken yet."""

    def __init__(self, value: Value, axis: int, start: int, stop: int) -> None:
        self.value, self.axis, self.start, self.stop = value, axis, start, stop


def cut_together(operands: dict[str, tuple[Value, int | None]]) -> list[dict[str, Any]] | None:
    """Cut every operand that has the axis at the boundaries of all of them; None where those are dynamic."""
    bounds: set[int] = set()
    for value, axis in operands.values():
        if axis is None or same(shape(value)[axis], 1):
            continue
        total = shape(value)[axis]
        if not is_static(total):
            return _cut_equal(operands)
        position = 0
        for size in runs(value, axis):
            if not is_static(size):
                return None
            position += size
            bounds.add(position)
    edges = [0, *sorted(bounds)]
    chunks = []
    for start, stop in pairwise(edges):
        chunk: dict[str, Any] = {}
        for name, (value, axis) in operands.items():
            whole = axis is None or same(shape(value)[axis], 1)
            chunk[name] = value if whole else Cut(value, axis, start, stop)  # type: ignore[arg-type]
        chunks.append(chunk)
    return chunks if len(chunks) > 1 else None


def _cut_equal(operands: dict[str, tuple[Value, int | None]]) -> list[dict[str, Any]] | None:
    """Dynamic boundaries: only where all operands that have the axis are cut alike already."""
    having = {n: v for n, (v, axis) in operands.items() if axis is not None and not same(shape(v)[axis], 1)}
    axes = {n: axis for n, (_, axis) in operands.items()}
    if not all(isinstance(v, Pieces) and v.dim == axes[n] for n, v in having.items()):
        return None
    sizes = [[shape(part)[axes[n]] for part in v.parts] for n, v in having.items()]  # type: ignore[union-attr, index]
    if not all(len(s) == len(sizes[0]) and all(map(same, s, sizes[0])) for s in sizes):
        return None
    pieces = range(len(sizes[0]))
    return [{n: having[n].parts[i] if n in having else operands[n][0] for n in operands} for i in pieces]  # type: ignore[union-attr]


def whole_cuts(w: Walk, chunk: dict[str, Any]) -> dict[str, Value]:
    return {n: take(w, v.value, v.axis, v.start, v.stop) if isinstance(v, Cut) else v for n, v in chunk.items()}


def runs(value: Value, axis: int) -> list[Size]:
    """The sizes of the pieces along `axis`."""
    if isinstance(value, Compact) and value.dim != axis:
        return runs(value.inner, axis)
    if isinstance(value, Pieces) and value.dim == axis:
        return [size for part in value.parts for size in runs(part, axis)]
    if isinstance(value, Pieces):
        edges: set[Size] = set()
        for part in value.parts:
            sizes = runs(part, axis)
            if len(sizes) == 1:
                continue
            if not all(map(is_static, sizes)):
                return [shape(value)[axis]]
            edges.update(sum(sizes[: i + 1]) for i in range(len(sizes) - 1))
        total = shape(value)[axis]
        if not edges or not is_static(total):
            return [total]
        ordered = [0, *sorted(edges), total]
        return [b - a for a, b in pairwise(ordered)]
    return [shape(value)[axis]]


def take(w: Walk, value: Value, axis: int, start: int, stop: int) -> Value:
    """Rows `start:stop` along `axis`, of static sizes."""
    if same(shape(value)[axis], stop) and start == 0:
        return value
    if isinstance(value, Compact):
        if value.dim != axis:
            return Compact(take(w, value.inner, axis, start, stop), value.level, value.dim)
        if value.level.index is None:
            return Compact(value.inner, Level(None, 1, stop - start), axis)
        value = Plain(w.build.whole(value))
    if isinstance(value, Pieces):
        if value.dim != axis:
            return Pieces(tuple(take(w, part, axis, start, stop) for part in value.parts), value.dim)
        taken, position = [], 0
        for part in value.parts:
            size = shape(part)[axis]
            low, high = max(start - position, 0), min(stop - position, size)
            if low < high:
                taken.append(take(w, part, axis, low, high))
            position += size
        if taken:
            return concatenate(w, taken, axis)
        value = Plain(w.build.whole(value))
    return Plain(w.build.emit(aten.slice.Tensor, value.node, axis, start, stop), value.blocked, value.blocked_rows)


def concatenate(w: Walk, parts: list[Value], dim: int) -> Value:
    """Join parts: whole neighbours at once, neighbours of one level at their compact size, the rest lazily."""
    flat: list[Value] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Pieces) and part.dim == dim else [part])
    merged: list[Value] = [flat[0]]
    for part in flat[1:]:
        joined = _join(w, merged[-1], part, dim)
        if joined is None:
            merged.append(part)
        else:
            merged[-1] = joined
    return merged[0] if len(merged) == 1 else Pieces(tuple(merged), dim)


def _join(w: Walk, a: Value, b: Value, dim: int) -> Value | None:
    if isinstance(a, Plain) and isinstance(b, Plain) and a.blocked == b.blocked:
        # `cat` of a cat: the inner one usually becomes dead.
        return Plain(_cat(w, [*_cat_inputs(a.node, dim), b.node], dim), a.blocked, a.blocked_rows)
    for level, axis in levels(a):
        if axis == dim:
            continue
        inner_a, inner_b = peel(a, level, axis), peel(b, level, axis)
        if inner_a is not None and inner_b is not None and same(shape(inner_a)[axis], shape(inner_b)[axis]):
            return Compact(concatenate(w, [inner_a, inner_b], dim), level, axis)
    return None


def _cat(w: Walk, nodes: list[Any], dim: int) -> Any:
    """`cat`; neighbouring slices of one tensor are one slice again."""
    before, last = nodes[-2:]
    slices = before.target is last.target is aten.slice.Tensor and len(before.args) == len(last.args) == 4
    if slices and before.args[:2] == last.args[:2] == (before.args[0], dim) and before.args[3] == last.args[2]:
        joined = take(w, Plain(before.args[0]), dim, before.args[2], last.args[3])
        nodes = [*nodes[:-2], w.build.whole(joined)]
    return nodes[0] if len(nodes) == 1 else w.build.emit(aten.cat.default, nodes, dim)


def _cat_inputs(node: Any, dim: int) -> list[Any]:
    if node.target is aten.cat.default and node.args[1:] == (dim,):
        return list(node.args[0])
    return [node]
