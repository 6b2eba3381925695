"""Shape -> tile configuration, as tables.

A table is a list of rows, best first; a row has upper bounds on named sizes, and the first row whose bounds all hold
is taken. The last row has no bounds, so that every shape has an answer. `pick` costs no launch and is tested without
a GPU. Autotuning is a development tool: what it finds is written here as a row, with the measurement in
`docs/performance.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Config = TypeVar("Config")


@dataclass(frozen=True)
class Row(Generic[Config]):
    """`config`, for shapes in which every size named in `upto` is at most its bound."""

    config: Config
    upto: dict[str, int] = field(default_factory=dict)


def pick(table: Sequence[Row[Config]], **sizes: int) -> Config:
    """The configuration of the first row whose bounds hold for `sizes`.

    Raises:
        KeyError: a row bounds a size that was not given.
        LookupError: no row fits, which a table that ends in an unbounded row cannot meet.
    """
    for row in table:
        if all(sizes[name] <= bound for name, bound in row.upto.items()):
            return row.config
    raise LookupError(f"no row for {sizes}")


@dataclass(frozen=True)
class GemmTile:
    """A block of output rows x columns, the step along K, and how the portable GEMM kernels run it."""

    rows: int
    cols: int
    step: int
    warps: int
    stages: int
