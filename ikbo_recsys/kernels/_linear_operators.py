"""The operators that traced calls of `linear` become; see `_compression_operators.py`.

Shape letters: U users, B candidates, Ku/Kc inputs, M outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels import _linear_launch, _plan


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
    with _plan.traceable():
        return _linear_launch.Plan(activation, is_traced=True).forward(user, cand, weight, to_user, bias, True)


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
    known = _plan.signature("linear_backward", (cand, user, weight, offsets), to_user)
    plan = _plan.recall(known)
    if plan is None:
        plan = _linear_launch.Plan(None)
        _plan.remember(known, plan)
    grads = plan.backward(grad, user, cand, weight, to_user, offsets, needs)
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
