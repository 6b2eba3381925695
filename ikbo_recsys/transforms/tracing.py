"""Getting a graph of a model: as it is, or with an index input it never had.

Shape letters: U users, B candidates.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from ikbo_recsys.export import any_size, check_assumptions, export

INDEX_NAME = "to_user"
"""The keyword input that a program gains when its caller broadcast."""


def export_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: Mapping[str, Any] | None
) -> ExportedProgram:
    """The model as it is, its batch sizes dynamic."""
    if dynamic is not None:
        return export(model, args, kwargs, dynamic=dynamic)
    try:
        return export(model, args, kwargs)
    except (
        ValueError,
        TypeError,
    ):  # no index to tell the batch sizes by: every first dimension is one, as far as it can be
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        shapes = [{0: Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves]
        return _export(model, args, kwargs, pytree.tree_unflatten(shapes, spec))


def export_with_index(
    model: nn.Module | ExportedProgram, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None, named: list[str]
) -> ExportedProgram:
    """The model with the named inputs at the user batch size and the index as keyword input `to_user`.

    Raises:
        ValueError: a name that is no input; inputs whose numbers of rows differ, so that it cannot be told which
            are copies.
    """
    if isinstance(model, ExportedProgram):
        if model.example_inputs is None:
            raise ValueError("the exported program has no example inputs: optimize the module, or export it with them")
        args, kwargs = model.example_inputs
        model = model.module(check_guards=False)
    leaves, spec = pytree.tree_flatten((args or (), dict(kwargs or {})))
    chosen = _chosen_leaves(model, args or (), dict(kwargs or {}), named)
    rows = {leaves[i].shape[0] for i in chosen}
    if len(rows) != 1:
        raise ValueError(
            f"the inputs named in user_inputs have {sorted(rows)} rows: they must all have the batch size B"
        )
    batch = rows.pop()
    users, candidates = 3, max(batch, 24)
    dims: list[Any] = []
    for i, leaf in enumerate(leaves):
        batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        dims.append({0: Dim("U") if i in chosen else Dim("B")} if batched else None)
        if batched:
            count = users if i in chosen else candidates
            leaves[i] = leaf.index_select(0, torch.arange(count, device=leaf.device) % max(batch, 1)) if batch else leaf
    device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
    index = torch.arange(candidates, device=device) % users
    example_args, example_kwargs = pytree.tree_unflatten(leaves, spec)
    args_dims, kwargs_dims = pytree.tree_unflatten(dims, spec)
    indexed_kwargs, indexed_dims = {**example_kwargs, INDEX_NAME: index}, {**kwargs_dims, INDEX_NAME: {0: Dim("B")}}
    return _export(_TakingIndex(model, chosen), example_args, indexed_kwargs, (args_dims, indexed_dims))


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: tuple[Any, Any]
) -> ExportedProgram:
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    names = list(bound)[: len(args)]
    parameters = inspect.signature(model.forward).parameters
    variadic = any(parameters[name].kind is inspect.Parameter.VAR_POSITIONAL for name in bound)
    args_shapes, kwargs_shapes = shapes
    if variadic:
        raise ValueError(f"{type(model).__name__}.forward takes *args: the pass needs named parameters")
    dynamic = {**dict(zip(names, args_shapes, strict=True)), **kwargs_shapes}
    with any_size(), torch.no_grad():
        program = torch.export.export(
            model, args, dict(kwargs), dynamic_shapes=dynamic, prefer_deferred_runtime_asserts_over_guards=True
        )
    check_assumptions(program, batch_symbols(program))
    return program


def batch_symbols(program: ExportedProgram) -> dict[str, Any]:
    """The dynamic first dimensions, whatever they are called."""
    wanted = set(program.graph_signature.user_inputs)
    found: dict[str, Any] = {}
    for node in program.graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder" and node.name in wanted and isinstance(val, Tensor) and val.dim():
            size = val.shape[0]
            if isinstance(size, torch.SymInt):
                found.setdefault(f"{size.node.expr}", size.node.expr)
    return found


def _chosen_leaves(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], named: list[str]) -> set[int]:
    """The positions of the named inputs among the flattened ones."""
    parameters = list(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    with_paths, _ = pytree.tree_flatten_with_path((args, kwargs))
    paths = []
    for path, leaf in with_paths:
        positional = _key_name(path[0]) == "0"
        first = parameters[int(_key_name(path[1]))] if positional else _key_name(path[1])
        parts = [first, *(_key_name(key) for key in path[2:])]
        paths.append((".".join(parts), leaf))
    chosen: set[int] = set()
    for name in named:
        found = {i for i, (path, _) in enumerate(paths) if path == name or path.startswith(f"{name}.")}
        found = found or {i for i, (path, _) in enumerate(paths) if path.endswith(f".{name}")}
        found = {i for i in found if isinstance(paths[i][1], Tensor) and paths[i][1].dim() > 0}
        if not found:
            raise ValueError(f"user_inputs names {name!r}, which is not among the inputs {[path for path, _ in paths]}")
        chosen |= found
    return chosen


def _key_name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


class _TakingIndex(nn.Module):
    """`model` with the keyword input `to_user`, by which the chosen inputs are broadcast before it.

    It has the parameters, buffers and submodules of the model under the same names, so that a program exported
    from it has the state_dict of the model.
    """

    def __init__(self, model: nn.Module, chosen: set[int]) -> None:
        super().__init__()
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[registry] = model.__dict__[registry]
        self.training = model.training
        signature = inspect.signature(model.forward)
        if INDEX_NAME in signature.parameters:
            raise ValueError(f"the model has a parameter {INDEX_NAME!r} already: it broadcasts inside")

        def forward(*args: Any, **kwargs: Any) -> Any:
            index = kwargs.pop(INDEX_NAME)
            leaves, spec = pytree.tree_flatten((args, kwargs))
            for i in chosen:
                leaves[i] = leaves[i].index_select(0, index)
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return model(*args, **kwargs)

        extra = inspect.Parameter(INDEX_NAME, inspect.Parameter.KEYWORD_ONLY)
        before = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        after = [p for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        forward.__signature__ = signature.replace(parameters=[*before, extra, *after])  # type: ignore[attr-defined]
        self.__dict__["forward"] = forward
