"""A GPU that is not there: the real launch code, Triton's own driver and launcher included, on tensors in host memory.

`install()` makes this process believe in two H200s. Triton compiles for them as far as PTX; `libcuda.c` takes the place
of the CUDA driver and records what is launched, byte for byte, instead of launching it. Tensors lie in host memory and
claim to be on a GPU, so every kernel's output is whatever the memory holds: zeros.

Irreversible, so tests that use it run in a process of their own, as `run_in_a_process_of_its_own` starts it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes import run_alone

_SWITCH = "IKBO_STANDIN"
_COMPILER = os.environ.get("CC", "gcc")
INSTALLED = os.environ.get(_SWITCH) == "1"
inside = pytest.mark.skipif(not INSTALLED, reason=f"needs {_SWITCH}=1")
outside = pytest.mark.skipif(INSTALLED, reason="this is that process")


def run_in_a_process_of_its_own(file: str, folder: Path, *arguments: str) -> None:
    """Run the tests of a file that are marked `inside`."""
    if shutil.which(_COMPILER) is None:
        pytest.skip(f"{_COMPILER} is needed, as it is for Triton's own launcher")
    more = {_SWITCH: "1", "TRITON_CACHE_DIR": str(folder / "cache"), "IKBO_STANDIN_FOLDER": str(folder)}
    run_alone(file, more, *arguments)


# ---- memory ---------------------------------------------------------------------------------------------------------

_SIZE = 8 << 30
_SHARE = 256 << 20
_NO_RESERVE = 0x4000
_ALIGNMENT = 512


class _Arena:
    """The memory of one GPU: addresses are handed out in order, so that equal calls get equal ones; never written."""

    def __init__(self) -> None:
        self._pages = mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | _NO_RESERVE)
        self.start = _TensorBase.data_ptr(torch.frombuffer(self._pages, dtype=torch.uint8))
        self._lock, self._threads = threading.Lock(), 0
        self._local = threading.local()
        self.inputs = self._new_share()

    def _new_share(self) -> list[int]:
        with self._lock:
            self._threads += 1
            return [(self._threads - 1) * _SHARE, self._threads * _SHARE]

    def scratch(self) -> list[int]:
        if not hasattr(self._local, "share"):
            self._local.share = self._new_share()
            self._local.first = self._local.share[0]
        return self._local.share

    def restart(self) -> None:
        """Forget what this thread's calls allocated."""
        share = self.scratch()
        share[0] = self._local.first

    def take(self, share: list[int], shape: Any, dtype: torch.dtype) -> Tensor:
        count, start = math.prod(shape), share[0]
        share[0] += -(-max(1, count * dtype.itemsize) // _ALIGNMENT) * _ALIGNMENT
        assert share[0] <= share[1], "the stand-in's memory is used up"
        # Each a tensor of its own, not a view of all memory: autograd tells them apart.
        flat = torch.frombuffer(self._pages, dtype=dtype, count=max(1, count), offset=start)
        return flat.resize_(shape) if count else flat[:0].view(shape)

    def has(self, address: int) -> bool:
        return self.start <= address < self.start + _SIZE


_TensorBase: Any = torch._C.TensorBase


@dataclass(frozen=True)
class Launch:
    """What reached the driver; `compiled` numbers the compiled kernels.

    Addresses of tensors that torch made on the way differ from call to call: they are given as their alignment and
    first bytes.
    """

    kernel: str
    compiled: int
    grid: tuple[int, ...]
    threads: int
    shared: int
    is_dependent: bool
    stream: int
    arguments: tuple[Any, ...]


class _Record(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        *((name, ctypes.c_uint32 * 3) for name in ("grid", "block")),
        *((name, ctypes.c_uint32) for name in ("shared", "dependent", "count", "bytes")),
        ("sizes", ctypes.c_uint32 * 96),
        ("params", ctypes.c_uint8 * 3072),
        ("snapshots", (ctypes.c_uint8 * 32) * 96),
    ]


class StandIn:
    """Two GPUs: `current` is the current one, `stream` its stream, `elsewhere` where torch's own results lie."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self.arenas = [_Arena(), _Arena()]
        self.current, self.elsewhere, self.stream, self.is_capturing = 0, 0, 7, False
        self._driver = driver
        self._names: dict[int, str] = {}
        self._layouts: dict[int, list[bool]] = {}
        driver.standin_get.restype = ctypes.POINTER(_Record)
        driver.standin_launched.restype = ctypes.c_uint64
        assert driver.standin_record_size() == ctypes.sizeof(_Record)

    # ---- tensors

    def fresh(self) -> None:
        """Give all inputs' memory back, for the next test."""
        for arena in self.arenas:
            arena.inputs[0] = 0

    def empty(self, *shape: int, dtype: torch.dtype = torch.float16, device: int = 0) -> Tensor:
        """An input: memory that stays its own."""
        arena = self.arenas[device]
        return arena.take(arena.inputs, shape, dtype)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float16, device: int = 0) -> Tensor:
        return self.empty(*shape, dtype=dtype, device=device).normal_()

    def put(self, values: Tensor, device: int = 0) -> Tensor:
        return self.empty(*values.shape, dtype=values.dtype, device=device).copy_(values)

    def device_of(self, tensor: Tensor) -> int:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return self.elsewhere
        address = _TensorBase.data_ptr(tensor)
        for i, arena in enumerate(self.arenas):
            if arena.has(address):
                return i
        return self.elsewhere

    def place(self, address: int, content: bytes) -> Any:
        """An address for comparison with another call's, or another process's."""
        for i, arena in enumerate(self.arenas):
            if arena.has(address):
                return f"gpu {i}", address - arena.start
        return "elsewhere", address % 16, content

    # ---- launches

    @property
    def launched(self) -> int:
        """Launches so far."""
        return self._driver.standin_launched()

    @property
    def loaded(self) -> int:
        """Compiled kernels loaded so far."""
        return self._driver.standin_loaded()

    def on_load(self, _: Any, function: int, name: str, files: dict[str, str], __: str) -> None:
        path = next(path for file, path in files.items() if file.endswith(".ptx"))
        sizes, pointers = _parameters(Path(path).read_text())
        self._names[function], self._layouts[function] = name, pointers
        count = len(sizes)
        array, marks = (ctypes.c_uint32 * count)(*sizes), (ctypes.c_uint8 * count)(*pointers)
        self._driver.standin_layout(ctypes.c_uint64(function), count, array, marks)

    def launches(self, call: Callable[[], Any]) -> list[Launch]:
        """What `call` launches, its allocations beginning where every call's do."""
        for arena in self.arenas:
            arena.restart()
        with self.recording() as launches:
            call()
        return launches

    @contextmanager
    def recording(self) -> Any:
        launches: list[Launch] = []
        self._driver.standin_record(1)
        yield launches
        for i in range(self._driver.standin_count()):
            launches.append(self._read(self._driver.standin_get(i).contents))
        self._driver.standin_record(0)

    def _read(self, record: _Record) -> Launch:
        arguments: list[Any] = []
        start, data = 0, bytes(record.params)
        for i in range(record.count):
            size = record.sizes[i]
            value = data[start : start + size]
            start += size
            if size == 128:
                address = int.from_bytes(value[:8], "little")
                shown: Any = ("descriptor", self.place(address, bytes(record.snapshots[i])), value[8:96])
            else:
                shown = int.from_bytes(value, "little")
                if self._layouts[record.function][i] and shown:
                    shown = self.place(shown, bytes(record.snapshots[i]))
            arguments.append(shown)
        return Launch(
            self._names[record.function],
            record.function,
            tuple(record.grid),
            record.block[0],
            record.shared,
            bool(record.dependent),
            record.stream,
            tuple(arguments),
        )


