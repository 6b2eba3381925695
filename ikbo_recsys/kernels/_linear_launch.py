"""The GPU paths of `linear`: the choice between them, forward and backward, eager and traced.

The user's part is one small GEMM, looked up in the epilogue of the candidates' one. Eager calls go to the launches
directly, traced calls through operators of this library, as in `_compression_launch.py`.

Shape letters: U users, B candidates, Ku/Kc features, M outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels import _backend, _checks, reference
from ikbo_recsys.kernels._backend import Choice
from ikbo_recsys.kernels._compression_launch import NO_WORK, WEIGHT_STEP, weight_parts
from ikbo_recsys.kernels._plan import is_traced, traceable


def choose(user: Tensor, cand: Tensor, weight: Tensor) -> Choice:
    """The path of a call whose tensors are checked and of one dtype."""
    portable = _backend.portable_refusal(cand.device, cand.dtype)
    if portable is None and 0 in (*user.shape, *cand.shape, *weight.shape):
        portable = NO_WORK
    return _choose(cand.dtype, portable)


def _choose(dtype: torch.dtype, portable: str | None) -> Choice:
    order = [("triton", "portable kernel"), ("torch", "plain torch")]
    if dtype is torch.float32:
        order = [("torch", "cuBLAS is the faster one in float32")]
    return _backend.choose({"torch": None, "triton": portable}, order)


@torch.compiler.assume_constant_result
def traced_path(device: int | None, dtype: torch.dtype) -> str:
    """The path of a traced call: nothing that would become a guard decides it."""
    where = torch.device("cpu") if device is None else torch.device("cuda", device)
    return _choose(dtype, _backend.portable_refusal(where, dtype)).path


def linear(
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
) -> Tensor:
    """The operator on a GPU, or by a path asked for by name; tensors checked and of one dtype."""
    traced = is_traced()
    path = traced_path(cand.device.index, cand.dtype) if traced else choose(user, cand, weight).path
    if path == "torch":
        with _checks.no_autocast(cand):
            return reference.linear(user, cand, weight, to_user, bias, activation)
    differentiable = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (user, cand, weight, bias)
    )
    # The derivative of an activation needs the sum before it: with gradients it is torch's, on the output's type.
    fused = None if differentiable else activation
    if traced:
        out: Tensor = torch.ops.ikbo.linear_portable(user, cand, weight, to_user, offsets, bias, fused)
    elif differentiable:
        out = _Differentiable.apply(user, cand, weight, to_user, offsets, bias)
    else:
        return forward(user, cand, weight, to_user, bias, activation)
    return reference.ACTIVATIONS[activation](out) if fused is None else out


def forward(
    user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """The operator without gradients."""
    kernels = _kernels()
    weight_user, weight_cand = weight_parts(weight, user.shape[1], WEIGHT_STEP)
    user_UM = kernels.linear(user, weight_user, torch.float32, bias_M=bias, weight_padded=True)
    return kernels.linear(cand, weight_cand, cand.dtype, user_UM, to_user, activation=activation, weight_padded=True)


@functools.cache
def _kernels() -> ModuleType:
    from ikbo_recsys.kernels._triton import linear as kernels

    return kernels


def backward(
    grad: Tensor,
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of user, cand, weight and bias before the activation, as far as `needs` asks for them."""
    from ikbo_recsys.kernels._triton import segment

    needs_user, needs_cand, needs_weight, needs_bias = needs
    dtype, user_features = cand.dtype, user.shape[1]
    weight_user, weight_cand = weight[:, :user_features], weight[:, user_features:]
    grads: list[Tensor | None] = [None, None, None, None]
    order, bounds = segment.grouping(to_user, offsets, user.shape[0])
    summed = segment.segment_sum(segment.rows_of(grad), order, bounds, user.shape[0], torch.float32)
    grad_user = summed.to(dtype)
    if needs_user:
        grads[0] = grad_user @ weight_user
    if needs_cand:
        grads[1] = grad @ weight_cand
    if needs_weight:
        grads[2] = torch.cat((grad_user.t() @ user, grad.t() @ cand), 1)
    if needs_bias:
        grads[3] = summed.sum(0).to(dtype)
    return grads


class _Differentiable(torch.autograd.Function):
    """The eager path with gradients, without the activation."""

    @staticmethod
    def forward(
        ctx: Any,
        user: Tensor,
        cand: Tensor,
        weight: Tensor,
        to_user: Tensor,
        offsets: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(user, cand, weight, to_user, offsets)
        return forward(user, cand, weight, to_user, bias, None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        user, cand, weight, to_user, offsets = ctx.saved_tensors
        needs = tuple(ctx.needs_input_grad[i] for i in (0, 1, 2, 5))
        with _checks.no_autocast(grad):
            grads = backward(grad, user, cand, weight, to_user, offsets, needs)
        return grads[0], grads[1], grads[2], None, None, grads[3]


# ---- operators for traced calls ------------------------------------------------------------------------------------


@torch.library.triton_op("ikbo::linear_portable", mutates_args={})
def linear_portable(
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
) -> Tensor:
    """The operator by the portable kernels."""
    with traceable():
        return forward(user, cand, weight, to_user, bias, activation)


@torch.library.custom_op("ikbo::linear_backward", mutates_args=())
def linear_backward(
    grad: Tensor,
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients that `needs` (user, cand, weight, bias) asks for, before the activation."""
    grads = backward(grad, user, cand, weight, to_user, offsets, needs)
    return [part for part in grads if part is not None]


@linear_backward.register_fake
def _(grad: Tensor, user: Tensor, cand: Tensor, weight: Tensor, to_user: Any, offsets: Any, needs: list[bool]) -> Any:
    made = (user, cand, weight, weight[:, 0])
    return [x.new_empty(x.shape) for x, needed in zip(made, needs, strict=True) if needed]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])


def _run_backward(ctx: Any, grad: Tensor) -> Any:
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 5)]
    grads = iter(torch.ops.ikbo.linear_backward(grad, *ctx.saved_tensors, needs))
    user, cand, weight, bias = (next(grads) if needed else None for needed in needs)
    return user, cand, weight, None, None, bias, None


linear_portable.register_autograd(_run_backward, setup_context=_save)
