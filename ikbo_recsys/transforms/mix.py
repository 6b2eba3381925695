"""Where the two sides meet: products that contract over pieces.

A contraction over `cat(user, candidate)` is the sum of two contractions; the user's is taken at the user batch
size. Where one index and whole candidates meet in the shapes of an operator of this library, that operator is put
in place.

Shape letters: U users, B candidates, K features, M outputs, D embedding size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ikbo_recsys.transforms.axes import (
    Maps,
    aligned,
    concatenate,
    cut_together,
    distribute,
    piece_axes,
    sink,
    whole_cuts,
)
from ikbo_recsys.transforms.interactions import gram, is_gram
from ikbo_recsys.transforms.rules import over_images, rule
from ikbo_recsys.transforms.values import (
    Compact,
    Pieces,
    Plain,
    Value,
    compact_rows,
    has_compact,
    is_floating,
    is_lazy,
    levels,
    peel,
    rank,
    same,
    shape,
)

if TYPE_CHECKING:
    from ikbo_recsys.transforms.walk import Walk

aten = torch.ops.aten
ikbo = torch.ops.ikbo


# ---- sums of parts -------------------------------------------------------------------------------------------------


def combine(w: Walk, results: list[Value], function: Any = aten.add.Tensor) -> Value:
    """The sum of partial results: those of one level at its compact size, the whole ones last."""
    waiting = list(results)
    total: Value | None = None
    while waiting:
        first = waiting.pop(0)
        for level, axis in levels(first):
            alike = [v for v in waiting if peel(v, level, axis) is not None]
            for other in alike:
                first = w.call(function, first, other)
            waiting = [v for v in waiting if all(v is not a for a in alike)]
            break
        total = first if total is None else w.call(function, total, first)
    assert total is not None
    return total


def _group_key(value: Value, axis: int) -> Any:
    """Pieces with one key are contracted together."""
    for level, where in levels(value):
        rows = compact_rows(value, level, where)
        if where != axis and rows is not None:
            return level.index, level.rows, where, str(rows), None if level.index is not None else str(level.full)
    return None


def group_pieces(w: Walk, value: Value, axis: int) -> list[Value] | None:
    """The pieces along `axis`, those of one level together; None when that makes a single group."""
    chunks = cut_together({"x": (value, axis)})
    if chunks is None:
        return None
    groups: dict[Any, list[Value]] = {}
    for chunk in chunks:
        piece = whole_cuts(w, chunk)["x"]
        groups.setdefault(_group_key(piece, axis), []).append(piece)
    return [concatenate(w, pieces, axis) for pieces in groups.values()] if len(groups) > 1 else None


def _grouped(w: Walk, operands: dict[str, tuple[Value, int]], leader: str) -> list[tuple[Any, dict[str, Value]]] | None:
    """Cut operands along their contracted axes together, and join what belongs to one level of `leader`."""
    chunks = cut_together({name: (value, axis) for name, (value, axis) in operands.items()})
    if chunks is None:
        return None
    groups: dict[Any, list[dict[str, Value]]] = {}
    for chunk in chunks:
        pieces = whole_cuts(w, chunk)
        keys = [_group_key(pieces[name], axis) for name, (_, axis) in operands.items()]
        key = (
            _group_key(pieces[leader], operands[leader][1])
            if all(k is None or k == keys[0] for k in keys)
            else tuple(keys)
        )
        groups.setdefault(key, []).append(pieces)
    joined = []
    for key, pieces_list in groups.items():
        whole = {n: concatenate(w, [p[n] for p in pieces_list], axis) for n, (_, axis) in operands.items()}
        joined.append((key, whole))
    return joined if len(joined) > 1 else None


# ---- linear --------------------------------------------------------------------------------------------------------


@rule("linear")
def linear(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """`F.linear`: independent along every axis but the last; over pieces of the last, a sum."""
    x, weight, bias = bound["input"], bound["weight"], bound["bias"]
    if not is_lazy(x) or is_lazy(weight) or is_lazy(bias) or rank(weight) != 2:
        return None
    last = rank(x) - 1
    maps: Maps = {"input": [axis if axis != last else None for axis in range(rank(x))], "weight": [None, None]}
    if bias is not None:
        maps["bias"] = [None]
    result = sink(w, target, bound, maps)
    if result is None:
        result = distribute(w, target, bound, maps)
    if result is None and last in piece_axes(x):
        result = _linear_over_pieces(w, x, last, weight, bias)
    return result


def _linear_over_pieces(w: Walk, x: Value, last: int, weight: Value, bias: Value | None) -> Value | None:
    groups = _grouped(w, {"x": (x, last), "weight": (weight, 1)}, "x")
    if groups is None:
        return None
    compact = [(key, g) for key, g in groups if has_compact(g["x"])]
    whole = [g for _, g in groups if not has_compact(g["x"])]
    if not compact:
        return None
    fused = _fused_linear(w, x, weight, bias, compact, whole)
    if fused is not None:
        first, rest = fused
    else:
        first, rest = None, [g for _, g in compact] + whole
    results = [] if first is None else [first]
    for group in rest:
        takes_bias = bias if not results else None
        results.append(w.call(aten.linear.default, group["x"], group["weight"], takes_bias))
    return combine(w, results)


def _fused_linear(w: Walk, x: Value, weight: Value, bias: Any, compact: list[Any], whole: list[Any]) -> Any:
    """`ikbo.linear` for one index and the whole columns, and the groups that remain; None where the shapes are
    others."""
    if rank(x) != 2 or len(whole) != 1 or not isinstance(whole[0]["x"], Plain):
        return None
    for position, (_, group) in enumerate(compact):
        user = group["x"]
        if not isinstance(user, Compact) or user.dim != 0 or user.level.index is None or user.level.rows != 1:
            continue
        if not is_floating(user) or has_compact(user.inner):
            continue
        node = w.build.emit(
            ikbo.linear.default,
            w.build.whole(user.inner),
            whole[0]["x"].node,
            _user_first(w, x, weight, group["weight"], whole[0]["weight"], user),
            user.level.index,
            w.argument(bias),
        )
        w.ledger.replaced_by("ikbo.linear")
        return Plain(node), [g for i, (_, g) in enumerate(compact) if i != position]
    return None


def _user_first(w: Walk, x: Value, weight: Value, user_columns: Value, cand_columns: Value, user: Value) -> Any:
    """The weight with the user's columns first: itself, where they are first already."""
    untouched = isinstance(x, Pieces) and len(x.parts) == 2 and x.parts[0] == user
    if untouched:
        return w.build.whole(weight)
    return w.build.emit(aten.cat.default, [w.build.whole(user_columns), w.build.whole(cand_columns)], 1)


