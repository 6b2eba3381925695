"""Launch of the Hopper attention kernel: tile table, TMA descriptors, and the reasons why a call cannot take it.

Shape letters as in `_attention_launch.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels import _attention_shares, _tuning
from ikbo_recsys.kernels._attention_launch import JAGGED, Problem, index_cache, row_slots
from ikbo_recsys.kernels._attention_shares import (
    FEWEST_WIDE_ROWS,
    LAST_ROUND,
    LEAST_MEASURED,
    TILE_ROWS,
    WHOLE,
    Merge,
    new_flags,
    slots,
    state,
)
from ikbo_recsys.kernels._backend import multiprocessors
from ikbo_recsys.kernels._launch import TMA_ALIGNMENT, Room, cdiv, device_guard, is_tma_ready
from ikbo_recsys.kernels._plan import Launch
from ikbo_recsys.kernels._tma import TensorLayout, launch

LOG2_E = 1.4426950408889634
BOX_ROWS = 64
BLOCK_KEYS = 128
SHARED_REGISTERS = 128
"""Of a thread, before consumers take some of the producer's, where two thread blocks share a multiprocessor."""
TABLE_BLOCK, _TABLE_STEP = 16, 16


@dataclass(frozen=True)
class HopperTile:
    """Keys of a block, stages of each ring, registers of a consumer's and of the producer's threads, consumers.

    For dq the stages are those of the keys, which are kept longer than the values: these have two less. With one
    consumer two thread blocks share a multiprocessor.
    """

    keys: int
    stages: int
    consumer_registers: int
    producer_registers: int
    consumers: int = 2

    @property
    def rows(self) -> int:
        """Of a tile of a forward kernel."""
        return self.consumers * BOX_ROWS

    @property
    def blocks(self) -> int:
        """On a multiprocessor at once."""
        return 2 // self.consumers

    def registers(self) -> dict[str, int]:
        return {"CONSUMER_REGISTERS": self.consumer_registers, "PRODUCER_REGISTERS": self.producer_registers}


def padded_size(head_size: int) -> int:
    """Columns of a head in shared memory and registers."""
    return 64 if head_size <= 64 else 128


# By padded head size.
FORWARD_TILES = {64: HopperTile(128, 4, 232, 40), 128: HopperTile(128, 2, 232, 40)}
NARROW_TILES = {64: HopperTile(128, 2, 216, 40, consumers=1), 128: HopperTile(64, 2, 216, 40, consumers=1)}


