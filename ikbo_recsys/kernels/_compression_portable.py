"""Launches of the portable linear compression kernels: tiles, grids, outputs.

Each class is made from the tensors of one call and then serves all calls that differ in contents and addresses only.

Shape letters: U users, B batch rows, K contracted features, D embedding size, M outputs, S splits of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ikbo_recsys.kernels import _backend, _launch, _tiles
from ikbo_recsys.kernels._launch import cdiv
from ikbo_recsys.kernels._plan import Launch


class Mix:
    """`weight @ x[b] (+ user[to_user[b]]) (+ bias)` as `[B, M, D]`, on the current GPU.

    Args:
        weight_MK, x_BKD: of any strides.
        out_dtype: of the result.
        has_user: whether a user's part is looked up; it is contiguous.
        has_bias: whether there is a bias.
        weight_padded: whether the weight has columns of zeros up to a multiple of 64.
        chained: whether the launch of a users' part and the next one, which looks it up, may run at the same time
            (`_plan.can_chain`): users are few, and leave most of a GPU to products that do not need their part yet.
    """

    def __init__(
        self,
        weight_MK: Tensor,
        x_BKD: Tensor,
        out_dtype: torch.dtype,
        *,
        has_user: bool = False,
        has_bias: bool = False,
        weight_padded: bool = False,
        chained: bool = False,
    ) -> None:
        from ikbo_recsys.kernels._triton.compression_linear import mix_kernel

        batch, num_k, size = x_BKD.shape
        num_m = weight_MK.shape[0]
        large_memory = _backend.has_large_shared_memory(x_BKD.device)
        tile = _tiles.mix_tile(num_m, size, num_k, x_BKD.element_size(), large_memory, has_user)
        tiles_m, tiles_d = cdiv(num_m, tile.rows), cdiv(size, tile.cols)
        self._out = _launch.Room((batch, num_m, size), out_dtype, x_BKD.device)
        unit = _launch.row_unit(x_BKD)
        self._sizes = (num_m, num_k, size // unit)
        x_strides = (x_BKD.stride(0) // unit, x_BKD.stride(1) // unit, x_BKD.stride(2))
        self._numbers = (*weight_MK.stride(), *x_strides, tiles_m, tiles_d)
        constants = {
            "HAS_USER": has_user,
            "HAS_BIAS": has_bias,
            "WEIGHT_PADDED": weight_padded,
            "CHAINED": chained,
            "PRECISION": _launch.input_precision(x_BKD.dtype),
            "UNIT": unit,
            "ROWS": tile.rows,
            "COLS": tile.cols,
            "STEP": tile.step,
        }
        options = tile.options(waits=chained and has_user)
        self._launch = Launch(mix_kernel, None, batch * tiles_m * tiles_d, constants, **options)

    def __call__(
        self,
        weight_MK: Tensor,
        x_BKD: Tensor,
        user_UMD: Tensor | None = None,
        to_user_B: Tensor | None = None,
        bias_M: Tensor | None = None,
    ) -> Tensor:
        out_BMD = self._out()
        # An absent one is never read: any pointer stands for it.
        pointers = (
            weight_MK,
            x_BKD,
            out_BMD if user_UMD is None else user_UMD,
            out_BMD if to_user_B is None else to_user_B,
            out_BMD if bias_M is None else bias_M,
            out_BMD,
        )
        num_users = 0 if user_UMD is None else user_UMD.shape[0]
        self._launch((*pointers, *self._sizes, num_users, *self._numbers))
        return out_BMD


class OuterSum:
    """`sum_b grad[b] @ x[b].T` in fp32, `[M, K]`: the gradient of a weight that the whole batch shares.

    The sum is split to fill the GPU, and the splits are added in a fixed order: the result does not change between
    runs.
    """

    def __init__(self, grad_BMD: Tensor, x_BKD: Tensor) -> None:
        from ikbo_recsys.kernels._triton.compression_linear import outer_sum_kernel

        batch, num_m, size = grad_BMD.shape
        num_k = x_BKD.shape[1]
        large_memory = _backend.has_large_shared_memory(x_BKD.device)
        tile = _tiles.outer_tile(num_m, num_k, size, x_BKD.element_size(), large_memory)
        tiles_m, tiles_k = cdiv(num_m, tile.rows), cdiv(num_k, tile.cols)
        steps = batch * cdiv(size, tile.step)
        splits = _tiles.splits(tiles_m * tiles_k, steps, tile.blocks * _launch.multiprocessors(x_BKD.device))
        self._partial, self._splits = _launch.Room((splits, num_m, num_k), torch.float32, x_BKD.device), splits
        strides = (*grad_BMD.stride(), *x_BKD.stride())
        self._numbers = (num_m, num_k, size, steps, cdiv(steps, splits), *strides, tiles_m, tiles_k)
        constants = {
            "PRECISION": _launch.input_precision(x_BKD.dtype),
            "STEPS_PER_ROW": cdiv(size, tile.step),
            "ROWS": tile.rows,
            "COLS": tile.cols,
            "STEP": tile.step,
        }
        self._launch = Launch(outer_sum_kernel, None, splits * tiles_m * tiles_k, constants, **tile.options())

    def __call__(self, grad_BMD: Tensor, x_BKD: Tensor) -> Tensor:
        with _launch.device_guard(x_BKD):
            partial_SMK = self._partial()
            self._launch((grad_BMD, x_BKD, partial_SMK, *self._numbers))
        return partial_SMK[0] if self._splits == 1 else partial_SMK.sum(0)
