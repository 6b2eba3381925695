"""Launches of the Hopper attention kernels where users have query rows of their own: see `_attention_hopper.py` and
`_attention_backward_hopper.py`.

The names and the use are those there; outputs, log-sum-exps, deltas and gradients of queries are pairs, as in
`_attention_both_launch.py`. Reasons to refuse a call are in `_attention_hopper.refusal`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ikbo_recsys.kernels._attention_backward_hopper import backward_launches, is_saved_ready
from ikbo_recsys.kernels._attention_both_launch import Pair, queries
from ikbo_recsys.kernels._attention_hopper import (
    BOX_ROWS,
    FORWARD_TILES,
    LOG2_E,
    adjacent_rows,
    flat_query_strides,
    forward_launch,
    history_layout,
    padded_size,
    result_layout,
    rows_layout,
    shared_table,
)
from ikbo_recsys.kernels._attention_launch import Problem, new_delta
from ikbo_recsys.kernels._launch import device_guard, is_tma_ready
from ikbo_recsys.kernels._tma import launch


class Forward:
    """The forward launch for problems that differ from `problem` in nothing but their tensors' addresses."""

    def __init__(self, problem: Problem, store_lse: bool) -> None:
        from ikbo_recsys.kernels._gluon.cross_attention import attention_forward_both

        query, user_query = queries(problem)
        heads, head_size = query.shape[2:]
        padded = padded_size(head_size)
        self._shapes = (query.shape, user_query.shape)
        self._lse_shapes = (query.shape[:3], user_query.shape[:3]) if store_lse else ((0,), (0,))
        adjacent = adjacent_rows(problem) and all(flat_query_strides(x) is not None for x in (query, user_query))
        outs = [result_layout(x.shape, padded) for x in (query, user_query)]
        # Without adjacent rows the queries are read through their pointers, and their descriptors are not looked at.
        self._is_gathered = not adjacent
        rows = [rows_layout(x, padded) for x in (query, user_query)] if adjacent else outs
        tile = FORWARD_TILES[padded]
        history = [history_layout(x, problem.layout, tile.keys, padded) for x in (problem.key, problem.value)]
        self._layouts = (*rows, *history, *outs)
        self._numbers = (
            *(problem.scale * LOG2_E, heads, problem.group, query.shape[1], user_query.shape[1]),
            *(stride // 8 for stride in (*query.stride()[:3], *user_query.stride()[:3])),
        )
        self._launch = forward_launch(attention_forward_both, problem, tile, padded, adjacent, store_lse)

    def __call__(self, problem: Problem) -> tuple[Pair, Pair]:
        """Outputs and log-sum-exps, the latter without elements unless asked for."""
        both, dtype, device = queries(problem), problem.query.dtype, problem.query.device
        out, user_out = (torch.empty(shape, dtype=dtype, device=device) for shape in self._shapes)
        lse, user_lse = (torch.empty(shape, dtype=torch.float32, device=device) for shape in self._lse_shapes)
        outs = (out, user_out)
        bases = (*(outs if self._is_gathered else both), problem.key, problem.value, *outs)
        with device_guard(problem.query):
            pointers = (*both, *outs, lse, user_lse, shared_table(problem), problem.index_pointers()[1])
            launch(self._launch, self._layouts, bases, (*pointers, *self._numbers))
        return (out, user_out), (lse, user_lse)


def backward_refusal(problem: Problem, outs: Pair, grads: Pair) -> str | None:
    """Why the backward kernels cannot take the call, or None, beyond what `refusal` says."""
    if not is_saved_ready(problem, *outs):
        return "a saved tensor came back unaligned"
    if not adjacent_rows(problem) or any(flat_query_strides(x) is None for x in queries(problem)):
        return "query rows of one user are not adjacent"
    if any(not is_tma_ready(grad) or flat_query_strides(grad) is None for grad in grads):
        return "the rows of a gradient are not adjacent and aligned"
    return None


class Backward:
    """The launches for delta and dq, and for dk and dv, for problems and gradients that differ from these in their
    addresses only."""

    def __init__(self, problem: Problem, grads: Pair, has_grad_lse: bool) -> None:
        from ikbo_recsys.kernels._gluon.cross_attention_backward import attention_backward_key_value_both
        from ikbo_recsys.kernels._gluon.cross_attention_backward_query import attention_backward_query_both

        query, user_query = queries(problem)
        key = problem.key
        heads, head_size = query.shape[2:]
        padded = padded_size(head_size)
        rows = [rows_layout(x, padded) for x in (query, user_query, *grads)]
        outs = [result_layout(x.shape, padded) for x in (query, user_query)]
        history = [history_layout(x, problem.layout, BOX_ROWS, padded) for x in (key, problem.value)]
        self._layouts_query = (*rows, *outs, *history)
        self._layouts_key_value = (*rows, *history)
        self._user_seeds = user_query.shape[1]
        self._sizes = problem.sizes()
        self._numbers = (heads, problem.group, problem.scale * LOG2_E, problem.scale)
        kernels = (attention_backward_query_both, attention_backward_key_value_both)
        self._launch_query, self._launch_key_value = backward_launches(kernels, problem, padded, has_grad_lse)

    def query(self, problem: Problem, outs: Pair, lses: Pair, grads: Pair, grad_lses: Pair | None) -> tuple[Pair, Pair]:
        """dq of both, contiguous, and delta of both."""
        heads, group, qk_scale, scale = self._numbers
        delta, user_delta = map(new_delta, lses, (None, None) if grad_lses is None else grad_lses)
        dq, user_dq = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in queries(problem))
        with device_guard(problem.query):
            bases = (*queries(problem), *grads, *outs, problem.key, problem.value)
            pointers = (*lses, delta, user_delta, dq, user_dq, shared_table(problem), problem.index_pointers()[1])
            numbers = (qk_scale, scale, heads, group, problem.query.shape[1])
            launch(self._launch_query, self._layouts_query, bases, (*pointers, *numbers))
        return (dq, user_dq), (delta, user_delta)

    def key_value(self, problem: Problem, lses: Pair, deltas: Pair, grads: Pair) -> tuple[Tensor, Tensor]:
        """dk and dv, contiguous."""
        key = problem.key
        dk, dv = (torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in range(2))
        users, cands, seeds, capacity = self._sizes
        with device_guard(key):
            pointers = (*lses, *deltas, dk, dv, *problem.index_pointers())
            numbers = (users, cands, seeds, self._user_seeds, capacity, *self._numbers)
            bases = (*queries(problem), *grads, key, problem.value)
            launch(self._launch_key_value, self._layouts_key_value, bases, (*pointers, *numbers))
        return dk, dv
