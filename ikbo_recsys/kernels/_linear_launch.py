"""The GPU paths of `linear`: the choice between them, forward and backward, eager and traced.

The user's part is one small GEMM, looked up in the epilogue of the candidates' one. Eager calls go to the launches
directly, traced calls through operators of this library, as in `_compression_launch.py`.

Shape letters: U users, B candidates, Ku/Kc features, M outputs.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels import _backend, _checks, _launch, reference
from ikbo_recsys.kernels._backend import Choice
from ikbo_recsys.kernels._compression_launch import NO_WORK, aligned_weight


def choose(user: Tensor, cand: Tensor, weight: Tensor) -> Choice:
    """The path of a call whose tensors are checked and of one dtype."""
    portable = _backend.portable_refusal(cand.device, cand.dtype)
    if portable is None and not torch.compiler.is_compiling() and 0 in (*user.shape, *cand.shape, *weight.shape):
        portable = NO_WORK
    order = [("triton", "portable kernel"), ("torch", "plain torch")]
    if cand.dtype is torch.float32:
        order = [("torch", "cuBLAS is the faster one in float32"), *order]
    return _backend.choose({"torch": None, "triton": portable}, order)


def linear(
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
) -> Tensor:
    """The operator on a GPU; tensors checked and of one dtype."""
    if choose(user, cand, weight).path == "torch":
        with _checks.no_autocast(cand):
            return reference.linear(user, cand, weight, to_user, bias, activation)
    differentiable = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (user, cand, weight, bias)
    )
    # The derivative of an activation needs the sum before it: with gradients the activation is torch's, in the
    # output's type.
    fused = None if differentiable else activation
    if torch.compiler.is_compiling() or _launch._is_tracing():
        out = traced_operators().portable(user, cand, weight, to_user, offsets, bias, fused)
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
    weight_user, weight_cand = aligned_weight(weight, user.shape[1])
    user_UM = kernels.linear(user, weight_user, torch.float32, bias_M=bias)
    return kernels.linear(cand, weight_cand, cand.dtype, user_UM, to_user, activation=activation)


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
    needs: tuple[bool, bool, bool, bool],
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
        user, cand, weight, _, _, bias = ctx.needs_input_grad
        with _checks.no_autocast(grad):
            grads = backward(grad, *ctx.saved_tensors, (user, cand, weight, bias))
        return grads[0], grads[1], grads[2], None, None, grads[3]


# ---- operators for traced calls
# ----------------------------------------------------------------------------------------

_SCHEMA = "(Tensor user, Tensor cand, Tensor weight, Tensor to_user, Tensor? offsets, Tensor? bias, str? activation) -> Tensor"
_BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor user, Tensor cand, Tensor weight, Tensor to_user, Tensor? offsets, bool[] needs) -> Tensor[]"
)


class _Operators:
    """The operators that a traced call becomes; made when the first one is traced."""

    def __init__(self) -> None:
        self.portable: Any = torch.library.triton_op(
            "ikbo::linear_portable", _traced_portable, mutates_args=(), schema=_SCHEMA
        )
        self.backward: Any = torch.library.triton_op(
            "ikbo::linear_backward", _traced_backward, mutates_args=(), schema=_BACKWARD_SCHEMA
        )
        self.portable.register_autograd(self._run_backward, setup_context=_save)

    def _run_backward(self, ctx: Any, grad: Tensor) -> Any:
        needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 5)]
        grads = iter(self.backward(grad, *ctx.saved_tensors, needs))
        user, cand, weight, bias = (next(grads) if needed else None for needed in needs)
        return user, cand, weight, None, None, bias, None


@functools.cache
def traced_operators() -> _Operators:
    return _Operators()


def _traced_portable(
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
) -> Tensor:
    return forward(user, cand, weight, to_user, bias, activation)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])


def _traced_backward(
    grad: Tensor,
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    needs: list[bool],
) -> list[Tensor]:
    user_needs, cand_needs, weight_needs, bias_needs = needs
    wanted = (user_needs, cand_needs, weight_needs, bias_needs)
    return [part for part in backward(grad, user, cand, weight, to_user, offsets, wanted) if part is not None]
