"""The rules: for each operator the axes along which it is independent. See `axes.py` for what follows from them.

An operator that is not here and that PyTorch does not tag as pointwise is copied whole, or taken apart where it is
composite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ikbo_recsys.transforms.axes import AxisMap, Maps, aligned, distribute, piece_axes, sink
from ikbo_recsys.transforms.builder import is_random, packet_name
from ikbo_recsys.transforms.values import (
    Compact,
    Level,
    Plain,
    Value,
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
Rule = Callable[["Walk", Any, dict[str, Any]], Any]

RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators of these names (`add`, or `fbgemm.name` outside aten), with spaces between them."""

    def register(function: Rule) -> Rule:
        for name in names.split():
            RULES[name if "." in name else f"aten.{name}"] = function
        return function

    return register


def find(target: Any) -> Rule | None:
    """The rule of an operator, or None."""
    found = RULES.get(packet_name(target))
    if found is not None or not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return found
    if torch.Tag.pointwise in target.tags and not is_random(target):
        return pointwise
    return None


_FILLS = frozenset(("aten.zeros", "aten.ones", "aten.full"))
_NOT_POINTWISE = (aten.where.default, aten.copy.default)
"""`where(condition)` finds positions; `copy` has the shape of one operand."""


# ---- one result row for each row -----------------------------------------------------------------------------------


