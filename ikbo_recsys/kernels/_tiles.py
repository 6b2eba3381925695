"""Shape -> tile configuration, as tables.

A table is a list of rows, best first; a row has upper bounds on named sizes, and the first row whose bounds all hold
is taken. The last row has no bounds, so that every shape has an answer. `pick` costs no launch and is tested without
a GPU. Autotuning is a development tool: what it finds is written here as a row, with the measurement in
`docs/performance.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    """A block of output rows x columns, the step along K, and how the portable GEMM kernels run it.

    `blocks` is how many of them one multiprocessor holds, by their registers and shared memory.
    """

    rows: int
    cols: int
    step: int
    warps: int
    stages: int
    blocks: int = 1

    def options(self, waits: bool = False) -> dict[str, int]:
        """Of a launch; `waits` says that the kernel may start while the one before it runs, and waits for its end by
        itself."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | {"launch_pdl": True} if waits else options


# ---- linear compression and linear ---------------------------------------------------------------------------------

# The loads of one step and stage are (rows + cols) * step elements; two-byte types have twice the step of fp32.
_MIX = (
    Row(GemmTile(rows=64, cols=64, step=64, warps=4, stages=3), {"rows": 64, "cols": 64}),
    Row(GemmTile(rows=128, cols=64, step=64, warps=4, stages=3), {"cols": 64}),
    # Several blocks on a multiprocessor: one loads and stores while another multiplies.
    Row(GemmTile(rows=64, cols=128, step=64, warps=4, stages=3, blocks=2), {"cols": 128}),
    Row(GemmTile(rows=64, cols=256, step=32, warps=4, stages=4, blocks=2)),
)
# Of a user's part for few outputs: few tiles, each alone on its multiprocessor, so what is on its way counts.
_MIX_FEW = (
    Row(GemmTile(rows=64, cols=64, step=64, warps=4, stages=4), {"cols": 64}),
    Row(GemmTile(rows=64, cols=128, step=64, warps=4, stages=4)),
)
# Tiles that read x half as often, where that pays (`_is_tall`).
_MIX_TALL = (
    _MIX[1],
    Row(GemmTile(rows=128, cols=128, step=64, warps=4, stages=3, blocks=2), {"cols": 128}),
    Row(GemmTile(rows=128, cols=256, step=64, warps=8, stages=3)),
)
# What it reads goes through L2 once for every tile: rows + cols per rows * cols of arithmetic, so large tiles.
_OUTER = (
    Row(GemmTile(rows=64, cols=64, step=64, warps=4, stages=4, blocks=2), {"rows": 64, "cols": 64}),
    Row(GemmTile(rows=64, cols=128, step=64, warps=4, stages=4, blocks=2), {"rows": 64}),
    Row(GemmTile(rows=128, cols=128, step=64, warps=8, stages=3, blocks=2), {"rows": 128, "cols": 128}),
    Row(GemmTile(rows=128, cols=256, step=64, warps=8, stages=4), {"rows": 128}),
    Row(GemmTile(rows=256, cols=128, step=64, warps=8, stages=4)),
)
_OUTER_SMALL_MEMORY = (
    Row(GemmTile(rows=64, cols=64, step=64, warps=4, stages=3), {"rows": 64, "cols": 64}),
    Row(GemmTile(rows=128, cols=128, step=64, warps=8, stages=3)),
)
# There are no tensor cores for IEEE fp32: the operands go through registers.
_OUTER_FP32 = (Row(GemmTile(rows=64, cols=64, step=64, warps=4, stages=3)),)
_LINEAR = (
    Row(GemmTile(rows=64, cols=64, step=64, warps=4, stages=4), {"cols": 64}),
    Row(GemmTile(rows=64, cols=128, step=64, warps=4, stages=3, blocks=2)),
)


def mix_tile(rows: int, cols: int, contracted: int, element_size: int, large_memory: bool, has_user: bool) -> GemmTile:
    """The tile of `out[b] = weight @ x[b]` for `rows x contracted` weights and `cols` columns of x.

    `large_memory` is `_backend.has_large_shared_memory`; without `has_user` it is most often a user's part itself.
    """
    table: Sequence[Row[GemmTile]] = _MIX
    if large_memory and element_size == 2 and _is_tall(rows, contracted):
        table = _MIX_TALL
    elif rows <= 64 and not has_user:
        table = _MIX_FEW
    return _fit(pick(table, rows=rows, cols=cols), contracted, element_size)


def _is_tall(rows: int, contracted: int) -> bool:
    """Whether 128 rows of a weight go into a tile, not 64: if that adds at most a seventh to the rows with which the
    last tiles are filled up, and if the sum is long, since in a short one a tile is mostly its beginning and its end,
    which other tiles on the multiprocessor hide."""
    short, tall = -(-rows // 64) * 64, -(-rows // 128) * 128
    return contracted > 256 and 7 * tall <= 8 * short


def outer_tile(rows: int, cols: int, contracted: int, element_size: int, large_memory: bool) -> GemmTile:
    """The tile of `sum_b grad[b] @ x[b].T` for a `rows x cols` result, `contracted` terms in each b; `large_memory` as
    above."""
    table = _OUTER_FP32 if element_size > 2 else _OUTER if large_memory else _OUTER_SMALL_MEMORY
    return _fit(pick(table, rows=rows, cols=cols), contracted, element_size)


def linear_tile(outputs: int, contracted: int, element_size: int) -> GemmTile:
    """The tile of `x @ weight.T`: the batch is on the rows, and does not choose, so that a new batch size compiles
    nothing."""
    return _fit(pick(_LINEAR, cols=outputs), contracted, element_size)


def splits(tiles: int, steps: int, slots: int) -> int:
    """Into how many parts a sum of `steps` goes, for `tiles` of output on a GPU that runs `slots` blocks at once.

    The time is the waves of blocks times the steps of each (a last wave of a few blocks costs as much as a full one),
    and the results of the parts, written and read once more: a fourteenth of a step's time for each tile, by the bytes
    of a 256 x 128 tile and the rates of L2 and memory. A part has at least 8 steps.
    """

    def cost(parts: int) -> float:
        return -(-tiles * parts // slots) * -(-steps // parts) + tiles * parts / 14

    return min(range(1, max(1, min(steps // 8, 64)) + 1), key=cost)


def segment_cols(width: int) -> int:
    """Columns per program of a segment sum: a power of two, 16 bytes a thread where the width allows it."""
    return max(32, min(1024, 1 << (max(width, 1) - 1).bit_length()))


def segment_splits(programs: int, batch: int, num_users: int, multiprocessors: int) -> int:
    """Programs that share one user's rows: 1 once there are enough, else a power of two (few compiled kernels)."""
    wanted = min(4 * multiprocessors // max(programs, 1), batch // (16 * max(num_users, 1)))
    return 1 << max(min(wanted, 64), 1).bit_length() - 1


def _fit(tile: GemmTile, contracted: int, element_size: int) -> GemmTile:
    """Shorten the step for short sums (16 is the least that tensor cores take) and for wide elements."""
    step = min(tile.step * 2 // max(element_size, 2), max(16, 1 << (max(contracted, 1) - 1).bit_length()))
    return replace(tile, step=step)
