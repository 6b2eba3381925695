"""Exporting a ranking model with two batch sizes, and packaging it for a process that does not have this library.

A ranking request has U users (usually one) and B candidates. `torch.export` with two dynamic batch sizes goes wrong in
two ways: it specialises a size of 0 or 1, so that a program traced with one user refuses two and one traced with two
refuses one; and sizes that are equal in the example may end up as one. `export` cures both and checks the result.

    program = export(model.dense, (user, candidate, index))
    package(program, "ranker.pt2")

and, wherever it is served::

    ranker = torch._inductor.aoti_load_package("ranker.pt2")
    scores = ranker(user, candidate, to_user)
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from ikbo_recsys import kernels
from ikbo_recsys.candidate_index import CandidateIndex

__all__ = ["check_program", "export", "package"]

USER, CANDIDATE = "U", "B"
_INDEX_NAMES = ("index", "to_user")
_PROBED_SIZES = tuple({USER: users, CANDIDATE: candidates} for users, candidates in ((1, 1), (1, 50), (7, 7), (9, 2)))

Sizes = str | Mapping[Any, Any] | Sequence[Any] | None
Dynamic = Mapping[str, Sizes]


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Dynamic | None = None,
    grouped: bool = False,
    strict: bool = False,
) -> ExportedProgram:
    """Export `module` with the batch sizes of users (U) and candidates (B) dynamic and independent of each other.

    The example's sizes do not matter: sizes of 0 and 1, and U equal to B, are replaced by others before tracing (values
    are never read). On the CPU no operator of this library is left in the program. It runs for any U >= 1 and B >= 0;
    Python in the model that asks whether a size is 0 or 1 is traced for other sizes.

    Args:
        module: called as `module(*args, **kwargs)`. Put it in `eval()` mode yourself.
        args, kwargs: example inputs: tensors, or nested tuples, lists and dicts of tensors. A `CandidateIndex` becomes
            the tensor `to_user [B]` of the program, because a serving process does not know the class.
        dynamic: for each parameter name of `module.forward`, which dimensions change. `"U"` and `"B"` mean dimension 0
            of each tensor in that argument, `{0: "U", 1: "T"}` names several (any further name is one more dynamic
            size), `None` or a missing name says that the shape is fixed. For a dict argument it may be a mapping by
            the same keys of what holds for each value, and for a list or tuple as long a list or tuple. The index must
            be marked `"B"`. By default all this is found from the shapes: B is the length of the index (the
            `CandidateIndex`, or the parameter `index` or `to_user`), inputs of that length are candidates, and those of
            the one other length, or of `num_users`, are users.
        grouped: promise that every index given to the program has the candidates of one user adjacent and users in
            order, so that it need not sort them. Needs a `CandidateIndex` among the inputs.
        strict: trace with TorchDynamo instead of by running the module's Python.

    Returns:
        The program. Its inputs are in the order of `args` and `kwargs`.

    Raises:
        TypeError: `args` is not a tuple, `forward` takes `*args`, or the index is not a tensor.
        ValueError: U and B cannot be found or told apart; one name given to two sizes; the module fixes a size that is
            to be dynamic, fails or works for some batch sizes only; it reads a number from a tensor, as attention over
            jagged rows without a bound of their length does; `grouped` without a `CandidateIndex`.
    """
    inputs = _named_arguments(module, args, dict(kwargs or {}))
    if dynamic is None:
        dynamic = _find_batch_sizes(inputs)
    unknown = sorted(set(dynamic) - set(inputs))
    if unknown:
        raise ValueError(f"dynamic names {unknown[0]!r} but the inputs of forward are {sorted(inputs)}")
    names = {name: _dimension_names(name, value, dynamic.get(name)) for name, value in inputs.items()}
    given = {dim_name for leaves in names.values() for leaf in leaves for dim_name in leaf.values()}
    for needed in (USER, CANDIDATE):
        if needed not in given:
            raise ValueError(
                f"no input has the dimension {needed!r}: dynamic must say which are the user's and candidates'"
            )

    wrapper = _grouped_wrapper(module, args, inputs, names) if grouped else module
    example = _with_distinct_sizes(inputs, names)
    example_args = tuple(list(example.values())[: len(args)])
    example_kwargs = {name: example[name] for name in kwargs or {}}
    shapes = _dynamic_shapes(example, names, {name: Dim(name) for name in given})
    shapes = {"args": tuple(shapes.values())} if grouped else shapes
    with any_size(), torch.no_grad(), _failures_explained(module):
        program = torch.export.export(
            wrapper,
            example_args,
            example_kwargs,
            dynamic_shapes=shapes,
            strict=strict,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    program = _without_composite_operators(program)
    check_assumptions(program, _check_symbols(program, names))
    return program


def package(program: ExportedProgram, path: str | os.PathLike[str], *, options: Mapping[str, Any] | None = None) -> str:
    """Compile a program ahead of time into a `.pt2` package, which runs in a process that never imports this library.

    Args:
        program: from `export`.
        path: where to write the package; it must end in `.pt2`.
        options: Inductor settings, as for `torch._inductor.aoti_compile_and_package`.

    Returns:
        The path. Load it with `torch._inductor.aoti_load_package(path)` and call it with tensors in that order.

    Raises:
        ValueError: as `check_program`, or `path` does not end in `.pt2`.
    """
    path = os.fspath(path)
    if not path.endswith(".pt2"):
        raise ValueError(f"path must end in '.pt2', got {path!r}")
    check_program(program)
    with any_size(), torch.no_grad():
        return torch._inductor.aoti_compile_and_package(
            program, package_path=path, inductor_configs=dict(options) if options else None
        )


def check_program(program: ExportedProgram) -> None:
    """Check that a program serves any U and B, and that who loads its package needs no operator of this library.

    Raises:
        ValueError: fewer than two different dynamic sizes among the inputs' first dimensions, or an `ikbo` operator
            that a package cannot carry (registered from Python: only a process that imports this library has it).
    """
    sizes = [tuple(value.shape) for value in _input_values(program) if isinstance(value, Tensor)]
    symbols = {str(shape[0]) for shape in sizes if shape and isinstance(shape[0], torch.SymInt)}
    if len(symbols) < 2:
        raise ValueError(
            f"the program has {len(symbols)} dynamic batch sizes, not 2: its inputs have the shapes {sizes}"
        )
    for node in _operator_nodes(program):
        if not (_is_composite(node.target) or _is_triton(node.target)):
            raise ValueError(
                f"the program contains {node.target}, which a package cannot carry: export what is called without "
                "gradients, with IKBO_BACKEND=auto, triton or torch"
            )


# ---- which dimension is which --------------------------------------------------------------------------------------


def _named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the parameter names of `forward`, in the order of the call."""
    if not isinstance(args, tuple):
        raise TypeError(f"args must be a tuple of the example inputs, got {type(args).__name__}")
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    parameters = inspect.signature(module.forward).parameters
    if any(parameters[name].kind is inspect.Parameter.VAR_POSITIONAL for name in bound):
        raise TypeError(f"{type(module).__name__}.forward takes *args: export needs named parameters")
    inputs = {**dict(list(bound.items())[: len(args)]), **kwargs}
    for name, value in inputs.items():
        if name in _INDEX_NAMES and not isinstance(value, (CandidateIndex, Tensor)):
            raise TypeError(f"{name} must be a CandidateIndex or an int32/int64 tensor [B], got {type(value).__name__}")
        parts = pytree.tree_leaves(value, is_leaf=lambda part: isinstance(part, CandidateIndex))
        if not isinstance(value, CandidateIndex) and any(isinstance(part, CandidateIndex) for part in parts):
            raise ValueError(f"{name} has a CandidateIndex inside: pass it as an argument of its own")
    return inputs


