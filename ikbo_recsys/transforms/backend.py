"""The pass while compiling: a `torch.compile` backend, and a pass for Inductor's ahead-of-time path.

The backend is found under the name "ikbo" through the entry point group `torch_dynamo_backends`, or, in a source
tree that was not installed, once this package is imported.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ikbo_recsys.transforms.optimize import NothingToOptimize, rewrite
from ikbo_recsys.transforms.report import Report

_NAME = "ikbo"
_STATE = re.compile(r"_(parameters|buffers)_")
_OPTIONS = ("inner", "on_report")


def ikbo(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="ikbo")`: the pass, then Inductor. Training works as with
    Inductor.

    A graph in which nothing can be sunk is compiled as it is, with a `NothingToOptimize` warning that says why.

    Args:
        module, example_inputs: from TorchDynamo.
        mode: as in `torch.compile`, for Inductor.
        options: `inner`, what compiles the result: "inductor" (default), "aot_eager", "eager", or a backend function;
            `on_report`, called with the `Report` of each graph. Others go to Inductor.

    Raises:
        ValueError: an unknown name for `inner`.
    """
    options = dict(options or {})
    inner, on_report = options.pop("inner", "inductor"), options.pop("on_report", None)
    traced, report = _rewritten(module)
    if on_report is not None:
        on_report(report)
    if report.refused is not None:
        warnings.warn(f"backend ikbo changed nothing: {report.refused}", NothingToOptimize, stacklevel=2)
    return _compile(module if traced is None else traced, example_inputs, inner, mode, options)


def _rewritten(module: GraphModule) -> tuple[GraphModule | None, Report]:
    """The graph in ATen operators, optimized; None where it was not changed."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("example_value", node.meta.get("val")) for node in placeholders]
    try:
        with torch.fx.traceback.preserve_node_meta():  # the model's source lines
            run = torch.fx.Interpreter(module).run
            traced = make_fx(run, pre_dispatch=True, decomposition_table={}, _allow_non_fake_inputs=True)(*values)
    except Exception as error:  # whatever cannot be traced again is compiled as it is
        return None, Report(refused=f"the graph could not be traced: {type(error).__name__}: {error}")
    inputs = []
    for new, old, value in zip(_placeholders(traced), placeholders, values, strict=True):
        is_state = isinstance(value, nn.Parameter) or _STATE.search(str(old.target)) or not isinstance(value, Tensor)
        if not is_state:
            inputs.append(new.name)
    report, _ = rewrite(traced, inputs)
    report.mode = "inside" if report.broadcasts else "none"
    return (None if report.refused is not None else traced), report


def _placeholders(module: GraphModule) -> list[torch.fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _compile(
    module: GraphModule, example_inputs: Sequence[Any], inner: Any, mode: str | None, options: dict[str, Any]
) -> Callable[..., Any]:
    if callable(inner):
        compiled: Callable[..., Any] = inner(module, example_inputs)
        return compiled
    if inner == "inductor":
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        settings = {**(list_mode_options(mode) if mode else {}), **options}
        return compile_fx(module, list(example_inputs), config_patches=settings or None)  # type: ignore[return-value]
    if inner not in ("aot_eager", "eager"):
        raise ValueError(f"inner must be 'inductor', 'aot_eager', 'eager' or a function, got {inner!r}")
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(inner)(module, list(example_inputs))  # type: ignore[return-value]


class GraphPass(CustomGraphPass):
    """The pass for programs on their way to an ahead-of-time package, where `optimize` cannot be called on them before.

    Inductor runs it on each graph that it lowers::

        package = torch._inductor.aoti_compile_and_package(
            program, inductor_configs={"pre_grad_custom_pass": GraphPass(user_inputs=["user"])}
        )

    Args:
        user_inputs: names of the program's inputs that are user-rate; None leaves it to the broadcasts found.
        on_report: called with the `Report` of each graph.
    """

    def __init__(
        self, user_inputs: Sequence[str] | None = None, on_report: Callable[[Report], Any] | None = None
    ) -> None:
        self.user_inputs = None if user_inputs is None else list(user_inputs)
        self.on_report = on_report

    def __call__(self, graph: Graph) -> None:
        module = graph.owning_module
        names = [node.name for node in graph.nodes if node.op == "placeholder" and not _STATE.search(str(node.target))]
        if module is None or not all("val" in n.meta for n in graph.nodes if n.op in ("placeholder", "call_function")):
            report = Report(refused="the graph is not one of ATen operators with shapes")
        else:
            report, _ = rewrite(module, names, self.user_inputs)
            report.mode = "inside" if report.broadcasts else "none"
        if report.refused is None:
            # Inductor goes on with the graph object that it passed.
            graph.__dict__.update(module.graph.__dict__)  # type: ignore[union-attr]
        else:
            warnings.warn(f"the ikbo pass changed nothing: {report.refused}", NothingToOptimize, stacklevel=2)
        if self.on_report is not None:
            self.on_report(report)

    def uuid(self) -> Any:
        from ikbo_recsys.transforms import (
            axes,
            broadcasts,
            builder,
            interactions,
            mix,
            mutation,
            rules,
            shapes,
            values,
            walk,
        )

        modules = (axes, broadcasts, builder, interactions, mix, mutation, rules, shapes, values, walk)
        return get_hash_for_files(tuple(m.__file__ for m in modules), repr(self.user_inputs))


def register() -> None:
    """Make the backend known by name, unless an installed entry point does."""
    from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

    if _NAME not in _COMPILER_FNS and not metadata.entry_points(group="torch_dynamo_backends", name=_NAME):
        register_backend(compiler_fn=ikbo, name=_NAME)  # type: ignore[arg-type]


register()
