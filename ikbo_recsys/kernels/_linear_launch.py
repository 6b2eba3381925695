"""The GPU paths of `linear`: the choice between them, forward and backward, eager and traced.

The user's part is one small GEMM, looked up in the epilogue of the candidates' one. Eager calls go to the launches
directly, traced calls through operators of this library, as in `_compression_launch.py`.

Shape letters: U users, B candidates, Ku/Kc features, M outputs.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ikbo_recsys.kernels import _backend, _checks, _launch, _plan, _tiles, reference
from ikbo_recsys.kernels._backend import Choice
from ikbo_recsys.kernels._compression_launch import NO_WORK
from ikbo_recsys.kernels._compression_weight import WEIGHT_STEP, aligned_parts, weight_parts
from ikbo_recsys.kernels._launch import cdiv
from ikbo_recsys.kernels._mix_plan import MixPlan, needs_gradient
from ikbo_recsys.kernels._segment_launch import SegmentSum, grouping, rows_of


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


@_backend.constant_while_tracing
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
    known: tuple[Hashable, ...] | None,
) -> Tensor:
    """The operator on a GPU, or by a path asked for by name; tensors checked and of one dtype.

    `known` is the call's signature when the tensors are those of the call: its plan is remembered.
    """
    if bias is not None:
        bias = bias.contiguous()  # the kernels step through it by one; the signature of a strided one is None
    if _plan.is_dispatched(user, cand, weight, bias):
        if not _plan.is_transformed() and traced_path(cand.device.index, cand.dtype) != "torch":
            from ikbo_recsys.kernels._linear_operators import linear_portable

            # The derivative of an activation needs the sum before it: with gradients it is torch's, on the output's
            # type.
            is_fused = not needs_gradient(user, cand, weight, bias)
            fused = activation if is_fused else None
            out: Tensor = linear_portable(user, cand, weight, to_user, offsets, bias, fused)
            return out if is_fused else reference.ACTIVATIONS[activation](out)
    elif choose(user, cand, weight).path != "torch":
        plan = Plan(activation)
        _plan.remember(known, plan)
        return plan.run(user, cand, weight, to_user, offsets, bias)
    with _checks.no_autocast(cand):
        return reference.linear(user, cand, weight, to_user, bias, activation)


class Plan(MixPlan):
    """What was prepared for calls that differ in contents and addresses only."""

    def __init__(self, activation: str | None, is_traced: bool = False) -> None:
        self._activation, self._is_traced = activation, is_traced
        self._parts: dict[bool, tuple[Part, Part]] = {}
        self._sums: dict[Hashable, SegmentSum] = {}

    def forward(self, user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, bias: Tensor | None) -> Tensor:
        return self._forward(user, cand, weight, to_user, bias, True)

    def start(self, user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, bias: Tensor | None) -> Tensor:
        # The derivative of an activation needs the sum before it: with gradients it is torch's, on the output's type.
        return self._forward(user, cand, weight, to_user, bias, False)

    def finish(self, out: Tensor) -> Tensor:
        return out if self._activation is None else reference.ACTIVATIONS[self._activation](out)

    def _forward(
        self, user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, bias: Tensor | None, activate: bool
    ) -> Tensor:
        """The operator without gradients, with its activation or before it."""
        weight_user, weight_cand = weight_parts(weight, user.shape[1], WEIGHT_STEP, self._is_traced)
        parts = self._parts.get(activate)
        if parts is None:
            activation, chained = self._activation if activate else None, _plan.can_chain(cand)
            parts = self._parts[activate] = (
                # Rounded to 16 bits, it would change the sign of sums near zero, where relu has its kink.
                Part(user, weight_user, torch.float32, None, has_bias=bias is not None, chained=chained),
                Part(cand, weight_cand, cand.dtype, activation, has_user=True, chained=chained),
            )
        return parts[1](cand, weight_cand, parts[0](user, weight_user, bias_M=bias), to_user)

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
        """Gradients of user, cand, weight and bias before the activation, as far as `needs` asks for them."""
        needs_user, needs_cand, needs_weight, needs_bias = needs
        dtype, user_features = cand.dtype, user.shape[1]
        weight_user, weight_cand = aligned_parts(weight, user_features)
        grads: list[Tensor | None] = [None, None, None, None]
        grad_user = grad
        if needs_user or needs_weight or needs_bias:
            summed = self._sum(grad, to_user, offsets, user.shape[0])
            grad_user = summed.to(dtype)
            if needs_bias:
                grads[3] = summed.sum(0).to(dtype)
        if needs_user:
            grads[0] = grad_user @ weight_user[:, :user_features]
        if needs_cand:
            grads[1] = grad @ weight_cand[:, : cand.shape[1]]
        if needs_weight:
            grads[2] = torch.cat((grad_user.t() @ user, grad.t() @ cand), 1)
        return grads

    def _sum(self, grad: Tensor, to_user: Tensor, offsets: Tensor | None, num_users: int) -> Tensor:
        order, bounds = grouping(to_user, offsets, num_users)
        rows_BX = rows_of(grad)
        facts = _plan.facts(rows_BX)
        if facts not in self._sums:
            self._sums[facts] = SegmentSum(rows_BX, order, num_users, torch.float32)
        return self._sums[facts](rows_BX, order, bounds)


class Part:
    """`act(x @ weight.T (+ user[to_user]) (+ bias))` as `[B, M]`: the launch for tensors that differ from these in
    contents and addresses only.

    Args:
        x_BK: of any strides.
        weight_MK: of any strides, with columns of zeros up to a multiple of 64.
        out_dtype: of the result.
        activation: as in `reference.ACTIVATIONS`.
        has_user: whether a user's part is looked up; it is contiguous.
        has_bias: whether there is a bias.
        chained: as of `_compression_portable.Mix`.
    """

    def __init__(
        self,
        x_BK: Tensor,
        weight_MK: Tensor,
        out_dtype: torch.dtype,
        activation: str | None,
        *,
        has_user: bool = False,
        has_bias: bool = False,
        weight_padded: bool = True,
        chained: bool = False,
    ) -> None:
        from ikbo_recsys.kernels._triton.linear import ACTIVATION_CODES, linear_kernel

        batch, num_k = x_BK.shape
        num_m = weight_MK.shape[0]
        tile = _tiles.linear_tile(num_m, num_k, x_BK.element_size())
        tiles_m = cdiv(num_m, tile.cols)
        self._out = _launch.Room((batch, num_m), out_dtype, x_BK.device)
        unit = _launch.row_unit(x_BK)
        self._sizes = (batch, num_m, num_k // unit)
        self._numbers = (x_BK.stride(0) // unit, x_BK.stride(1), *weight_MK.stride(), tiles_m)
        constants = {
            "HAS_USER": has_user,
            "HAS_BIAS": has_bias,
            "WEIGHT_PADDED": weight_padded,
            "CHAINED": chained,
            "ACTIVATION": ACTIVATION_CODES[activation],
            "PRECISION": _launch.input_precision(x_BK.dtype),
            "UNIT": unit,
            "ROWS": tile.rows,
            "COLS": tile.cols,
            "STEP": tile.step,
        }
        options = tile.options(waits=chained and has_user)
        self._launch = _plan.Launch(linear_kernel, None, cdiv(batch, tile.rows) * tiles_m, constants, **options)

    def __call__(
        self,
        x_BK: Tensor,
        weight_MK: Tensor,
        user_UM: Tensor | None = None,
        to_user_B: Tensor | None = None,
        bias_M: Tensor | None = None,
    ) -> Tensor:
        num_users = 0 if user_UM is None else user_UM.shape[0]
        with _launch.device_guard(x_BK):
            out_BM = self._out()
            # An absent one is never read: any pointer stands for it.
            pointers = (
                x_BK,
                weight_MK,
                out_BM if user_UM is None else user_UM,
                out_BM if to_user_B is None else to_user_B,
                out_BM if bias_M is None else bias_M,
                out_BM,
            )
            self._launch((*pointers, *self._sizes, num_users, *self._numbers))
        return out_BM
