"""TMA descriptors of Gluon kernels: what is said of a tensor's layout before there is the tensor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikbo_recsys.kernels._launch import TMA_ALIGNMENT
from ikbo_recsys.kernels._plan import Launch


class TensorLayout:
    """Shape, strides and box under which tensors of one layout become descriptors."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> None:
        # The stride of a dimension of size 1 is never used, but has to be aligned.
        outer = zip(shape[:-1], strides[:-1], strict=True)
        self.shape, self.box = list(shape), tuple(box)
        self.strides = [TMA_ALIGNMENT if n == 1 else stride for n, stride in outer] + [1]

    @classmethod
    def of(cls, tensor: Tensor, box: Sequence[int]) -> TensorLayout:
        """That of a tensor as it is."""
        return cls(tensor.shape, tensor.stride(), box)

    def checked(self, base: Tensor) -> Any:
        """Triton's own descriptor, which it compiles from."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(base, self.shape, self.strides, list(self.box), _shared_layout(self.box, base.dtype))

    def described(self, base: Tensor) -> Descriptor:
        """What a compiled kernel's launcher reads of it. Triton's own class checks and converts all anew."""
        return Descriptor(base, self.shape, self.strides)


class Descriptor(NamedTuple):
    """See `TensorLayout.described`."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


def launch(kernel: Launch, layouts: Sequence[TensorLayout], bases: Sequence[Tensor], rest: Sequence[Any]) -> None:
    """Launch with descriptors of `bases` first, and then the other arguments; a kernel's layouts are always the same
    ones."""
    kernel((*bases, *rest), layouts)


@functools.cache
def _shared_layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for(list(box), gl.float16 if dtype is torch.float16 else gl.bfloat16)
