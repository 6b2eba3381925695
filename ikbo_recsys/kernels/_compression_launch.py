"""The GPU paths of `compression_linear`: the choice between them, forward and backward, eager and traced.

Eager calls go to the launches directly: `torch.library`'s dispatch costs tens of microseconds. Traced calls go through
operators of this library, `triton_op` for the portable kernels (Inductor and AOTInductor see the kernels) and
`custom_op` for the Hopper ones (which they cannot).

Shape letters: U users, B candidates, Ku/Kc features, D embedding size, M outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.kernels import _backend, _checks, _compression_hopper, _launch, reference
from ikbo_recsys.kernels._backend import Choice
from ikbo_recsys.kernels._plan import is_traced, traceable

NO_WORK = "a tensor has no elements"
WEIGHT_STEP = 64
"""The portable kernels' longest step along K: with weights padded to it their loads need no masks."""
_FLOAT32_ORDER = [("torch", "cuBLAS is the faster one in float32"), ("triton", "portable kernels")]


def choose(user: Tensor, cand: Tensor, weight: Tensor) -> Choice:
    """The path of a call whose tensors are checked and of one dtype."""
    portable = _backend.portable_refusal(cand.device, cand.dtype)
    if portable is None and 0 in (*user.shape, *cand.shape, *weight.shape):
        portable = NO_WORK
    hopper = portable or _backend.hopper_refusal(cand.device) or _compression_hopper.refusal(user, cand)
    return _choose(cand.dtype, portable, hopper)


def _choose(dtype: torch.dtype, portable: str | None, hopper: str | None) -> Choice:
    order = [("gluon", "warp-specialized kernels for Hopper"), ("triton", "portable kernels"), ("torch", "plain torch")]
    if dtype is torch.float32:
        order = _FLOAT32_ORDER
    return _backend.choose({"torch": None, "triton": portable, "gluon": hopper}, order)


@torch.compiler.assume_constant_result
def traced_path(device: int | None, dtype: torch.dtype) -> str:
    """The path of a traced call, by what is fixed while tracing: no sizes, which must not become guards, no addresses.

    The Hopper operator looks at the rest when it runs. Exported programs have the portable kernels, which travel in
    them.
    """
    where = torch.device("cpu") if device is None else torch.device("cuda", device)
    portable = _backend.portable_refusal(where, dtype)
    hopper = portable or _backend.hopper_refusal(where) or _compression_hopper.type_refusal(dtype)
    # Asked here and not by the caller: inside torch.compile, PyTorch 2.11 answers yes.
    if torch.compiler.is_exporting():
        hopper = "an exported program carries the portable kernel"
    return _choose(dtype, portable, hopper).path


def signature(
    user: Tensor, cand: Tensor, weight: Tensor, index: CandidateIndex | Tensor, bias: Tensor | None
) -> tuple[Any, ...] | None:
    """Everything that the checks and the choice of a path look at; None where they have to be made anew.

    Checking a call costs more than launching it. A call with the signature of an earlier one needs it only once.
    """
    if is_traced() or _checks.check_mode() or torch.is_autocast_enabled("cuda"):
        return None
    to_user, shared = (index.to_user, index.num_users) if isinstance(index, CandidateIndex) else (index, -1)
    if not all(isinstance(x, Tensor) for x in (user, weight, to_user)):
        return None
    if not user.dtype == weight.dtype == cand.dtype == (cand if bias is None else bias).dtype:
        return None
    facts: list[Any] = [_backend.requested_backend(), shared, user.data_ptr() % 16, cand.data_ptr() % 16]
    for x in (user, cand, weight, to_user, bias):
        if x is None:
            facts.append(None)
        else:
            facts += (x.dtype, x.device, x.shape, x.stride())
    return tuple(facts)


_MOST_KNOWN = 1024
_known: dict[tuple[Any, ...], str] = {}


def repeat(
    known: tuple[Any, ...],
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    index: CandidateIndex | Tensor,
    bias: Tensor | None,
) -> Tensor | None:
    """The result of a call whose signature is known, or None."""
    path = _known.get(known)
    if path is None:
        return None
    to_user, offsets = (index.to_user, index.offsets) if isinstance(index, CandidateIndex) else (index, None)
    return _run(path, user, cand, weight, to_user, offsets, bias)


def compression_linear(
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    known: tuple[Any, ...] | None = None,
) -> Tensor:
    """The operator on a GPU, or by a path asked for by name; tensors checked and of one dtype.

    `known` is the call's signature, to be remembered.
    """
    traced = is_traced()
    path = traced_path(cand.device.index, cand.dtype) if traced else choose(user, cand, weight).path
    if path == "torch":
        with _checks.no_autocast(cand):
            return reference.compression_linear(user, cand, weight, to_user, bias)
    if traced:
        named = torch.ops.ikbo
        operator = named.compression_linear_hopper if path == "gluon" else named.compression_linear_portable
        out: Tensor = operator(user, cand, weight, to_user, offsets, bias)
        return out
    if known is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[known] = path
    return _run(path, user, cand, weight, to_user, offsets, bias)


