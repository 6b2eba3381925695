"""`optimize`: the pass on a graph, on an exported program and on a model.

Shape letters: U users, B candidates.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    InputSpec,
    TensorArgument,
)
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from ikbo_recsys.transforms import mutation
from ikbo_recsys.transforms.report import Report, close
from ikbo_recsys.transforms.tracing import INDEX_NAME, batch_symbols, export_model, export_with_index
from ikbo_recsys.transforms.walk import RefusedError, Walk

FAILED = "the pass failed, please report it"


class NothingToOptimize(UserWarning):
    """The pass changed nothing."""


@dataclass
class Optimized:
    """An optimized program and what was done to it.

    Attributes:
        program: the exported program, with the parameters, buffers and state_dict keys of the model.
        report: the accounts; `print(report)` is a table.
    """

    program: ExportedProgram
    report: Report

    def module(self) -> nn.Module:
        """The program as a module: called as the model was, trained as it was (it holds the model's own parameters)."""
        module = self.program.module(check_guards=False)
        # The check of all input sizes takes a millisecond of Python per call, more than a small model does.
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()
        return module


def optimize(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    user_inputs: Iterable[str] | None = None,
    dynamic: Mapping[str, Any] | None = None,
    caller_broadcasts: bool | None = None,
) -> Optimized:
    """Remove the copies of user rows from a model, and the arithmetic done on them, without changing its results.

    Two worlds. (a) The model broadcasts inside (`user[index]`, `repeat_interleave`, ...): its inputs stay what
    they are. (b) Its caller broadcast before the model: the inputs named in `user_inputs` become user-batch
    inputs, and the program gains the keyword input `to_user` `[B]`, the candidate-to-user index.

    Args:
        model: a module (its training flag counts: export captures it), or an exported program.
        args, kwargs: example inputs, with a module. In (b) all of them have B rows.
        user_inputs: names of the inputs that are user-rate: parameter names of `forward`, or `x.age` for a part of
            the container `x`. Needed in (b). In (a) it restricts the pass to values computed from them.
        dynamic: as in `ikbo_recsys.export.export`, with a module in (a). By default that function's own rule, else
            every first dimension.
        caller_broadcasts: whether it is (b). By default it is (b) when `user_inputs` are named and all inputs have
            one batch size.

    Returns:
        The optimized program and the report. When nothing could be done it holds the program as it was exported,
        the report's `refused` says why, and a `NothingToOptimize` warning is raised.

    Raises:
        ValueError: a name in `user_inputs` that is no input; a module without example inputs.

    Example::

        >>> class Ranker(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(10, 1)
        ...
        ...     def forward(self, user, candidate, index):
        ...         return self.linear(torch.cat([user[index], candidate], 1))
        >>> example = (torch.randn(3, 6), torch.randn(24, 4), torch.arange(24) // 8)
        >>> optimized = optimize(Ranker(), example)
        >>> optimized.report.count("replaced")
        1
        >>> optimized.module()(*example).shape
        torch.Size([24, 1])
    """
    named = None if user_inputs is None else [user_inputs] if isinstance(user_inputs, str) else list(user_inputs)
    if caller_broadcasts and not named:
        raise ValueError("caller_broadcasts needs user_inputs: the names of the inputs that were broadcast")
    if not isinstance(model, ExportedProgram) and args is None and kwargs is None:
        raise ValueError("optimize needs example inputs (args, kwargs) with a module")
    if not caller_broadcasts:
        if isinstance(model, ExportedProgram):
            program = model
        else:
            program = export_model(model, args or (), kwargs or {}, dynamic)
        if not named or caller_broadcasts is False or len(batch_symbols(program)) != 1:
            return _announced(_optimize_program(program, named))
    program = export_with_index(model, args, kwargs, named or [])
    result = _optimize_program(program, [*(named or []), INDEX_NAME])
    result.report.mode = "caller"
    return _announced(result)


def _announced(result: Optimized) -> Optimized:
    if result.report.refused is not None:
        message = f"ikbo_recsys.transforms changed nothing: {result.report.refused}"
        warnings.warn(message, NothingToOptimize, stacklevel=3)
    return result


def rewrite(
    module: GraphModule,
    inputs: Iterable[str],
    user_inputs: Iterable[str] | None = None,
    constants: dict[str, torch.Tensor] | None = None,
    lifted: bool = False,
) -> tuple[Report, dict[str, torch.Tensor]]:
    """Run the pass on a graph whose nodes carry `meta["val"]`, in place.

    Args:
        module: a graph of ATen operators.
        inputs: the names of its placeholders that are inputs of the model.
        user_inputs: the names of those that are user-rate; None leaves it to the broadcasts found.
        constants: values of placeholders and attributes that are known not to change.
        lifted: whether new constants become placeholders (exported programs) or attributes.

    Returns:
        The report, and the new constants by name. A graph that is refused is unchanged.
    """
    reference = copy(module)
    reference.graph = _copy_graph(module)
    mutation.functionalize(reference.graph)
    walk = Walk(reference, inputs, user_inputs, constants or {}, lifted)
    try:
        graph = walk.run()
    except RefusedError as refused:
        return Report(refused=str(refused)), {}
    except Exception as error:
        # A model that ran must go on running: whatever is wrong with the pass, the graph is as it was.
        return Report(refused=f"{FAILED}: {type(error).__name__}: {error}"), {}
    report = close(walk.ledger, reference.graph, graph)
    if not report.changed:
        report.refused = _why_nothing(report)
        return report, {}
    for name, value in walk.build.constants.items():
        if not lifted:
            module.register_buffer(name, value, persistent=False)
    module.graph = graph
    module.recompile()
    return report, walk.build.constants


def _copy_graph(module: GraphModule) -> torch.fx.Graph:
    graph = torch.fx.Graph(module)
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        copied[node] = graph.node_copy(node, lambda n: copied[n])
    return graph


def _why_nothing(report: Report) -> str:
    if not report.broadcasts:
        return "no broadcast from users to candidates was found (if the caller made it, name the inputs in user_inputs)"
    reasons = sorted({entry.reason for entry in report.entries if entry.reason})
    return "broadcasts were found and none could be sunk: " + "; ".join(
        reasons or ["their results are used as they are"]
    )


# ---- exported programs ---------------------------------------------------------------------------------------------


def _optimize_program(program: ExportedProgram, user_inputs: Iterable[str] | None) -> Optimized:
    """The pass on an exported program whose model broadcasts inside. `program` itself is not changed."""
    signature = program.graph_signature
    inputs = [spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    module = copy(program.graph_module)
    module.graph = _copy_graph(program.graph_module)
    names = None if user_inputs is None else _input_names(inputs, user_inputs)
    report, new_constants = rewrite(module, inputs, names, _constants(program), lifted=True)
    report.mode = "inside" if report.broadcasts else "none"
    if report.refused is not None:
        return Optimized(program, report)
    output = next(node for node in module.graph.nodes if node.op == "output")
    new_signature = _signature(program, output, new_constants)
    optimized = ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=new_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants={**program.constants, **new_constants},
        verifiers=[program.verifier],
    )
    return Optimized(optimized, report)


def _constants(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Constants and buffers that the program never writes, by the names of their placeholders."""
    signature = program.graph_signature
    written = {spec.target for spec in signature.output_specs if spec.target is not None}
    known = {}
    for spec in signature.input_specs:
        if spec.kind not in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR) or spec.target in written:
            continue
        value = program.constants.get(spec.target, program.state_dict.get(spec.target))
        integers = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
        # Buffers that a checkpoint could replace are data; those outside the state_dict are part of the code.
        if integers and (spec.kind is InputKind.CONSTANT_TENSOR or not spec.persistent):
            known[spec.arg.name] = value
    return known


def _signature(program: ExportedProgram, output: torch.fx.Node, constants: dict[str, torch.Tensor]) -> Any:
    old = program.graph_signature
    results = pytree.tree_leaves(output.args[0])
    output_specs = []
    for spec, result in zip(old.output_specs, results, strict=True):
        arg = spec.arg
        if isinstance(result, torch.fx.Node) and not isinstance(arg, ConstantArgument):
            arg = replace(arg, name=result.name)
        output_specs.append(replace(spec, arg=arg))
    new = [InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(f"c_{name}"), name) for name in constants]
    first = next(i for i, spec in enumerate(old.input_specs) if spec.kind is InputKind.USER_INPUT)
    input_specs = [*old.input_specs[:first], *new, *old.input_specs[first:]]
    return type(old)(input_specs=input_specs, output_specs=output_specs)


def _input_names(inputs: Sequence[str], user_inputs: Iterable[str]) -> set[str]:
    """The placeholders that the given names stand for."""
    found = set()
    for name in user_inputs:
        flat = name.replace(".", "_")
        matching = {i for i in inputs if i == flat} or {i for i in inputs if i.startswith(f"{flat}_")}
        matching = matching or {i for i in inputs if i.endswith(f"_{flat}")}
        if not matching:
            raise ValueError(f"user_inputs names {name!r}, which is not among the inputs {list(inputs)}")
        found |= matching
    return found