def type_refusal(dtype: torch.dtype, head_size: int) -> str | None:
    """Why the kernels cannot take these, or None."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels take float16 and bfloat16, not {dtype}"
    if head_size > 128 or head_size % 8:
        return f"the kernels take head sizes that are multiples of 8 up to 128, not {head_size}"
    return None


def is_faster(query: Tensor, key: Tensor, num_users: int, is_jagged: bool, user_query: Tensor | None) -> bool:
    """Whether these kernels are faster than the portable ones: where there are rows enough for tiles of 128, or, unless
    users have rows of their own, more keys than a block. (With fewer they are faster, too, but for the table of tiles,
    which the portable kernel does without.)"""
    own = 0 if user_query is None else user_query.shape[1]
    if query.shape[0] * query.shape[1] + own * num_users >= FEWEST_WIDE_ROWS * num_users:
        return True
    keys = key.shape[0] if is_jagged else key.shape[1] * num_users
    return user_query is None and keys > BLOCK_KEYS * num_users


def refusal(
    query: Tensor, key: Tensor, value: Tensor, is_jagged: bool, scale: float, user_query: Tensor | None = None
) -> str | None:
    """Why the kernels cannot take the call, or None. Device and library are checked elsewhere."""
    why = type_refusal(query.dtype, query.shape[3])
    if why is not None:
        return why
    if scale <= 0:
        return f"the kernels take positive scales, not {scale}"
    if key.shape[0 if is_jagged else 1] == 0:
        return "there is no history at all"
    queries = (("query", query),) if user_query is None else (("query", query), ("user_query", user_query))
    for name, x in queries:
        if sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) >= 2**34:
            return f"{name} spans more than 2^34 elements, its strides are {x.stride()}"
    for name, tensor in (*queries, ("key", key), ("value", value)):
        if not is_tma_ready(tensor):
            return f"{name} is not aligned to {TMA_ALIGNMENT} bytes in its base and strides {tensor.stride()}"
    return None


def flat_query_strides(query: Tensor) -> tuple[int, int] | None:
    """(row, head) strides of the query as `[B * S, H, D]`, or None when it is not one, or not aligned for TMA."""
    cands, seeds = query.shape[:2]
    stride_b, stride_s, stride_h, _ = query.stride()
    if seeds > 1 and cands > 1 and stride_b != seeds * stride_s:
        return None
    return (stride_s if seeds > 1 else stride_b), stride_h


def rows_layout(x_BSHD: Tensor, padded: int) -> TensorLayout:
    """`[B * S, H, D]` by 64 rows of one head."""
    flat = flat_query_strides(x_BSHD)
    assert flat is not None
    return TensorLayout((x_BSHD.shape[0] * x_BSHD.shape[1], *x_BSHD.shape[2:]), (*flat, 1), (BOX_ROWS, 1, padded))


def result_layout(shape: Sequence[int], padded: int) -> TensorLayout:
    """As `rows_layout`, of a contiguous `[B, S, H, D]` that is yet to be made."""
    cands, seeds, heads, size = shape
    return TensorLayout((cands * seeds, heads, size), (heads * size, size, 1), (BOX_ROWS, 1, padded))


def history_layout(x: Tensor, layout: int, keys: int, padded: int) -> TensorLayout:
    """`[U, T, Hkv, D]`, or `[1, L, Hkv, D]` where jagged, by a number of keys of one head."""
    if layout == JAGGED:
        return TensorLayout((1, *x.shape), (TMA_ALIGNMENT, *x.stride()), (1, keys, 1, padded))
    return TensorLayout(x.shape, x.stride(), (1, keys, 1, padded))


def tile_table(problem: Problem, rows: int = TILE_ROWS, chained: bool = False) -> Tensor:
    """The table of `_triton/schedule.py`, on the device: the number of tiles, then the tiles."""
    from ikbo_recsys.kernels._triton.schedule import TILE_FIELDS, fill_tile_table, fill_tile_table_both

    device, own = problem.query.device, problem.user_query
    offsets, _, kv = problem.index_pointers()
    limit = row_slots(problem, rows)
    table = torch.empty((1 + limit, TILE_FIELDS), dtype=torch.int32, device=device)
    fill = Launch(
        fill_tile_table if own is None else fill_tile_table_both,
        problem.index_key(),
        cdiv(problem.num_users, TABLE_BLOCK),
        {"ROWS": rows, "KV_LAYOUT": problem.layout, "BLOCK": TABLE_BLOCK, "STEP": _TABLE_STEP, "CHAINED": chained},
        num_warps=4,
    )
    fill((table, offsets, kv, *problem.sizes(), *(() if own is None else (own.shape[1],)), limit))
    return table


def shared_table(problem: Problem, rows: int = TILE_ROWS) -> Tensor:
    """`tile_table`, made once for the layers and passes that share an index, if it may be kept with it."""
    kv, own = problem.kv, problem.user_query
    if not problem.keeps_table or (kv is not None and kv.is_inference()):
        return tile_table(problem, rows, chained=True)
    contents = None if kv is None else (id(kv), kv._version, kv.data_ptr())
    own_rows = None if own is None else own.shape[1]
    kept = (rows, problem.layout, problem.query.shape[1], own_rows, problem.capacity, contents)
    # `kv` is kept with the table, so that no other tensor can come to have its id.
    owned = None if kv is problem.offsets else kv
    return index_cache(problem.offsets, kept, lambda: (tile_table(problem, rows, chained=True), owned))[0]


def adjacent_rows(problem: Problem) -> bool:
    """Whether 64 rows of a tile are adjacent in the query: when candidates are, or when they are one candidate's."""
    return problem.permutation is None or problem.query.shape[1] % BOX_ROWS == 0


def forward_tile(problem: Problem, padded: int, way: int) -> HopperTile:
    """Of the forward kernel where blocks share tiles in a way: only those of 128 rows are shared."""
    is_narrow = way == WHOLE and not _attention_shares.has_wide_tiles(problem)
    return (NARROW_TILES if is_narrow else FORWARD_TILES)[padded]


def forward_blocks(problem: Problem, tile: HopperTile, parts: int = 1) -> int:
    """Thread blocks of a forward kernel whose items are cut into parts."""
    items = row_slots(problem, tile.rows) * problem.query.shape[2]
    return min(multiprocessors(problem.query.device) * tile.blocks, items * parts)


