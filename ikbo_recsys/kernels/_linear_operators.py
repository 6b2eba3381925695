"""The operators that traced calls of `linear` become; see `_compression_operators.py`.

Shape letters: U users, B candidates, Ku/Kc inputs, M outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ikbo_recsys.kernels import _linear_launch, _plan
from ikbo_recsys.kernels._mix_plan import register_gradients


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
        return _linear_launch.Plan(activation, is_traced=True).forward(user, cand, weight, to_user, bias)


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
    grads = plan.backward(grad, user, cand, weight, to_user, offsets, tuple(needs))
    return [part for part in grads if part is not None]


register_gradients(linear_backward, linear_portable)
