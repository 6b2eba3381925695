"""The GPU paths of `broadcast` and `segment_sum`: each is the other's gradient, and the sum does not depend on timing.

Traced calls take the reference, which Inductor fuses into its neighbours.

Shape letters: U users, B candidates, X columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels import _backend, _launch, reference
from ikbo_recsys.kernels._backend import Choice


def choose(x: Tensor) -> Choice:
    """The path of `segment_sum`, and of `broadcast`'s gradient."""
    portable = _backend.portable_refusal(x.device, x.dtype)
    if portable is None and (torch.compiler.is_compiling() or _launch._is_tracing()):
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


def segment_sum(x: Tensor, to_user: Tensor, offsets: Tensor | None, num_users: int) -> Tensor:
    """The sum of each user's rows on a GPU."""
    if choose(x).path == "torch":
        return reference.segment_sum(x, to_user, num_users)
    out: Tensor = _SegmentSum.apply(x, to_user, offsets, num_users)
    return out


def _sum(x: Tensor, to_user: Tensor, offsets: Tensor | None, num_users: int) -> Tensor:
    from ikbo_recsys.kernels._triton import segment

    if x.numel() == 0 or num_users == 0:
        return x.new_zeros((num_users, *x.shape[1:]))
    order, bounds = segment.grouping(to_user, offsets, num_users)
    summed_UX = segment.segment_sum(segment.rows_of(x), order, bounds, num_users, x.dtype)
    return summed_UX.reshape(num_users, *x.shape[1:])


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to_user: Tensor, offsets: Tensor | None) -> Tensor:
        ctx.save_for_backward(to_user, offsets)
        ctx.num_users = x.shape[0]
        return reference.broadcast(x, to_user)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        to_user, offsets = ctx.saved_tensors
        return segment_sum(grad, to_user, offsets, ctx.num_users), None, None


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to_user: Tensor, offsets: Tensor | None, num_users: int) -> Tensor:
        ctx.save_for_backward(to_user, offsets)
        return _sum(x, to_user, offsets, num_users)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        to_user, offsets = ctx.saved_tensors
        return broadcast(grad, to_user, offsets), None, None, None
