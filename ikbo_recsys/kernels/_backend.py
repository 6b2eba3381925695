"""Which path runs, and why.

A *path* is one implementation of an operator: `torch` (the reference in plain torch), `triton` (portable kernels) or
`gluon` (warp-specialized kernels for Hopper). Each operator registers a *chooser*: a function of the call's own
arguments that lists, for every path, why it cannot take the call (or None), and the order in which `auto` prefers
them. Nothing here imports triton.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

PATHS = ("torch", "triton", "gluon")
_ENVIRONMENT = "IKBO_BACKEND"

_variables: Any = getattr(os.environ, "_data", None) if os.name == "posix" else None
_override: str | None = None
_choosers: dict[str, Callable[..., Choice]] = {}


class BackendError(RuntimeError):
    """A path was asked for by name and cannot take the call. `auto` never raises it."""


@dataclass(frozen=True)
class Choice:
    """The path of one call.

    Attributes:
        path: "torch", "triton" or "gluon".
        reason: why this one.
        refused: for each path that cannot take the call, why not.
    """

    path: str
    reason: str
    refused: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.reason}"]
        lines += [f"  not {path}: {why}" for path, why in self.refused.items()]
        return "\n".join(lines)


def environment(name: str) -> str:
    """An environment variable, "" where there is none: which `os.environ` takes longest to find out, by an exception,
    and every call asks for two."""
    return "" if _variables is not None and name.encode() not in _variables else os.environ.get(name, "")


def requested_backend() -> str:
    """The path asked for: by `use_backend`, else by `IKBO_BACKEND`, else "auto"."""
    if _override is not None:
        return _override
    name = environment(_ENVIRONMENT) or "auto"
    if name != "auto" and name not in PATHS:
        raise ValueError(f"{_ENVIRONMENT} must be auto or one of {', '.join(PATHS)}, got {name!r}")
    return name


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Make every operator take the path `name` inside the `with` block; it wins over `IKBO_BACKEND`.

    Args:
        name: "torch", "triton", "gluon", or "auto" for the library's own choice.

    Raises:
        ValueError: an unknown name. Inside the block, a call that the path cannot take raises `BackendError` and says
            why.

    Example::

        >>> with use_backend("torch"):
        ...     out = compression_linear(user, cand, weight, index)
    """
    if name != "auto" and name not in PATHS:
        raise ValueError(f"name must be auto or one of {', '.join(PATHS)}, got {name!r}")
    global _override
    before, _override = _override, name
    try:
        yield
    finally:
        _override = before


def choose(refusals: Mapping[str, str | None], order: Sequence[tuple[str, str]]) -> Choice:
    """Pick a path.

    Args:
        refusals: for every path, why it cannot take the call, or None. A path that is not named does not exist.
        order: (path, reason) in the order that `auto` prefers, best first; the last one must never refuse.

    Raises:
        BackendError: the requested path refuses.
    """
    refused = {path: why for path, why in refusals.items() if why is not None}
    requested = requested_backend()
    if requested != "auto":
        why = refused.get(requested) if requested in refusals else "this operator has no such path"
        if why is not None:
            raise BackendError(f"the {requested} path was requested and cannot take this call: {why}")
        return Choice(requested, "requested", refused)
    for path, reason in order:
        if path not in refused:
            return Choice(path, reason, refused)
    raise AssertionError(f"every path refused: {refused}")


def register_chooser(operator: str, chooser: Callable[..., Choice]) -> None:
    """Say who answers `explain(operator, ...)`. `chooser` takes the operator's own arguments."""
    _choosers[operator] = chooser


def explain(operator: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Choice:
    """Which path a call takes, and why, without running it.

    Args:
        operator: the operator's name or its public function.
        *args, **kwargs: the arguments of the call.

    Returns:
        A `Choice`; `str()` of it is a sentence for each path.

    Raises:
        ValueError: an operator without a chooser (those run in plain torch everywhere).
        BackendError: the requested path refuses.

    Example::

        >>> explain("compression_linear", user, cand, weight, index).path
        'torch'
    """
    name = operator if isinstance(operator, str) else operator.__name__
    if name not in _choosers:
        raise ValueError(f"{name!r} is not one of {', '.join(sorted(_choosers))}")
    return _choosers[name](*args, **kwargs)


def constant_while_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result`, which imports TorchDynamo: a second of every process's first call."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# ---- facts about this process and its devices, asked once ----------------------------------------------------------


@functools.cache
def triton_refusal() -> str | None:
    """Why the portable kernels cannot run in this process, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


@functools.cache
def triton_version() -> tuple[int, int]:
    """(major, minor) of the installed Triton; (0, 0) without one. From its metadata: importing it takes a second."""
    from importlib import metadata

    for distribution in ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm", "fbtriton"):
        try:
            major, minor = metadata.version(distribution).split(".")[:2]
        except metadata.PackageNotFoundError:
            continue
        return int(major), int(minor)
    return (0, 0)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability; (0, 0) for anything that is not an NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def has_large_shared_memory(device: torch.device) -> bool:
    """Whether one block can have 163 KB of shared memory and more, as on A100, H100 and B200.

    The GPUs of the same generations for workstations and inference have 99 KB (L4, A10: 8.9, 8.6), AMD's 64 KB.
    """
    major, minor = capability(device)
    return major in (9, 10, 11) or (major, minor) in ((8, 0), (8, 7))


def has_dependent_launches(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it runs, and wait for its end by itself (programmatic dependent
    launch). Triton's interpreter does not know that."""
    import triton

    return torch.version.hip is None and capability(device) >= (9, 0) and not triton.knobs.runtime.interpret


@functools.cache
def hopper_refusal(device: torch.device) -> str | None:
    """Why the Gluon kernels cannot run on `device` in this process, or None."""
    if triton_refusal() is not None:
        return triton_refusal()
    if capability(device) != (9, 0):
        return f"the kernel needs a Hopper GPU (compute capability 9.0), {device} has {capability(device)}"
    if triton_version() < (3, 6):
        return f"the kernel needs Triton 3.6 or newer, {'.'.join(map(str, triton_version()))} is installed"
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        return "this Triton has no Gluon"
    return None


def portable_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the portable kernels cannot take tensors of this device and dtype, or None."""
    if device.type != "cuda":
        return f"the kernels run on a GPU, the tensors are on {device}"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernels take float32, float16 and bfloat16, not {dtype}"
    if torch.version.hip is None and capability(device) < (8, 0):
        return f"the kernels need compute capability 8.0 or newer, {device} has {capability(device)}"
    return triton_refusal()
