"""What plans of `linear` and of `compression_linear` share: the call, the eager autograd function, the gradients of
their operators.

Both mix a user's and a candidate's tensor by one weight and add a bias, and have the same gradients to give.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.kernels import _launch


def needs_gradient(user: Tensor, cand: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        user.requires_grad or cand.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )


class MixPlan(ABC):
    """What was prepared for calls that differ in contents and addresses only."""

    def __call__(
        self, user: Tensor, cand: Tensor, weight: Tensor, index: CandidateIndex | Tensor, bias: Tensor | None
    ) -> Tensor:
        if isinstance(index, CandidateIndex):
            return self.run(user, cand, weight, index.to_user, index.offsets, bias)
        return self.run(user, cand, weight, index, None, bias)

    def run(
        self,
        user: Tensor,
        cand: Tensor,
        weight: Tensor,
        to_user: Tensor,
        offsets: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        if needs_gradient(user, cand, weight, bias):
            return self.finish(_Differentiable.apply(self, user, cand, weight, to_user, offsets, bias))
        return self.forward(user, cand, weight, to_user, bias)

    @abstractmethod
    def forward(self, user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, bias: Tensor | None) -> Tensor:
        """The operator without gradients."""

    def start(self, user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, bias: Tensor | None) -> Tensor:
        """The part of the operator that `backward` is the derivative of."""
        return self.forward(user, cand, weight, to_user, bias)

    def finish(self, out: Tensor) -> Tensor:
        """The rest of it, in plain torch."""
        return out

    @abstractmethod
    def backward(
        self,
        grad: Tensor,
        user: Tensor,
        cand: Tensor,
        weight: Tensor,
        to_user: Tensor,
        offsets: Tensor | None,
        needs: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """The gradients of user, cand, weight and bias that `needs` asks for."""


class _Differentiable(torch.autograd.Function):
    """The eager path with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: MixPlan,
        user: Tensor,
        cand: Tensor,
        weight: Tensor,
        to_user: Tensor,
        offsets: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(user, cand, weight, to_user, offsets)
        ctx.plan = plan
        return plan.start(user, cand, weight, to_user, bias)

    @staticmethod
    @_launch.first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        needs = ctx.needs_input_grad
        with _launch.autocast_off():
            grads = ctx.plan.backward(grad, *ctx.saved_tensors, (needs[1], needs[2], needs[3], needs[6]))
        return None, grads[0], grads[1], grads[2], None, None, grads[3]


def register_gradients(backward: Any, *operators: Any) -> None:
    """Make `backward(grad, user, cand, weight, to_user, offsets, needs)` the derivative of operators whose arguments
    are `(user, cand, weight, to_user, offsets, bias)` and possibly more that have no gradient.

    `backward` gives the gradients of user, cand, weight and bias that `needs` asks for, and no others.
    """

    @backward.register_fake  # type: ignore[untyped-decorator]
    def _(
        grad: Tensor, user: Tensor, cand: Tensor, weight: Tensor, to_user: Any, offsets: Any, needs: list[bool]
    ) -> Any:
        made = (user, cand, weight, weight[:, 0])
        return [x.new_empty(x.shape) for x, needed in zip(made, needs, strict=True) if needed]

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.others = len(inputs) - 6

    def differentiate(ctx: Any, grad: Tensor) -> Any:
        needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 5)]
        grads = iter(backward(grad, *ctx.saved_tensors, needs))
        user, cand, weight, bias = (next(grads) if needed else None for needed in needs)
        return user, cand, weight, None, None, bias, *[None] * ctx.others

    for operator in operators:
        operator.register_autograd(differentiate, setup_context=save)
