"""Recognising a broadcast in each of its spellings.

Whatever the spelling, the result is `Compact(x, level)` with a candidate-to-user index as a node of the graph. A
look-up is taken for a broadcast when its source is computed from an input (a table of parameters is an embedding)
and when it does not select fewer rows than the source has.

Shape letters: U rows of the source, B rows of the index, R copies of each row.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.utils import _pytree as pytree

from ikbo_recsys.transforms.axes import concatenate, sink, take
from ikbo_recsys.transforms.builder import is_pure, packet_name
from ikbo_recsys.transforms.report import has_hint, hint
from ikbo_recsys.transforms.rules import rule
from ikbo_recsys.transforms.values import (
    Compact,
    Level,
    Pieces,
    Plain,
    Value,
    example,
    expanded_inner,
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

_SAME_INDEX = frozenset(
    f"aten.{n}" for n in ("clone", "contiguous", "detach", "alias", "lift_fresh_copy", "lift_fresh")
)
_SAME_ROWS = frozenset(f"aten.{n}" for n in ("unsqueeze", "view", "reshape", "squeeze", "flatten", "ravel"))


def canonical(w: Walk, node: Node) -> Node:
    """The index behind casts and views of it: `idx`, `idx.long()`, `idx.view(-1)` and a row of `stack([idx, ...])`
    are one."""
    while True:
        source = _row_of_stack(w, node)
        if source is None:
            source = _same_index(node)
        if source is None:
            return node
        node = source


def _same_index(node: Node) -> Node | None:
    """The one-dimensional integer tensor that `node` is a cast or a view of, if it is."""
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if node.op != "call_function" or source is None:
        return None
    name, val, before = packet_name(node.target), node.meta.get("val"), source.meta.get("val")
    if not isinstance(val, torch.Tensor) or not isinstance(before, torch.Tensor) or not _same_numel(val, before):
        return None
    if before.dim() != 1:
        return canonical_view(source) if name in _SAME_ROWS else None
    casts = name in ("aten.to", "aten._to_copy") and val.device == before.device
    integers = {val.dtype, before.dtype} <= {torch.int32, torch.int64}
    same_rows = name in _SAME_ROWS and val.dim() == 1
    return source if name in _SAME_INDEX or same_rows or (casts and integers) else None


def _row_of_stack(w: Walk, node: Node) -> Node | None:
    """The tensor that was stacked, where `node` takes one row of a stack (as torchrec does with inverse indices)."""
    args = node.args
    if node.target is operator.getitem and isinstance(args[0], Node) and args[0].target is aten.unbind.int:
        if args[0].args[1:] not in ((), (0,)):
            return None
        return _row(w, args[0].args[0], args[1])
    if node.target is aten.select.int and args[1] == 0:
        return _row(w, args[0], args[2])
    return None


def _row(w: Walk, matrix: Any, row: Any) -> Node | None:
    if not isinstance(row, int) or row < 0:
        return None
    if matrix.target is aten.stack.default and matrix.args[1:] in ((), (0,)):
        found: Node = matrix.args[0][row]
        return found
    reordered = matrix.target is aten.index_select.default and matrix.args[1] == 0
    if reordered or matrix.target is torch.ops.ikbo.broadcast.default:
        order = constant_value(w, matrix.args[-1])
        return None if order is None else _row(w, matrix.args[0], int(order[row]))
    return None


def canonical_view(node: Node) -> Node | None:
    """The one-dimensional tensor that `node` is a view of, if it is."""
    while node.op == "call_function" and packet_name(node.target) in _SAME_ROWS | _SAME_INDEX:
        source = node.args[0]
        if not isinstance(source, Node) or not _same_numel(node.meta["val"], source.meta["val"]):
            return None
        node = source
        if node.meta["val"].dim() == 1:
            return node
    return None


def _same_numel(a: Any, b: Any) -> bool:
    return same(a.numel(), b.numel())


def look_up(w: Walk, source: Value, dim: int, index: Value) -> Value | None:
    """`source` at rows `index` along `dim`, lazily; None where that is no broadcast, with the reason."""
    if rank(index) != 1 or w.fake(index).dtype not in (torch.int32, torch.int64):
        return None
    for level, axis in levels(index):
        inner_index = peel(index, level, axis)
        if inner_index is not None:  # an index that is looked up itself: two levels
            inner = _look_up_or_copy(w, source, dim, inner_index)
            return Compact(inner, level, dim)
    node = canonical(w, w.build.whole(index))
    chosen = _pick_pieces(w, source, dim, node)
    if chosen is not None:
        return chosen
    reason = _no_broadcast(w, source, dim, node)
    if reason is not None:
        if reason:
            w.ledger.left(reason)
        return None
    if _is_identity(node, shape(source)[dim]):
        return source
    level = Level(node)
    w.ledger.broadcast(str(node.name), shape(source)[dim], level.full)
    return Compact(source, level, dim)


def _look_up_or_copy(w: Walk, source: Value, dim: int, index: Value) -> Value:
    found = look_up(w, source, dim, index)
    if found is not None:
        return found
    return Plain(w.build.emit(aten.index_select.default, w.build.whole(source), dim, w.build.whole(index)))


def _no_broadcast(w: Walk, source: Value, dim: int, index: Node) -> str | None:
    """Why a look-up is left alone, "" if that is not worth telling."""
    inputs = w.depends(source)
    if not inputs:
        return ""
    if example(source).device != index.meta["val"].device:
        return f"the index is on {index.meta['val'].device} and the source on {example(source).device}"
    if w.user_inputs is not None and not inputs <= w.user_inputs | w.depends(Plain(index)):
        others = ", ".join(sorted(inputs - w.user_inputs))
        return f"the source depends on {others}, not named in user_inputs"
    sizes = shape(source)[dim], index.meta["val"].shape[0]
    rows, entries = map(hint, sizes)
    if rows > entries and w.user_inputs is None and all(map(has_hint, sizes)):
        return f"it selects {entries} of {rows} rows: a choice, not a replication"
    return None


def _is_identity(index: Node, rows: Any) -> bool:
    if packet_name(index.target) != "aten.arange" or not same(index.meta["val"].shape[0], rows):
        return False
    overload, args = index.target, index.args
    if overload in (aten.arange.default,):
        return True
    return overload is aten.arange.start and bool(args[0] == 0)


def _pick_pieces(w: Walk, source: Value, dim: int, index: Node) -> Value | None:
    """Rows of known numbers out of a concatenation (how torchrec reorders the indices of a variable batch)."""
    if not isinstance(source, Pieces | Compact) or (is_lazy(source) and not is_static(shape(source)[dim])):
        return None
    numbers = constant_value(w, index)
    if numbers is None or not isinstance(source, Pieces) or source.dim != dim or numbers.numel() > 4096:
        return None
    rows = [int(i) % shape(source)[dim] for i in numbers.tolist()]
    return concatenate(w, [take(w, source, dim, row, row + 1) for row in rows], dim) if rows else None


def constant_value(w: Walk, node: Node) -> torch.Tensor | None:
    """The value of a node that is computed from constants only."""
    value = _constant(w, node)
    return value if isinstance(value, torch.Tensor) else None


def _constant(w: Walk, node: Node) -> Any:
    if node.op in ("placeholder", "get_attr"):
        return w.constants.get(node.name if node.op == "placeholder" else str(node.target))
    target = node.target
    if node.op != "call_function" or not is_pure(target):
        return None
    if any(not is_static(t.numel()) or t.numel() > _LARGEST_CONSTANT for t in _tensors_of(node.meta.get("val"))):
        return None
    known: dict[Node, Any] = {source: _constant(w, source) for source in node.all_input_nodes}
    if any(value is None for value in known.values()):
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _Held(known[n]))  # type: ignore[arg-type, return-value]
    args, kwargs = pytree.tree_map_only(_Held, lambda held: held.value, (args, kwargs))
    with torch.no_grad(), unset_fake_temporarily():
        return target(*args, **kwargs)  # type: ignore[operator]


class _Held:
    """A value that `map_arg` does not look into."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _tensors_of(val: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(val) if isinstance(t, torch.Tensor)]


