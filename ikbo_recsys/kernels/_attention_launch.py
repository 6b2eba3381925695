"""Launches of the target attention kernels: shapes to grids and tiles, outputs, workspaces. Tensors arrive checked.

Shape letters: U users, B candidates, S seeds, T history rows, L history rows of all users, H query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels._launch import cdiv, device_guard, input_precision, launcher
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


# Row tiles shrink with the rows a user has on average: one user's rows never share a tile with another's.
_FORWARD_16BIT = (
    Row(AttentionTile(16, 64, 4, 3), {"head_size": 128, "user_rows": 16}),
    Row(AttentionTile(32, 64, 4, 3), {"head_size": 128, "user_rows": 32}),
    Row(AttentionTile(64, 64, 4, 3), {"head_size": 128, "user_rows": 64}),
    Row(AttentionTile(128, 64, 4, 3), {"head_size": 64}),
    Row(AttentionTile(128, 64, 8, 3), {"head_size": 128}),
    Row(AttentionTile(16, 32, 4, 2), {"user_rows": 16}),
    Row(AttentionTile(64, 32, 4, 2)),
)
_FORWARD_32BIT = (
    Row(AttentionTile(16, 32, 4, 2), {"user_rows": 16}),
    Row(AttentionTile(64, 32, 8, 2), {"head_size": 64}),
    Row(AttentionTile(32, 32, 8, 2), {"head_size": 128}),
    Row(AttentionTile(16, 32, 8, 1)),
)
_BACKWARD_QUERY_16BIT = (
    Row(AttentionTile(16, 64, 4, 3), {"head_size": 128, "user_rows": 16}),
    Row(AttentionTile(64, 64, 4, 3), {"head_size": 128, "user_rows": 64}),
    Row(AttentionTile(128, 64, 8, 3), {"head_size": 64}),
    Row(AttentionTile(128, 64, 8, 2), {"head_size": 128}),
    Row(AttentionTile(64, 32, 8, 1)),
)
_BACKWARD_KEY_VALUE_16BIT = (
    Row(AttentionTile(16, 64, 4, 2), {"head_size": 128, "user_rows": 16}),
    Row(AttentionTile(64, 128, 8, 2), {"head_size": 64}),
    Row(AttentionTile(64, 128, 8, 2), {"head_size": 128}),
    Row(AttentionTile(32, 64, 8, 1)),
)
_BACKWARD_32BIT = (
    Row(AttentionTile(32, 32, 8, 1), {"head_size": 64}),
    Row(AttentionTile(16, 16, 4, 1), {"head_size": 128}),
    Row(AttentionTile(16, 16, 8, 1)),
)


@dataclass(frozen=True)
class Problem:
    """One attention call: its tensors as they are read in place, and the numbers that every launch needs.

    Attributes:
        query: `[B, S, H, D]`.
        key, value: `[U, T, Hkv, D]` (FULL, LENGTHS) or `[L, Hkv, D]` (JAGGED). Innermost stride 1 for all three.
        offsets: `[U + 1]`, where each user's candidates begin in grouped order.
        permutation: `[B]`, the candidate at each place of the grouped order; None when the batch is grouped.
        kv: lengths `[U]` or offsets `[U + 1]`, as `layout` says; None for FULL.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    offsets: Tensor
    permutation: Tensor | None
    kv: Tensor | None
    layout: int
    scale: float

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
        """Query rows per user, on average. Under tracing with dynamic sizes it is not known, and must not become a guard."""
        rows, users = self.query.shape[0] * self.query.shape[1], self.num_users
        if not isinstance(rows, int) or not isinstance(users, int):
            return 64
        return cdiv(rows, max(users, 1))

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

    def constants(self) -> dict[str, Any]:
        head_size = self.query.shape[3]
        return {
            "QK_SCALE": self.scale * _LOG2_E,
            "HEADS": self.query.shape[2],
            "GROUP": self.group,
            "HEAD_SIZE": head_size,
            "BLOCK_D": max(16, 1 << (head_size - 1).bit_length()),
            "KV_LAYOUT": self.layout,
            "PERMUTED": self.permutation is not None,
            "PRECISION": input_precision(self.query.dtype),
        }

    def tile(self, narrow: Any, wide: Any) -> AttentionTile:
        table = wide if self.query.dtype is torch.float32 else narrow
        return pick(table, head_size=self.query.shape[3], user_rows=self.user_rows)


def innermost_contiguous(x: Tensor) -> Tensor:
    """`x` itself when its innermost stride is 1, which is what the kernels read in place; a copy otherwise."""
    return x if x.stride(-1) == 1 else x.contiguous()


