"""The GPU paths of `compression_linear`: the choice between them, forward and backward.

Eager calls go to the launches directly: `torch.library`'s dispatch costs tens of microseconds. Traced calls go through
`_compression_operators.py`.

Shape letters: U users, B candidates, Ku/Kc features, D embedding size, M outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ikbo_recsys.kernels import _backend, _checks, _compression_hopper, _plan, reference
from ikbo_recsys.kernels._backend import Choice
from ikbo_recsys.kernels._compression_backward import Backward, readable
from ikbo_recsys.kernels._compression_portable import Mix
from ikbo_recsys.kernels._compression_weight import WEIGHT_STEP, aligned_parts, weight_parts
from ikbo_recsys.kernels._launch import device_guard
from ikbo_recsys.kernels._mix_plan import MixPlan

NO_WORK = "a tensor has no elements"
_FLOAT32_ORDER = [("torch", "cuBLAS is the faster one in float32"), ("triton", "portable kernels")]


def choose(user: Tensor, cand: Tensor, weight: Tensor) -> Choice:
    """The path of a call whose tensors are checked and of one dtype."""
    portable = _backend.portable_refusal(cand.device, cand.dtype)
    if portable is None and 0 in (*user.shape, *cand.shape, *weight.shape):
        portable = NO_WORK
    hopper = (
        portable or _backend.hopper_refusal(cand.device) or _compression_hopper.refusal(user, cand, weight.shape[0])
    )
    return _choose(cand.dtype, portable, hopper)


def _choose(dtype: torch.dtype, portable: str | None, hopper: str | None) -> Choice:
    order = [("gluon", "warp-specialized kernels for Hopper"), ("triton", "portable kernels"), ("torch", "plain torch")]
    if dtype is torch.float32:
        order = _FLOAT32_ORDER
    return _backend.choose({"torch": None, "triton": portable, "gluon": hopper}, order)


@_backend.constant_while_tracing
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


def compression_linear(
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    known: tuple[Hashable, ...] | None,
) -> Tensor:
    """The operator on a GPU, or by a path asked for by name; tensors checked and of one dtype.

    `known` is the call's signature when the tensors are those of the call: its plan is remembered.
    """
    if bias is not None:
        bias = bias.contiguous()  # the kernels step through it by one; the signature of a strided one is None
    if _plan.is_dispatched(user, cand, weight, bias):
        path = "torch" if _plan.is_transformed() else traced_path(cand.device.index, cand.dtype)
        if path != "torch":
            from ikbo_recsys.kernels import _compression_operators as named

            operator = named.compression_linear_hopper if path == "gluon" else named.compression_linear_portable
            out: Tensor = operator(user, cand, weight, to_user, offsets, bias)
            return out
    else:
        path = choose(user, cand, weight).path
    if path == "torch":
        with _checks.no_autocast(cand):
            return reference.compression_linear(user, cand, weight, to_user, bias)
    plan = Plan(path)
    _plan.remember(known, plan)
    return plan.run(user, cand, weight, to_user, offsets, bias)


class Plan(MixPlan):
    """A path, and what it prepared for calls that differ in contents and addresses only."""

    def __init__(self, path: str, is_traced: bool = False) -> None:
        self._path = path
        self._launches: Callable[..., Callable[..., Tensor]] = _Portable
        self._parts: Callable[[Tensor, int], tuple[Tensor, Tensor]]
        self._parts = functools.partial(weight_parts, step=WEIGHT_STEP, is_traced=is_traced)
        if path == "gluon":
            self._launches, self._parts = _compression_hopper.forward_launches, aligned_parts
        self._forward: Callable[..., Tensor] | None = None
        self._backwards: dict[Hashable, Backward] = {}

    def forward(self, user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, bias: Tensor | None) -> Tensor:
        """The operator without gradients."""
        with device_guard(cand):
            parts = self._parts(weight, user.shape[1])
            tensors = (user, cand, parts, to_user, bias)
            if self._forward is not None:
                return self._forward(*tensors)
            self._forward = self._launches(*tensors)
            with _plan.compiled_together(cand):
                return self._forward(*tensors)

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
        grad = readable(grad)
        # Saved tensors may come back in another layout: hooks that keep them elsewhere return contiguous ones.
        facts = (_plan.facts(grad), _plan.facts(user), _plan.facts(cand), needs)
        launches = self._backwards.get(facts)
        if launches is None:
            launches = self._backwards[facts] = Backward(self._path, grad, user, cand, needs)
        with device_guard(grad):
            return launches(grad, user, cand, weight, to_user, offsets)


class _Portable:
    """The two launches of the portable kernels."""

    def __init__(
        self, user: Tensor, cand: Tensor, weights: tuple[Tensor, Tensor], to_user: Tensor, bias: Tensor | None
    ) -> None:
        has_bias, chained = bias is not None, _plan.can_chain(cand)
        self._user = Mix(weights[0], user, cand.dtype, has_bias=has_bias, weight_padded=True, chained=chained)
        self._cand = Mix(weights[1], cand, cand.dtype, has_user=True, weight_padded=True, chained=chained)

    def __call__(
        self, user: Tensor, cand: Tensor, weights: tuple[Tensor, Tensor], to_user: Tensor, bias: Tensor | None
    ) -> Tensor:
        user_UMD = self._user(weights[0], user, bias_M=bias)
        return self._cand(weights[1], cand, user_UMD, to_user)
