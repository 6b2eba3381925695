"""Launches of the target attention kernels: shapes to grids and tiles, outputs, workspaces. Tensors arrive checked.

The backward launches are in `_attention_backward_launch.py`.

Shape letters: U users, B candidates, S seeds, T history rows, L history rows of all users, H query heads, Hkv key
heads, D head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels._backend import has_large_shared_memory
from ikbo_recsys.kernels._launch import DerivedCache, Room, cdiv, device_guard, input_precision
from ikbo_recsys.kernels._plan import Launch, is_traced, once_launched
from ikbo_recsys.kernels._tiles import Row, pick

FULL, LENGTHS, JAGGED = 0, 1, 2
"""Layouts of the history: padded and full, padded with lengths, jagged with offsets."""

MAX_HEAD_SIZE = 256
_LOG2_E = 1.0 / math.log(2.0)


@dataclass(frozen=True)
class AttentionTile:
    """Query rows and keys of a block, and how Triton runs it."""

    rows: int
    keys: int
    warps: int
    stages: int

    def halved(self) -> AttentionTile:
        """Half the rows and keys, at most two stages: at most 64 KB of shared memory for every head size."""
        return AttentionTile(max(16, self.rows // 2), max(16, self.keys // 2), self.warps, min(self.stages, 2))


# Row tiles shrink with the rows a user has on average: one user's rows never share a tile with another's.
FORWARD_16BIT = (
    Row(AttentionTile(16, 64, 4, 3), {"head_size": 128, "user_rows": 16}),
    Row(AttentionTile(32, 64, 4, 3), {"head_size": 128, "user_rows": 32}),
    Row(AttentionTile(64, 128, 4, 3), {"head_size": 64, "user_rows": 64}),
    Row(AttentionTile(64, 64, 4, 3), {"head_size": 128, "user_rows": 64}),
    Row(AttentionTile(128, 64, 4, 3), {"head_size": 64}),
    Row(AttentionTile(128, 64, 8, 3), {"head_size": 128}),
    Row(AttentionTile(16, 32, 4, 2), {"user_rows": 16}),
    Row(AttentionTile(64, 32, 4, 2)),
)
FORWARD_32BIT = (
    Row(AttentionTile(16, 32, 4, 2), {"user_rows": 16}),
    Row(AttentionTile(64, 32, 8, 2), {"head_size": 64}),
    Row(AttentionTile(32, 32, 8, 2), {"head_size": 128}),
    Row(AttentionTile(16, 32, 8, 1)),
)
BACKWARD_QUERY_16BIT = (
    Row(AttentionTile(16, 64, 4, 3), {"head_size": 128, "user_rows": 16}),
    Row(AttentionTile(64, 64, 4, 3), {"head_size": 128, "user_rows": 64}),
    Row(AttentionTile(128, 64, 8, 3), {"head_size": 64}),
    Row(AttentionTile(128, 64, 8, 2), {"head_size": 128}),
    Row(AttentionTile(64, 32, 8, 1)),
)
BACKWARD_KEY_VALUE_16BIT = (
    Row(AttentionTile(16, 64, 4, 2), {"head_size": 128, "user_rows": 16}),
    Row(AttentionTile(32, 64, 4, 2), {"head_size": 64, "user_rows": 64}),
    Row(AttentionTile(64, 128, 8, 2), {"head_size": 64}),
    Row(AttentionTile(64, 128, 8, 2), {"head_size": 128}),
    Row(AttentionTile(32, 64, 8, 1)),
)
# All gradients in one pass; `user_rows` are the packed rows of a key head's group. Row tiles have room for twice the
# average, where a tile of 64 has: a user with more rows is read twice.
BACKWARD_FEW_16BIT = (
    Row(AttentionTile(16, 64, 4, 3), {"head_size": 64, "user_rows": 8}),
    Row(AttentionTile(32, 64, 4, 3), {"head_size": 64, "user_rows": 16}),
    Row(AttentionTile(64, 64, 4, 3), {"head_size": 64}),
    Row(AttentionTile(16, 64, 4, 2), {"user_rows": 8}),
    Row(AttentionTile(32, 64, 4, 2), {"user_rows": 16}),
    Row(AttentionTile(64, 64, 8, 3)),
)
BACKWARD_32BIT = (
    Row(AttentionTile(32, 32, 8, 1), {"head_size": 64}),
    Row(AttentionTile(16, 16, 4, 1), {"head_size": 128}),
    Row(AttentionTile(16, 16, 8, 1)),
)


_INDICES = DerivedCache()


def index_cache(index: Tensor, key: Hashable, make: Callable[[], Any]) -> Any:
    """What is derived from an index tensor, made once per tensor, contents (its version counter), stream and mode.

    The values live as long as the tensor. Within a captured CUDA graph they are made anew, so that a replay sees the
    contents of its time; so they are for inference tensors, whose writes leave no trace.
    """
    if is_traced() or not index.is_cuda or index.is_inference() or torch.cuda.is_current_stream_capturing():
        return make()
    values = _INDICES.forms(index, (index._version, index.data_ptr()))
    # What is made in inference mode cannot be saved for a backward pass later.
    key = (torch._C._cuda_getCurrentRawStream(index.get_device()), torch.is_inference_mode_enabled(), key)
    value = values.get(key)
    if value is None:
        if len(values) >= 8:  # of other shapes, and of contents that lengths had
            values.clear()
        value = make()
        # Other threads launch on this stream, too, and must not be before what is still to be written.
        once_launched(functools.partial(values.__setitem__, key, value))
    return value


@dataclass(slots=True, eq=False)  # not frozen: that takes four times as long to make
class Problem:
    """One attention call: its tensors as they are read in place, and the numbers that every launch needs.

    Attributes:
        query: `[B, S, H, D]`.
        key, value: `[U, T, Hkv, D]` (FULL, LENGTHS) or `[L, Hkv, D]` (JAGGED). Innermost stride 1 for all three.
        offsets: `[U + 1]`, where each user's candidates begin in grouped order.
        permutation: `[B]`, the candidate at each place of the grouped order; None when the batch is grouped.
        kv: lengths `[U]` or offsets `[U + 1]`, as `layout` says; None for FULL.
        user_query: `[U, X, H, D]`, query rows of the users' own, or None. Its launches are those of
            `_attention_both_launch.py` and `_attention_both_hopper.py`.
        keeps_table: whether the tile table may be kept with the index for other calls.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    offsets: Tensor
    permutation: Tensor | None
    kv: Tensor | None
    layout: int
    scale: float
    user_query: Tensor | None = None
    keeps_table: bool = True

    @property
    def num_users(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def capacity(self) -> int:
        """T, or L when jagged."""
        return self.key.shape[0] if self.layout == JAGGED else self.key.shape[1]

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.query.shape[2] // self.key.shape[-2]

    @property
    def user_rows(self) -> int:
        """Query rows per user, on average. Under tracing with dynamic sizes it is not known, and must not become a
        guard."""
        rows, users = self.query.shape[0] * self.query.shape[1], self.num_users
        own = 0 if self.user_query is None else self.user_query.shape[1]
        if not isinstance(rows, int) or not isinstance(users, int) or not isinstance(own, int):
            return 64
        return cdiv(rows, max(users, 1)) + own

    def index_key(self) -> tuple[Hashable, ...]:
        """What Triton specializes kernels on that read all but the index, and fresh tensors, through descriptors."""
        kv, permutation = self.kv, self.permutation
        return (
            *(self.query.device, self.query.dtype, self.offsets.dtype),
            *(None if permutation is None else permutation.dtype, None if kv is None else kv.dtype),
        )

    def sizes(self) -> tuple[int, ...]:
        return self.num_users, self.query.shape[0], self.query.shape[1], self.capacity

    def query_strides(self) -> tuple[int, ...]:
        return self.query.stride()[:3]

    def history_strides(self) -> tuple[int, ...]:
        if self.layout == JAGGED:
            return (0, *self.key.stride()[:2], 0, *self.value.stride()[:2])
        return (*self.key.stride()[:3], *self.value.stride()[:3])

    def index_pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """offsets, permutation, kv; an absent one is never read, so any pointer stands for it."""
        permutation = self.offsets if self.permutation is None else self.permutation
        return self.offsets, permutation, self.offsets if self.kv is None else self.kv

    def constants(self, **more: Any) -> dict[str, Any]:
        """The constexpr arguments that all the kernels have, and `more`."""
        head_size = int(self.query.shape[3])
        return {
            "QK_SCALE": self.scale * _LOG2_E,
            "HEADS": int(self.query.shape[2]),
            "GROUP": int(self.group),
            "HEAD_SIZE": head_size,
            "BLOCK_D": max(16, 1 << (head_size - 1).bit_length()),
            "KV_LAYOUT": self.layout,
            "PERMUTED": self.permutation is not None,
            "PRECISION": input_precision(self.query.dtype),
            **more,
        }

    def tile(self, narrow: Any, wide: Any, user_rows: int | None = None) -> AttentionTile:
        """Of one of two tables, by the type of the tensors; for other rows per user than `self.user_rows`, if given."""
        table = wide if self.query.dtype is torch.float32 else narrow
        rows = self.user_rows if user_rows is None else user_rows
        tile = pick(table, head_size=int(self.query.shape[3]), user_rows=rows)
        device = self.query.device
        return tile if device.type != "cuda" or has_large_shared_memory(device) else tile.halved()


def row_slots(problem: Problem, rows: int) -> int:
    """How many tiles of `rows` query rows there can be: see `_triton/schedule.py`."""
    slots = problem.query.shape[0] * problem.query.shape[1] // rows + problem.num_users
    if problem.user_query is not None:
        slots += problem.num_users * cdiv(problem.user_query.shape[1], rows)
    return slots


class Forward:
    """The forward launch for problems that differ from `problem` in nothing but their tensors' addresses."""

    def __init__(self, problem: Problem, store_lse: bool) -> None:
        from ikbo_recsys.kernels._triton.cross_attention import attention_forward

        query = problem.query
        self._out = Room(query.shape, query.dtype, query.device)
        self._lse = Room(query.shape[:3], torch.float32, query.device) if store_lse else None
        tile = problem.tile(FORWARD_16BIT, FORWARD_32BIT)
        self._numbers = (*problem.sizes(), *problem.query_strides(), *problem.history_strides())
        self._launch = Launch(
            attention_forward,
            None,
            row_slots(problem, tile.rows) * query.shape[2],
            problem.constants(ROWS=tile.rows, KEYS=tile.keys, STORE_LSE=store_lse),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def __call__(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """`out [B, S, H, D]`, and `lse [B, S, H]` fp32; where that is not asked for any tensor stands for it."""
        query = problem.query
        with device_guard(query):
            out = self._out()
            lse = out if self._lse is None else self._lse()
            pointers = (query, problem.key, problem.value, out, lse, *problem.index_pointers())
            self._launch((*pointers, *self._numbers))
        return out, lse


def new_delta(lse: Tensor, grad_lse: Tensor | None) -> Tensor:
    """Room for delta; the gradient of the log-sum-exp stands in it, where there is one."""
    if grad_lse is None:
        return torch.empty_like(lse)
    return grad_lse.clone(memory_format=torch.contiguous_format)


def key_slots(problem: Problem, keys: int) -> int:
    """How many blocks of `keys` history rows there can be, over all users."""
    if problem.layout == JAGGED:
        return problem.capacity // keys + problem.num_users
    return problem.num_users * cdiv(problem.capacity, keys)
