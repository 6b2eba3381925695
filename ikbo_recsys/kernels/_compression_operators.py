"""The operators that traced calls of `compression_linear` become: `triton_op` for the portable kernels (Inductor and
AOTInductor see the kernels), `custom_op` for the Hopper ones (which they cannot) and for the gradients.

A module of its own, imported by the first traced call: registering a `triton_op` imports TorchInductor, which takes
longer than compiling the kernels.

Shape letters: U users, B candidates, Ku/Kc features, D embedding size, M outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels import _compression_launch, _plan, reference
from ikbo_recsys.kernels._mix_plan import register_gradients


@torch.library.triton_op("ikbo::compression_linear_portable", mutates_args={})
def compression_linear_portable(
    user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, offsets: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The operator by the portable kernels."""
    with _plan.traceable():
        return _compression_launch.Plan("triton", is_traced=True).forward(user, cand, weight, to_user, bias)


@torch.library.custom_op("ikbo::compression_linear_hopper", mutates_args=())
def compression_linear_hopper(
    user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, offsets: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The operator by the Hopper kernels where the call at hand fits them."""
    known = _plan.signature("compression_linear_hopper", (cand, user, weight, bias), to_user)
    plan = _plan.recall(known)
    if plan is None:
        refused = _compression_launch.choose(user, cand, weight).refused
        if "triton" in refused:
            return reference.compression_linear(user, cand, weight, to_user, bias)
        plan = _compression_launch.Plan("triton" if "gluon" in refused else "gluon")
        _plan.remember(known, plan)
    out: Tensor = plan.forward(user, cand, weight, to_user, bias)
    return out


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
    known = _plan.signature("compression_linear_backward", (cand, user, weight, offsets), to_user)
    plan = _plan.recall(known)
    if plan is None:
        path = _compression_launch.choose(user, cand, weight).path
        plan = _compression_launch.Plan("gluon" if path == "gluon" else "triton")
        _plan.remember(known, plan)
    grads = plan.backward(grad, user, cand, weight, to_user, offsets, tuple(needs))
    return [part for part in grads if part is not None]


register_gradients(compression_linear_backward, compression_linear_portable, compression_linear_hopper)
