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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels import _backend

TMA_ALIGNMENT = 16
"""Bytes to which a TMA tensor's base address and every stride but the innermost must be aligned."""


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
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


def input_precision(dtype: torch.dtype) -> str:
    """`input_precision` of `tl.dot`: only fp32 has a choice, and there it follows torch's own switch."""
    if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
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


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the GPU; 1 for a device without any, such as the interpreter's."""
    return _backend.multiprocessors(device) if device.type == "cuda" else 1


def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def specialization(arguments: Sequence[Any], free: Sequence[int] = ()) -> tuple[Any, ...]:
    """What Triton specializes a kernel on, as the key of a `_plan.Launch`: dtypes, alignment of pointers, integers,
    the GPU.

    Args:
        arguments: before the constexpr ones; tensors and integers.
        free: the positions of the integers in `do_not_specialize`.
    """
    key: list[Any] = [arguments[0].device]
    for place, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            key.append((argument.dtype, argument.data_ptr() % 16 == 0))
        elif place not in free:
            key.append(argument)
    return tuple(key)


def launcher(kernel: Any) -> Callable[..., Any]:
    """`triton_op`'s wrapper of a kernel while a graph is being traced, the kernel itself otherwise.

    The wrapper (`torch.library.wrap_triton`) is what lets Inductor and AOTInductor see the kernel; it costs tens of
    microseconds, which an eager call should not pay.
    """
    if torch.compiler.is_compiling() or _is_tracing():
        from torch.library import wrap_triton

        return wrap_triton(kernel)
    return kernel


def _is_tracing() -> bool:
    """Whether a fake-tensor or proxy mode is active, as inside `make_fx` and AOTAutograd."""
    return torch._C._len_torch_dispatch_stack() > 0


class WeightCache:
    """Derived forms of a weight (padded, transposed), made once and remade when the weight changes.

    Keyed by the tensor object, weakly, so that it dies with the weight and never enters a state_dict. An entry is
    valid while the weight's version counter, storage address, shape and dtype are what they were: an optimizer step,
    `load_state_dict`, `.data =` and `.to()` all change one of them. While a CUDA graph is being captured the form is
    made anew, inside the graph: replays then see the weight as it is at that time, and no cached copy is freed under a
    graph that reads it. Inference tensors have no version counter, so theirs is made anew each time too.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self._make = make
        self._entries: Any = WeakIdKeyDictionary()

    def get(self, weight: Tensor, *key: Any) -> Any:
        """`make(weight, *key)`, from the cache when nothing changed since."""
        if weight.is_inference() or _is_capturing():
            return self._make(weight.detach(), *key)
        state = (weight._version, weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), key)
        entry = self._entries.get(weight)
        if entry is not None and entry[0] == state:
            return entry[1]
        value = self._make(weight.detach(), *key)
        self._entries[weight] = (state, value)
        return value


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