def row_slots(problem: Problem, rows: int) -> int:
    """How many tiles of `rows` query rows there can be: see `_triton/schedule.py`."""
    return problem.query.shape[0] * problem.query.shape[1] // rows + problem.num_users


def forward(problem: Problem, store_lse: bool) -> tuple[Tensor, Tensor]:
    """`out [B, S, H, D]`, and `lse [B, S, H]` fp32 (without elements unless asked for)."""
    from ikbo_recsys.kernels._triton.cross_attention import attention_forward

    query = problem.query
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3] if store_lse else (0,), dtype=torch.float32, device=query.device)
    tile = problem.tile(_FORWARD_16BIT, _FORWARD_32BIT)
    with device_guard(query):
        launcher(attention_forward)[(row_slots(problem, tile.rows) * query.shape[2],)](
            query,
            problem.key,
            problem.value,
            out,
            lse,
            *problem.index_pointers(),
            *problem.sizes(),
            *problem.query_strides(),
            *problem.history_strides(),
            **problem.constants(),
            ROWS=tile.rows,
            KEYS=tile.keys,
            STORE_LSE=store_lse,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out, lse


def backward(
    problem: Problem, out: Tensor, lse: Tensor, grad: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key, value: contiguous, None where not needed."""
    grad = innermost_contiguous(grad)
    with device_guard(problem.query):
        dq, delta = _backward_query(problem, out, lse, grad, needs[0])
        dk, dv = _backward_key_value(problem, lse, delta, grad, needs[1], needs[2])
    return dq, dk, dv


def _backward_query(problem: Problem, out: Tensor, lse: Tensor, grad: Tensor, need: bool) -> tuple[Tensor | None, Tensor]:
    from ikbo_recsys.kernels._triton.cross_attention_backward import attention_backward_query

    query = problem.query
    delta = torch.empty_like(lse)
    dq = torch.empty(query.shape, dtype=query.dtype, device=query.device) if need else None
    tile = problem.tile(_BACKWARD_QUERY_16BIT, _BACKWARD_32BIT)
    launcher(attention_backward_query)[(row_slots(problem, tile.rows) * query.shape[2],)](
        query,
        problem.key,
        problem.value,
        out,
        grad,
        lse,
        delta,
        delta if dq is None else dq,
        *problem.index_pointers(),
        *problem.sizes(),
        *problem.query_strides(),
        *problem.history_strides(),
        *grad.stride()[:3],
        **problem.constants(),
        SCALE=problem.scale,
        ROWS=tile.rows,
        KEYS=tile.keys,
        NEED_DQ=need,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return dq, delta


def _backward_key_value(
    problem: Problem, lse: Tensor, delta: Tensor, grad: Tensor, need_dk: bool, need_dv: bool
) -> tuple[Tensor | None, Tensor | None]:
    from ikbo_recsys.kernels._triton.cross_attention_backward import attention_backward_key_value

    if not (need_dk or need_dv):
        return None, None
    key = problem.key
    tile = problem.tile(_BACKWARD_KEY_VALUE_16BIT, _BACKWARD_32BIT)
    if problem.layout == JAGGED:
        slots = problem.capacity // tile.keys + problem.num_users
    else:
        slots = problem.num_users * cdiv(problem.capacity, tile.keys)
    splits = _splits(slots * key.shape[-2], problem.user_rows * problem.group, tile.rows)
    dtype = key.dtype if splits == 1 else torch.float32
    dk, dv = (torch.empty((splits, *key.shape), dtype=dtype, device=key.device) if n else None for n in (need_dk, need_dv))
    launcher(attention_backward_key_value)[(slots * key.shape[-2] * splits,)](
        problem.query,
        key,
        problem.value,
        grad,
        lse,
        delta,
        delta if dk is None else dk,
        delta if dv is None else dv,
        *problem.index_pointers(),
        *problem.sizes(),
        key.numel(),
        *problem.query_strides(),
        *problem.history_strides(),
        *grad.stride()[:3],
        **problem.constants(),
        SCALE=problem.scale,
        ROWS=tile.rows,
        KEYS=tile.keys,
        SPLITS=splits,
        NEED_DK=need_dk,
        NEED_DV=need_dv,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return tuple(None if x is None else x[0] if splits == 1 else x.sum(0).to(key.dtype) for x in (dk, dv))  # type: ignore[return-value]


def _splits(programs: int, rows: int, tile_rows: int) -> int:
    """Into how many shares a user's rows are cut: 1 unless the keys alone leave most of a GPU idle.

    From shapes only, so that the result does not depend on the device: below 128 programs, as many shares as bring it to
    256, each of at least 8 tiles.
    """
    if not isinstance(programs, int) or programs >= 128 or programs == 0:
        return 1
    return max(1, min(cdiv(256, programs), rows // (8 * tile_rows), 64))
