"""The new graph under construction: nodes with their metadata, equal nodes made once, lazy values made whole on
demand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._sympy.functions import FloorDiv

from ikbo_recsys.transforms.values import Compact, Level, Pieces, Plain, Size, Value, is_static, shape

aten = torch.ops.aten

_STATEFUL = frozenset(
    ("aten.batch_norm", "aten.instance_norm", "aten.native_batch_norm", "aten._native_batch_norm_legit")
)
"""Operators that write to their arguments (running statistics) though their schemas do not say so."""

_KNOWN_NAMESPACES = frozenset(("aten", "prims", "ikbo", "fbgemm", "torchrec"))
"""Whose operators say what they do. A custom operator of anybody else may count, log or draw numbers without a word."""

_META_KEYS = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "custom", "from_node")


class NotExpressibleError(Exception):
    """A size of the new graph that cannot be computed from the sizes of its tensors."""


def packet_name(target: Any) -> str:
    """`aten.add` for every overload of it; the function's own name for what is not an operator."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target.namespace, target._schema.name.split("::")[1]
        return f"{namespace}.{name}"
    return getattr(target, "__name__", str(target))


def is_random(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_pure(target: Any) -> bool:
    """Whether two calls with equal arguments may be one call."""
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in _KNOWN_NAMESPACES:
            return False
        return not (target._schema.is_mutable or is_random(target) or packet_name(target) in _STATEFUL)
    return target in (operator.getitem, operator.mul, operator.add, operator.sub, operator.floordiv)


class Builder:
    """Builds the new graph of `module` beside the old one."""

    def __init__(self, module: GraphModule, lifted: bool) -> None:
        self.module = module
        self.graph = Graph(module)
        self.lifted = lifted
        self.constants: dict[str, torch.Tensor] = {}
        self.known: dict[Value, Node] = {}
        self.origin: Node | None = None
        self.first_input: Node | None = None
        self._nodes: dict[Any, Node] = {}
        self._sizes: dict[Any, tuple[Node, int]] = {}
        # Of the tensors themselves: while TorchDynamo compiles, the ambient mode is another one.
        fakes = (node.meta.get("val") for node in module.graph.nodes)
        modes = (val.fake_mode for val in fakes if isinstance(val, FakeTensor))
        self.fake_mode: FakeTensorMode = next(modes, None) or FakeTensorMode()

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def copy(self, node: Node, args: Callable[[Node], Any]) -> Node:
        """The old node as it is, its arguments replaced."""
        new = self.graph.node_copy(node, args)
        new.meta["ikbo_origin"] = node
        new.meta["ikbo_keep"] = not is_pure(node.target)
        self._remember_sizes(new)
        return new

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call of `target`; the existing node when an equal call was made before."""
        return self.emit_known(None, target, args, kwargs)

    def emit_known(self, val: Any, target: Any, args: Any, kwargs: Any) -> Node:
        """`emit` with the metadata of the result, where it is known."""
        key = _key((target, args, kwargs)) if is_pure(target) else None
        if key is not None and key in self._nodes:
            return self._nodes[key]
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        node.meta["val"] = self.infer(target, *args, **kwargs) if val is None else val
        if self.origin is not None:
            node.meta.update({k: self.origin.meta[k] for k in _META_KEYS if k in self.origin.meta})
            node.meta["ikbo_origin"] = self.origin
        node.meta["ikbo_keep"] = key is None
        self._remember_sizes(node)
        if key is not None:
            self._nodes[key] = node
        return node

    def forget(self) -> None:
        """Make no more use of the nodes so far: the mode in which operators run has changed."""
        self._nodes.clear()

    def infer(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The metadata of a call's result."""
        args, kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.inference():
            return target(*args, **kwargs)

    def inference(self) -> AbstractContextManager[Any]:
        """Where fake tensors are computed with: no autograd, and no new facts about sizes."""
        return _Inference(self.fake_mode)

    def constant(self, tensor: torch.Tensor) -> Node:
        """A new constant of the program."""
        name = f"ikbo_constant_{len(self.constants)}"
        while hasattr(self.module, name):
            name += "_"
        self.constants[name] = tensor
        if self.lifted:
            with self.graph.inserting_before(self.first_input):
                node = self.graph.placeholder(f"c_{name}")
        else:
            self.module.register_buffer(name, tensor, persistent=False)
            node = self.graph.get_attr(name)
        node.meta["val"] = self.fake_mode.from_tensor(tensor, static_shapes=True)
        return node

    def _remember_sizes(self, node: Node) -> None:
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            return
        for dim, size in enumerate(val.shape):
            if isinstance(size, torch.SymInt):
                self._sizes.setdefault(size.node.expr, (node, dim))

    # ---- sizes -----------------------------------------------------------------------------------------------------

    def size(self, size: Size) -> int | Node:
        """An argument that evaluates to `size`.

        Raises:
            NotExpressibleError: no tensor of the graph so far has it.
        """
        return size if is_static(size) else self._expression(size.node.expr)

    def _expression(self, expr: Any) -> int | Node:
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if expr in self._sizes:
            node, dim = self._sizes[expr]
            return self.emit(aten.sym_size.int, node, dim)
        functions = {sympy.Mul: operator.mul, sympy.Add: operator.add, FloorDiv: operator.floordiv}
        function = functions.get(type(expr))
        if function is None:
            raise NotExpressibleError(str(expr))
        terms = [self._expression(term) for term in expr.args]
        total = terms[0]
        for term in terms[1:]:
            both_static = isinstance(total, int) and isinstance(term, int)
            total = function(total, term) if both_static else self.emit(function, total, term)
        return total

    def sizes(self, sizes: Iterable[Size]) -> list[int | Node]:
        """The size arguments of a view; one dynamic size beside static ones is left to the operator (-1)."""
        sizes = list(sizes)
        dynamic = [i for i, size in enumerate(sizes) if not is_static(size)]
        empty = any(is_static(size) and size == 0 for size in sizes)
        if len(dynamic) == 1 and not empty:
            return [-1 if i == dynamic[0] else size for i, size in enumerate(sizes)]
        return [self.size(size) for size in sizes]

    # ---- lazy values made whole ------------------------------------------------------------------------------------

    def whole(self, value: Value) -> Node:
        """The node of the full value: this is where copies are made."""
        if isinstance(value, Plain):
            return value.node
        if value in self.known:
            return self.known[value]
        if isinstance(value, Pieces):
            return self.emit(aten.cat.default, [self.whole(part) for part in value.parts], value.dim)
        level, dim, inner = value.level, value.dim, value.inner
        if isinstance(inner, Compact) and level.index is not None:
            if inner.level.index is None and inner.dim != dim:  # look up first, stretch afterwards
                return self.whole(Compact(Compact(inner.inner, level, dim), inner.level, inner.dim))
            if inner.dim == dim and inner.level.index is not None and level.rows == inner.level.rows == 1:
                index = self.emit(aten.index_select.default, inner.level.index, 0, level.index)
                return self.whole(Compact(inner.inner, Level(index), dim))
        node = self.whole(inner)
        if level.index is None:
            sizes: list[Any] = [-1] * node.meta["val"].dim()
            sizes[dim] = level.size
            return self.emit(aten.expand.default, node, sizes)
        if level.rows == 1:
            return self.look_up(node, dim, level.index)
        split = self.emit(aten.reshape.default, node, self._split_rows(node, dim, level.rows))
        looked_up = self.look_up(split, dim, level.index)
        return self.emit(aten.flatten.using_ints, looked_up, dim, dim + 1)

    def look_up(self, node: Node, dim: int, index: Node) -> Node:
        """Rows `index` of `node`, copied."""
        if dim == 0:
            return self.emit(torch.ops.ikbo.broadcast.default, node, index)
        return self.emit(aten.index_select.default, node, dim, index)

    def _split_rows(self, node: Node, dim: int, rows: int) -> list[int | Node]:
        sizes = list(node.meta["val"].shape)
        return self.sizes([*sizes[:dim], sizes[dim] // rows, rows, *sizes[dim + 1 :]])

    def size_of(self, value: Value, dim: int) -> int | Node:
        """An argument that evaluates to one full size of `value`, without making it."""
        size = shape(value)[dim]
        if is_static(size):
            return size
        if isinstance(value, Plain):
            return self.emit(aten.sym_size.int, value.node, dim)
        if isinstance(value, Compact) and value.dim == dim:
            level = value.level
            if level.index is None:
                return self.size(level.full) if level.size is None else level.size
            entries = self.emit(aten.sym_size.int, level.index, 0)
            return entries if level.rows == 1 else self.emit(operator.mul, entries, level.rows)
        if isinstance(value, Compact):
            return self.size_of(value.inner, dim)
        if value.dim != dim:
            return self.size_of(value.parts[0], dim)
        return self.size(size)


class _Inference:
    def __init__(self, fake_mode: FakeTensorMode) -> None:
        shape_env = fake_mode.shape_env
        suppress = nullcontext() if shape_env is None else shape_env.suppress_guards()
        # Some composite operators know symbolic sizes only through their Python decompositions.
        python = nullcontext() if shape_env is None else enable_python_dispatcher()
        self._contexts: list[Any] = [suppress, torch.no_grad(), fake_mode, python]

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exc)


def _key(value: Any) -> Any:
    """A hashable form in which 1, 1.0 and True differ."""
    if isinstance(value, list | tuple):
        return (type(value).__name__ == "slice", tuple(_key(v) for v in value))
    if isinstance(value, dict):
        return tuple((name, _key(value[name])) for name in sorted(value))
    return (type(value), value)
