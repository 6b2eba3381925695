"""Repeated launches without Triton's per-call work.

`kernel[grid](...)` looks at every argument to find the compiled version it needs; with thirty arguments, four of them
TMA descriptors, that costs more host time than a short kernel runs. The facts it looks for are few and known to the
caller, who gives them as a key: a `Launch` with a known key goes straight to the compiled kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ikbo_recsys.kernels._launch import _is_tracing

_MOST = 1024
_inside = threading.local()
_compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


@contextmanager
def traceable() -> Iterator[None]:
    """Within the body of a `triton_op`: launches go through `torch.library.wrap_triton`, whatever the tensors are.

    The body runs on fake, functional and proxy tensors, with their modes switched off, so nothing else tells.
    """
    before, _inside.operator = getattr(_inside, "operator", False), True
    try:
        yield
    finally:
        _inside.operator = before


def is_traced() -> bool:
    """Whether the call may be traced rather than run: values and addresses are not to be asked for."""
    return torch.compiler.is_compiling() or getattr(_inside, "operator", False) or _is_tracing()


class Launch:
    """A kernel, its grid and its constants, to be launched once or often.

    Args:
        kernel: a `@triton.jit` or `@gluon.jit` function whose constexpr arguments come last.
        key: everything that Triton would specialize on: dtypes, divisibility of pointers and of the integers that are
        not in
            `do_not_specialize`, the GPU. Constants and options are added here.
        blocks: of the one-dimensional grid.
        constants: the constexpr arguments.
        **options: `num_warps`, `num_stages`, …
    """

    def __init__(
        self, kernel: Any, key: tuple[Hashable, ...], blocks: Any, constants: Mapping[str, Any], **options: Any
    ) -> None:
        self._kernel, self._blocks, self._constants, self._options = kernel, blocks, constants, options
        self._key = key
        self._run: Callable[..., None] | None = None
        self._tail: tuple[Any, ...] = ()

    def __call__(self, arguments: Sequence[Any], checked: Callable[[], Sequence[Any]] | None = None) -> None:
        """Launch.

        Args:
            arguments: the arguments before the constexpr ones, in order.
            checked: makes `arguments` in the form that Triton compiles from, where theirs is enough for a compiled
            kernel only.
        """
        if self._run is not None:
            self._run(*arguments, *self._tail)
            return
        kernel = self._kernel
        if is_traced():
            torch.library.wrap_triton(kernel)[(self._blocks,)](*arguments, **self._constants, **self._options)
            return
        key = (id(kernel), self._key, tuple(self._constants.values()), tuple(self._options.values()))
        known = _compiled.get(key)
        if known is None:
            full = arguments if checked is None else checked()
            compiled = kernel[(self._blocks,)](*full, **self._constants, **self._options)
            # The interpreter compiles nothing.
            if compiled is None:
                return
            tail = tuple(self._constants[name] for name in kernel.arg_names[len(arguments) :])
            if len(_compiled) >= _MOST:
                _compiled.clear()
            _compiled[key] = known = (compiled, tail)
            self._run, self._tail = compiled[(self._blocks, 1, 1)], tail
            return
        self._run, self._tail = known[0][(self._blocks, 1, 1)], known[1]
        self._run(*arguments, *self._tail)
