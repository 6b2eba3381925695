"""The gradients of `compression_linear` on a GPU.

The output's gradient is summed over each user's candidates first, so every matmul runs at its own side's batch size.
docs/maths.md has the formulas and what each stage costs at least.

Shape letters: U users, B candidates, K features, D embedding size, M outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_recsys.kernels import _compression_portable, _outer_sum_hopper
from ikbo_recsys.kernels._compression_weight import aligned_parts
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
        weight_user, weight_cand = aligned_parts(weight_MK, user_UKD.shape[1])
        grad_user_UMD = grad_BMD
        if self._needs_user or self._needs_weight or self._needs_bias:
            grad_user_UMD = self._per_user(grad_BMD, to_user, offsets)
            if self._needs_bias:
                grads[3] = grad_user_UMD.sum((0, 2)).to(self._dtype)
                grad_user_UMD = grad_user_UMD.to(self._dtype)
        if self._needs_user:
            grads[0] = _input_gradient(weight_user[:, : user_UKD.shape[1]], grad_user_UMD)
        if self._needs_cand:
            grads[1] = _input_gradient(weight_cand[:, : cand_BKD.shape[1]], grad_BMD)
        if self._needs_weight:
            pairs = ((grad_user_UMD, user_UKD), (grad_BMD, cand_BKD))
            if self._outer_sums is None:
                first, second = (_outer_sum(self._path, *pair) for pair in pairs)
                self._outer_sums = first, second
            parts = [outer_sum(*pair) for outer_sum, pair in zip(self._outer_sums, pairs, strict=True)]
            grads[2] = torch.cat(parts, 1).to(self._dtype)
        return grads

    def _per_user(self, grad_BMD: Tensor, to_user: Tensor, offsets: Tensor | None) -> Tensor:
        order, bounds = grouping(to_user, offsets, self._num_users)
        rows_BX = rows_of(grad_BMD)
        if self._segment_sum is None:
            self._segment_sum = SegmentSum(rows_BX, order, self._num_users, self._summed_dtype)
        return self._segment_sum(rows_BX, order, bounds).unflatten(1, grad_BMD.shape[1:])


OuterSum = _compression_portable.OuterSum | _outer_sum_hopper.OuterSum


def _outer_sum(path: str, grad_BMD: Tensor, x_BKD: Tensor) -> OuterSum:
    """The launch of the path's kernel, or of the portable one for what it cannot take."""
    if path == "gluon" and _outer_sum_hopper.refusal(grad_BMD, x_BKD) is None:
        return _outer_sum_hopper.OuterSum(grad_BMD, x_BKD)
    return _compression_portable.OuterSum(grad_BMD, x_BKD)


def readable(grad: Tensor) -> Tensor:
    """With an innermost stride of 1, which gradients of sums do not have."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def _input_gradient(weight_MK: Tensor, grad_BMD: Tensor) -> Tensor:
    """`weight.T @ grad[b]` by cuBLAS.

    The contiguous dimensions, K and D, are both dimensions of the result, so that M, which is odd as often as not, has
    no alignment to fulfil. The batch stride of the weight is 0, which cuBLAS takes as it is.
    """
    return torch.bmm(weight_MK.t().expand(grad_BMD.shape[0], -1, -1), grad_BMD)