def _parameters(ptx: str) -> tuple[list[int], list[bool]]:
    """Sizes of a kernel's parameters, and which are pointers."""
    header = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    assert header, "no kernel in the PTX"
    sizes, pointers = [], []
    for line in filter(None, (part.strip() for part in header[1].split(","))):
        array = re.search(r"\[(\d+)\]", line)
        scalar = re.search(r"\.[usbf](\d+)", line)
        assert scalar, line
        sizes.append(int(array[1]) if array else int(scalar[1]) // 8)
        pointers.append(".ptr" in line and not array)
    return sizes, pointers


# ---- installation ---------------------------------------------------------------------------------------------------

_installed: StandIn | None = None


def install() -> StandIn:
    """The process's stand-in, installed at the first call."""
    global _installed
    if _installed is None:
        assert INSTALLED, "only in a process of its own"
        folder = Path(os.environ["IKBO_STANDIN_FOLDER"])
        _installed = StandIn(_build_driver(folder))
        _replace_torch(_installed)
        _replace_triton(_installed, folder)
    return _installed


def _build_driver(folder: Path) -> ctypes.CDLL:
    import triton.backends.nvidia

    includes = Path(triton.backends.nvidia.__file__).parent / "include"
    library = folder / "libcuda.so.1"
    if not library.exists():
        source = Path(__file__).with_name("libcuda.c")
        # A library of this name that is loaded already is the one that everyone finds.
        command = [_COMPILER, "-shared", "-fPIC", "-O2", f"-I{includes}", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*command, "-o", str(library), str(source)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _replace_torch(gpu: StandIn) -> None:
    """Tensors say that they are on a GPU, and new ones for a GPU come from its memory."""
    devices = [torch.device("cuda", i) for i in range(2)]
    # Nothing but the device differs from what torch says.
    plain: Any = _TensorBase.device.__get__

    def device(tensor: Tensor) -> torch.device:
        real = plain(tensor)
        return devices[gpu.device_of(tensor)] if real.type == "cpu" else real

    named: Any = torch.Tensor
    named.device = property(device)
    named.is_cuda = property(lambda tensor: plain(tensor).type == "cpu")
    named.get_device = lambda tensor: gpu.device_of(tensor)

    real_empty = torch.empty

    def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Tensor:
        where = torch.device("cpu" if device is None else device)
        if where.type != "cuda":
            return real_empty(*size, dtype=dtype, device=device, **more)
        arena = gpu.arenas[gpu.current if where.index is None else where.index]
        shape = size[0] if size and not isinstance(size[0], int) else size
        return arena.take(arena.scratch(), shape, dtype or torch.get_default_dtype())

    def empty_like(tensor: Tensor, **more: Any) -> Tensor:
        return empty(tensor.shape, dtype=more.get("dtype", tensor.dtype), device=more.get("device", tensor.device))

    real_strided = torch.empty_strided

    def empty_strided(size: Any, strides: Any, *, device: Any = None, **more: Any) -> Tensor:
        if torch.device("cpu" if device is None else device).type != "cuda":
            return real_strided(size, strides, device=device, **more)
        made = empty(size, device=device, **more)
        assert made.stride() == strides or not made.numel(), "the stand-in's new tensors are contiguous"
        return made

    torch.empty, torch.empty_like = empty, empty_like  # type: ignore[assignment]
    torch.empty_strided = empty_strided
    from ikbo_recsys.kernels import _launch

    if _launch._empty_strided_cuda is not None:
        _launch._empty_strided_cuda = lambda size, strides, dtype: empty_strided(
            size, strides, dtype=dtype, device=devices[gpu.current]
        )
    for name in ("zeros", "ones", "full", "arange", "tensor"):
        setattr(torch, name, _without_gpu(getattr(torch, name)))

    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 2
    cuda.current_device = lambda: gpu.current
    torch._C._cuda_getDevice = lambda: gpu.current
    cuda.is_current_stream_capturing = lambda: gpu.is_capturing
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    library: Any = torch._C
    library._cuda_getCurrentRawStream = lambda index: gpu.stream + 100 * index

    class Guard:
        def __init__(self, device: Any) -> None:
            self._index = device if isinstance(device, int) else torch.device(device).index

        def __enter__(self) -> None:
            self._before, gpu.current = gpu.current, self._index

        def __exit__(self, *_: object) -> None:
            gpu.current = self._before

    cuda.device = Guard


def _without_gpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*args: Any, device: Any = None, **more: Any) -> Tensor:
        if device is not None and torch.device(device).type == "cuda":
            device = "cpu"
        return factory(*args, device=device, **more)

    return make


_ASSEMBLER = """#!/bin/sh
[ "$1" = --version ] && exec "{real}" --version
for last; do :; done
echo not machine code > "$last"
"""


def _replace_triton(gpu: StandIn, folder: Path) -> None:
    """Triton's own driver, and everything up to PTX: an assembler that is asked for nothing but its version."""
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    assembler = folder / "ptxas"
    if not assembler.exists():
        assembler.write_text(_ASSEMBLER.format(real=triton.knobs.nvidia.ptxas.path))
        assembler.chmod(0o755)
    os.environ["TRITON_PTXAS_PATH"] = str(assembler)
    triton.runtime.driver.set_active(CudaDriver())
    triton.knobs.runtime.kernel_load_end_hook.add(gpu.on_load)
