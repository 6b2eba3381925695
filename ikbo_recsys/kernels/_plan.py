"""Repeated calls without the work of the first one.

Two memories. `signature` and `recall` remember whole calls: a call that looks like an earlier one (dtypes, devices,
shapes, strides, alignment, switches) needs neither its checks nor the choice of a path, and has its *plan*: grids,
constants, descriptors. A `Launch` remembers compiled kernels: `kernel[grid](...)` looks at every argument to find the
compiled version it needs, which for thirty arguments takes longer than a short kernel runs; the facts it looks for
are known to the caller, who gives them as a key.

Neither keeps a tensor: what is remembered is what was seen of them.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.kernels import _backend, _checks, _launch
from ikbo_recsys.kernels._direct import Compiled, Layout

_MOST = 1024


class _Inside(threading.local):
    """What a thread is within."""

    operator = False


_modes: Any = torch._C._len_torch_dispatch_stack
_transform: Any = torch._C._functorch.peek_interpreter_stack
_log = logging.getLogger(__name__)
_inside = _Inside()
_compiled: dict[Hashable, Compiled] = {}
_plans: dict[Hashable, Any] = {}


def forget() -> None:
    """Empty both memories: the next call of everything is a first one."""
    _compiled.clear()
    _plans.clear()


def _keep(memory: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    if len(memory) >= _MOST:
        memory.clear()
    memory[key] = value


# ---- tracing ---------------------------------------------------------------------------------------------------------


@contextmanager
def traceable() -> Iterator[None]:
    """Within the body of a `triton_op`: launches go through `torch.library.wrap_triton`, whatever the tensors are.

    The body runs on fake, functional and proxy tensors, with their modes switched off, so nothing else tells.
    """
    before, _inside.operator = _inside.operator, True
    try:
        yield
    finally:
        _inside.operator = before


def is_traced() -> bool:
    """Whether the call may be traced rather than run: values and addresses are not to be asked for."""
    return (
        torch.compiler.is_compiling()
        or _inside.operator
        # A fake-tensor or proxy mode, as inside make_fx and AOTAutograd; a transform of torch.func.
        or _modes() > 0
        or _transform() is not None
    )


def is_transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) is active: the call is then made of plain torch, because none
    of them sees through an operator with a gradient of its own."""
    return not torch.compiler.is_compiling() and _transform() is not None


def is_dispatched(*tensors: Tensor | None) -> bool:
    """Whether a call has to go through PyTorch's dispatcher: it is traced, or a tensor is of a kind that has no memory
    of its own (fake, distributed, quantized, ...)."""
    return is_traced() or any(
        x is not None and type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ for x in tensors
    )


def can_chain(tensor: Tensor) -> bool:
    """Whether a kernel launched here may start while the one before it runs, and wait for its end by itself. Not in
    traced programs, which others launch."""
    return _backend.has_dependent_launches(tensor.device) and not is_traced()


# ---- calls -----------------------------------------------------------------------------------------------------------

_PLAIN = (Tensor, torch.nn.Parameter)


def facts(tensor: Tensor) -> tuple[Hashable, ...]:
    """What checks, plans and Triton look at in a tensor."""
    seen = (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() & 15)
    return (*seen, _launch.pointer_facts(tensor)) if _launch.IS_HIP else seen


def signature(
    operator: str, tensors: Sequence[Any], index: CandidateIndex | Tensor, *more: Hashable
) -> tuple[Hashable, ...] | None:
    """Everything that the checks, the choice of a path and its plan look at; None where they have to look each time.

    Args:
        operator: its name.
        tensors: all tensors of the call but the index; the first is floating, None for an absent one.
        index: the index of the call.
        *more: its numbers and names.
    """
    if is_traced() or _checks.check_mode():
        return None
    # Without an argument it is CUDA's that is meant, in half the time.
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled() else None
    known: list[Hashable] = [operator, _backend.requested_backend(), autocast, *more]
    if isinstance(index, CandidateIndex):
        known.append(index.num_users)
        tensors = (*tensors, index.to_user, index.offsets)
    else:
        tensors = (*tensors, index)
    for x in tensors:
        if x is None:
            known.append(None)
        elif type(x) in _PLAIN:
            # As `facts`, without a call.
            stride = x.stride()
            if len(stride) == 1 and stride[0] != 1:
                # The column of a matrix: kernels step through index tensors by one, so it is copied each time.
                return None
            known.append((x.shape, stride, x.dtype, x.get_device(), x.data_ptr() & 15))
        else:
            return None
    if _launch.IS_HIP:
        known += (_launch.pointer_facts(x) for x in tensors if x is not None)
    if tensors[0].dtype is torch.float32:
        known.append(_launch.input_precision(torch.float32))
    return tuple(known)


