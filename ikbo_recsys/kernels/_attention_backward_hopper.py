"""Launches of all gradients of target attention in one pass, on Hopper. Shape letters as in `_attention_launch.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ikbo_recsys.kernels._attention_hopper import (
    BLOCK_KEYS,
    BOX_ROWS,
    LOG2_E,
    HopperTile,
    fills_the_gpu,
    history_layout,
    padded_size,
    rows_layout,
)
from ikbo_recsys.kernels._attention_launch import Problem, key_slots, new_delta, row_slots
from ikbo_recsys.kernels._attention_shares import key_blocks
from ikbo_recsys.kernels._launch import Room, device_guard
from ikbo_recsys.kernels._plan import Launch
from ikbo_recsys.kernels._tma import launch

FEWEST_BLOCKS = 6
"""Of 128 keys to a user, counted as `key_blocks` does, from which one pass is faster than two kernels: below, what it
saves is less than what its kernels before and behind take, which do not depend on the keys."""

# By padded head size.
ONE_PASS_TILES = {64: HopperTile(BLOCK_KEYS, 4, 240, 24), 128: HopperTile(BLOCK_KEYS, 3, 240, 24)}


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
        self._layouts = (*rows, *history, history_layout(key, problem.layout, BOX_ROWS, padded // 2))
        self._prepared = (query.shape[0] * query.shape[1], heads, *rows[1].strides[:2])
        self._numbers = (*problem.sizes(), heads, problem.group, problem.scale * LOG2_E, problem.scale)
        self._finished = (*problem.sizes()[:3], heads, problem.scale)
        common = {"HEAD_SIZE": head_size, "D": padded}
        is_permuted = problem.permutation is not None
        self._prepare = Launch(prepare_once, None, tiles * heads, {**common, "GRAD_LSE": has_grad_lse}, num_warps=4)
        self._launch = Launch(
            attention_backward_once,
            problem.index_key(),
            key_slots(problem, BLOCK_KEYS) * key.shape[-2],
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
            self._prepare((out, grad, delta, work, *self._prepared))
            bases = (query, grad, key, problem.value, key)
            rest = (lse, delta, dk, dv, work, offsets, permutation, kv, *self._numbers)
            launch(self._launch, self._layouts, bases, rest)
            self._finish((work, dq, offsets, permutation, *self._finished))
        return dq, dk, dv
