"""Operators of two sides that are recognised by more than one node: all pairs of features, and attention.

Shape letters: U users, B candidates, D embedding size, H heads, S queries, T history rows, F features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ikbo_recsys.transforms.axes import aligned, concatenate, distribute, runs, sink, take
from ikbo_recsys.transforms.builder import packet_name
from ikbo_recsys.transforms.rules import rule
from ikbo_recsys.transforms.values import (
    Compact,
    Level,
    Pieces,
    Plain,
    Value,
    has_compact,
    is_floating,
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


# ---- pairwise dots -------------------------------------------------------------------------------------------------


def is_gram(w: Walk, a: Value, b: Value) -> bool:
    """Whether `b` is `a` transposed: features `[B, F, D]` in pieces."""
    if not isinstance(a, Pieces) or rank(a) != 3 or a.dim != 1 or not isinstance(b, Pieces) or b.dim != 2:
        return False
    return bool(w.call(aten.permute.default, a, [0, 2, 1]) == b)


def gram(w: Walk, target: Any, args: dict[str, Any], maps: Any) -> Value | None:
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
    if not all(map(is_static, sizes)) or not is_floating(features):
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
        if has_compact(inner_key) or has_compact(inner_value) or rank(query) != 4 or not is_floating(query):
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