def recall(known: Hashable | None) -> Any:
    """The plan of a call like this one, or None."""
    return None if known is None else _plans.get(known)


def remember(known: Hashable | None, plan: Any) -> None:
    """Keep the plan of a call. It must hold nothing that the signature does not determine, and no tensor."""
    if known is not None:
        _keep(_plans, known, plan)


# ---- launches --------------------------------------------------------------------------------------------------------


class Launch:
    """A kernel, its grid and its constants, to be launched once or often.

    Args:
        kernel: a `@triton.jit` or `@gluon.jit` function whose constexpr arguments come last.
        key: everything that Triton would specialize on: dtypes, divisibility of pointers and of the integers that are
            not in `do_not_specialize`, the GPU. Constants and options are added here. None: it is found from the
            arguments of the first launch, which are tensors and numbers then.
        blocks: of the one-dimensional grid.
        constants: the constexpr arguments.
        **options: `num_warps`, `num_stages`, …
    """

    def __init__(
        self, kernel: Any, key: tuple[Hashable, ...] | None, blocks: Any, constants: Mapping[str, Any], **options: Any
    ) -> None:
        self._kernel, self._blocks, self._constants, self._options = kernel, blocks, constants, options
        self._key = key
        self._run: Callable[[Sequence[Any]], None] | None = None

    def __call__(self, arguments: Sequence[Any], layouts: Sequence[Layout] = ()) -> None:
        """Launch.

        Args:
            arguments: the arguments before the constexpr ones, in order: tensors, then numbers, the same at each call.
            layouts: of the first ones, which are tensors that the kernel gets descriptors of. The same at each call.
        """
        together = _together  # another thread may be about to end it
        if together is not None and together.takes(self, arguments, layouts):
            return
        if self._run is not None:
            self._run(arguments)
            return
        kernel = self._kernel
        if is_traced():
            torch.library.wrap_triton(kernel)[(self._blocks,)](*arguments, **self._constants, **self._options)
            return
        key = self._whole_key(arguments)
        known = _compiled.get(key)
        if known is not None:
            self._run = known.runner(self._blocks, arguments, layouts)
            self._run(arguments)
            return
        full = _checked(arguments, layouts)
        compiled = kernel[(self._blocks,)](*full, **self._constants, **self._options)
        # The interpreter compiles nothing.
        if compiled is not None:
            tail = tuple(self._constants[name] for name in kernel.arg_names[len(arguments) :])
            _keep(_compiled, key, Compiled(compiled, tail))

    def _whole_key(self, arguments: Sequence[Any]) -> Hashable:
        facts = _specialization(self._kernel, arguments) if self._key is None else self._key
        return (id(self._kernel), facts, tuple(self._constants.values()), tuple(self._options.values()))

    def is_compiled(self, arguments: Sequence[Any]) -> bool:
        return self._run is not None or self._whole_key(arguments) in _compiled

    def compile(self, arguments: Sequence[Any], layouts: Sequence[Layout]) -> Any:
        """Triton's compiled kernel, or what will be it at the end of its `AsyncCompileMode`; arguments as of a call."""
        full = _checked(arguments, layouts)
        return self._kernel.warmup(*full, grid=(self._blocks,), **self._constants, **self._options)

    def drop_unfinished(self) -> None:
        """Triton 3.7 keeps what failed under `AsyncCompileMode`, and raises it again at every call of its kind."""
        for cache, *_ in getattr(self._kernel, "device_caches", {}).values():
            for key in [key for key, compiled in cache.items() if hasattr(compiled, "future")]:
                del cache[key]