def forward_launch(
    kernel: Any, problem: Problem, tile: HopperTile, padded: int, adjacent: bool, store_lse: bool, **form: Any
) -> Launch:
    """Of one of the forward kernels; `adjacent` says whether query rows come by TMA, `form` what else it is made
    for."""
    return Launch(
        kernel,
        problem.index_key(),
        forward_blocks(problem, tile, max(form.get("SHARES", WHOLE), 1)),
        {
            "KEYS": tile.keys,
            "D": padded,
            "HEAD_SIZE": problem.query.shape[3],
            "STAGES": tile.stages,
            "JAGGED": problem.layout == JAGGED,
            "GATHER": not adjacent,
            "PERMUTED": problem.permutation is not None,
            "STORE_LSE": store_lse,
            **form,
            **tile.registers(),
        },
        num_warps=4,
        launch_pdl=True,
        **({} if tile.blocks == 1 else {"maxnreg": SHARED_REGISTERS}),
    )


def shares(problem: Problem, padded: int) -> int:
    """SHARES of a call: what the rule predicts to be faster, or what is, where measuring was asked for."""
    default = _attention_shares.shares(problem, padded)
    other, saved, _ = _attention_shares.predicted(problem, padded)
    options = [default] if saved < LEAST_MEASURED else [default, *({WHOLE, other} - {default})]
    query, layout = problem.query, problem.layout
    shape = (query.shape, problem.key.shape, problem.num_users, layout, query.dtype, query.get_device())

    def run(option: int) -> Any:
        return functools.partial(Forward(problem, False, option), problem)

    with device_guard(query):
        return _tuning.fastest("cross_attention", shape, options, run)


class Forward:
    """The forward launch for problems that differ from `problem` in nothing but their tensors' addresses.

    `way` is a value of SHARES; None asks `shares`.
    """

    def __init__(self, problem: Problem, store_lse: bool, way: int | None = None) -> None:
        from ikbo_recsys.kernels._gluon.cross_attention import attention_forward, attention_forward_shared

        query = problem.query
        heads, head_size = query.shape[2:]
        padded = padded_size(head_size)
        self._out = Room(query.shape, query.dtype, query.device)
        self._lse = Room(query.shape[:3], torch.float32, query.device) if store_lse else None
        adjacent = adjacent_rows(problem) and flat_query_strides(query) is not None
        out = result_layout(query.shape, padded)
        # Without adjacent rows the query is read through its pointer, and its descriptor is not looked at.
        self._is_gathered = not adjacent
        rows = rows_layout(query, padded) if adjacent else out
        way = shares(problem, padded) if way is None else way
        self._tile = tile = forward_tile(problem, padded, way)
        history = [history_layout(x, problem.layout, tile.keys, padded) for x in (problem.key, problem.value)]
        self._layouts = (rows, *history, out)
        self._numbers = (
            *(problem.scale * LOG2_E, heads, problem.group, query.shape[1]),
            *(stride // 8 for stride in problem.query_strides()),
        )
        self._padded, self._shares = padded, way
        kernel, form = attention_forward_shared, {"SHARES": way}
        if way == WHOLE:
            kernel, form = attention_forward, {"CONSUMERS": tile.consumers}
        self._launch = forward_launch(kernel, problem, tile, padded, adjacent, store_lse, **form)
        self._merge = Merge(problem, padded, self._shares, store_lse) if self._shares > LAST_ROUND else None

    def __call__(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """`out [B, S, H, D]`, and `lse [B, S, H]` fp32; where that is not asked for any tensor stands for it."""
        query = problem.query
        with device_guard(query):
            out = self._out()
            lse = out if self._lse is None else self._lse()
            bases = (out if self._is_gathered else query, problem.key, problem.value, out)
            room: tuple[Tensor, ...] = ()
            if self._shares == LAST_ROUND:
                # Before the table, behind which the kernel may start early.
                blocks = forward_blocks(problem, self._tile)
                room = (state(blocks, self._padded, query.device), new_flags(blocks, query.device))
            table = shared_table(problem, self._tile.rows)
            if self._merge is not None:
                # Nobody looks at flags.
                room = (state(slots(problem) * self._shares, self._padded, query.device), table)
            rest = (query, out, lse, *room, table, problem.index_pointers()[1], *self._numbers)
            launch(self._launch, self._layouts, bases, rest)
            if self._merge is not None:
                self._merge(problem, room[0], out, lse, table)
        return out, lse
