"""Rules of operators that only rearrange: reshapes, transpositions, slices, concatenations.

Shape letters: U rows before a broadcast, B after it, T rows merged into one entry of the index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ikbo_recsys.transforms.axes import concatenate, piece_axes, sink, take
from ikbo_recsys.transforms.broadcasts import interleaved, tiled
from ikbo_recsys.transforms.report import hint
from ikbo_recsys.transforms.rules import rule
from ikbo_recsys.transforms.values import (
    Compact,
    Level,
    Pieces,
    Plain,
    Size,
    Value,
    has_compact,
    is_lazy,
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

Group = tuple[int, int, int, int]
"""Axes `a:b` of the input hold the elements of axes `c:d` of the output."""


# ---- reshape -------------------------------------------------------------------------------------------------------


@rule("view reshape _unsafe_view flatten unflatten view_as reshape_as ravel")
def reshape(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """Rows stay rows when the axis leads its group of merged or split axes."""
    value = bound["self"]
    if not is_lazy(value) or isinstance(bound.get("dtype"), torch.dtype):
        return None
    out = list(_shape_of(w, target, bound))
    result = _reshaped(w, value, out)
    if result is None:
        w.leave("the reshape merges the rows with axes in front of them")
        result = _reshaped(w, Plain(w.build.whole(value)), out)
    return result


def _shape_of(w: Walk, target: Any, bound: dict[str, Any]) -> torch.Size:
    """The full output shape."""
    from ikbo_recsys.transforms.walk import unbind

    args, kwargs = unbind(target, {**bound, "self": None})
    args = w.argument([Plain(w.build.whole(a)) if is_lazy(a) else a for a in args[1:]])
    args, kwargs = torch.fx.node.map_arg((args, w.argument(kwargs)), lambda n: n.meta["val"])
    fake = w.fake(bound["self"])
    with w.build.inference():
        return target(fake, *args, **kwargs).shape


def _reshaped(w: Walk, value: Value, out: list[Size]) -> Value | None:
    """`value` with full shape `out`."""
    if isinstance(value, Plain):
        if len(out) == rank(value) and all(map(same, out, shape(value))):
            return value
        node = w.build.emit(aten.reshape.default, value.node, w.build.sizes(out))
        return Plain(node, value.blocked, value.blocked_rows)
    before = shape(value)
    groups = match_groups(before, out)
    if groups is None:
        return None
    group = next(g for g in groups if g[0] <= value.dim < g[1])
    if isinstance(value, Pieces):
        return _reshaped_pieces(w, value, before, out, group)
    return _reshaped_compact(w, value, before, out, group)


def match_groups(before: list[Size], after: list[Size]) -> list[Group] | None:
    """The finest grouping of axes with equal numbers of elements; None with empty tensors."""
    if any(hint(size) == 0 for size in (*before, *after)):
        return None
    groups, a, c = [], 0, 0
    while a < len(before) or c < len(after):
        b, d = min(a + 1, len(before)), min(c + 1, len(after))
        left, right = _product(before[a:b]), _product(after[c:d])
        while not same(left, right):
            if (hint(left) < hint(right) or d == len(after)) and b < len(before):
                left, b = left * before[b], b + 1
            elif d < len(after):
                right, d = right * after[d], d + 1
            else:
                return None
        groups.append((a, b, c, d))
        a, c = b, d
    return groups


def _product(sizes: list[Size]) -> Size:
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def _leading(sizes: list[Size], start: int, stop: int) -> int:
    """The first axis of a group that is not of size one (its last axis, where all are)."""
    for axis in range(start, stop):
        if not same(sizes[axis], 1):
            return axis
    return stop - 1


def _reshaped_compact(w: Walk, value: Compact, before: list[Size], out: list[Size], group: Group) -> Value | None:
    a, b, c, d = group
    level, dim = value.level, value.dim
    if c == d:
        return None
    first = _leading(before, a, b)
    rest_in = _product([before[axis] for axis in range(a, b) if axis != dim])
    target_axis = _leading(out, c, d)
    inner_before = shape(value.inner)
    if level.index is None:
        if same(rest_in, 1) and same(out[target_axis], before[dim]):
            inner = _reshaped(w, value.inner, _with(out, target_axis, 1))
            return None if inner is None else Compact(inner, level, target_axis)
        return _merge_stretched(w, value, before, out, group)
    if first != dim and not same(before[dim], 1):
        return None
    if any(not same(before[axis], 1) for axis in range(a, dim)):
        return None
    rest_out = _product([out[axis] for axis in range(c, d) if axis != target_axis])
    rows = _ratio(level.rows * rest_in, rest_out)
    if rows is None:
        return None
    inner_rows = inner_before[dim] * rest_in if same(rest_out, 1) else _exact(inner_before[dim], rest_in, rest_out)
    if inner_rows is None:
        return None
    inner = _reshaped(w, value.inner, _with(out, target_axis, inner_rows))
    return None if inner is None else Compact(inner, Level(level.index, rows), target_axis)


def _ratio(numerator: Size, denominator: Size) -> int | None:
    if is_static(numerator) and is_static(denominator):
        return numerator // denominator if denominator and numerator % denominator == 0 else None
    return 1 if same(numerator, denominator) else None


def _exact(rows: Size, rest_in: Size, rest_out: Size) -> Size | None:
    if same(rest_in, rest_out):
        return rows
    if is_static(rest_in) and is_static(rest_out):
        return rows * (rest_in // rest_out) if rest_in % rest_out == 0 else rows // (rest_out // rest_in)
    return None


def _with(sizes: list[Size], axis: int, size: Size) -> list[Size]:
    return [*sizes[:axis], size, *sizes[axis + 1 :]]


def _merge_stretched(w: Walk, value: Compact, before: list[Size], out: list[Size], group: Group) -> Value | None:
    """`x[:, None].expand(U, R, ...).reshape(U * R, ...)` repeats rows in place; `x[None].expand(R, U, ...)` tiles
    them."""
    a, b, c, d = group
    wide_in = [axis for axis in range(a, b) if not same(before[axis], 1)]
    wide_out = [axis for axis in range(c, d) if not same(out[axis], 1)]
    if len(wide_in) != 2 or len(wide_out) != 1 or value.dim not in wide_in:
        return None
    other = next(axis for axis in wide_in if axis != value.dim)
    copies, rows = w.build.size_of(value, value.dim), w.build.size_of(value, other)
    target_axis = wide_out[0]
    inner = _reshaped(w, value.inner, _with(out, target_axis, before[other]))
    if inner is None:
        return None
    make = interleaved if other < value.dim else tiled
    node = make(w, value, rows, copies)
    if w.user_inputs is None or w.depends(value) <= w.user_inputs:
        w.ledger.broadcast(node.name, before[other], out[target_axis])
    return Compact(inner, Level(node), target_axis)


def _reshaped_pieces(w: Walk, value: Pieces, before: list[Size], out: list[Size], group: Group) -> Value | None:
    a, b, c, d = group
    if c == d or any(not same(before[axis], 1) for axis in range(a, value.dim)):
        return None
    target_axis = _leading(out, c, d)
    rest_in = _product([before[axis] for axis in range(value.dim + 1, b)])
    rest_out = _product([out[axis] for axis in range(target_axis + 1, d)])
    parts = []
    for part in value.parts:
        width = shape(part)[value.dim]
        if same(rest_in, rest_out):
            new_width = width
        else:
            ratio = _ratio(width * rest_in, rest_out) if is_static(width) else None
            if ratio is None:
                return None
            new_width = ratio
        parts.append(_reshaped_part(w, part, value.dim, _with(out, target_axis, new_width), target_axis))
    return concatenate(w, [part for part in parts if part is not None], target_axis)


_MOST_ROWS = 64


def _reshaped_part(w: Walk, part: Value, dim: int, out: list[Size], target_axis: int) -> Value | None:
    new = _reshaped(w, part, out)
    rows = shape(part)[dim]
    if new is None and is_static(rows) and 1 < rows <= _MOST_ROWS and out[target_axis] % rows == 0 and piece_axes(part):
        # Pieces behind a merged axis: row by row they lead (all products of two lists of features, flattened).
        one = _with(out, target_axis, out[target_axis] // rows)
        single = [_reshaped(w, take(w, part, dim, row, row + 1), one) for row in range(rows)]
        if all(v is not None for v in single):
            return concatenate(w, [v for v in single if v is not None], target_axis)
    return _reshaped(w, Plain(w.build.whole(part)), out) if new is None else new


# ---- axes come, go and change places -------------------------------------------------------------------------------


@rule("unsqueeze")
def unsqueeze(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    value = bound["self"]
    dim = bound["dim"] % (rank(value) + 1)
    if not is_lazy(value):
        return None
    return _moved(
        w,
        value,
        [axis + (axis >= dim) for axis in range(rank(value))],
        lambda v: w.call(aten.unsqueeze.default, v, dim),
    )


@rule("squeeze")
def squeeze(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    value = bound["self"]
    if not is_lazy(value):
        return None
    sizes = shape(value)
    dims = bound.get("dim", list(range(len(sizes))))
    dims = sorted({d % len(sizes) for d in (dims if isinstance(dims, list | tuple) else [dims])})
    dims = [d for d in dims if same(sizes[d], 1)]
    lazy_axes = {axis for _, axis in levels(value)}
    if lazy_axes & set(dims) or any(not is_static(sizes[d]) for d in bound.get("dims", [])):
        return None
    kept = [axis for axis in range(len(sizes)) if axis not in dims]
    to = [kept.index(axis) if axis in kept else None for axis in range(len(sizes))]
    return _moved(w, value, to, lambda v: w.call(aten.squeeze.dims, v, dims)) if dims else value


@rule("permute transpose t mT swapaxes swapdims numpy_T")
def permute(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    value = bound["self"]
    if not is_lazy(value):
        return None
    order = _order(target, bound, rank(value))
    if order is None:
        return None
    return _moved(
        w, value, [order.index(axis) for axis in range(len(order))], lambda v: w.call(aten.permute.default, v, order)
    )


def _order(target: Any, bound: dict[str, Any], axes: int) -> list[int] | None:
    from ikbo_recsys.transforms.builder import packet_name

    name = packet_name(target).removeprefix("aten.")
    order = list(range(axes))
    if name == "permute":
        return [d % axes for d in bound["dims"]]
    if name in ("t", "numpy_T"):
        return order[::-1]
    if name == "mT":
        return None if axes < 2 else [*order[:-2], order[-1], order[-2]]
    first, second = [d for n, d in bound.items() if n != "self"][:2]
    order[first], order[second] = order[second], order[first]
    return order


def _moved(w: Walk, value: Value, to: list[Any], apply: Any) -> Value | None:
    """`value` after an operator that moves axis `i` to `to[i]`."""
    if isinstance(value, Plain):
        result: Value = apply(value)
        return result
    if to[value.dim] is None:
        return None
    if isinstance(value, Compact):
        inner = _moved(w, value.inner, to, apply)
        return None if inner is None else Compact(inner, value.level, to[value.dim])
    parts = [_moved(w, part, to, apply) for part in value.parts]
    return None if any(p is None for p in parts) else Pieces(tuple(p for p in parts if p is not None), to[value.dim])


# ---- parts ---------------------------------------------------------------------------------------------------------


@rule("slice narrow")
def slices(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    value = bound["self"]
    if not is_lazy(value):
        return None
    dim = (bound["dim"] or 0) % rank(value)
    size = shape(value)[dim]
    start, step = bound.get("start") or 0, bound.get("step", 1)
    stop = bound.get("end")
    if "length" in bound and isinstance(start, int) and isinstance(bound["length"], int) and start >= 0:
        stop = start + bound["length"]
    everything = start == 0 and step == 1 and (stop is None or (isinstance(stop, int) and stop == 2**63 - 1))
    if everything and "length" not in bound:
        return value
    if is_static(size) and step == 1 and isinstance(start, int) and (stop is None or isinstance(stop, int)):
        start = max(start + size, 0) if start < 0 else min(start, size)
        stop = size if stop is None else stop
        stop = max(stop + size, start) if stop < 0 else max(min(stop, size), start)
        if stop > start and not any(axis == dim and level.index is not None for level, axis in levels(value)):
            return take(w, value, dim, start, stop)
    return sink(w, target, bound, {"self": [None if axis == dim else axis for axis in range(rank(value))]})


@rule("select")
def select(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    value = bound["self"]
    if not is_lazy(value) or not isinstance(bound["index"], int):
        return None
    dim = bound["dim"] % rank(value)
    size, place = shape(value)[dim], bound["index"]
    if any(axis == dim and level.index is not None for level, axis in levels(value)):
        return None
    if not is_static(size):
        axes = [None if axis == dim else axis - (axis > dim) for axis in range(rank(value))]
        return sink(w, target, bound, {"self": axes})
    place = place + size if place < 0 else place
    one = take(w, value, dim, place, place + 1)
    if isinstance(one, Plain):
        return Plain(w.build.emit(aten.squeeze.dim, one.node, dim), one.blocked, one.blocked_rows)
    return w.call(aten.squeeze.dim, _drop_stretch(one, dim), dim)


def _drop_stretch(value: Value, dim: int) -> Value:
    from ikbo_recsys.transforms.values import expanded_inner

    inner = expanded_inner(value, dim)
    return value if inner is None else inner


@rule("split split_with_sizes chunk unbind tensor_split unsafe_split unsafe_chunk hsplit")
def splits(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """A tuple of slices, cut where PyTorch cuts."""
    value = bound["self"]
    if not is_lazy(value) or "dim" not in bound:
        return None
    dim = bound["dim"] % rank(value)
    if not is_static(shape(value)[dim]) or any(axis == dim for _, axis in levels(value)):
        return None
    with w.build.inference():
        args = [v for n, v in bound.items() if n not in ("self", "dim")]
        if any(isinstance(v, Plain) for v in torch.utils._pytree.tree_leaves(args)):
            return None
        whole = target(torch.empty(shape(value)[dim]), *args, dim=0)
    results, start = [], 0
    unbound = target is aten.unbind.int
    for part in whole:
        width = 1 if unbound else part.shape[0]
        if width == 0:
            return None
        piece = take(w, value, dim, start, start + width)
        results.append(w.call(aten.squeeze.dim, piece, dim) if unbound else piece)
        start += width
    return tuple(results)


# ---- concatenations ------------------------------------------------------------------------------------------------


@rule("cat concat concatenate")
def cat(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    values = bound["tensors"]
    if not any(map(is_lazy, values)) or not isinstance(bound["dim"], int):
        return None
    dtypes = {w.fake(v).dtype for v in values}
    ranks = {rank(v) for v in values}
    if len(dtypes) > 1 or len(ranks) > 1:
        return None
    dim = bound["dim"] % ranks.pop()
    values = [_restretched(w, v, values, dim) for v in values]
    joined = concatenate(w, values, dim)
    if not has_compact(joined) or any(axis == dim for v in values for _, axis in levels(v)):
        return None
    return joined


def _restretched(w: Walk, value: Value, values: list[Value], dim: int) -> Value:
    """A stretched part among compact ones is stretched to their compact rows, so that all can be joined there."""
    if not isinstance(value, Compact) or value.level.index is not None or value.dim == dim:
        return value
    for other in values:
        for level, axis in levels(other):
            if (
                axis == value.dim
                and level.index is not None
                and all(peel(v, level, axis) is not None or v is value for v in values)
            ):
                inner = peel(other, level, axis)
                rows = None if inner is None else w.build.size_of(inner, axis)
                return Compact(Compact(value.inner, Level(None, 1, rows), axis), level, axis)
    return value


@rule("stack hstack vstack")
def stack(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    values = bound["tensors"]
    if not any(map(is_lazy, values)) or "dim" not in bound:
        return None
    dim = bound["dim"] % (rank(values[0]) + 1)
    return w.call(aten.cat.default, [w.call(aten.unsqueeze.default, v, dim) for v in values], dim)


@rule("sym_size")
def sym_size(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """A size of a lazy value, without making the value."""
    value = bound["self"]
    if not is_lazy(value):
        return None
    size = w.build.size_of(value, bound["dim"] % rank(value))
    return size if isinstance(size, int) else Plain(size)
