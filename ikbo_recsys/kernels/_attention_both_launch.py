"""Launches of the portable attention kernels where users have query rows of their own: see `_attention_launch.py`.

The classes have the names and the use of those there. Where a kernel reads or writes something for each kind of rows
(outputs, log-sum-exp, delta, gradients of queries), they take and give a `Pair`: the candidates', the users'.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from ikbo_recsys.kernels._attention_backward_launch import gradient_rooms, gradient_strides, splits, summed
from ikbo_recsys.kernels._attention_launch import (
    BACKWARD_32BIT,
    BACKWARD_KEY_VALUE_16BIT,
    BACKWARD_QUERY_16BIT,
    FORWARD_16BIT,
    FORWARD_32BIT,
    Problem,
    key_slots,
    new_delta,
    row_slots,
)
from ikbo_recsys.kernels._launch import device_guard
from ikbo_recsys.kernels._plan import Launch

Pair: TypeAlias = tuple[Tensor, Tensor]


def queries(problem: Problem) -> Pair:
    """Both query tensors of a problem that has both."""
    assert problem.user_query is not None
    return problem.query, problem.user_query


class Forward:
    """The forward launch for problems that differ from `problem` in nothing but their tensors' addresses."""

    def __init__(self, problem: Problem, store_lse: bool) -> None:
        from ikbo_recsys.kernels._triton.cross_attention_both import attention_forward_both

        query, user_query = queries(problem)
        self._shapes = (query.shape, user_query.shape)
        self._lse_shapes = (query.shape[:3], user_query.shape[:3]) if store_lse else ((0,), (0,))
        tile = problem.tile(FORWARD_16BIT, FORWARD_32BIT)
        strides = (*problem.query_strides(), *problem.history_strides(), *user_query.stride()[:3])
        self._numbers = (*problem.sizes(), user_query.shape[1], *strides)
        self._launch = Launch(
            attention_forward_both,
            None,
            row_slots(problem, tile.rows) * query.shape[2],
            problem.constants(ROWS=tile.rows, KEYS=tile.keys, STORE_LSE=store_lse),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def __call__(self, problem: Problem) -> tuple[Pair, Pair]:
        """Outputs and log-sum-exps, the latter without elements unless asked for."""
        both, dtype, device = queries(problem), problem.query.dtype, problem.query.device
        out, user_out = (torch.empty(shape, dtype=dtype, device=device) for shape in self._shapes)
        lse, user_lse = (torch.empty(shape, dtype=torch.float32, device=device) for shape in self._lse_shapes)
        pointers = (*both, problem.key, problem.value, out, user_out, lse, user_lse, *problem.index_pointers())
        with device_guard(problem.query):
            self._launch((*pointers, *self._numbers))
        return (out, user_out), (lse, user_lse)


class BackwardQuery:
    """The launch for delta and dq, for problems and gradients that differ from these in their addresses only."""

    def __init__(self, problem: Problem, grads: Pair, needs: tuple[bool, bool], has_grad_lse: bool = False) -> None:
        from ikbo_recsys.kernels._triton.cross_attention_both import attention_backward_query_both

        tile = problem.tile(BACKWARD_QUERY_16BIT, BACKWARD_32BIT)
        self._needs = needs
        self._numbers = (*problem.sizes(), queries(problem)[1].shape[1], *_strides(problem, grads))
        self._launch = Launch(
            attention_backward_query_both,
            None,
            row_slots(problem, tile.rows) * problem.query.shape[2],
            problem.constants(
                **{"SCALE": problem.scale, "ROWS": tile.rows, "KEYS": tile.keys},
                **{"NEED_DQ": needs[0], "NEED_USER_DQ": needs[1], "GRAD_LSE": has_grad_lse},
            ),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def __call__(
        self, problem: Problem, outs: Pair, lses: Pair, grads: Pair, grad_lses: Pair | None = None
    ) -> tuple[tuple[Tensor | None, Tensor | None], Pair]:
        """dq (None unless needed) and delta of both; the innermost strides of `grads` are 1."""
        both = queries(problem)
        delta, user_delta = map(new_delta, lses, (None, None) if grad_lses is None else grad_lses)
        dq, user_dq = (
            torch.empty(query.shape, dtype=query.dtype, device=query.device) if need else None
            for query, need in zip(both, self._needs, strict=True)
        )
        outputs = (delta if dq is None else dq, user_delta if user_dq is None else user_dq)
        pointers = (*both, problem.key, problem.value, *outs, *grads, *lses, delta, user_delta, *outputs)
        with device_guard(problem.query):
            self._launch((*pointers, *problem.index_pointers(), *self._numbers))
        return (dq, user_dq), (delta, user_delta)


class BackwardKeyValue:
    """The launch for dk and dv, for problems and gradients that differ from these in their addresses only."""

    def __init__(self, problem: Problem, grads: Pair, need_dk: bool, need_dv: bool) -> None:
        from ikbo_recsys.kernels._triton.cross_attention_both import attention_backward_key_value_both

        key, user_query = problem.key, queries(problem)[1]
        tile = problem.tile(BACKWARD_KEY_VALUE_16BIT, BACKWARD_32BIT)
        slots = key_slots(problem, tile.keys)
        self._splits = splits(slots * key.shape[-2], problem.user_rows * problem.group, tile.rows)
        self._rooms = gradient_rooms(key, self._splits, (need_dk, need_dv))
        self._numbers = (*problem.sizes(), user_query.shape[1], key.numel(), *_strides(problem, grads))
        self._launch = Launch(
            attention_backward_key_value_both,
            None,
            slots * key.shape[-2] * self._splits,
            problem.constants(
                **{"SCALE": problem.scale, "ROWS": tile.rows, "KEYS": tile.keys, "SPLITS": self._splits},
                **{"NEED_DK": need_dk, "NEED_DV": need_dv},
            ),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def __call__(self, problem: Problem, lses: Pair, deltas: Pair, grads: Pair) -> tuple[Tensor | None, Tensor | None]:
        """dk and dv, contiguous, None where not needed."""
        key, delta = problem.key, deltas[0]
        with device_guard(key):
            dk, dv = (None if room is None else room() for room in self._rooms)
            outputs = (delta if dk is None else dk, delta if dv is None else dv)
            pointers = (*queries(problem), key, problem.value, *grads, *lses, *deltas, *outputs)
            self._launch((*pointers, *problem.index_pointers(), *self._numbers))
        return summed(dk, self._splits, key.dtype), summed(dv, self._splits, key.dtype)


def _strides(problem: Problem, grads: Pair) -> tuple[int, ...]:
    own = (*queries(problem)[1].stride()[:3], *grads[1].stride()[:3])
    return (*gradient_strides(problem, grads[0]), *own)
