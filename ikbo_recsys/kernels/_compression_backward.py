"""The gradients of `compression_linear` on a GPU.

The output's gradient is summed over each user's candidates first, so every matmul runs at its own side's batch size.
docs/maths.md has the formulas and what each stage costs at least.

Shape letters: U users, B candidates, K features, D embedding size, M outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ikbo_recsys.kernels import _compression_hopper, _compression_portable, _outer_sum_hopper
from ikbo_recsys.kernels._compression_weight import WEIGHT_STEP, transposed
from ikbo_recsys.kernels._launch import TMA_ALIGNMENT
from ikbo_recsys.kernels._segment_launch import SegmentSum, grouping, rows_of


class Backward:
    """The launches for calls, gradients included, that differ from this one in contents and addresses only.

    Args:
        path: of the forward pass.
        grad_BMD: of the output, as `readable` gives it.
        needs: which of the gradients of user, cand, weight and bias are asked for.
    """

    def __init__(self, path: str, grad_BMD: Tensor, user_UKD: Tensor, cand_BKD: Tensor, needs: Sequence[bool]) -> None:
        self._path = path
        self._needs_user, self._needs_cand, self._needs_weight, self._needs_bias = needs
        self._num_users, self._dtype = user_UKD.shape[0], cand_BKD.dtype
        # The bias sums once more: that sum's terms stay in fp32.
        self._summed_dtype = torch.float32 if self._needs_bias else self._dtype
        self._segment_sum: SegmentSum | None = None
        self._input_gradients: list[InputGradient | None] = [None, None]
        self._outer_sums: tuple[OuterSum, OuterSum] | None = None

    def __call__(
        self,
        grad_BMD: Tensor,
        user_UKD: Tensor,
        cand_BKD: Tensor,
        weight_MK: Tensor,
        to_user: Tensor,
        offsets: Tensor | None,
    ) -> list[Tensor | None]:
        """The gradients of user, cand, weight and bias, None where not asked for."""
        grads: list[Tensor | None] = [None, None, None, None]
        weight_user, weight_cand = weight_MK.split((user_UKD.shape[1], cand_BKD.shape[1]), 1)
        grad_user_UMD = grad_BMD
        if self._needs_user or self._needs_weight or self._needs_bias:
            grad_user_UMD = self._per_user(grad_BMD, to_user, offsets)
            if self._needs_bias:
                grads[3] = grad_user_UMD.sum((0, 2)).to(self._dtype)
                grad_user_UMD = grad_user_UMD.to(self._dtype)
        if self._needs_user:
            grads[0] = self._of_input(0, weight_user, grad_user_UMD)
        if self._needs_cand:
            grads[1] = self._of_input(1, weight_cand, grad_BMD)
        if self._needs_weight:
            pairs = ((grad_user_UMD, user_UKD), (grad_BMD, cand_BKD))
            if self._outer_sums is None:
                first, second = (_outer_sum(self._path, *pair) for pair in pairs)
                self._outer_sums = first, second
            parts = [outer_sum(*pair) for outer_sum, pair in zip(self._outer_sums, pairs, strict=True)]
            grads[2] = torch.cat(parts, 1).to(self._dtype)
        return grads

    def _of_input(self, which: int, weight_MK: Tensor, grad_BMD: Tensor) -> Tensor:
        """`weight.T @ grad[b]`."""
        launches = self._input_gradients[which]
        if launches is None:
            launches = self._input_gradients[which] = _input_gradient(self._path, weight_MK, grad_BMD)
        return launches(weight_MK, grad_BMD)

    def _per_user(self, grad_BMD: Tensor, to_user: Tensor, offsets: Tensor | None) -> Tensor:
        order, bounds = grouping(to_user, offsets, self._num_users)
        rows_BX = rows_of(grad_BMD)
        if self._segment_sum is None:
            self._segment_sum = SegmentSum(rows_BX, order, self._num_users, self._summed_dtype)
        return self._segment_sum(rows_BX, order, bounds).unflatten(1, grad_BMD.shape[1:])


def readable(grad: Tensor) -> Tensor:
    """With an innermost stride of 1, which gradients of sums do not have."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


OuterSum = _compression_portable.OuterSum | _outer_sum_hopper.OuterSum
InputGradient = Callable[[Tensor, Tensor], Tensor]


def _outer_sum(path: str, grad_BMD: Tensor, x_BKD: Tensor) -> OuterSum:
    """The launch of the path's kernel, or of the portable one for what it cannot take."""
    if path == "gluon" and _outer_sum_hopper.refusal(grad_BMD, x_BKD) is None:
        return _outer_sum_hopper.OuterSum(grad_BMD, x_BKD)
    return _compression_portable.OuterSum(grad_BMD, x_BKD)


def _input_gradient(path: str, weight_MK: Tensor, grad_BMD: Tensor) -> InputGradient:
    """The launch of `weight.T @ grad[b]`: the kernel of the forward pass, without a user's part.

    In 16 bits cuBLAS has only kernels with loads of 2 bytes for a K that 8 does not divide: 1.6 ms where the forward
    kernel takes 0.4 (H200, default case of the benchmark).
    """
    if grad_BMD.dtype is torch.float32:
        return _by_cublas
    product: _compression_hopper.CandidatePart | _compression_portable.Mix
    if path == "gluon" and _compression_hopper.refusal(grad_BMD, grad_BMD, weight_MK.shape[1]) is None:
        step = TMA_ALIGNMENT // weight_MK.element_size()
        product = _compression_hopper.CandidatePart(transposed(weight_MK, step), grad_BMD)
    else:
        step = WEIGHT_STEP
        product = _compression_portable.Mix(transposed(weight_MK, step), grad_BMD, grad_BMD.dtype, weight_padded=True)
    return lambda weight, grad: product(transposed(weight, step), grad)


def _by_cublas(weight_MK: Tensor, grad_BMD: Tensor) -> Tensor:
    """The batch stride of the weight is 0, which cuBLAS takes as it is."""
    return torch.bmm(weight_MK.t().expand(grad_BMD.shape[0], -1, -1), grad_BMD)
