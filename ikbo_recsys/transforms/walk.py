"""One forward walk over a graph that rebuilds it with lazy values.

Each operator of the old graph is evaluated over `Value`s. Its rule either answers (with a lazy value, or with new
nodes), or the operands are made whole and the operator is copied as it was, with the reason. Because values are
lazy, the walk is its own fixpoint: a copy sinks as far as rules carry it, and is made once, where it must be.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ikbo_recsys.transforms import broadcasts, interactions, labels, mix, mutation, rules, shapes
from ikbo_recsys.transforms.builder import Builder, NotExpressibleError, is_random, packet_name
from ikbo_recsys.transforms.report import Ledger
from ikbo_recsys.transforms.values import Plain, Value, example, has_compact, is_lazy, is_tensor, shape

aten = torch.ops.aten

RULE_MODULES = (broadcasts, interactions, mix, rules, shapes)
"""Importing them registers the rules."""

_READS_STRIDES = frozenset(("aten.as_strided", "aten.as_strided_", "aten.set_", "aten.resize_", "aten._reshape_alias"))
_DROPPED_CHECKS = frozenset(("aten._assert_tensor_metadata",))


class RefusedError(Exception):
    """The whole graph is left alone, for the reason given."""


class Walk:
    """The walk over one graph.

    Args:
        module: its nodes carry `meta["val"]`. It is not changed, except for constants that are registered.
        inputs: the names of the placeholders that are inputs of the model: not parameters, buffers or constants.
        user_inputs: which of them are user-rate. None: whatever the model itself replicates is.
        constants: values of placeholders and attributes that never change.
        lifted: the graph is an exported program's, whose constants are placeholders.
    """

    def __init__(
        self,
        module: GraphModule,
        inputs: Iterable[str],
        user_inputs: Iterable[str] | None,
        constants: dict[str, torch.Tensor],
        lifted: bool,
    ) -> None:
        self.module = module
        self.build = Builder(module, lifted)
        self.inputs = frozenset(inputs)
        self.user_inputs = None if user_inputs is None else frozenset(user_inputs)
        self.constants = constants
        self.ledger = Ledger()
        self.grams: dict[Any, Any] = {}
        self.reason: str | None = None
        self.depth = 0
        self._depends: dict[Node, frozenset[str]] = {}
        self._env: dict[Node, Any] = {}

    def run(self) -> torch.fx.Graph:
        """The new graph, linted, without dead nodes.

        Raises:
            RefusedError: the graph holds something that the walk could change the meaning of.
        """
        opaque = mutation.opaque_nodes(self.module.graph)
        for node in self.module.graph.nodes:
            _refuse_unsafe(node)
            self.build.origin = node
            self._env[node] = self._evaluate(node, opaque)
        graph = self.build.graph
        graph.eliminate_dead_code(is_impure_node=_is_kept)
        graph.lint()
        return graph

    # ---- old nodes -------------------------------------------------------------------------------------------------

    def _evaluate(self, node: Node, opaque: set[Node]) -> Any:
        if node.op == "placeholder":
            new = self.build.copy(node, self._whole_argument)
            if node.name in self.inputs:
                self.build.first_input = self.build.first_input or new
            return Plain(new)
        if mutation.changes_mode(node):
            # A copy that is not made yet belongs to the mode it was asked for in: without gradients, for one.
            self._env = {old: self._settled(value) for old, value in self._env.items()}
            self.build.forget()
            return self._verbatim(node)
        if node.op in ("get_attr", "output"):
            return Plain(self.build.copy(node, self._whole_argument))
        if (
            node.op != "call_function"
            or node in opaque
            or not isinstance(node.target, torch._ops.OpOverload | type(_builtin))
        ):
            return self._verbatim(node)
        args, kwargs = _over_values(node, self._env)
        if packet_name(node.target) in _DROPPED_CHECKS:
            return None if any(map(is_lazy, args)) else self._verbatim(node)
        self.ledger.begin(node, labels.savable(self, node.target, args, kwargs))
        self.reason = None
        return self.call(node.target, *args, **kwargs)

    def _verbatim(self, node: Node) -> Any:
        new = self.build.copy(node, self._whole_argument)
        return Plain(new)

    def _settled(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._settled(v) for v in value)
        return Plain(self.build.whole(value)) if is_lazy(value) else value

    def _whole_argument(self, node: Node) -> Any:
        return self.argument(self._env[node])

    # ---- calls over values -----------------------------------------------------------------------------------------

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """`target` over values: a value, or a tuple of values for an operator with several results."""
        if target is operator.getitem and isinstance(args[0], tuple | list):
            return args[0][args[1]]
        if not isinstance(target, torch._ops.OpOverload):
            return self.plain(target, args, kwargs)
        return self.call_bound(target, bind(target, args, kwargs))

    def call_bound(self, target: Any, bound: dict[str, Any]) -> Any:
        """`call` with the arguments by name."""
        args, kwargs = unbind(target, bound)
        self.depth += 1
        try:
            rule = rules.find(target)
            result = None if rule is None else rule(self, target, bound)
            if result is None and any(map(is_lazy, tensors(bound))):
                result = self._decomposed(target, args, kwargs) if rule is None else None
                if result is None:
                    self._note_left(target, bound)
        except NotExpressibleError as unknown:
            self.refuse(f"the size {unknown} cannot be computed from the sizes of the inputs")
            result = None
        finally:
            self.depth -= 1
        return self.plain(target, args, kwargs) if result is None else result

    def decomposed(self, target: Any, bound: dict[str, Any]) -> Any:
        """A composite operator as the operators it is made of, or None."""
        return self._decomposed(target, *unbind(target, bound))

    def plain(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The operator as it is, on whole operands."""
        # The strides of a rewritten operand may be others.
        target = aten.reshape.default if target in (aten.view.default, aten._unsafe_view.default) else target
        blocked = labels.blocked(target, args, kwargs)
        whole_args, whole_kwargs = self.argument(args), self.argument(kwargs)
        # Whole operands: at the top level this is the old node again, with the metadata it had.
        val = self.build.origin.meta.get("val") if self.depth == 0 and self.build.origin is not None else None
        node = self.build.emit_known(val, target, whole_args, whole_kwargs)
        if isinstance(node.meta["val"], tuple | list):
            items = range(len(node.meta["val"]))
            return tuple(Plain(self.build.emit(operator.getitem, node, i), *blocked) for i in items)
        return Plain(node, *blocked)

    def argument(self, value: Any) -> Any:
        """An argument of a new node: values made whole, in whatever list they are."""
        if isinstance(value, Plain) or is_lazy(value):
            return self.build.whole(value)
        if isinstance(value, list | tuple):
            return type(value)(self.argument(v) for v in value)
        if isinstance(value, dict):
            return {name: self.argument(v) for name, v in value.items()}
        return value

    def _decomposed(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A composite operator without a rule, as the operators it is made of."""
        if not target._can_decompose() or is_random(target):
            return None
        flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=is_tensor)
        values = [v for v in flat if is_tensor(v)]
        others = [None if is_tensor(v) else v for v in flat]
        if any(isinstance(v, Plain) for v in others):
            return None

        def decompose(*inputs: torch.Tensor) -> Any:
            remaining = iter(inputs)
            leaves = [next(remaining) if is_tensor(v) else v for v in flat]
            call_args, call_kwargs = pytree.tree_unflatten(leaves, spec)
            return target.decompose(*call_args, **call_kwargs)

        try:
            with self.build.inference():
                traced = make_fx(decompose)(*[self.fake(v) for v in values])
        except Exception:  # a composite operator that cannot be traced on its own is copied whole
            return None
        return self._inline(traced, values)

    def _inline(self, traced: GraphModule, values: list[Value]) -> Any:
        if any(mutation.is_mutation(node) for node in traced.graph.nodes):
            return None
        env: dict[Node, Any] = {}
        remaining = iter(values)
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(remaining)
            elif node.op == "call_function":
                args, kwargs = _over_values(node, env)
                env[node] = self.call(node.target, *args, **kwargs)
            elif node.op == "output":
                result = node.args[0]
                return tuple(env[n] for n in result) if isinstance(result, tuple | list) else env[result]
            else:
                return None
        return None

    # ---- what rules ask --------------------------------------------------------------------------------------------

    def fake(self, value: Value) -> torch.Tensor:
        """A fake tensor of the full shape."""
        if isinstance(value, Plain):
            val: torch.Tensor = value.node.meta["val"]
            return val
        like = example(value)
        with self.build.inference():
            return torch.empty(shape(value), dtype=like.dtype, device=like.device)

    def depends(self, value: Value) -> frozenset[str]:
        """The inputs of the model that the value is computed from."""
        found: set[str] = set()
        labels.visit_nodes(value, lambda node: found.update(self._inputs_of(node)))
        return frozenset(found)

    def _inputs_of(self, root: Node) -> frozenset[str]:
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [n for n in node.all_input_nodes if n not in self._depends and node.target is not _SYM_SIZE]
            if missing and node not in self._depends:
                stack.extend(missing)
                continue
            stack.pop()
            if node in self._depends:
                continue
            if node.op == "placeholder":
                self._depends[node] = frozenset((node.name,)) & self.inputs
            elif node.target is _SYM_SIZE:
                self._depends[node] = frozenset()
            else:
                self._depends[node] = frozenset().union(*(self._depends[n] for n in node.all_input_nodes))
        return self._depends[root]

    def refuse(self, reason: str) -> None:
        """Say why the current operator stays as it is. The first reason given is kept: it is the most specific one."""
        self.reason = self.reason or reason

    def leave(self, reason: str) -> None:
        """Record that the current operator runs on whole rows."""
        self.ledger.left(reason)

    def _note_left(self, target: Any, bound: dict[str, Any]) -> None:
        if not any(map(has_compact, tensors(bound))):
            return
        if is_random(target):
            self.refuse("it is random: every candidate has its own draw")
        self.refuse(f"{packet_name(target)} mixes rows, or has no rule for these operands")
        self.ledger.left(self.reason or "")


_builtin = operator.getitem
_SYM_SIZE = aten.sym_size.int


def _refuse_unsafe(node: Node) -> None:
    """Raise for what the walk cannot carry over."""
    if mutation.changes_mode(node) == "autocast":
        raise RefusedError(f"{node.name} enters or leaves an autocast region inside the graph")
    if packet_name(node.target) in _READS_STRIDES:
        raise RefusedError(f"{node.name} ({packet_name(node.target)}) depends on how its operand lies in memory")


def _is_kept(node: Node) -> bool:
    return bool(node.meta.get("ikbo_keep")) or node.is_impure()


def _over_values(node: Node, env: dict[Node, Any]) -> tuple[Any, Any]:
    """The arguments of an old node, with values for the nodes in them."""

    def convert(argument: Any) -> Any:
        if isinstance(argument, Node):
            return env[argument]
        if isinstance(argument, dict):
            return {name: convert(a) for name, a in argument.items()}
        if isinstance(argument, list | tuple):
            converted = [convert(a) for a in argument]
            return tuple(converted) if isinstance(argument, tuple) else converted
        return argument

    return convert(node.args), convert(node.kwargs)


def tensors(bound: Any) -> list[Value]:
    """The tensor values among arguments, lists included."""
    if is_tensor(bound):
        return [bound]
    if isinstance(bound, dict):
        bound = list(bound.values())
    return [v for item in bound for v in tensors(item)] if isinstance(bound, list | tuple) else []


def bind(target: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their names in the schema, defaults filled in."""
    bound = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        else:
            bound[argument.name] = kwargs.get(argument.name, argument.default_value)
    return bound


def unbind(target: Any, bound: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments again, without trailing defaults."""
    schema = target._schema.arguments
    positional = [a for a in schema if not a.kwarg_only]
    while positional and positional[-1].has_default_value() and _is_default(bound, positional[-1]):
        positional.pop()
    kwargs = {a.name: bound[a.name] for a in schema if a.kwarg_only and not _is_default(bound, a)}
    return [bound[a.name] for a in positional], kwargs


def _is_default(bound: dict[str, Any], argument: Any) -> bool:
    value = bound[argument.name]
    if not argument.has_default_value() or is_tensor(value) or isinstance(value, Plain):
        return False
    return type(value) is type(argument.default_value) and bool(value == argument.default_value)
