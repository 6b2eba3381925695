"""What the pass knows about a value of the graph: whole, compact, or in pieces.

A tensor that is `inner` with its rows copied is carried as `Compact(inner, level, dim)`: the copy does not exist
until something needs it. A concatenation with a compact part is carried as `Pieces`. Everything else is `Plain`, a
node of the new graph.

Shape letters: U rows before a broadcast, B after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

Size = Any
"""A size: an int, or a `torch.SymInt` where it is dynamic."""


@dataclass(frozen=True)
class Level:
    """How the rows of a compact axis are replicated.

    Attributes:
        index: a node of the new graph, integers `[B]`: full row `b` is compact row `index[b]`. None: the compact
            axis has one row, and every full row is that one (what `expand` makes).
        rows: adjacent rows that one entry of `index` stands for. More than one after a reshape merged the batch
            axis with the axes behind it: full row `b * rows + t` is compact row `index[b] * rows + t`.
        size: with `index=None`, the full size: an int, or a node that computes it.
    """

    index: Node | None
    rows: int = 1
    size: int | Node | None = None

    @property
    def full(self) -> Size:
        """The number of full rows."""
        if self.index is not None:
            return self.index.meta["val"].shape[0] * self.rows
        return self.size.meta["val"] if isinstance(self.size, Node) else self.size


@dataclass(frozen=True)
class Plain:
    """A node of the new graph, at its full size.

    Attributes:
        blocked: a level, when every row of this value is known to be a copy but an operator without a rule was in
            the way. Only the accounts read it: what could be saved, and is not.
        blocked_rows: the number of different rows.
    """

    node: Node
    blocked: Level | None = None
    blocked_rows: Size = None


@dataclass(frozen=True)
class Compact:
    """`full[..., b, ...] = inner[..., level(b), ...]` along axis `dim`."""

    inner: Value
    level: Level
    dim: int


@dataclass(frozen=True)
class Pieces:
    """The concatenation of `parts` along `dim`, not made."""

    parts: tuple[Value, ...]
    dim: int


Value: TypeAlias = "Plain | Compact | Pieces"


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal for every batch."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return statically_known_true(a == b)


def is_static(size: Size) -> bool:
    return isinstance(size, int)


def shape(value: Value) -> list[Size]:
    """The full shape."""
    if isinstance(value, Plain):
        return list(value.node.meta["val"].shape)
    if isinstance(value, Compact):
        sizes = shape(value.inner)
        sizes[value.dim] = value.level.full
        return sizes
    sizes = shape(value.parts[0])
    for part in value.parts[1:]:
        sizes[value.dim] = sizes[value.dim] + shape(part)[value.dim]
    return sizes


def rank(value: Value) -> int:
    while not isinstance(value, Plain):
        value = value.inner if isinstance(value, Compact) else value.parts[0]
    return value.node.meta["val"].dim()


def example(value: Value) -> torch.Tensor:
    """Some tensor of the value's dtype and device (of an unrelated shape)."""
    while not isinstance(value, Plain):
        value = value.inner if isinstance(value, Compact) else value.parts[0]
    val: torch.Tensor = value.node.meta["val"]
    return val


def is_floating(value: Value) -> bool:
    """Whether the operators of this library take values of this type."""
    return example(value).dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def is_tensor(value: Any) -> bool:
    """Whether `value` is a tensor of the graph (and not a number, a list or a size)."""
    if isinstance(value, Plain):
        return isinstance(value.node.meta.get("val"), torch.Tensor)
    return isinstance(value, Compact | Pieces)


def is_lazy(value: Any) -> bool:
    return isinstance(value, Compact | Pieces)


def has_compact(value: Any) -> bool:
    """Whether some part of the value is compact."""
    if isinstance(value, Pieces):
        return any(has_compact(part) for part in value.parts)
    return isinstance(value, Compact)


def levels(value: Value) -> list[tuple[Level, int]]:
    """The (level, axis) pairs that `peel` could take off, outermost first."""
    if isinstance(value, Plain):
        return []
    if isinstance(value, Compact):
        return [(value.level, value.dim)] + [pair for pair in levels(value.inner) if pair[1] != value.dim]
    common = levels(value.parts[0])
    for part in value.parts[1:]:
        other = levels(part)
        common = [pair for pair in common if any(_equal(pair[0], o[0]) and pair[1] == o[1] for o in other)]
    return [pair for pair in common if pair[1] != value.dim]


def _equal(a: Level, b: Level) -> bool:
    if a.index is None and b.index is None:
        return same(a.full, b.full)
    return a.index is b.index and a.rows == b.rows


def peel(value: Value, level: Level, dim: int) -> Value | None:
    """`value` with the replication `level` along `dim` taken off, or None if it does not have it."""
    if isinstance(value, Plain):
        return None
    if isinstance(value, Compact):
        if value.dim == dim:
            return value.inner if _equal(value.level, level) else None
        inner = peel(value.inner, level, dim)
        return None if inner is None else Compact(inner, value.level, value.dim)
    if value.dim == dim:
        return None
    parts = [inner for part in value.parts if (inner := peel(part, level, dim)) is not None]
    if len(parts) < len(value.parts):
        return None
    rows = shape(parts[0])[dim]  # one index may serve two sources of different lengths
    return Pieces(tuple(parts), value.dim) if all(same(shape(part)[dim], rows) for part in parts) else None


def expanded_inner(value: Value, dim: int) -> Value | None:
    """`value` with size one along `dim` when it is constant along it, else None."""
    for level, axis in levels(value):
        if axis == dim and level.index is None:
            return peel(value, level, dim)
    return None


def compact_rows(value: Value, level: Level, dim: int) -> Size:
    """The number of rows along `dim` under `level`."""
    inner = peel(value, level, dim)
    return None if inner is None else shape(inner)[dim]
