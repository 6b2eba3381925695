"""Launches of the Hopper attention kernels for gradients, in two kernels or in one pass, and the reasons why a call
cannot take them.

Shape letters as in `_attention_launch.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels import _attention_shares
from ikbo_recsys.kernels._attention_hopper import (
    BLOCK_KEYS,
    BOX_ROWS,
    LOG2_E,
    HopperTile,
    adjacent_rows,
    flat_query_strides,
    history_layout,
    padded_size,
    result_layout,
    rows_layout,
    shared_table,
)
from ikbo_recsys.kernels._attention_launch import JAGGED, Problem, key_slots, new_delta, row_slots
from ikbo_recsys.kernels._attention_shares import FEWEST_WIDE_ROWS, TILE_ROWS, key_blocks
from ikbo_recsys.kernels._backend import multiprocessors
from ikbo_recsys.kernels._launch import Room, device_guard, is_tma_ready
from ikbo_recsys.kernels._plan import Launch
from ikbo_recsys.kernels._tma import TensorLayout, launch

# By padded head size.
BACKWARD_QUERY_TILES = {64: HopperTile(BOX_ROWS, 6, 232, 40), 128: HopperTile(BOX_ROWS, 4, 232, 40)}
BACKWARD_TILES = {64: HopperTile(BLOCK_KEYS, 4, 240, 24), 128: HopperTile(BLOCK_KEYS, 3, 240, 24)}
ONE_PASS_TILES = {64: HopperTile(BLOCK_KEYS, 4, 232, 40), 128: HopperTile(BLOCK_KEYS, 3, 240, 24)}
_FEWEST_IN_ALL = 96
"""Blocks of 128 keys, those of all users and key heads, that fill a GPU."""
FEWEST_BLOCKS = 6
"""Of 128 keys to a user, counted as `key_blocks` does, from which one pass is faster than two kernels: below, what it
saves is less than what its kernels before and behind take, which do not depend on the keys."""


# ---- in two kernels --------------------------------------------------------------------------------------------------


def backward_refusal(problem: Problem, out: Tensor, grad: Tensor) -> str | None:
    """Why the backward kernels cannot take the call, or are slower, or None, beyond what `refusal` says."""
    if not _attention_shares.has_wide_tiles(problem):
        return f"users have fewer than {FEWEST_WIDE_ROWS} query rows"
    if not is_saved_ready(problem, out):
        return "a saved tensor came back unaligned"
    if not adjacent_rows(problem) or flat_query_strides(problem.query) is None:
        return "query rows of one user are not adjacent"
    if not is_tma_ready(grad) or flat_query_strides(grad) is None:
        return "the rows of the gradient are not adjacent and aligned"
    return None


def is_saved_ready(problem: Problem, *outs: Tensor) -> bool:
    """Whether saved tensors still are what `refusal` asks for: hooks may have put them elsewhere."""
    queries = (problem.query,) if problem.user_query is None else (problem.query, problem.user_query)
    return all(map(is_tma_ready, (*queries, problem.key, problem.value, *outs)))


def fills_the_gpu(problem: Problem) -> bool:
    """Whether blocks of keys are enough without splitting the query rows, which only the portable kernel does."""
    return key_slots(problem, BLOCK_KEYS) * problem.key.shape[-2] >= _FEWEST_IN_ALL


def backward_launches(
    kernels: tuple[Any, Any], problem: Problem, padded: int, has_grad_lse: bool
) -> tuple[Launch, Launch]:
    """Of one of the two kernels for delta and dq, and of the one for dk and dv that belongs to it."""
    query = problem.query
    heads, is_jagged = query.shape[2], problem.layout == JAGGED
    common = {"D": padded, "HEAD_SIZE": query.shape[3], "PERMUTED": problem.permutation is not None}
    tile = BACKWARD_QUERY_TILES[padded]
    of_query = Launch(
        kernels[0],
        problem.index_key(),
        min(multiprocessors(query.device), row_slots(problem, TILE_ROWS) * heads),
        {**common, "STAGES": tile.stages, "JAGGED": is_jagged, "GRAD_LSE": has_grad_lse, **tile.registers()},
        num_warps=4,
        launch_pdl=True,
    )
    tile = BACKWARD_TILES[padded]
    of_key_value = Launch(
        kernels[1],
        problem.index_key(),
        key_slots(problem, BLOCK_KEYS) * problem.key.shape[-2],
        {**common, "STAGES": tile.stages, "KV_LAYOUT": problem.layout, **tile.registers()},
        num_warps=4,
        launch_pdl=True,
    )
    return of_query, of_key_value


class Backward:
    """The launches for delta and dq, and for dk and dv, for problems and gradients that differ from these in their
    addresses only."""

    def __init__(self, problem: Problem, grad: Tensor, has_grad_lse: bool) -> None:
        from ikbo_recsys.kernels._gluon.cross_attention_backward import attention_backward_key_value
        from ikbo_recsys.kernels._gluon.cross_attention_backward_query import attention_backward_query

        query, key = problem.query, problem.key
        heads, head_size = query.shape[2:]
        padded = padded_size(head_size)
        rows = [rows_layout(x, padded) for x in (query, grad)]
        history = [history_layout(x, problem.layout, BOX_ROWS, padded) for x in (key, problem.value)]
        self._layouts_query = (*rows, result_layout(query.shape, padded), *history)
        self._layouts_key_value = (*rows, *history)
        self._sizes, self._of_query = problem.sizes(), Room(query.shape, query.dtype, query.device)
        self._of_key = Room(key.shape, key.dtype, key.device)
        self._numbers = (heads, problem.group, problem.scale * LOG2_E, problem.scale)
        kernels = (attention_backward_query, attention_backward_key_value)
        self._launch_query, self._launch_key_value = backward_launches(kernels, problem, padded, has_grad_lse)

    def query(
        self, problem: Problem, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """dq, contiguous, and delta."""
        query = problem.query
        heads, group, qk_scale, scale = self._numbers
        delta = new_delta(lse, grad_lse)
        with device_guard(query):
            dq = self._of_query()
            bases = (query, grad, out, problem.key, problem.value)
            pointers = (lse, delta, dq, shared_table(problem), problem.index_pointers()[1])
            numbers = (qk_scale, scale, heads, group, query.shape[1])
            launch(self._launch_query, self._layouts_query, bases, (*pointers, *numbers))
        return dq, delta

    def key_value(self, problem: Problem, lse: Tensor, delta: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """dk and dv, contiguous."""
        key = problem.key
        with device_guard(key):
            dk, dv = self._of_key(), self._of_key()
            bases = (problem.query, grad, key, problem.value)
            rest = (lse, delta, dk, dv, *problem.index_pointers(), *self._sizes, *self._numbers)
            launch(self._launch_key_value, self._layouts_key_value, bases, rest)
        return dk, dv


# ---- in one pass -----------------------------------------------------------------------------------------------------


def one_pass(problem: Problem, needs: tuple[bool, bool, bool]) -> bool:
    """Whether one pass is to give the gradients, of calls that the backward kernels for Hopper can take.

    It adds dq up in no fixed order, so not where only deterministic algorithms are allowed.
    """
    return (
        problem.user_query is None
        and all(needs)
        and key_blocks(problem) >= FEWEST_BLOCKS
        and not torch.are_deterministic_algorithms_enabled()
        and fills_the_gpu(problem)
    )


class OnePass:
    """The launches for dq, dk and dv, for problems and gradients that differ from these in their addresses only."""

    def __init__(self, problem: Problem, grad: Tensor, has_grad_lse: bool) -> None:
        from ikbo_recsys.kernels._gluon.cross_attention_backward_once import attention_backward_once
        from ikbo_recsys.kernels._gluon.cross_attention_backward_staying import attention_backward_staying
        from ikbo_recsys.kernels._triton.cross_attention_backward_once import finish_once, prepare_once

        query, key = problem.query, problem.key
        heads, head_size = query.shape[2:]
        padded = padded_size(head_size)
        tile, tiles = ONE_PASS_TILES[padded], row_slots(problem, BOX_ROWS)
        device = query.device
        self._work = Room((heads, tiles, BOX_ROWS * padded), torch.float32, device)
        self._dq, self._dk = Room(query.shape, query.dtype, device), Room(key.shape, key.dtype, device)
        rows = [rows_layout(x, padded) for x in (query, grad)]
        history = [history_layout(x, problem.layout, BOX_ROWS, padded) for x in (key, problem.value)]
        blocks = key_slots(problem, BLOCK_KEYS) * key.shape[-2]
        self._layouts: tuple[TensorLayout, ...] = (*rows, *history)
        self._numbers = (*problem.sizes(), heads, problem.group, problem.scale * LOG2_E, problem.scale)
        kernel, grid = attention_backward_once, blocks
        self._counter: Room | None = None
        if padded == 64:
            self._counter = Room((1,), torch.int32, device)
            self._layouts += (history_layout(key, problem.layout, BOX_ROWS, padded // 2),)
            self._numbers = (blocks, *self._numbers)
            kernel, grid = attention_backward_staying, min(blocks, multiprocessors(device))
        self._prepared = (query.shape[0] * query.shape[1], heads, *rows[1].strides[:2])
        self._finished = (*problem.sizes()[:3], heads, problem.scale)
        common = {"HEAD_SIZE": head_size, "D": padded}
        is_permuted = problem.permutation is not None
        self._prepare = Launch(prepare_once, None, tiles * heads, {**common, "GRAD_LSE": has_grad_lse}, num_warps=4)
        self._launch = Launch(
            kernel,
            problem.index_key(),
            grid,
            {
                **common,
                **{"STAGES": tile.stages, "KV_LAYOUT": problem.layout, "PERMUTED": is_permuted},
                **tile.registers(),
            },
            num_warps=4,
            launch_pdl=True,
        )
        self._finish = Launch(
            finish_once, problem.index_key(), tiles * heads, {**common, "PERMUTED": is_permuted}, num_warps=4
        )

    def __call__(
        self, problem: Problem, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv, contiguous."""
        query, key = problem.query, problem.key
        delta = new_delta(lse, grad_lse)
        offsets, permutation, kv = problem.index_pointers()
        with device_guard(query):
            work, dq, dk, dv = self._work(), self._dq(), self._dk(), self._dk()
            counter = None if self._counter is None else self._counter()
            self._prepare((out, grad, delta, work, counter, *self._prepared))
            bases: tuple[Tensor, ...] = (query, grad, key, problem.value)
            rest: tuple[Any, ...] = (lse, delta, dk, dv, work)
            if counter is not None:
                bases, rest = (*bases, key), (*rest, counter)
            launch(self._launch, self._layouts, bases, (*rest, offsets, permutation, kv, *self._numbers))
            self._finish((work, dq, offsets, permutation, *self._finished))
        return dq, dk, dv