def _run(
    path: str,
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    if torch.is_grad_enabled() and _any_requires_grad(user, cand, weight, bias):
        return _Differentiable.apply(path, user, cand, weight, to_user, offsets, bias)
    return forward(path, user, cand, weight, to_user, bias)


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


# ---- forward -------------------------------------------------------------------------------------------------------


def forward(path: str, user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, bias: Tensor | None) -> Tensor:
    """The operator by the path "gluon" or "triton", without gradients."""
    if path == "gluon":
        parts = weight_parts(weight, user.shape[1], _launch.TMA_ALIGNMENT // weight.element_size())
        return _compression_hopper.compression_linear(user, cand, *parts, to_user, bias)
    kernels = _kernels()
    weight_user, weight_cand = weight_parts(weight, user.shape[1], WEIGHT_STEP)
    user_UMD = kernels.mix(weight_user, user, torch.float32, bias_M=bias, weight_padded=True)
    return kernels.mix(weight_cand, cand, cand.dtype, user_UMD, to_user, weight_padded=True)


@functools.cache
def _kernels() -> ModuleType:
    from ikbo_recsys.kernels._triton import compression_linear as kernels

    return kernels


def weight_parts(weight: Tensor, user_features: int, step: int) -> tuple[Tensor, Tensor]:
    """`(weight[:, :Ku], weight[:, Ku:])`, each with columns of zeros up to a multiple of `step`: rows begin at
    multiples of it.

    Where that is not so in `weight` itself, they are padded copies, which are made once and again after the weight
    changes. The padding belongs to the tensors returned: a compiler is free to move what lies beyond a view.
    """
    traced = is_traced()
    fits = weight.stride(1) == 1 and not (weight.stride(0) % step or user_features % step or weight.shape[1] % step)
    if fits and (traced or weight.data_ptr() % _launch.TMA_ALIGNMENT == 0):
        return weight[:, :user_features], weight[:, user_features:]
    if traced:
        return _padded_parts(weight, user_features, step)
    parts: tuple[Tensor, Tensor] = _PADDED.get(weight, user_features, step)
    return parts


def _padded_parts(weight: Tensor, user_features: int, step: int) -> tuple[Tensor, Tensor]:
    user_part, cand_part = weight[:, :user_features], weight[:, user_features:]
    return (
        F.pad(user_part, (0, -user_part.shape[1] % step)).contiguous(),
        F.pad(cand_part, (0, -cand_part.shape[1] % step)).contiguous(),
    )


_PADDED = _launch.WeightCache(_padded_parts)


# ---- backward ------------------------------------------------------------------------------------------------------


def backward(
    grad: Tensor,
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of user, cand, weight and bias, as far as `needs` asks for them.

    The output's gradient is summed over each user's candidates first, so every matmul runs at its own side's batch
    size.
    """
    from ikbo_recsys.kernels._triton import segment

    kernels, dtype = _kernels(), cand.dtype
    needs_user, needs_cand, needs_weight, needs_bias = needs
    aligned = _launch.TMA_ALIGNMENT // weight.element_size()
    weight_user, weight_cand = weight_parts(weight, user.shape[1], aligned)
    grads: list[Tensor | None] = [None, None, None, None]
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    grad_user_UMD = grad
    if needs_user or needs_weight or needs_bias:
        num_users, (num_m, size) = user.shape[0], grad.shape[1:]
        order, bounds = segment.grouping(to_user, offsets, num_users)
        summed = segment.segment_sum(segment.rows_of(grad), order, bounds, num_users, torch.float32)
        grad_user_UMD = summed.unflatten(1, (num_m, size))
        if needs_bias:
            grads[3] = grad_user_UMD.sum((0, 2)).to(dtype)
        grad_user_UMD = grad_user_UMD.to(dtype)
    if needs_user:
        grads[0] = _input_gradient(weight_user[:, : user.shape[1]], grad_user_UMD)
    if needs_cand:
        grads[1] = _input_gradient(weight_cand[:, : cand.shape[1]], grad)
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
        user, cand, weight, to_user, offsets = ctx.saved_tensors
        needs = tuple(ctx.needs_input_grad[i] for i in (1, 2, 3, 6))
        with _checks.no_autocast(grad):
            grads = backward(grad, user, cand, weight, to_user, offsets, needs)
        return None, grads[0], grads[1], grads[2], None, None, grads[3]


# ---- operators for traced calls ------------------------------------------------------------------------------------


@torch.library.triton_op("ikbo::compression_linear_portable", mutates_args={})
def compression_linear_portable(
    user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, offsets: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The operator by the portable kernels."""
    with traceable():
        return forward("triton", user, cand, weight, to_user, bias)


@torch.library.custom_op("ikbo::compression_linear_hopper", mutates_args=())
def compression_linear_hopper(
    user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, offsets: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The operator by the Hopper kernels where the call at hand fits them."""
    path = choose(user, cand, weight).refused
    if "triton" in path:
        return reference.compression_linear(user, cand, weight, to_user, bias)
    return forward("triton" if "gluon" in path else "gluon", user, cand, weight, to_user, bias)


@compression_linear_hopper.register_fake
def _(user: Tensor, cand: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return cand.new_empty((cand.shape[0], weight.shape[0], cand.shape[2]))


@torch.library.custom_op("ikbo::compression_linear_backward", mutates_args=())
def compression_linear_backward(
    grad: Tensor,
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients that `needs` (user, cand, weight, bias) asks for.

    Opaque to the compiler: how sums are split follows from the batch sizes, which must not become guards.
    """
    grads = backward(grad, user, cand, weight, to_user, offsets, needs)
    return [part for part in grads if part is not None]


@compression_linear_backward.register_fake
def _(grad: Tensor, user: Tensor, cand: Tensor, weight: Tensor, to_user: Any, offsets: Any, needs: list[bool]) -> Any:
    made = (user, cand, weight, weight[:, 0])
    return [x.new_empty(x.shape) for x, needed in zip(made, needs, strict=True) if needed]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])


def _run_backward(ctx: Any, grad: Tensor) -> Any:
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 5)]
    grads = iter(torch.ops.ikbo.compression_linear_backward(grad, *ctx.saved_tensors, needs))
    user, cand, weight, bias = (next(grads) if needed else None for needed in needs)
    return user, cand, weight, None, None, bias


compression_linear_portable.register_autograd(_run_backward, setup_context=_save)
compression_linear_hopper.register_autograd(_run_backward, setup_context=_save)
