"""In-place operators: made ordinary where nobody can tell, fenced off where somebody could.

`torch.export` keeps `relu_` and `add_` as they were written. On a fresh tensor that nothing else views they are
renamings (`functionalize`). Where another view is read later the whole family of views is left exactly as it is
(`opaque_nodes`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ikbo_recsys.transforms.builder import packet_name


def is_mutation(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def changes_mode(node: Node) -> str | None:
    """ "autocast" or "grad" for a node that changes how the nodes behind it run."""
    name = getattr(node.target, "__name__", "")
    if "autocast" in name:
        return "autocast"
    return "grad" if "set_grad_enabled" in name or "inference_mode" in name else None


def functionalize(graph: Graph) -> int:
    """Replace in-place operators on fresh tensors by their ordinary forms, in place; return how many."""
    replaced = 0
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        ordinary = _ordinary(node)
        if ordinary is None:
            continue
        written = node.args[0]
        if not isinstance(written, Node) or not _only_seen_through(written, node, order):
            continue
        node.target = ordinary
        # Whatever read the written tensor afterwards reads the result.
        for user in list(written.users):
            if order[user] > order[node]:
                user.replace_input_with(written, node)
        replaced += 1
    return replaced


def opaque_nodes(graph: Graph) -> set[Node]:
    """The nodes that must stay as they are and where they are.

    Every view of a tensor that is written in place, the writers, and whoever reads such memory: read lazily, it
        could be read
    after the write.
    """
    family = _families(graph)
    written: set[Node] = set()
    for node in graph.nodes:
        if is_mutation(node):
            written.update(family[source] for source in _written_arguments(node))
    fenced = {node for node in graph.nodes if family[node] in written}
    readers = {user for node in fenced for user in node.users}
    return {node for node in fenced | readers if node.op == "call_function"}


def _ordinary(node: Node) -> Any:
    """The overload without the underscore, with the same arguments, or None."""
    if not is_mutation(node) or not node.target._schema.name.endswith("_"):  # type: ignore[union-attr]
        return None
    schema = node.target._schema  # type: ignore[union-attr]
    namespace, name = schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    if packet is None or schema.overload_name not in {o or "" for o in _overloads(packet)}:
        return None
    ordinary = getattr(packet, schema.overload_name or "default")
    names = [a.name for a in schema.arguments]
    same_arguments = names == [a.name for a in ordinary._schema.arguments]
    written, result = node.args[0], node.meta.get("val")
    # `x += y` keeps the type and shape of x; the ordinary form may promote or broadcast.
    if not same_arguments or not isinstance(written, Node):
        return None
    before = written.meta.get("val")
    unchanged = (
        isinstance(before, torch.Tensor) and isinstance(result, torch.Tensor) and _promotes_to(node, ordinary, before)
    )
    return ordinary if unchanged else None


def _overloads(packet: Any) -> list[str]:
    return [o if o != "default" else "" for o in packet.overloads()]


def _promotes_to(node: Node, ordinary: Any, before: torch.Tensor) -> bool:
    from torch.fx.node import map_arg

    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    try:
        with torch.no_grad():
            after = ordinary(*args, **kwargs)
    except Exception:  # whatever is wrong with it, it is left in place
        return False
    return bool(after.dtype == before.dtype and len(after.shape) == len(before.shape))


def _only_seen_through(written: Node, writer: Node, order: dict[Node, int]) -> bool:
    """Whether the memory belongs to the graph and no other name of it is read after `writer`."""
    root = written
    while (source := _viewed(root)) is not None:
        root = source
    if root.op != "call_function":
        return False
    names, stack = {root}, [root]
    while stack:
        for user in stack.pop().users:
            if user not in names and order[user] < order[writer] and _viewed(user) in names:
                names.add(user)
                stack.append(user)
    return all(order[user] <= order[writer] for name in names - {written} for user in name.users)


def _viewed(node: Node) -> Node | None:
    """The tensor whose memory the node may share: it is not necessarily a view (reshape, contiguous, to)."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        sources = node.all_input_nodes
        return sources[0] if node.op == "call_function" and sources and _name(node) == "getitem" else None
    schema = node.target._schema
    aliases = any(argument.alias_info is not None for argument in schema.arguments)
    if not aliases and packet_name(node.target) not in _MAY_ALIAS:
        return None
    sources = node.all_input_nodes
    return sources[0] if sources else None


_MAY_ALIAS = frozenset(
    f"aten.{name}"
    for name in (
        *("reshape", "contiguous", "to", "type_as", "flatten", "reshape_as", "ravel", "einsum", "sum_to_size", "lift"),
        *("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "atleast_2d", "atleast_3d"),
    )
)


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "")


def _written_arguments(node: Node) -> list[Node]:
    schema = node.target._schema  # type: ignore[union-attr]
    found = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        found += [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, Node)]
    return found


def _families(graph: Graph) -> dict[Node, Node]:
    """For each node the first node whose memory it may share."""
    family: dict[Node, Node] = {}
    for node in graph.nodes:
        source = _viewed(node)
        family[node] = family[source] if source is not None else node
    return family
