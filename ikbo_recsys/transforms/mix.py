"""Where the two sides meet: products that contract over pieces, attention, pairwise dots.

A contraction over `cat(user, candidate)` is the sum of two contractions; the user's is taken at the user batch
size. Where one index and whole candidates meet in the shapes of an operator of this library, that operator is put
in place.

Shape letters: U users, B candidates, K features, M outputs, D embedding size, H heads, S queries, T history rows,
F features.
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
    runs,
    sink,
    take,
)
from ikbo_recsys.transforms.axes import _whole_cuts as whole_cuts
from ikbo_recsys.transforms.builder import packet_name
from ikbo_recsys.transforms.rules import over_images, rule
from ikbo_recsys.transforms.values import (
    Compact,
    Level,
    Pieces,
    Plain,
    Value,
    compact_rows,
    has_compact,
    is_lazy,
    is_static,
    is_tensor,
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
        if not _floating(w, user) or has_compact(user.inner):
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


def _floating(w: Walk, value: Value) -> bool:
    return w.fake(value).dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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
    if result is None and _is_gram(w, a, b):
        result = _gram(w, canonical, args, maps)
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
    if len(users) != 1 or len(cands) != 1 or not _floating(w, b):
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


# ---- pairwise dots -------------------------------------------------------------------------------------------------


def _is_gram(w: Walk, a: Value, b: Value) -> bool:
    """Whether `b` is `a` transposed: features `[B, F, D]` in pieces."""
    if not isinstance(a, Pieces) or rank(a) != 3 or a.dim != 1 or not isinstance(b, Pieces) or b.dim != 2:
        return False
    return bool(w.call(aten.permute.default, a, [0, 2, 1]) == b)


def _gram(w: Walk, target: Any, args: dict[str, Any], maps: Any) -> Value | None:
    """All dots of features, in blocks; remembered, in case only pairs are read."""
    blocks: Value | None = distribute(w, target, args, maps)
    if blocks is not None:
        w.grams[blocks] = args["self"]
    return blocks


def pairs_of_gram(w: Walk, source: Value, indices: list[Any]) -> Value | None:
    """`gram[:, i, j]` with constant i and j as `ikbo.dot_interaction`."""
    from ikbo_recsys.transforms.broadcasts import constant_value

    features = w.grams.get(source) if isinstance(source, Pieces) else None
    if features is None or len(indices) != 3 or indices[0] is not None:
        return None
    if any(not isinstance(i, Plain) for i in indices[1:]):
        return None
    i, j = (constant_value(w, index.node) for index in indices[1:])
    if i is None or j is None or i.dim() != 1 or i.shape != j.shape or bool((i == j).any()):
        return None
    groups = _user_and_candidate(w, features)
    if groups is None:
        return None
    user, cand, order = groups
    total = len(order)
    place = torch.tensor([order.index(f) for f in range(total)])
    low, high = torch.minimum(place[i], place[j]), torch.maximum(place[i], place[j])
    chosen = low * total - low * (low + 1) // 2 + high - low - 1
    node = w.build.emit(ikbo.dot_interaction.default, w.build.whole(user.inner), cand.node, user.level.index)
    w.ledger.replaced_by("ikbo.dot_interaction")
    device = w.fake(features).device
    pairs = node
    if not torch.equal(chosen, torch.arange(total * (total - 1) // 2)):
        pairs = w.build.emit(aten.index_select.default, node, 1, w.build.constant(chosen.to(device)))
    users = total - shape(cand)[1]
    return _pairs_in_pieces(w, Plain(pairs), user, high < users, low, high, device)


def _pairs_in_pieces(
    w: Walk,
    pairs: Plain,
    user: Compact,
    of_user: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    device: torch.device,
) -> Value:
    """The pairs again, those of two user features compact: the layer behind them has less to do.

    Whoever needs them whole reads `pairs`.
    """
    if not bool(of_user.any()) or bool(of_user.all()):
        return pairs
    own = w.build.whole(user.inner)
    gram = w.build.emit(aten.bmm.default, own, w.build.emit(aten.transpose.int, own, 1, 2))
    first, second = (w.build.constant(side[of_user].to(device)) for side in (low, high))
    user_pairs = w.build.emit(aten.index.Tensor, gram, [None, first, second])
    others = w.build.constant((~of_user).nonzero().flatten().to(device))
    other_pairs = w.build.emit(aten.index_select.default, pairs.node, 1, others)
    parts: list[Value] = []
    taken = {True: 0, False: 0}
    start, flags = 0, of_user.tolist()
    for stop in range(1, len(flags) + 1):
        if stop < len(flags) and flags[stop] == flags[start]:
            continue
        kind, count = flags[start], stop - start
        source = user_pairs if kind else other_pairs
        part = take(w, Plain(source), 1, taken[kind], taken[kind] + count)
        parts.append(Compact(part, user.level, 0) if kind else part)
        taken[kind] += count
        start = stop
    pieces = Pieces(tuple(parts), 1)
    w.build.known[pieces] = pairs.node
    return pieces


def _user_and_candidate(w: Walk, features: Value) -> tuple[Compact, Plain, list[int]] | None:
    """The user's and the candidates' features, and the old numbers of the features in that order."""
    sizes = runs(features, 1)
    if not all(map(is_static, sizes)) or not _floating(w, features):
        return None
    user: list[Value] = []
    cand: list[Value] = []
    user_numbers: list[int] = []
    cand_numbers: list[int] = []
    start, level = 0, None
    for size in sizes:
        piece = take(w, features, 1, start, start + size)
        numbers = range(start, start + size)
        start += size
        if isinstance(piece, Plain):
            cand.append(piece)
            cand_numbers += numbers
            continue
        if not isinstance(piece, Compact) or piece.dim != 0 or piece.level.rows != 1 or piece.level.index is None:
            return None
        if has_compact(piece.inner) or (level is not None and piece.level != level):
            return None
        level = piece.level
        user.append(piece)
        user_numbers += numbers
    if not user or not cand:
        return None
    users, cands = concatenate(w, user, 1), concatenate(w, cand, 1)
    if not isinstance(users, Compact) or not isinstance(cands, Plain):
        return None
    return users, cands, user_numbers + cand_numbers


# ---- attention -----------------------------------------------------------------------------------------------------


@rule("scaled_dot_product_attention")
def attention(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """Independent along batch and heads; keys and values of users under queries of candidates become
    `cross_attention`."""
    query, key, value, mask = (bound[n] for n in ("query", "key", "value", "attn_mask"))
    operands = [v for v in (query, key, value, mask) if is_tensor(v)]
    if not any(map(is_lazy, operands)):
        return None
    if bound["dropout_p"]:
        w.refuse("attention with dropout draws for every candidate")
        return None
    axes = rank(query)
    if rank(key) != axes or rank(value) != axes:
        return None
    batch = list(range(axes - 2 - bool(bound["enable_gqa"])))
    rest = [None] * (axes - len(batch))
    rows = axes - 2 if not bound["is_causal"] else None
    maps = {"query": [*batch, *rest], "key": [*batch, *rest], "value": [*batch, *rest]}
    maps["query"][axes - 2] = rows
    maps["value"][axes - 1] = axes - 1
    if is_tensor(mask):
        maps["attn_mask"] = [a if a in batch or a == rows else None for a in aligned(mask, axes)]
    result = sink(w, target, bound, maps)
    return _cross_attention(w, bound) if result is None else result


def _cross_attention(w: Walk, bound: dict[str, Any]) -> Value | None:
    query, key, value = (bound[n] for n in ("query", "key", "value"))
    for level, axis in levels(key):
        inner_key, inner_value = peel(key, level, axis), peel(value, level, axis)
        if inner_key is None or inner_value is None or axis != 0 or level.index is None or level.rows != 1:
            continue
        if has_compact(inner_key) or has_compact(inner_value) or rank(query) != 4 or not _floating(w, query):
            continue
        lengths = None
        if bound["attn_mask"] is not None:
            lengths = _prefix_lengths(w, bound["attn_mask"], level)
            if lengths is None:
                w.refuse("the attention mask is not a prefix of each user's history")
                return None
        if bound["is_causal"] or not same(shape(inner_key)[3], shape(inner_value)[3]):
            w.refuse("causal attention, or values of another width than keys, is not what cross_attention computes")
            return None
        if not same(shape(query)[0], level.full) or not same(shape(inner_key)[0], shape(inner_value)[0]):
            continue
        swapped = [w.build.emit(aten.transpose.int, w.build.whole(v), 1, 2) for v in (query, inner_key, inner_value)]
        node = w.build.emit(
            ikbo.cross_attention.default, *swapped, level.index, kv_lengths=lengths, scale=bound["scale"]
        )
        w.ledger.replaced_by("ikbo.cross_attention")
        return Plain(w.build.emit(aten.transpose.int, node, 1, 2))
    w.refuse("queries, keys and values do not meet as candidates and one user level")
    return None


def _prefix_lengths(w: Walk, mask: Value, level: Level) -> Any:
    """The lengths behind a mask `arange(T) < lengths[:, None]` of the users, or None."""
    inner: Value | None = mask
    while isinstance(inner, Compact) and (inner.level.index is None or inner.level == level):
        inner = inner.inner
    if not isinstance(inner, Plain) or not any(found == level for found, _ in levels(mask)):
        return None
    if rank(inner) != 4 or not same(shape(inner)[1], 1) or not same(shape(inner)[2], 1):
        return None
    node: Any = inner.node
    while packet_name(node.target) in ("aten.unsqueeze", "aten.view", "aten.reshape", "aten.expand", "aten.slice"):
        if packet_name(node.target) == "aten.slice" and not _keeps_everything(node):
            return None
        node = node.args[0]
    name = packet_name(node.target)
    if name not in ("aten.lt", "aten.gt") or node.meta["val"].dim() != 2:
        return None
    small, large = node.args[:2] if name == "aten.lt" else node.args[1::-1]
    if not _is_counter(small, shape(inner)[3]):
        return None
    lengths = large
    while hasattr(lengths, "target") and packet_name(lengths.target) in ("aten.unsqueeze", "aten.view", "aten.reshape"):
        lengths = lengths.args[0]
    fits = getattr(lengths, "meta", {}).get("val")
    if fits is None or fits.dim() != 1 or fits.dtype not in (torch.int32, torch.int64):
        return None
    if not same(fits.shape[0], node.meta["val"].shape[0]) or not is_static(shape(inner)[3]):
        return None
    return w.build.emit(aten.clamp.default, lengths, 0, shape(inner)[3])


def _keeps_everything(node: Any) -> bool:
    return all(same(a, b) for a, b in zip(node.meta["val"].shape, node.args[0].meta["val"].shape, strict=True))


def _is_counter(node: Any, length: Any) -> bool:
    while hasattr(node, "target") and packet_name(node.target) in ("aten.unsqueeze", "aten.view", "aten.reshape"):
        node = node.args[0]
    if not hasattr(node, "target") or node.target not in (aten.arange.default, aten.arange.start):
        return False
    starts_at_zero = node.target is aten.arange.default or node.args[0] == 0
    return starts_at_zero and same(node.meta["val"].shape[0], length)
