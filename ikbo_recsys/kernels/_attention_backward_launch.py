"""Backward launches of the portable target attention kernels: see `_attention_launch.py`.

Two kernels, one for delta and dq and one for dk and dv, or one for all three, `BackwardFew`, where users have few query
rows.

Shape letters as in `_attention_launch.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ikbo_recsys.kernels._attention_launch import (
    BACKWARD_32BIT,
    BACKWARD_FEW_16BIT,
    BACKWARD_KEY_VALUE_16BIT,
    BACKWARD_QUERY_16BIT,
    Problem,
    key_slots,
    new_delta,
    row_slots,
)
from ikbo_recsys.kernels._launch import Room, cdiv, device_guard
from ikbo_recsys.kernels._plan import Launch

MOST_FEW_ROWS = 64
"""Query rows per user and key head, on average, up to which all gradients come from one pass over keys and values."""
_MOST_FEW_HEAD_SIZE = 128
_PARTS = 4
"""Programs for each user and key head, all but one of which end at once unless the user has more rows than a tile."""
_FEWEST_PROGRAMS = 128
"""Below, programs that take all keys of a user leave most of a GPU idle: blocks of keys have to run side by side."""


class BackwardQuery:
    """The launch for delta and dq, for problems and gradients that differ from these in their addresses only."""

    def __init__(self, problem: Problem, grad: Tensor, need: bool, has_grad_lse: bool = False) -> None:
        from ikbo_recsys.kernels._triton.cross_attention_backward_query import attention_backward_query

        tile = problem.tile(BACKWARD_QUERY_16BIT, BACKWARD_32BIT)
        query = problem.query
        self._dq = Room(query.shape, query.dtype, query.device) if need else None
        self._numbers = (*problem.sizes(), *gradient_strides(problem, grad))
        self._launch = Launch(
            attention_backward_query,
            None,
            row_slots(problem, tile.rows) * problem.query.shape[2],
            problem.constants(SCALE=problem.scale, ROWS=tile.rows, KEYS=tile.keys, NEED_DQ=need, GRAD_LSE=has_grad_lse),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def __call__(
        self, problem: Problem, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """dq (None unless needed) and delta, `[B, S, H]`; the innermost stride of `grad` is 1."""
        query = problem.query
        delta = new_delta(lse, grad_lse)
        with device_guard(query):
            dq = None if self._dq is None else self._dq()
            pointers = (query, problem.key, problem.value, out, grad, lse, delta, delta if dq is None else dq)
            self._launch((*pointers, *problem.index_pointers(), *self._numbers))
        return dq, delta


class BackwardKeyValue:
    """The launch for dk and dv, for problems and gradients that differ from these in their addresses only."""

    def __init__(self, problem: Problem, grad: Tensor, need_dk: bool, need_dv: bool) -> None:
        from ikbo_recsys.kernels._triton.cross_attention_backward import attention_backward_key_value

        key = problem.key
        tile = problem.tile(BACKWARD_KEY_VALUE_16BIT, BACKWARD_32BIT)
        slots = key_slots(problem, tile.keys)
        self._splits = splits(slots * key.shape[-2], problem.user_rows * problem.group, tile.rows)
        self._rooms = gradient_rooms(key, self._splits, (need_dk, need_dv))
        self._numbers = (*problem.sizes(), key.numel(), *gradient_strides(problem, grad))
        self._launch = Launch(
            attention_backward_key_value,
            None,
            slots * key.shape[-2] * self._splits,
            problem.constants(
                **{"SCALE": problem.scale, "ROWS": tile.rows, "KEYS": tile.keys, "SPLITS": self._splits},
                **{"NEED_DK": need_dk, "NEED_DV": need_dv},
            ),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def __call__(
        self, problem: Problem, lse: Tensor, delta: Tensor, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """dk and dv, contiguous, None where not needed."""
        key = problem.key
        with device_guard(key):
            dk, dv = (None if room is None else room() for room in self._rooms)
            outputs = (delta if dk is None else dk, delta if dv is None else dv)
            pointers = (problem.query, key, problem.value, grad, lse, delta, *outputs, *problem.index_pointers())
            self._launch((*pointers, *self._numbers))
        return summed(dk, self._splits, key.dtype), summed(dv, self._splits, key.dtype)


def few_refusal(problem: Problem) -> str | None:
    """Why `BackwardFew` cannot take the call, or is slower than the two kernels, or None."""
    query = problem.query
    if problem.user_query is not None:
        return "users have query rows of their own"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"the kernel takes float16 and bfloat16, not {query.dtype}"
    if query.shape[3] > _MOST_FEW_HEAD_SIZE:
        return f"the kernel takes head sizes up to {_MOST_FEW_HEAD_SIZE}, not {query.shape[3]}"
    rows, programs = problem.user_rows * problem.group, problem.num_users * problem.key.shape[-2]
    if rows > MOST_FEW_ROWS:
        return f"users have more than {MOST_FEW_ROWS} query rows per key head: {rows}"
    if programs < _FEWEST_PROGRAMS:
        return f"there are fewer than {_FEWEST_PROGRAMS} users times key heads: {programs}"
    return None


class BackwardFew:
    """The launch for all gradients in one pass, for problems and gradients that differ from these in their addresses
    only; `few_refusal` says which ones it takes."""

    def __init__(self, problem: Problem, grad: Tensor, needs: tuple[bool, bool, bool], has_grad_lse: bool) -> None:
        from ikbo_recsys.kernels._triton.cross_attention_backward_few import attention_backward_few

        query, key = problem.query, problem.key
        need_dq, need_dk, need_dv = needs
        tile = problem.tile(BACKWARD_FEW_16BIT, BACKWARD_32BIT, problem.user_rows * problem.group)
        of_query, of_key = (Room(x.shape, x.dtype, x.device) for x in (query, key))
        self._rooms = [room if need else None for room, need in zip((of_query, of_key, of_key), needs, strict=True)]
        self._numbers = (*problem.sizes()[1:], *gradient_strides(problem, grad))
        self._launch = Launch(
            attention_backward_few,
            None,
            problem.num_users * key.shape[-2] * _PARTS,
            problem.constants(
                **{"SCALE": problem.scale, "ROWS": tile.rows, "KEYS": tile.keys, "PARTS": _PARTS},
                **{"NEED_DQ": need_dq, "NEED_DK": need_dk, "NEED_DV": need_dv, "GRAD_LSE": has_grad_lse},
            ),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def __call__(
        self, problem: Problem, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dq, dk and dv, contiguous, None where not needed; the innermost stride of `grad` is 1."""
        query = problem.query
        with device_guard(query):
            # A copy has the alignment that the kernel was compiled for.
            grad_lse = lse if grad_lse is None else grad_lse.clone(memory_format=torch.contiguous_format)
            dq, dk, dv = (None if room is None else room() for room in self._rooms)
            outputs = (out if x is None else x for x in (dq, dk, dv))
            pointers = (query, problem.key, problem.value, out, grad, lse, grad_lse, *outputs)
            self._launch((*pointers, *problem.index_pointers(), *self._numbers))
        return dq, dk, dv


def gradient_rooms(key: Tensor, splits: int, needs: tuple[bool, ...]) -> list[Room | None]:
    """For the gradients of keys and of values that are needed; in fp32, one after the other, where there are splits."""
    shape, dtype = (key.shape, key.dtype) if splits == 1 else ((splits, *key.shape), torch.float32)
    room = Room(shape, dtype, key.device)
    return [room if need else None for need in needs]


def summed(parts: Tensor | None, splits: int, dtype: torch.dtype) -> Tensor | None:
    """The sum of a gradient's splits."""
    return parts if parts is None or splits == 1 else parts.sum(0).to(dtype)


def gradient_strides(problem: Problem, grad: Tensor) -> tuple[int, ...]:
    return *problem.query_strides(), *problem.history_strides(), *grad.stride()[:3]


def splits(programs: int, rows: int, tile_rows: int) -> int:
    """Into how many shares a user's rows are cut: 1 unless the keys alone leave most of a GPU idle.

    From shapes only, so that the result does not depend on the device: below 128 programs, as many shares as bring it
    to 256, each of at least 8 tiles.
    """
    if not isinstance(programs, int) or programs >= 128 or programs == 0:
        return 1
    return max(1, min(cdiv(256, programs), rows // (8 * tile_rows), 64))