@rule(
    "silu mish hardswish hardsigmoid leaky_relu log_sigmoid softplus relu6 selu celu elu gelu square "
    "float_power rsub true_divide divide multiply subtract where masked_fill clip softsign tanhshrink "
    "isfinite isinf isnan nan_to_num clamp_max clamp_min absolute negative greater less greater_equal "
    "less_equal not_equal logical_and logical_or logical_xor logical_not"
)
def pointwise(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """Elementwise with broadcasting: independent along every axis."""
    names = [name for name, value in bound.items() if is_tensor(value)]
    if not any(is_lazy(bound[name]) for name in names) or target in _NOT_POINTWISE:
        return None
    bound = dict(bound)
    out_rank = max(rank(bound[name]) for name in names)
    for name in names:
        bound[name] = _without_needless_stretch(w, bound, name, names, out_rank)
    maps = {name: aligned(bound[name], out_rank) for name in names}
    result = sink(w, target, bound, maps)
    if result is None:
        result = distribute(w, target, bound, maps)
    if result is None and any(_stretched(bound[name]) for name in names):
        return None
    if result is None:
        w.refuse("it combines rows of a user with rows of candidates: elementwise, memory only")
    return result


def _stretched(value: Value) -> bool:
    return isinstance(value, Compact) and value.level.index is None


def _without_needless_stretch(w: Walk, bound: dict[str, Any], name: str, names: list[str], out_rank: int) -> Value:
    """An operand without its `expand`, and a constant fill without its rows, where another operand has the rows
    anyway."""
    value: Value = bound[name]
    for axis in reversed(range(rank(value))):
        offset = out_rank - rank(value) + axis
        for other in names:
            their_axis = offset - (out_rank - rank(bound[other])) if other != name else -1
            if their_axis < 0 or not same(shape(bound[other])[their_axis], shape(value)[axis]):
                continue
            if same(shape(value)[axis], 1) or expanded_inner(bound[other], their_axis) is not None:
                continue
            inner = expanded_inner(value, axis)
            value = inner if inner is not None else _fill_without_rows(w, value, axis)
    return value


def _fill_without_rows(w: Walk, value: Value, axis: int) -> Value:
    """`zeros(B, 1)` as `zeros(1, 1)`: what a constant fill contributes to an elementwise operator is its number."""
    if not isinstance(value, Plain) or packet_name(value.node.target) not in _FILLS:
        return value
    sizes = list(value.node.args[0])  # type: ignore[arg-type]
    sizes[axis] = 1
    return Plain(w.build.emit(value.node.target, sizes, *value.node.args[1:], **value.node.kwargs))


@rule("new_zeros new_ones new_full zeros_like ones_like full_like")
def fills(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """A constant fill takes only dtype, device and shape of its operand."""
    like = bound["self"]
    name = target._schema.name.split("::")[1]
    if not is_lazy(like) and name.endswith("_like"):
        return None
    val = w.fake(like)
    own_sizes = [w.build.size_of(like, axis) for axis in range(rank(like))]
    sizes = own_sizes if name.endswith("_like") else bound["size"]
    if bound.get("layout") not in (None, torch.strided) or bound.get("pin_memory") or bound.get("memory_format"):
        return None
    options = {"dtype": bound.get("dtype") or val.dtype, "device": bound.get("device") or val.device}
    number = {"zeros": 0, "ones": 1}.get(name.split("_")[0 if name.endswith("_like") else 1], bound.get("fill_value"))
    if isinstance(number, Plain):
        return None
    return Plain(w.build.emit(aten.full.default, w.argument(list(sizes)), number, **options))


@rule("type_as")
def type_as(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """Only the type of the second operand matters."""
    if not is_lazy(bound["self"]) and not is_lazy(bound["other"]):
        return None
    other = w.fake(bound["other"])
    if other.device != w.fake(bound["self"]).device:
        return None
    return w.call(aten.to.dtype, bound["self"], other.dtype)


@rule(
    "to _to_copy clone contiguous detach alias lift_fresh_copy dropout feature_dropout prelu alpha_dropout "
    "feature_alpha_dropout lift_fresh"
)
def unary(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """Elementwise in the first operand; random ones only where they are not random (dropout in evaluation)."""
    first = next(iter(bound))
    value = bound[first]
    if not is_lazy(value) or not is_tensor(value):
        return None
    if is_random(target):
        if bound.get("train", True) and bound.get("p") != 0.0:
            w.refuse("dropout in training draws for every candidate")
            return None
        return value
    maps: Maps = {first: list(range(rank(value)))}
    if is_tensor(bound.get("weight")):  # prelu: one slope, or one for each channel
        maps["weight"] = [1] if rank(value) > 1 and not same(shape(bound["weight"])[0], 1) else [None]
    result = sink(w, target, bound, maps)
    return distribute(w, target, bound, maps) if result is None else result


# ---- axes that are mixed, and the others ---------------------------------------------------------------------------


def _mixing(value: Value, mixed: list[int]) -> AxisMap:
    """The identity, None for the mixed axes."""
    mixed = [axis % rank(value) for axis in mixed]
    return [None if axis in mixed else axis for axis in range(rank(value))]


def _reduced(value: Value, mixed: list[int], keepdim: bool) -> AxisMap:
    axes = _mixing(value, mixed)
    if keepdim:
        return axes
    kept = iter(range(rank(value)))
    return [None if axis is None else next(kept) for axis in axes]


def _sink_or_distribute(w: Walk, target: Any, bound: dict[str, Any], maps: Maps) -> Any:
    result = sink(w, target, bound, maps)
    return distribute(w, target, bound, maps) if result is None else result


@rule(
    "softmax log_softmax _softmax _log_softmax cumsum cumprod sort topk flip glu roll argsort logcumsumexp "
    "cummax cummin"
)
def along_one_axis(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """Same shape, mixing the axis `dim` (or `dims`)."""
    value = bound["self"]
    dims = bound["dims"] if "dims" in bound else bound["dim"]
    if not is_lazy(value) or dims is None or (isinstance(dims, list | tuple) and not dims):
        return None
    dims = list(dims) if isinstance(dims, list | tuple) else [dims]
    return _sink_or_distribute(w, target, bound, {"self": _mixing(value, dims)})


@rule(
    "sum mean amax amin prod any all logsumexp var std argmax argmin max min norm linalg_vector_norm "
    "var_mean median nansum count_nonzero frobenius_norm"
)
def reductions(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """Mixing the reduced axes. A sum or a mean over pieces is taken piece by piece (a maximum is not: where entries
    are equal its gradient would be shared out in another way)."""
    value = bound["self"]
    if not is_lazy(value):
        return None
    if any(is_tensor(v) for n, v in bound.items() if n != "self"):  # max(x, y)
        return pointwise(w, target, bound)
    dims = bound.get("dim")
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        w.refuse("it reduces over all rows")
        return None
    dims = [d % rank(value) for d in (dims if isinstance(dims, list | tuple) else [dims])]
    keepdim = bool(bound.get("keepdim", False))
    result = _sink_or_distribute(w, target, bound, {"self": _reduced(value, dims, keepdim)})
    if result is None and target in _COMBINE:
        result = _piecewise_reduction(w, target, bound, dims)
    if result is None and any(axis in dims for _, axis in levels(value)):
        w.refuse("it reduces over rows")
    return result


_COMBINE = {
    aten.sum.dim_IntList: aten.add.Tensor,
    aten.mean.dim: aten.add.Tensor,
}


def _piecewise_reduction(w: Walk, target: Any, bound: dict[str, Any], dims: list[int]) -> Any:
    from ikbo_recsys.transforms.mix import combine, group_pieces

    value = bound["self"]
    for axis in piece_axes(value):
        groups = group_pieces(w, value, axis) if axis in dims else None
        if groups is None:
            continue
        one_piece = aten.sum.dim_IntList if target is aten.mean.dim else target
        results = [w.call_bound(one_piece, {**bound, "self": group}) for group in groups]
        total = combine(w, results, _COMBINE[target])
        if target is not aten.mean.dim:
            return total
        count = 1
        for dim in dims:
            size = shape(value)[dim]
            if not is_static(size):
                return None
            count *= size
        return w.call(aten.div.Scalar, total, count)
    return None


@rule("layer_norm native_layer_norm rms_norm")
def layer_norms(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """Mixing the last axes."""
    value = bound["input"]
    if not is_lazy(value):
        return None
    mixed = list(range(-len(bound["normalized_shape"]), 0))
    maps: Maps = {"input": _mixing(value, mixed)}
    for name in ("weight", "bias"):
        if is_tensor(bound.get(name)):
            maps[name] = [None] * rank(bound[name])
    if packet_name(target) == "aten.native_layer_norm":
        return sink(w, target, bound, maps)
    return _sink_or_distribute(w, target, bound, maps)


@rule("group_norm")
def group_norms(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """Independent along the batch axis."""
    return sink(w, target, bound, {"input": [0] + [None] * (rank(bound["input"]) - 1)})


@rule("batch_norm")
def batch_norms(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """In evaluation an affine map of each channel; in training the statistics are those of the rows as they are
    repeated."""
    value = bound["input"]
    if not is_lazy(value):
        return None
    if bound["training"] or not is_tensor(bound.get("running_mean")):
        w.refuse("batch norm in training takes its statistics over all rows")
        return None
    maps: Maps = {"input": list(range(rank(value)))}
    for name in ("weight", "bias", "running_mean", "running_var"):
        if is_tensor(bound.get(name)):
            maps[name] = [1]
    return _sink_or_distribute(w, target, bound, maps)


@rule("conv2d conv3d convolution adaptive_avg_pool1d avg_pool1d max_pool1d constant_pad_nd pad")
def over_images(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """Independent along the batch axis (a pad must leave it alone)."""
    name = "input" if "input" in bound else "self"
    value = bound[name]
    own_axes = rank(value) - len(bound["pad"]) // 2 if "pad" in bound else 1
    batched = 3 if not is_tensor(bound.get("weight")) else rank(bound["weight"])
    if "pad" not in bound and rank(value) != batched:
        return None
    axes: AxisMap = [axis if axis < own_axes else None for axis in range(rank(value))]
    maps: Maps = {name: axes}
    for other in ("weight", "bias"):
        if is_tensor(bound.get(other)):
            maps[other] = [None] * rank(bound[other])
    return sink(w, target, bound, maps)


@rule("gru lstm rnn_tanh rnn_relu")
def recurrent(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """A recurrent network over a history: every sequence is on its own. The states have the rows on axis 1."""
    value: Any = bound.get("input")
    states: Any = bound.get("hx")
    if "batch_first" not in bound or not isinstance(value, Compact) or (bound["train"] and bound["dropout"] != 0.0):
        return None
    level, axis = value.level, value.dim
    if rank(value) != 3 or axis != (0 if bound["batch_first"] else 1) or level.rows != 1:
        return None
    rows = w.build.size_of(value.inner, axis)
    given = states if isinstance(states, list) else [states]
    inner = [_state_of(w, state, level, rows) for state in given]
    if any(state is None for state in inner):
        return None
    compact = {**bound, "input": value.inner, "hx": inner if isinstance(states, list) else inner[0]}
    output, *last = w.call_bound(target, compact)
    return (Compact(output, level, axis), *(Compact(state, level, 1) for state in last))


def _state_of(w: Walk, state: Value, level: Level, rows: Any) -> Value | None:
    """An initial state at the compact rows: looked up along with the input, or a constant fill."""
    found = peel(state, level, 1) if is_lazy(state) else None
    if found is None and isinstance(state, Plain) and packet_name(state.node.target) in _FILLS:
        sizes: list[Any] = list(state.node.args[0])  # type: ignore[arg-type]
        sizes[1] = rows
        found = Plain(w.build.emit(state.node.target, sizes, *state.node.args[1:], **state.node.kwargs))
    return found


@rule("embedding embedding_bag")
def embeddings(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """A table looked up with the ids of users: look up once per user."""
    from ikbo_recsys.transforms.broadcasts import embedding_as_broadcast

    if packet_name(target) == "aten.embedding_bag":
        return None
    broadcast = embedding_as_broadcast(w, bound)
    if broadcast is not None:
        return broadcast
    ids = bound["indices"]
    if not is_lazy(ids) or bound.get("scale_grad_by_freq"):
        return None
    return _sink_or_distribute(w, target, bound, {"weight": [None, None], "indices": list(range(rank(ids)))})


@rule("one_hot bucketize")
def per_element(w: Walk, target: Any, bound: dict[str, Any]) -> Any:
    """A result for each element, with possibly an axis behind."""
    data_dependent = bound.get("num_classes", 0) == -1
    if data_dependent or not is_tensor(bound["self"]) or is_lazy(bound.get("boundaries")):
        return None
    return _sink_or_distribute(w, target, bound, {"self": list(range(rank(bound["self"])))})
