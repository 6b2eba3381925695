"""The GPU paths of `broadcast` and `segment_sum`: each is the other's gradient, and the sum does not depend on timing.

Traced calls take the reference, which Inductor fuses into its neighbours.

Shape letters: U users, B candidates, X columns, S splits of a user's rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.kernels import _backend, _launch, _plan, _tiles, reference
from ikbo_recsys.kernels._backend import Choice
from ikbo_recsys.kernels._launch import cdiv


def choose(x: Tensor) -> Choice:
    """The path of `segment_sum`, and of `broadcast`'s gradient."""
    portable = _backend.portable_refusal(x.device, x.dtype)
    if portable is None and _plan.is_dispatched(x):
        portable = "the call is traced, and Inductor fuses plain torch into its neighbours"
    if portable is None and x.numel() == 0:
        portable = "the tensor has no elements"
    return _backend.choose({"torch": None, "triton": portable}, [("triton", "deterministic"), ("torch", "plain torch")])


def broadcast(x: Tensor, to_user: Tensor, offsets: Tensor | None) -> Tensor:
    """`x[to_user]` on a GPU."""
    if not (torch.is_grad_enabled() and x.requires_grad) or choose(x).path == "torch":
        return reference.broadcast(x, to_user)
    out: Tensor = _Broadcast.apply(x, to_user, offsets)
    return out


def segment_sum(
    x: Tensor, to_user: Tensor, offsets: Tensor | None, num_users: int, known: tuple[Any, ...] | None = None
) -> Tensor:
    """The sum of each user's rows on a GPU. `known` is the call's signature, to be remembered."""
    if choose(x).path == "torch":
        return reference.segment_sum(x, to_user, num_users)
    plan = Plan(num_users)
    _plan.remember(known, plan)
    return plan.run(x, to_user, offsets)


class Plan:
    """The launch for calls that differ in contents and addresses only."""

    def __init__(self, num_users: int) -> None:
        self._num_users = num_users
        self._sum: SegmentSum | None = None

    def __call__(self, x: Tensor, index: CandidateIndex | Tensor) -> Tensor:
        if isinstance(index, CandidateIndex):
            return self.run(x, index.to_user, index.offsets)
        return self.run(x, index, None)

    def run(self, x: Tensor, to_user: Tensor, offsets: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            out: Tensor = _SegmentSum.apply(x, to_user, offsets, self)
            return out
        return self.sum(x, to_user, offsets)

    def sum(self, x: Tensor, to_user: Tensor, offsets: Tensor | None) -> Tensor:
        num_users = self._num_users
        if num_users == 0:
            return x.new_zeros((0, *x.shape[1:]))
        order, bounds = grouping(to_user, offsets, num_users)
        rows_BX = rows_of(x)
        if self._sum is None:
            self._sum = SegmentSum(rows_BX, order, num_users, x.dtype)
        return self._sum(rows_BX, order, bounds).view(num_users, *x.shape[1:])


class SegmentSum:
    """`out[u] = sum of x over the candidates of user u`, `[U, X]`, zeros for a user without any: the launch for tensors
    that differ from these in contents and addresses only.

    Args:
        x_BX: `[B, X]`; rows of any stride, columns contiguous.
        order_B: from `grouping`.
    """

    def __init__(self, x_BX: Tensor, order_B: Tensor | None, num_users: int, out_dtype: torch.dtype) -> None:
        from ikbo_recsys.kernels._triton.segment import segment_sum_kernel

        batch, width = x_BX.shape
        cols = _tiles.segment_cols(width)
        blocks = cdiv(width, cols)
        splits = _tiles.segment_splits(blocks * num_users, batch, num_users, _launch.multiprocessors(x_BX.device))
        self._splits, self._dtype = splits, out_dtype
        self._out = _launch.Room((splits, num_users, width), out_dtype if splits == 1 else torch.float32, x_BX.device)
        self._numbers = (num_users, batch, width, x_BX.stride(0), blocks, splits)
        constants = {"HAS_ORDER": order_B is not None, "COLS": cols, "UNROLL": 4}
        self._launch = _plan.Launch(segment_sum_kernel, None, blocks * num_users * splits, constants, num_warps=4)

    def __call__(self, x_BX: Tensor, order_B: Tensor | None, offsets: Tensor) -> Tensor:
        with _launch.device_guard(x_BX):
            out_SUX = self._out()
            self._launch((x_BX, offsets if order_B is None else order_B, offsets, out_SUX, *self._numbers))
        return out_SUX[0] if self._splits == 1 else out_SUX.sum(0).to(self._dtype)


def grouping(to_user_B: Tensor, offsets: Tensor | None, num_users: int) -> tuple[Tensor | None, Tensor]:
    """`(order, offsets)`: the candidates of user u are `order[offsets[u]:offsets[u + 1]]`; `order` is None when
    grouped."""
    if offsets is not None:
        return None, offsets
    sorted_B, order_B = torch.sort(to_user_B, stable=True)
    bounds = torch.arange(num_users + 1, dtype=to_user_B.dtype, device=to_user_B.device)
    return order_B, torch.searchsorted(sorted_B, bounds)


def rows_of(x: Tensor) -> Tensor:
    """`x` as `[B, X]` with contiguous columns; a view where its strides allow one, else a copy of its own size."""
    flat = x.reshape(x.shape[0], -1)
    return flat if flat.shape[1] == 0 or flat.stride(1) == 1 else flat.contiguous()


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to_user: Tensor, offsets: Tensor | None) -> Tensor:
        ctx.save_for_backward(to_user, offsets)
        ctx.num_users = x.shape[0]
        # Not the reference, which prepares for torch's own gradient by a copy in fp32.
        return x.index_select(0, to_user)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        to_user, offsets = ctx.saved_tensors
        return segment_sum(grad, to_user, offsets, ctx.num_users), None, None


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to_user: Tensor, offsets: Tensor | None, plan: Plan) -> Tensor:
        ctx.save_for_backward(to_user, offsets)
        return plan.sum(x, to_user, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        to_user, offsets = ctx.saved_tensors
        return broadcast(grad, to_user, offsets), None, None, None