def _find_batch_sizes(inputs: Mapping[str, Any]) -> dict[str, str | None]:
    """Which inputs are the users' and which the candidates', from the length of the index and of everything else."""
    by_class = [name for name, value in inputs.items() if isinstance(value, CandidateIndex)]
    index_name = next(iter(by_class or [name for name in inputs if name in _INDEX_NAMES]), None)
    if index_name is None:
        raise ValueError(f"no CandidateIndex and no parameter called 'index' among {sorted(inputs)}: give dynamic")
    index = inputs[index_name]
    num_candidates = index.num_candidates if isinstance(index, CandidateIndex) else index.shape[0]
    lengths = {
        name: sorted({leaf.shape[0] if leaf.dim() else 0 for leaf in _leaves(value)}) for name, value in inputs.items()
    }
    others = sorted({n for name, sizes in lengths.items() if name != index_name for n in sizes} - {num_candidates})
    if isinstance(index, CandidateIndex):
        others = [index.num_users] if index.num_users != num_candidates else []
    if len(others) != 1:
        found = f"first dimensions of {others}" if others else f"nothing but first dimensions of {num_candidates}"
        raise ValueError(
            f"the users' batch size cannot be told: besides B = {num_candidates} the inputs have {found}. Give "
            f"dynamic={{{next(iter(inputs))!r}: 'U', ..., {index_name!r}: 'B'}}, or an example with U different from B"
        )
    return {
        name: CANDIDATE if sizes == [num_candidates] else USER if sizes == others else None
        for name, sizes in lengths.items()
    }


