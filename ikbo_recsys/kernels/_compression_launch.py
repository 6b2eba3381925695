"""The GPU paths of `compression_linear`: the choice between them, forward and backward, eager and traced.

Eager calls go to the launches directly: `torch.library`'s dispatch costs tens of microseconds. Traced calls go through
operators of this library, `triton_op` for the portable kernels (Inductor and AOTInductor see the kernels) and
`custom_op` for the Hopper ones (which they cannot).

Shape letters: U users, B candidates, Ku/Kc features, D embedding size, M outputs.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ikbo_recsys.kernels import _backend, _checks, _compression_hopper, _launch, reference
from ikbo_recsys.kernels._backend import Choice

NO_WORK = "a tensor has no elements"


def choose(user: Tensor, cand: Tensor, weight: Tensor) -> Choice:
    """The path of a call whose tensors are checked and of one dtype."""
    device, dtype = cand.device, cand.dtype
    portable = _backend.portable_refusal(device, dtype)
    if portable is None and not torch.compiler.is_compiling() and 0 in (*user.shape, *cand.shape, *weight.shape):
        portable = NO_WORK
    hopper = portable or _backend.hopper_refusal(device) or _compression_hopper.refusal(user, cand)
    order = [("gluon", "warp-specialized kernels for Hopper"), ("triton", "portable kernels"), ("torch", "plain torch")]
    if dtype is torch.float32:
        order = [("torch", "cuBLAS is the faster one in float32"), *order]
    return _backend.choose({"torch": None, "triton": portable, "gluon": hopper}, order)


def compression_linear(
    user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, offsets: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The operator on a GPU; tensors checked and of one dtype."""
    path = choose(user, cand, weight).path
    if path == "torch":
        with _checks.no_autocast(cand):
            return reference.compression_linear(user, cand, weight, to_user, bias)
    if torch.compiler.is_compiling() or _launch._is_tracing():
        operators = traced_operators()
        traced = operators.hopper if path == "gluon" else operators.portable
        return traced(user, cand, weight, to_user, offsets, bias)
    if torch.is_grad_enabled() and _any_requires_grad(user, cand, weight, bias):
        return _Differentiable.apply(path, user, cand, weight, to_user, offsets, bias)
    return forward(path, user, cand, weight, to_user, bias)


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


# ---- forward
# -----------------------------------------------------------------------------------------------------------


def forward(path: str, user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, bias: Tensor | None) -> Tensor:
    """The operator by the path "gluon" or "triton", without gradients."""
    weight_user, weight_cand = aligned_weight(weight, user.shape[1])
    if path == "gluon":
        return _compression_hopper.compression_linear(user, cand, weight_user, weight_cand, to_user, bias)
    kernels = _kernels()
    user_UMD = kernels.mix(weight_user, user, torch.float32, bias_M=bias)
    return kernels.mix(weight_cand, cand, cand.dtype, user_UMD, to_user)


@functools.cache
def _kernels() -> ModuleType:
    from ikbo_recsys.kernels._triton import compression_linear as kernels

    return kernels


def aligned_weight(weight: Tensor, user_features: int) -> tuple[Tensor, Tensor]:
    """`(weight[:, :Ku], weight[:, Ku:])`, each with rows that begin at multiples of 16 bytes.

    Where they do not in `weight` itself, they are parts of a padded copy, which is made once and again after the weight
    changes. The padding is never read as data: both parts have their own K.
    """
    step = _launch.TMA_ALIGNMENT // weight.element_size()
    is_traced = torch.compiler.is_compiling() or _launch._is_tracing()
    even = weight.stride(1) == 1 and weight.stride(0) % step == 0 and user_features % step == 0
    if even and (is_traced or weight.data_ptr() % _launch.TMA_ALIGNMENT == 0):
        return weight[:, :user_features], weight[:, user_features:]
    if is_traced:
        return _padded_parts(weight, user_features)
    parts: tuple[Tensor, Tensor] = _PADDED.get(weight, user_features)
    return parts


def _padded_parts(weight: Tensor, user_features: int) -> tuple[Tensor, Tensor]:
    step = _launch.TMA_ALIGNMENT // weight.element_size()
    parts = []
    for part in (weight[:, :user_features], weight[:, user_features:]):
        padded = F.pad(part, (0, -part.shape[1] % step))
        parts.append(padded[:, : part.shape[1]])
    return parts[0], parts[1]


_PADDED = _launch.WeightCache(_padded_parts)


# ---- backward
# ----------------------------------------------------------------------------------------------------------


