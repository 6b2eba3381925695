"""What every kernel launch needs, written once.

Conventions that the kernels rely on:
- Offsets into tensors that grow with the batch are int64 in the kernel: `row.to(tl.int64) * stride`. Strides are
  passed as they are, so views of any layout are read in place.
- Grids are one-dimensional (2^31 - 1 blocks; the other axes end at 65,535) and the kernel splits the block number.
- An index entry outside `[0, U)` is clamped in the kernel, so that it never reads foreign memory; `IKBO_CHECK=1`
  reports it.
- Nothing is launched for an output without elements; the public functions return before.
- fp32 products use `input_precision(dtype)`: IEEE unless torch itself was told to use tf32.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels import _backend

TMA_ALIGNMENT = 16
"""Bytes to which a TMA tensor's base address and every stride but the innermost must be aligned."""

IS_HIP = torch.version.hip is not None


class _Nothing:
    """A context manager that does nothing, cheaper than `contextlib.nullcontext()` made anew each call."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NOTHING = _Nothing()


def device_guard(tensor: Tensor) -> Any:
    """Make the tensor's GPU the current one for the launch: Triton launches on the current device and its current
    stream."""
    device = tensor.get_device()  # negative for one on the CPU
    # Not `torch.cuda.current_device`, which first looks whether there is CUDA at all.
    if device < 0 or device == torch._C._cuda_getDevice():
        return _NOTHING
    return torch.cuda.device(tensor.device)


# How TorchInductor's programs make room on the current GPU: `torch.empty_strided` takes twice as long, to read its
# arguments. Not all of PyTorch's builds have it.
_empty_strided_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


class Room:
    """Contiguous tensors of one shape, to be written; a GPU's are made while it is the current one.

    In traced calls, in which this has to be made anew, by `torch.empty`: TorchInductor copies what a kernel writes into
    otherwise.
    """

    __slots__ = ("_device", "_dtype", "_is_quick", "_size", "_strides")

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        from ikbo_recsys.kernels._plan import is_traced

        strides = list(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))
        # A `torch.Size` is read more slowly than a tuple.
        self._size, self._strides = tuple(shape), None if is_traced() else tuple(reversed(strides))
        self._dtype, self._device = dtype, device
        self._is_quick = self._strides is not None and device.type == "cuda" and _empty_strided_cuda is not None

    def __call__(self) -> Tensor:
        if self._is_quick:
            made: Tensor = _empty_strided_cuda(self._size, self._strides, self._dtype)
            return made
        if self._strides is None:
            return torch.empty(self._size, dtype=self._dtype, device=self._device)
        return torch.empty_strided(self._size, self._strides, dtype=self._dtype, device=self._device)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`once_differentiable` for a backward function, without its work where no graph of the gradients is made."""
    with_error = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def either(ctx: Any, *grads: Any) -> Any:
        return (with_error if torch.is_grad_enabled() else backward)(ctx, *grads)

    return either


def autocast_off() -> Any:
    """A region without autocast, for eager code on a GPU; nothing where it is off already."""
    return torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled("cuda") else _NOTHING


def input_precision(dtype: torch.dtype) -> str:
    """`input_precision` of `tl.dot`: only fp32 has a choice, and there it follows torch's own switch."""
    # Not `allow_tf32`: it raises once the newer switch has been set.
    if dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def is_tma_ready(tensor: Tensor) -> bool:
    """Whether a TMA descriptor fits the tensor as it is: innermost stride 1, everything else in multiples of 16 bytes.

    The stride of a dimension of size 1 is never used; a stride of 0 (an expanded dimension) has no descriptor.
    """
    if tensor.stride(-1) != 1 or tensor.data_ptr() % TMA_ALIGNMENT:
        return False
    step = TMA_ALIGNMENT // tensor.element_size()
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return all(n == 1 or (stride > 0 and stride % step == 0) for n, stride in outer)


def row_unit(tensor: Tensor) -> int:
    """The most elements, up to 16 bytes of them, of which the innermost dimension and every other stride are multiples.

    Triton specializes numbers on being multiples of 16 only; kernels that take them in these units know of the others.
    1 where it could not matter (the innermost stride is not 1) or would ask something of a dynamic size.
    """
    numbers = (tensor.shape[-1], *tensor.stride()[:-1])
    if tensor.stride(-1) != 1 or not all(isinstance(n, int) for n in numbers):
        return 1
    unit = TMA_ALIGNMENT // tensor.element_size()
    while any(n % unit for n in numbers):
        unit //= 2
    return unit


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the GPU; 1 for a device without any, such as the interpreter's."""
    return _backend.multiprocessors(device) if device.type == "cuda" else 1


def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def pointer_facts(tensor: Tensor) -> tuple[bool, ...]:
    """What Triton specializes a pointer on: alignment to 16 bytes, and on AMD whether 32-bit offsets reach it all."""
    is_aligned = tensor.data_ptr() % 16 == 0
    return (is_aligned, tensor.untyped_storage().nbytes() < 2**31) if IS_HIP else (is_aligned,)


def is_capturing(tensor: Tensor) -> bool:
    """Whether work on a tensor becomes part of a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class DerivedCache:
    """What is derived from tensors, made once for each state of a tensor and kept as long as the tensor itself."""

    def __init__(self) -> None:
        self._entries: dict[int, _Derived] = {}

    def forms(self, tensor: Tensor, state: Hashable) -> dict[Any, Any]:
        """Where the forms of a tensor in this state are kept, empty at first; those of other states are forgotten."""
        number = id(tensor)
        entry = self._entries.get(number)
        if entry is None or entry.tensor() is not tensor or entry.state != state:
            entries = self._entries
            reference = weakref.ref(tensor, lambda dead: _drop(entries, number, dead))
            entry = entries[number] = _Derived(reference, state)
        return entry.forms


class WeightCache(DerivedCache):
    """Derived forms of a weight (padded, transposed), made once and remade when the weight changes.

    Keyed by the tensor object, weakly, so that they die with the weight and never enter a state_dict. They are valid
    while the weight's version counter, storage address, shape and dtype are what they were: an optimizer step,
    `load_state_dict`, `.data =` and `.to()` all change one of them. Each stream has its own: what one stream is about
    to make is not there for another, and its memory goes back to the stream that made it. While a CUDA graph is being
    captured a form is made anew, inside the graph: replays then see the weight as it is at that time, and no cached
    copy is freed under a graph that reads it. Inference tensors have no version counter, so theirs are made anew each
    time too.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self._make = make

    def get(self, weight: Tensor, *key: Any) -> Any:
        """`make(weight, *key)`, from the cache when nothing changed since."""
        if weight.is_inference() or is_capturing(weight):
            return self._make(weight.detach(), *key)
        forms = self.forms(weight, (weight._version, weight.data_ptr(), weight.dtype, weight.shape, weight.stride()))
        stream = torch._C._cuda_getCurrentRawStream(weight.get_device()) if weight.is_cuda else None
        form = forms.get((key, stream))
        if form is None:
            form = forms[key, stream] = self._make(weight.detach(), *key)
        return form


class _Derived:
    """The forms of one tensor in one state."""

    __slots__ = ("forms", "state", "tensor")

    def __init__(self, tensor: weakref.ref[Tensor], state: Hashable) -> None:
        self.tensor, self.state = tensor, state
        self.forms: dict[Any, Any] = {}


def _drop(entries: dict[int, _Derived], number: int, dead: weakref.ref[Tensor]) -> None:
    """Forget a tensor that died, unless another one has its number by now."""
    entry = entries.get(number)
    if entry is not None and entry.tensor is dead:
        del entries[number]