def _dimension_names(name: str, value: Any, dynamic: Sizes) -> list[dict[int, str]]:
    """For each tensor of one argument, the names of its dynamic dimensions."""
    parts = _parts(name, value, dynamic)
    if parts is not None:
        return [dims for part_name, part, sizes in parts for dims in _dimension_names(part_name, part, sizes)]
    dims: dict[int, str] = {0: dynamic} if isinstance(dynamic, str) else dict(dynamic or {})  # type: ignore[arg-type]
    if dims and not _leaves(value):
        raise TypeError(f"dynamic[{name!r}] is {dynamic!r} but the input has no tensor: it is a {type(value).__name__}")
    if not all(isinstance(dim, int) for dim in dims):
        raise ValueError(f"dynamic[{name!r}] has the keys {list(dims)} but the input is a {type(value).__name__}")
    unnamable = [dim_name for dim_name in dims.values() if not str(dim_name).isidentifier()]
    if unnamable:
        raise ValueError(f"dynamic[{name!r}] gives the name {unnamable[0]!r}, which is not an identifier")
    for leaf in _leaves(value):
        beyond = [dim for dim in dims if not 0 <= dim < leaf.dim()]
        if beyond:
            raise ValueError(
                f"dynamic[{name!r}] names dimension {beyond[0]} but the input has shape {tuple(leaf.shape)}"
            )
    if isinstance(value, CandidateIndex) and dims != {0: CANDIDATE}:
        raise ValueError(f"dynamic[{name!r}] must be {CANDIDATE!r}: it is the index, got {dynamic!r}")
    return [dims for _ in _leaves(value)]


def _parts(name: str, value: Any, dynamic: Sizes) -> list[tuple[str, Any, Sizes]] | None:
    """The name, value and description of each part of an argument, where `dynamic` describes them one by one."""
    if isinstance(value, dict) and isinstance(dynamic, Mapping) and not all(isinstance(key, int) for key in dynamic):
        unknown = [key for key in dynamic if key not in value]
        if unknown:
            raise ValueError(f"dynamic[{name!r}] names {unknown[0]!r} but the keys of the input are {list(value)}")
        return [(f"{name}.{key}", part, dynamic.get(key)) for key, part in value.items()]
    if isinstance(dynamic, (list, tuple)):
        is_sequence = isinstance(value, (list, tuple))
        if not is_sequence or len(value) != len(dynamic):
            given = f"has {len(value)}" if is_sequence else f"is a {type(value).__name__}"
            raise ValueError(f"dynamic[{name!r}] has {len(dynamic)} entries but the input {given}")
        return [(f"{name}.{i}", part, sizes) for i, (part, sizes) in enumerate(zip(value, dynamic, strict=True))]
    return None


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, CandidateIndex):
        return [value.to_user]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


# ---- the example ---------------------------------------------------------------------------------------------------