class _Together:
    """The launches of one thread that wait for each other's kernels to be compiled."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.calls: list[tuple[Launch, Sequence[Any], Sequence[Layout]]] = []
        self.behind: list[Callable[[], None]] = []

    def is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def takes(self, launch: Launch, arguments: Sequence[Any], layouts: Sequence[Layout]) -> bool:
        if not self.is_here():
            return False
        self.calls.append((launch, arguments, layouts))
        return True

    def compile(self, device: torch.device) -> None:
        """Compile, all at the same time, the kernels that are not compiled yet; load them and their launchers."""
        import triton

        new = [call for call in self.calls if not call[0].is_compiled(call[1])]
        if len(new) < 2 or not hasattr(triton, "AsyncCompileMode"):
            return

        def load(compiled: Any) -> None:
            with torch.cuda.device(device):
                _ = compiled.run

        def start() -> list[Any]:
            with triton.AsyncCompileMode(threads, ignore_errors=True):
                return [launch.compile(arguments, layouts) for launch, arguments, layouts in new]

        try:
            with _uncollected(), ThreadPoolExecutor(len(new)) as threads:
                _start_compiler(threads)
                # In a context of its own, where the mode is kept: an interrupt leaves it on, and this thread could
                # compile nothing any more.
                found = copy_context().run(start)
                kernels = {id(x): x for x in (y.result() if hasattr(y, "result") else y for y in found)}
                list(threads.map(load, kernels.values()))
        finally:
            for launch, _, _ in new:
                launch.drop_unfinished()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection. Where it runs Python code (`gc.callbacks`, as of metrics), the lock changes hands in
    the middle of `ast.parse`, and that fails in a second thread, in Python 3.11.7 for one."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _start_compiler(threads: ThreadPoolExecutor) -> None:
    """What Triton does once per process before it compiles: it hashes its own 400 MB while a C compiler, where the
    kernel cache is empty, makes its driver module. Each takes 0.2 to 0.4 s, most of it without Python's lock."""
    from triton.runtime import cache, driver

    hashed = threads.submit(getattr(cache, "triton_key", lambda: None))
    _ = driver.active.get_current_target()
    hashed.result()


_together: _Together | None = None
_together_lock = threading.Lock()


@contextmanager
def compiled_together(tensor: Tensor) -> Iterator[None]:
    """Launches within are made at its end, in their order, and the kernels that they need are compiled at the same
    time: MLIR's passes, LLVM and ptxas run without Python's lock.

    For the first call of a plan. Nothing within but launches may read what launches write. Where a call is traced, runs
    in Triton's interpreter or is captured, and while another thread is within, launches are made as they come.
    """
    global _together
    if not tensor.is_cuda or is_traced() or _launch.is_capturing(tensor) or not _together_lock.acquire(blocking=False):
        yield
        return
    _together = together = _Together()
    try:
        yield
    finally:
        _together = None
        # Whatever went wrong within: what was to be known once they are made is valid.
        try:
            together.compile(tensor.device)
        except Exception:
            _log.debug("compiling at the same time failed, each launch compiles for itself", exc_info=True)
        finally:
            _together_lock.release()
            for launch, arguments, layouts in together.calls:
                with _launch.device_guard(tensor):
                    launch(arguments, layouts)
            for action in together.behind:
                action()


def once_launched(action: Callable[[], None]) -> None:
    """Do something once this thread's launches so far are made: now, or at the end of `compiled_together`. Let others
    know, for example, of what they write."""
    together = _together
    if together is not None and together.is_here():
        together.behind.append(action)
    else:
        action()


def _checked(arguments: Sequence[Any], layouts: Sequence[Layout]) -> list[Any]:
    """Arguments in the form that Triton compiles from."""
    described = zip(layouts, arguments, strict=False)
    return [*(layout.checked(base) for layout, base in described), *arguments[len(layouts) :]]


def _specialization(kernel: Any, arguments: Sequence[Any]) -> tuple[Hashable, ...]:
    """What Triton specializes a kernel on. In the interpreter nothing is."""
    parameters = getattr(kernel, "params", ())
    key: list[Hashable] = [arguments[0].device]
    for argument, parameter in zip(arguments, parameters, strict=False):
        if isinstance(argument, Tensor):
            key += (argument.dtype, *_launch.pointer_facts(argument))
        else:
            # Of the others only the width counts: 32 bits, or 64.
            key.append(argument >= 2**31 if parameter.do_not_specialize else argument)
    return tuple(key)
