"""Compiled kernels launched through the C function under Triton's launcher.

Before it calls that function, Triton spends more time in Python than a short kernel runs: every TMA descriptor is
encoded and spelt out anew, every pointer is looked up in the driver. What the function is called with follows from a
compiled kernel and its arguments, and Triton itself is asked for it, once per compiled kernel. Where the answer is not
what is expected of it, launches go through Triton's own Python, as they do while a profiler listens.
"""

from __future__ import annotations

import copy
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

_MOST_ADDRESSES = 64
_log = logging.getLogger(__name__)


class Layout(Protocol):
    """How a tensor becomes a TMA descriptor: see `_tma.py`."""

    def checked(self, base: Tensor) -> Any:
        """Triton's own descriptor, which it compiles from."""

    def described(self, base: Tensor) -> Any:
        """What a compiled kernel's launcher reads of it."""


class _Native(NamedTuple):
    """Triton's C function, called with the grid, the stream, `head` and the kernel's arguments, one by one or as a
    list; `expanded(i, descriptor)` is what stands for the i-th descriptor among them."""

    function: Callable[..., None]
    head: tuple[Any, ...]
    takes_list: bool
    expanded: Callable[[int, Any], list[Any]]


class Compiled:
    """A compiled kernel with its constexpr arguments."""

    def __init__(self, compiled: Any, constants: tuple[Any, ...]) -> None:
        self._compiled, self._constants = compiled, constants
        self._native: _Native | None = None
        self._is_asked = False

    def runner(
        self, blocks: int, arguments: Sequence[Any], layouts: Sequence[Layout]
    ) -> Callable[[Sequence[Any]], None]:
        """A function that launches `blocks` blocks on the GPU that is the current one now, on its current stream.

        Its arguments are tensors and numbers, in this order, of which only the tensors may be others than in
        `arguments`; of the first ones, which there are layouts for, the kernel gets descriptors.
        """
        import triton

        compiled, tail, count = self._compiled, self._constants, len(layouts)
        driver, hooks = triton.runtime.driver.active, triton.knobs.runtime
        device, stream = driver.get_current_device(), driver.get_current_stream
        run, hooked = compiled.run, compiled[(blocks, 1, 1)]

        def described(arguments: Sequence[Any]) -> list[Any]:
            tensors = zip(layouts, arguments, strict=False)
            return [*(layout.described(x) for layout, x in tensors), *arguments[count:], *tail]

        if not self._is_asked:
            self._native, self._is_asked = _ask(compiled, described(arguments), count), True
        native = self._native
        pointers = count
        while pointers < len(arguments) and isinstance(arguments[pointers], Tensor):
            pointers += 1
        rest = (*arguments[pointers:], *tail)
        # A descriptor is its address, its layout and what the kernel was compiled for: of these only the first changes.
        memories: list[dict[int, list[Any]]] = [{} for _ in layouts]
        together: dict[tuple[int, ...], list[Any]] = {}

        def descriptors(addresses: tuple[int, ...], arguments: Sequence[Any]) -> list[Any]:
            assert native is not None
            found: list[Any] = []
            for i, (memory, address) in enumerate(zip(memories, addresses, strict=True)):
                one = memory.get(address)
                if one is None:
                    one = _keep(memory, address, native.expanded(i, layouts[i].described(arguments[i])))
                found += one
            return _keep(together, addresses, found)

        def launch(arguments: Sequence[Any]) -> None:
            try:
                is_hooked = hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls
            except AttributeError:
                # Not Triton's chains: a function, or None.
                is_hooked = True
            if is_hooked:
                # A profiler gets what Triton's own launch gives it.
                hooked(*described(arguments))
                return
            if native is None:
                entry = (compiled.function, compiled.packed_metadata, None, None, None)
                run(blocks, 1, 1, stream(device), *entry, *described(arguments))
                return
            # Triton asks the driver about every tensor, and takes addresses as they are.
            addresses = [x.data_ptr() for x in arguments[:pointers]]
            bases = tuple(addresses[:count])
            first = together.get(bases)
            if first is None:
                first = descriptors(bases, arguments)
            if native.takes_list:
                given = [*first, *addresses[count:], *rest]
                native.function(blocks, 1, 1, stream(device), *native.head, given)
            else:
                native.function(blocks, 1, 1, stream(device), *native.head, *first, *addresses[count:], *rest)

        return launch


def _keep(memory: dict[Any, list[Any]], key: Any, value: list[Any]) -> list[Any]:
    if len(memory) >= _MOST_ADDRESSES:
        memory.clear()
    memory[key] = value
    return value


def _ask(compiled: Any, arguments: list[Any], descriptors: int) -> _Native | None:
    """Let Triton's launcher call a function that records what it is called with, in place of the one in C."""
    try:
        return _understood(compiled, arguments, descriptors)
    except Exception:
        _log.debug("Triton's launcher is not the one expected: launches go through it", exc_info=True)
        return None


def _understood(compiled: Any, arguments: list[Any], descriptors: int) -> _Native:
    from triton.backends.nvidia import driver

    launcher, calls = copy.copy(compiled.run), []

    def record(*given: Any) -> None:
        calls.append(given)

    # Memory for a kernel's scratch is allocated for each launch.
    assert launcher.global_scratch_size == launcher.profile_scratch_size == 0
    function, metas, launcher.launch = launcher.launch, [], record
    if descriptors:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        function, metas = cells["launcher"].cell_contents, cells["tensordesc_meta"].cell_contents
        launcher.launch = driver.wrap_handle_tensordesc(record, compiled.src.signature, metas)
    assert isinstance(function, types.BuiltinFunctionType)

    def expanded(i: int, descriptor: Any) -> list[Any]:
        return driver.make_tensordesc_arg(descriptor, metas[i])  # type: ignore[no-any-return]

    def is_same(one: Any, other: Any) -> bool:
        return one is other or type(one) is type(other) is driver.PyCUtensorMap

    stream = object()
    launcher(1, 2, 3, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
    (given,) = calls
    assert (*given[:3], given[4]) == (1, 2, 3, compiled.function)
    assert given[3] is stream
    wanted = [x for i in range(descriptors) for x in expanded(i, arguments[i])] + arguments[descriptors:]
    for takes_list in (False, True):
        found, end = (given[-1], -1) if takes_list else (given[-len(wanted) :], -len(wanted))
        if isinstance(found, (list, tuple)) and len(found) == len(wanted) and all(map(is_same, found, wanted)):
            return _Native(function, given[4:end], takes_list, expanded)
    raise AssertionError("the arguments are not where they were looked for")