def _with_distinct_sizes(inputs: Mapping[str, Any], names: Mapping[str, list[dict[int, str]]]) -> dict[str, Any]:
    """The inputs with an index as a tensor, and with sizes that cannot be mistaken for a constant or for each other."""
    sizes: dict[str, int] = {}
    for name, value in inputs.items():
        for leaf, dims in zip(_leaves(value), names[name], strict=True):
            for dim, dim_name in dims.items():
                size = leaf.shape[dim]
                if sizes.setdefault(dim_name, size) != size:
                    raise ValueError(
                        f"dimension {dim} of {name} is {size} but {dim_name!r} is {sizes[dim_name]} elsewhere"
                    )
    # Three and not two: models test for small constants (two classes, pairs). Many candidates per user, because few is
    # another special case (tiles of one candidate, see `kernels/_packing.py`).
    taken: set[int] = set()
    for dim_name in sorted(sizes, key=lambda name: name != USER):
        size = max(sizes[dim_name], 8 * sizes[USER] if dim_name == CANDIDATE else 3)
        while size in taken:
            size += 1
        sizes[dim_name] = size
        taken.add(size)

    def resized(name: str, value: Any) -> Any:
        if isinstance(value, CandidateIndex):
            value = value.to_user
        leaves, spec = pytree.tree_flatten(value)
        dims = iter(names[name])
        return pytree.tree_unflatten(
            [_resize(leaf, next(dims), sizes) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )

    return {name: resized(name, value) for name, value in inputs.items()}


def _resize(x: Tensor, dims: Mapping[int, str], sizes: Mapping[str, int]) -> Tensor:
    for dim, dim_name in dims.items():
        size = sizes[dim_name]
        if x.shape[dim] == 0:
            x = x.new_zeros((*x.shape[:dim], size, *x.shape[dim + 1 :]))
        elif x.shape[dim] != size:
            x = x.index_select(dim, torch.arange(size, device=x.device) % x.shape[dim])
    return x


def _dynamic_shapes(
    example: Mapping[str, Any], names: Mapping[str, list[dict[int, str]]], dims: Mapping[str, Any]
) -> Any:
    shapes = {}
    for name, value in example.items():
        leaves, spec = pytree.tree_flatten(value)
        of_tensor = iter(names[name])
        marks = [
            {dim: dims[dim_name] for dim, dim_name in next(of_tensor).items()} if isinstance(leaf, Tensor) else None
            for leaf in leaves
        ]
        shapes[name] = pytree.tree_unflatten(marks, spec)
    return shapes


class _Grouped(nn.Module):
    """Makes the grouped `CandidateIndex` inside the program, from the tensor that the program gets."""

    def __init__(self, module: nn.Module, position: int, user_position: int, user_leaf: int, user_dim: int) -> None:
        super().__init__()
        self.module = module
        self.position = position
        self.user = (user_position, user_leaf, user_dim)

    def forward(self, *args: Any) -> Any:
        position, leaf, dim = self.user
        num_users = _leaves(args[position])[leaf].shape[dim]
        index = CandidateIndex.from_user_ids(args[self.position], num_users, grouped=True)
        return self.module(*args[: self.position], index, *args[self.position + 1 :])


def _grouped_wrapper(
    module: nn.Module, args: tuple[Any, ...], inputs: Mapping[str, Any], names: Mapping[str, list[dict[int, str]]]
) -> nn.Module:
    positions = [i for i, value in enumerate(args) if isinstance(value, CandidateIndex)]
    if not positions or len(inputs) != len(args):
        raise ValueError("grouped needs a CandidateIndex among positional example inputs, and no keyword inputs")
    user_position, user_leaf, user_dim = next(
        (position, leaf, dim)
        for position, name in enumerate(inputs)
        for leaf, dims in enumerate(names[name])
        for dim, dim_name in dims.items()
        if dim_name == USER
    )
    return _Grouped(module, positions[0], user_position, user_leaf, user_dim).train(module.training)


# ---- the program ---------------------------------------------------------------------------------------------------


@contextmanager
def any_size() -> Iterator[None]:
    """Sizes of 0 and 1 are like any other: without this they become constants, or are excluded."""
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield


@contextmanager
def _failures_explained(module: nn.Module) -> Iterator[None]:
    """What tracing says of a model that is for some sizes only, which is several kinds of errors, as a ValueError."""
    name = type(module).__name__
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        text = str(error)
        if isinstance(error, GuardOnDataDependentSymNode) or "data-dependent expression" in text:
            raise ValueError(
                f"{name} reads a size from the values of a tensor, which a program cannot. Attention over jagged rows "
                "does for want of a bound: give max_length / max_kv_length (to IKBOCrossAttention / to "
                f"kernels.cross_attention). {text}"
            ) from error
        # "24 not in VR[5, 5]": the size that was traced is not the one that the model asks for.
        if isinstance(error, torch._dynamo.exc.UserError) or " not in VR[" in text:
            raise ValueError(f"{name} fixes a size that should be dynamic: {text}") from error
        if isinstance(error, AssertionError):
            raise ValueError(f"{name} asserts what does not hold for the sizes it is traced with: {text}") from error
        raise


def _input_values(program: ExportedProgram) -> list[Any]:
    """The fake value of each user input, in order."""
    wanted = set(program.graph_signature.user_inputs)
    return [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in wanted]


def _check_symbols(program: ExportedProgram, names: Mapping[str, list[dict[int, str]]]) -> dict[str, Any]:
    """Raise unless every named dimension is a symbol of its own; return the symbols by name."""
    values = [value for value in _input_values(program) if isinstance(value, Tensor)]
    leaves = [(name, dims) for name, of_argument in names.items() for dims in of_argument]
    symbols: dict[str, Any] = {}
    for (name, dims), value in zip(leaves, values, strict=True):
        for dim, dim_name in dims.items():
            size = value.shape[dim]
            if not isinstance(size, torch.SymInt):
                raise ValueError(
                    f"dimension {dim} of {name} should be {dim_name!r} but the program has fixed it at {size}"
                )
            if symbols.setdefault(dim_name, size.node.expr) != size.node.expr:
                raise ValueError(
                    f"dimension {dim} of {name} should be {dim_name!r} but the program has two sizes for that name"
                )
    if len(set(symbols.values())) != len(symbols):
        raise ValueError(f"the program has made one size of two: {symbols}")
    return symbols


def check_assumptions(program: ExportedProgram, symbols: Mapping[str, Any]) -> None:
    """Drop the assertions that a size is not 0 or 1, and raise if another one fails for a pair of batch sizes.

    Whether a strided view is contiguous depends on whether a size is 1 or 0, so PyTorch asserts that it is not wherever
    it asked. But strides of such a size are irrelevant, and what was traced for other sizes gives the right result.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten._assert_scalar.default:
            continue
        value = node.args[0].meta.get("val") if isinstance(node.args[0], torch.fx.Node) else None
        if not isinstance(value, torch.SymBool) or not value.node.expr.free_symbols <= set(symbols.values()):
            continue
        assumed = value.node.expr
        if isinstance(assumed, sympy.Ne) and assumed.rhs in (0, 1):
            graph.erase_node(node)
            continue
        for pair in _PROBED_SIZES:
            sizes = {symbol: pair.get(name, 16) for name, symbol in symbols.items()}
            if assumed.subs(sizes) == sympy.false:
                raise ValueError(f"the model assumes {assumed} (with {symbols}), which does not hold for {pair}")
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _operator_nodes(program: ExportedProgram) -> list[torch.fx.Node]:
    return [
        node
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "ikbo"
    ]


def _without_composite_operators(program: ExportedProgram) -> ExportedProgram:
    """Replace `torch.ops.ikbo.*`, where the model calls it by that name, by the plain operators it is made of."""
    composite: set[Any] = {node.target for node in _operator_nodes(program) if _is_composite(node.target)}
    if not composite:
        return program
    with any_size(), torch.no_grad():
        return program.run_decompositions({operator: getattr(kernels, operator._opname) for operator in composite})


def _is_composite(operator: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def _is_triton(operator: Any) -> bool:
    """Whether it is a `triton_op`, whose kernels are compiled into the package."""
    # What is registered as one. Which kernels it has is only guessed by PyTorch, from the text of its function.
    return operator.name() in torch._library.triton.triton_ops_to_kernels