_LARGEST_CONSTANT = 1 << 16


# ---- spellings -----------------------------------------------------------------------------------------------------


@rule("index_select")
def index_select(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    source = bound["self"]
    dim = bound["dim"] % max(rank(source), 1)
    found = look_up(w, source, dim, bound["index"])
    if found is None and is_lazy(source):
        axes = [None if axis == dim else axis for axis in range(rank(source))]
        found = sink(w, target, {**bound, "dim": dim}, {"self": axes, "index": [None]})
    return found


@rule("ikbo.broadcast fbgemm.index_select_dim0")
def explicit(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    names = list(bound)
    return look_up(w, bound[names[0]], 0, bound[names[1]])


@rule("fbgemm.group_index_select_dim0")
def group_index_select(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """What an embedding bag collection does with a variable batch: one look-up for each feature."""
    sources, indices = (bound[name] for name in list(bound)[:2])
    return tuple(_look_up_or_copy(w, s, 0, i) for s, i in zip(sources, indices, strict=True))


@rule("index")
def index(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """`x[idx]`, `x[:, idx]`; and `x[:, i, j]`, which looks up features and not rows."""
    source, indices = bound["self"], list(bound["indices"])
    used = [axis for axis, i in enumerate(indices) if i is not None]
    if len(used) == 1 and rank(indices[used[0]]) == 1:
        found = look_up(w, source, used[0], indices[used[0]])
        if found is not None:
            return found
    from ikbo_recsys.transforms.interactions import pairs_of_gram

    found = pairs_of_gram(w, source, indices)
    if found is not None:
        return found
    if (
        not is_lazy(source)
        or any(is_lazy(indices[axis]) for axis in used)
        or used != list(range(used[0], used[-1] + 1))
    ):
        return None
    if any(w.fake(indices[axis]).dtype in (torch.bool, torch.uint8) for axis in used):
        return None
    result_rank = max(rank(indices[axis]) for axis in used)
    for level, axis in levels(source):
        if axis in used:
            continue
        inner = peel(source, level, axis)
        out = axis if axis < used[0] else axis - len(used) + result_rank
        return Compact(w.call_bound(target, {**bound, "self": inner}), level, out)
    return None


def embedding_as_broadcast(w: Walk, bound: dict[str, Any]) -> Value | None:
    """`F.embedding(idx, user_rows)`: a look-up among computed rows."""
    if not w.depends(bound["weight"]) or bound["padding_idx"] != -1 or bound["scale_grad_by_freq"] or bound["sparse"]:
        return None
    return look_up(w, bound["weight"], 0, bound["indices"])


@rule("gather take_along_dim")
def gather(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """`torch.gather(x, 0, idx[:, None].expand(-1, D))`: a look-up of rows, when the index is constant along the
    other axes."""
    source, index = bound["self"], bound["index"] if "index" in bound else bound["indices"]
    dim = bound["dim"]
    if dim is None or bound.get("sparse_grad") or rank(source) != rank(index):
        return None
    dim %= max(rank(source), 1)
    narrow: Value = index
    for axis in range(rank(index)):
        if axis == dim:
            continue
        if not same(shape(index)[axis], shape(source)[axis]):
            return None
        if not same(shape(narrow)[axis], 1):
            inner = expanded_inner(narrow, axis)
            if inner is None:
                return None
            narrow = inner
    return look_up(w, source, dim, w.call(aten.reshape.default, narrow, [-1]))


def interleaved(w: Walk, like: Value, rows: int | Node, copies: int | Node) -> Node:
    """The index `[U R]` that repeats each row R times in place."""
    counter = _counter(w, like, rows, copies)
    return w.build.emit(
        aten.floor_divide.default, counter, w.build.emit(aten.scalar_tensor.default, copies, dtype=torch.int64)
    )


def tiled(w: Walk, like: Value, rows: int | Node, copies: int | Node) -> Node:
    """The index `[R U]` that repeats all rows R times."""
    return w.build.emit(aten.remainder.Scalar, _counter(w, like, rows, copies), rows)


def _counter(w: Walk, like: Value, rows: int | Node, copies: int | Node) -> Node:
    static = isinstance(rows, int) and isinstance(copies, int)
    total = rows * copies if static else w.build.emit(operator.mul, rows, copies)  # type: ignore[operator]
    return w.build.emit(aten.arange.default, total, device=example(like).device)


@rule("repeat_interleave")
def repeat_interleave(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    source = bound.get("self")
    if target is aten.repeat_interleave.Tensor or source is None or not w.depends(source):
        return None
    dim, repeats = bound["dim"], bound["repeats"]
    if dim is None and rank(source) != 1:
        return None
    dim = (dim or 0) % max(rank(source), 1)
    if dim != 0:
        return None
    if not is_tensor(repeats):
        node = interleaved(w, source, w.build.size_of(source, 0), w.argument(repeats))
    elif bound["output_size"] is None:
        w.ledger.left("repeat_interleave needs output_size= : without it the number of candidates is data")
        return None
    else:
        node = w.build.emit(
            aten.repeat_interleave.Tensor, w.build.whole(repeats), output_size=w.argument(bound["output_size"])
        )
        if not same(shape(repeats)[0], shape(source)[0]):
            return None
    return look_up(w, source, 0, Plain(node))


@rule("repeat tile")
def repeat(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """Copies along axes of size one are an `expand`; whole copies of the rows are a broadcast."""
    value, counts = bound["self"], list(bound["repeats"] if "repeats" in bound else bound["dims"])
    while len(counts) < rank(value):
        counts.insert(0, 1)
    if not w.depends(value):
        return None
    value = unsqueezed(w, value, len(counts))
    stretched = []
    for axis, count in enumerate(counts):
        if count == 1:
            continue
        if same(shape(value)[axis], 1):
            stretched.append((axis, count))
        elif axis == 0:
            found = look_up(w, value, 0, Plain(tiled(w, value, w.build.size_of(value, 0), w.argument(count))))
            if found is None:
                return None
            value = found
        else:
            return None
    for axis, count in stretched:
        value = Compact(value, Level(None, 1, w.argument(count)), axis)
    return value


def unsqueezed(w: Walk, value: Value, to_rank: int) -> Value:
    """Leading axes of size one up to `to_rank`."""
    while rank(value) < to_rank:
        value = w.call(aten.unsqueeze.default, value, 0)
    return value


@rule("expand expand_as broadcast_to")
def expand(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """A stretch of axes of size one; it costs nothing until something makes it whole."""
    value = bound["self"]
    if "other" in bound:
        sizes = [w.build.size_of(bound["other"], axis) for axis in range(rank(bound["other"]))]
        full = shape(bound["other"])
    else:
        sizes = [w.argument(size) for size in bound["size"]]
        full = [size.meta["val"] if isinstance(size, Node) else size for size in sizes]
    value = unsqueezed(w, value, len(sizes))
    before = shape(value)
    for axis, size in enumerate(sizes):
        unchanged = (isinstance(size, int) and size == -1) or same(full[axis], before[axis])
        if unchanged:
            continue
        if not same(before[axis], 1):
            return None
        value = Compact(value, Level(None, 1, size), axis)
    return value