@rule("addmm baddbmm")
def addmm(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """A product and a sum."""
    names = list(bound)
    bias, a, b = (bound[n] for n in names[:3])
    if not any(map(is_lazy, (bias, a, b))):
        return None
    product = w.call(aten.matmul.default, a, b)
    if bound["alpha"] != 1:
        product = w.call(aten.mul.Tensor, product, bound["alpha"])
    if bound["beta"] != 1:
        bias = w.call(aten.mul.Tensor, bias, bound["beta"])
    return w.call(aten.add.Tensor, product, bias)


# ---- matmul --------------------------------------------------------------------------------------------------------


@rule("matmul mm bmm")
def matmul(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """Independent along batch axes, the rows of the first and the columns of the second; over pieces of the rest,
    a sum."""
    names = list(bound)[:2]
    a, b = (bound[n] for n in names)
    if not is_lazy(a) and not is_lazy(b):
        return None
    if rank(a) < 2 or rank(b) < 2:
        return _vectors(w, a, b)
    out_rank = max(rank(a), rank(b))
    map_a, map_b = aligned(a, out_rank), aligned(b, out_rank)
    map_a[-1], map_b[-2] = None, None  # type: ignore[call-overload]
    canonical, args = aten.matmul.default, {"self": a, "other": b}
    maps = {"self": map_a, "other": map_b}
    result = sink(w, canonical, args, maps)
    if result is None and is_gram(w, a, b):
        result = gram(w, canonical, args, maps)
    if result is None:
        result = _matmul_over_pieces(w, a, b)
    if result is None:
        result = distribute(w, canonical, args, maps)
    if result is None:
        w.refuse("it multiplies rows of a user with rows of candidates: memory only")
    return result


@rule("tensordot")
def tensordot(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """`tensordot(x, weight, ([-1], [0]))` is a matmul; as a composite operator it would merge all axes of x first."""
    x, weight = bound["self"], bound["other"]
    if not is_lazy(x) or is_lazy(weight) or rank(weight) != 2 or rank(x) < 2:
        return None
    if [d % rank(x) for d in bound["dims_self"]] != [rank(x) - 1] or [d % 2 for d in bound["dims_other"]] != [0]:
        return w.decomposed(target, bound)
    return w.call(aten.matmul.default, x, weight)


@rule("conv1d")
def convolution_of_one(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """A convolution with a kernel of one element is a product over the channels."""
    x, weight, bias = bound["input"], bound["weight"], bound["bias"]
    trivial = list(bound["stride"]) == [1] and bound["padding"] in ([0], "valid") and bound["groups"] == 1
    if not is_lazy(x) or is_lazy(weight) or rank(x) != 3 or not trivial or not same(shape(weight)[2], 1):
        return over_images(w, target, bound)
    product = w.call(aten.matmul.default, w.call(aten.squeeze.dim, weight, 2), x)
    return product if bias is None else w.call(aten.add.Tensor, product, w.call(aten.unsqueeze.default, bias, 1))


def _vectors(w: Walk, a: Value, b: Value) -> Value | None:
    if rank(a) >= 2 and rank(b) == 1:
        column = w.call(aten.matmul.default, a, w.call(aten.unsqueeze.default, b, 1))
        result: Value = w.call(aten.squeeze.dim, column, rank(column) - 1)
        return result
    return None


def _matmul_over_pieces(w: Walk, a: Value, b: Value) -> Value | None:
    last_a, first_b = rank(a) - 1, rank(b) - 2
    if last_a not in piece_axes(a) and first_b not in piece_axes(b):
        return None
    leader = "a" if last_a in piece_axes(a) else "b"
    groups = _grouped(w, {"a": (a, last_a), "b": (b, first_b)}, leader)
    if groups is None:
        return None
    fused = _compression(w, a, b, [g for _, g in groups])
    if fused is not None:
        return fused
    results = [w.call(aten.matmul.default, g["a"], g["b"]) for _, g in groups]
    return combine(w, results) if any(map(has_compact, results)) else None


def _compression(w: Walk, a: Value, b: Value, groups: list[dict[str, Value]]) -> Value | None:
    """`weight @ cat(user, candidate)` over the feature axis."""
    if not isinstance(a, Plain) or rank(a) != 2 or rank(b) != 3 or len(groups) != 2:
        return None
    users = [g for g in groups if isinstance(g["b"], Compact)]
    cands = [g for g in groups if isinstance(g["b"], Plain)]
    if len(users) != 1 or len(cands) != 1 or not is_floating(b):
        return None
    user, cand = users[0]["b"], cands[0]["b"]
    if not isinstance(user, Compact) or not isinstance(cand, Plain) or user.dim != 0 or has_compact(user.inner):
        return None
    if user.level.index is None or user.level.rows != 1:
        return None
    untouched = isinstance(b, Pieces) and len(b.parts) == 2 and b.parts[0] == user
    columns = [w.build.whole(users[0]["a"]), w.build.whole(cands[0]["a"])]
    weight = a.node if untouched else w.build.emit(aten.cat.default, columns, 1)
    node = w.build.emit(ikbo.compression_linear.default, w.build.whole(user.inner), cand.node, weight, user.level.index)
    w.ledger.replaced_by("ikbo.compression_linear")
    return Plain(node)