def backward(
    grad: Tensor,
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    needs: tuple[bool, bool, bool, bool],
) -> list[Tensor | None]:
    """Gradients of user, cand, weight and bias, as far as `needs` asks for them.

    The output's gradient is summed over each user's candidates first, so every matmul runs at its own side's batch
    size.
    """
    from ikbo_recsys.kernels._triton import segment

    kernels, dtype = _kernels(), cand.dtype
    needs_user, needs_cand, needs_weight, needs_bias = needs
    weight_user, weight_cand = aligned_weight(weight, user.shape[1])
    grads: list[Tensor | None] = [None, None, None, None]
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    grad_user_UMD = None
    if needs_user or needs_weight or needs_bias:
        num_users, (num_m, size) = user.shape[0], grad.shape[1:]
        order, bounds = segment.grouping(to_user, offsets, num_users)
        summed = segment.segment_sum(segment.rows_of(grad), order, bounds, num_users, torch.float32)
        grad_user_UMD = summed.unflatten(1, (num_m, size))
        if needs_bias:
            grads[3] = grad_user_UMD.sum((0, 2)).to(dtype)
        grad_user_UMD = grad_user_UMD.to(dtype)
    if needs_user:
        grads[0] = kernels.mix(weight_user.t(), grad_user_UMD, dtype)
    if needs_cand:
        grads[1] = _input_gradient(weight_cand, grad)
    if needs_weight:
        parts = (kernels.outer_sum(grad_user_UMD, user), kernels.outer_sum(grad, cand))
        grads[2] = torch.cat(parts, 1).to(dtype)
    return grads


def _input_gradient(weight_MK: Tensor, grad_BMD: Tensor) -> Tensor:
    """`weight.T @ grad[b]`: cuBLAS, which neither side's alignment stands in the way of."""
    return torch.bmm(weight_MK.t().expand(grad_BMD.shape[0], -1, -1), grad_BMD)


class _Differentiable(torch.autograd.Function):
    """The eager path with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        path: str,
        user: Tensor,
        cand: Tensor,
        weight: Tensor,
        to_user: Tensor,
        offsets: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(user, cand, weight, to_user, offsets)
        return forward(path, user, cand, weight, to_user, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        _, user, cand, weight, _, _, bias = ctx.needs_input_grad
        with _checks.no_autocast(grad):
            grads = backward(grad, *ctx.saved_tensors, (user, cand, weight, bias))
        return None, grads[0], grads[1], grads[2], None, None, grads[3]


# ---- operators for traced calls
# ----------------------------------------------------------------------------------------


class _Operators:
    """The operators that a traced call becomes; made when the first one is traced."""

    def __init__(self) -> None:
        self.portable: Any = torch.library.triton_op(
            "ikbo::compression_linear_portable", _traced_portable, mutates_args=(), schema=_SCHEMA
        )
        self.hopper: Any = torch.library.custom_op(
            "ikbo::compression_linear_hopper", _traced_hopper, mutates_args=(), schema=_SCHEMA
        )
        self.backward: Any = torch.library.triton_op(
            "ikbo::compression_linear_backward", _traced_backward, mutates_args=(), schema=_BACKWARD_SCHEMA
        )
        self.hopper.register_fake(_fake)
        for operator in (self.portable, self.hopper):
            operator.register_autograd(self._run_backward, setup_context=_save)

    def _run_backward(self, ctx: Any, grad: Tensor) -> Any:
        needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 5)]
        grads = iter(self.backward(grad, *ctx.saved_tensors, needs))
        user, cand, weight, bias = (next(grads) if needed else None for needed in needs)
        return user, cand, weight, None, None, bias


@functools.cache
def traced_operators() -> _Operators:
    return _Operators()


_SCHEMA = "(Tensor user, Tensor cand, Tensor weight, Tensor to_user, Tensor? offsets, Tensor? bias) -> Tensor"
_BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor user, Tensor cand, Tensor weight, Tensor to_user, Tensor? offsets, bool[] needs) -> Tensor[]"
)


def _traced_portable(
    user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, offsets: Tensor | None, bias: Tensor | None
) -> Tensor:
    return forward("triton", user, cand, weight, to_user, bias)


def _traced_hopper(
    user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, offsets: Tensor | None, bias: Tensor | None
) -> Tensor:
    # A graph is traced without addresses: here they are known.
    path = "triton" if _compression_hopper.refusal(user, cand) else "gluon"
    return forward(path, user, cand, weight, to_user, bias)


def _fake(
    user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, offsets: Tensor | None, bias: Tensor | None
) -> Tensor:
    return cand.new_empty((cand.shape[0], weight.shape[0], cand.shape[2]))


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
