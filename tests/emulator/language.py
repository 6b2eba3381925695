"""Stand-ins for `gl`, `mbarrier`, `tma`, `async_copy` and `warpgroup_mma`, and the running of a kernel on them."""

from __future__ import annotations

import inspect
import re
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.emulator.scheduler import Barrier, NamedBarrier, Scheduler
from tests.emulator.values import Beside, Descriptor, Eights, Pointer, Product, Shared, Value, number, raw


class Block:
    """The state of the block that runs."""

    def __init__(self, number: int, blocks: int, scheduler: Scheduler) -> None:
        self.number, self.blocks, self.scheduler = number, blocks, scheduler
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[str, NamedBarrier] = defaultdict(NamedBarrier)
        self.memories: list[Shared] = []
        self.waited: set[int] = set()  # who waited for the kernel before


_block: Block


def writer() -> int:
    """Who runs: 1 for the block before its partitions, else 2 and up."""
    task = _block.scheduler.current
    return 1 if task is None else 2 + _block.scheduler.tasks.index(task)


# ---- programmatic dependent launch ---------------------------------------------------------------------------------


class Kernel:
    """What the running kernel may touch before it has waited for the kernel before, with which it may overlap."""

    def __init__(self, before: Kernel | None, is_dependent: bool) -> None:
        self.is_dependent, self.lets_next_begin = is_dependent, False
        self.written: set[int] = set()  # addresses of storages
        self.before_writes = before.written if is_dependent and before and before.lets_next_begin else set()

    def reads(self, memory: Tensor) -> None:
        assert not self._overlaps() or memory.untyped_storage().data_ptr() not in self.before_writes, (
            "what the kernel before writes is read without waiting for it"
        )

    def writes(self, memory: Tensor) -> None:
        assert not self._overlaps(), "global memory is written without waiting for the kernel before"
        self.written.add(memory.untyped_storage().data_ptr())

    def _overlaps(self) -> bool:
        return self.is_dependent and not _block.waited & {1, writer()}


_kernel = Kernel(None, False)

# ---- gl --------------------------------------------------------------------------------------------------------------


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _arange(start: int, end: int, layout: Any = None) -> Value:
    return Value(torch.arange(start, end, dtype=torch.int32))


def _zeros(shape: Any, dtype: torch.dtype, layout: Any = None) -> Value:
    return Value(torch.zeros([number(n) for n in shape], dtype=dtype))


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(yes, Pointer):
        return yes if raw(condition) else no
    a, b = (x if isinstance(x, Tensor) else torch.tensor(x) for x in (raw(yes), raw(no)))
    if not isinstance(raw(yes), Tensor) and isinstance(raw(no), Tensor):
        a = a.to(b.dtype)
    if not isinstance(raw(no), Tensor) and isinstance(raw(yes), Tensor):
        b = b.to(a.dtype)
    if not isinstance(raw(yes), Tensor) and not isinstance(raw(no), Tensor) and a.dtype == torch.int64:
        a, b = a.int(), b.int()
    return Value(torch.where(torch.as_tensor(raw(condition)), a, b))


def _extreme(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Any]:
    def extreme(a: Any, b: Any) -> Value:
        return Value(function(*(torch.as_tensor(raw(x)) for x in (a, b))))

    return extreme


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Value:
    places, counts = pointer.places(mask)
    _kernel.reads(pointer.memory)
    out = torch.full(places.shape, float(raw(other)), dtype=torch.float64).to(pointer.memory.dtype)
    out[counts] = pointer.memory[places[counts]]
    return Value(out)


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    places, counts = pointer.places(mask)
    values = torch.as_tensor(raw(value)).to(pointer.memory.dtype).broadcast_to(places.shape)
    if counts.any():
        _kernel.writes(pointer.memory)
    pointer.memory[places[counts]] = values[counts]


def _atomic_add(pointer: Pointer, value: Any, sem: str = "acq_rel", scope: str = "gpu") -> Value:
    """Each element's in its turn. Gives what was there before the first."""
    places, _ = pointer.places(None)
    _kernel.writes(pointer.memory)
    before = pointer.memory[places].clone()
    values = torch.as_tensor(raw(value)).to(pointer.memory.dtype).broadcast_to(places.shape)
    pointer.memory.index_add_(0, places.reshape(-1), values.reshape(-1))
    _block.scheduler.pause()
    return Value(before)


def _inline_asm(asm: str, constraints: str, args: Sequence[Any], **_: Any) -> Any:
    """The few pieces of assembly that the kernels have, by what they say."""
    named = re.search(r"bar\.(sync|arrive) (\d+), 256;", asm)
    if named:
        barrier = _block.named[named[2]]
        mine = barrier.arrive(_block.scheduler.current)
        if named[1] == "sync":
            _block.scheduler.pause(lambda: barrier.generation > mine, f"named barrier {named[2]}")
        return args[0]
    if re.search(r"bar\.(arrive|sync) \d+, 128;", asm):  # whoever arrives is all who are waited for
        return args[0]
    if asm.startswith("griddepcontrol."):
        if asm.startswith("griddepcontrol.wait"):
            _block.waited.add(writer())
        else:
            _kernel.lets_next_begin = True
        return None
    if asm == "mov.b32 $0, $1;":  # a value that the compiler knows nothing of
        return args[0]
    if asm.startswith("cvt.rn."):  # two numbers, rounded, in one register
        dtype = torch.bfloat16 if "bf16x2" in asm else torch.float16
        return Value(torch.stack([raw(x).to(dtype) for x in args], -1).view(torch.int32).squeeze(-1))
    if "cvt.f32.f16" in asm:  # the inverse
        low, high = raw(args[0]).contiguous().view(torch.float16).unflatten(-1, (-1, 2)).float().unbind(-1)
        return Value(low), Value(high)
    if "mul.f32" in asm:  # the multiplication by a factor that is skipped where all factors are 1
        return args[0] * args[1]
    raise NotImplementedError(asm)


def _allocate(dtype: torch.dtype, shape: Any, layout: Any = None, value: Any = None) -> Shared:
    shared = Shared.allocate(dtype, shape, layout)
    _block.memories.append(shared)
    return shared


def _warp_specialize(functions: Any, warps: Any, registers: Any) -> None:
    _block.scheduler.run(functions)
    _block.scheduler.current = None


gl = SimpleNamespace(
    **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "int16", "int32", "int64")},
    **dict.fromkeys(
        ("DistributedLinearLayout", "NVMMADistributedLayout", "SliceLayout", "BlockedLayout", "DotOperandLayout"),
        _nothing,
    ),
    SwizzledSharedLayout=_nothing,
    NVMMASharedLayout=_nothing,
    constexpr=None,
    program_id=lambda axis: Value(_block.number),
    num_programs=lambda axis: Value(_block.blocks),
    to_tensor=lambda x: x if isinstance(x, Value) else Value(x),
    static_range=lambda *bounds: range(*map(number, bounds)),
    arange=_arange,
    zeros=_zeros,
    zeros_like=lambda x: Value(torch.zeros_like(raw(x))),
    full_like=lambda x, value: Value(torch.full_like(raw(x), value)),
    where=_where,
    minimum=_extreme(torch.minimum),
    maximum=_extreme(torch.maximum),
    exp2=lambda x: Value(torch.exp2(raw(x))),
    log2=lambda x: Value(torch.log2(raw(x))),
    sum=lambda x, axis: Value(raw(x).sum(axis)),
    max=lambda x, axis: Value(raw(x).amax(axis)),
    join=lambda a, b: Value(torch.stack((raw(a), raw(b)), -1)),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    load=_load,
    atomic_add=_atomic_add,
    store=_store,
    allocate_shared_memory=_allocate,
    inline_asm_elementwise=_inline_asm,
    warp_specialize=_warp_specialize,
)

# ---- barriers --------------------------------------------------------------------------------------------------------


def _barrier(place: Shared) -> Barrier:
    return _block.barriers[place.memory.data_ptr()]


def _init(place: Shared, count: int) -> None:
    _block.barriers[place.memory.data_ptr()] = Barrier(number(count))


def _wait(place: Shared, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    if raw(pred):
        barrier, parity = _barrier(place), number(phase)
        _block.scheduler.pause(lambda: barrier.phase != parity, f"phase {parity} of barrier {_name(place)}")


def _arrive(place: Shared, count: int = 1, pred: Any = True) -> None:
    if raw(pred):
        _barrier(place).arrive(number(count))
        _block.scheduler.pause()


def _expect(place: Shared, size: Any, pred: Any = True) -> None:
    if raw(pred):
        _barrier(place).expect(number(size))


def _name(place: Shared) -> int:
    return list(_block.barriers).index(place.memory.data_ptr())


mbarrier = SimpleNamespace(init=_init, wait=_wait, arrive=_arrive, expect=_expect, MBarrierLayout=_nothing)


def fence_async_shared() -> None:
    mine = writer()
    for shared in _block.memories:
        shared.dirty[shared.dirty == mine] = 0


# ---- TMA, cp.async ---------------------------------------------------------------------------------------------------


def tma_load(descriptor: Descriptor, corner: Any, barrier: Shared, shared: Shared, pred: Any = True) -> None:
    """The box lands at some later time, and tells the barrier."""
    if not raw(pred):
        return
    inside, part = descriptor.box(corner)
    assert shared.shape == descriptor.block_shape, f"a box of {descriptor.block_shape} into {shared.shape}"
    arrives = _barrier(barrier)
    _kernel.reads(descriptor.tensor)

    def land() -> None:
        shared.memory.zero_()
        shared.memory[part] = descriptor.tensor[inside]
        shared.dirty.zero_()
        arrives.land(shared.memory.numel() * shared.memory.element_size())

    assert not shared.dirty.any(), "written by ordinary stores and loaded over by TMA without a fence between"
    shared.memory.fill_(float("nan"))
    _block.scheduler.events.append(land)
    _block.scheduler.pause()


def tma_store(descriptor: Descriptor, corner: Any, shared: Shared) -> None:
    """The box is read at some later time, at the latest when it is waited for."""
    inside, part = descriptor.box(corner)
    assert shared.shape == descriptor.block_shape, f"a box of {descriptor.block_shape} from {shared.shape}"
    shared.read_by_hardware()
    if descriptor.tensor[inside].numel():
        _kernel.writes(descriptor.tensor)

    def store() -> None:
        descriptor.tensor[inside] = shared.memory[part]

    assert _block.scheduler.current is not None
    _block.scheduler.current.stores.append(store)
    _block.scheduler.pause()


def _store_wait(pendings: int = 0) -> None:
    assert _block.scheduler.current is not None
    stores = _block.scheduler.current.stores
    while len(stores) > pendings:
        stores.pop(0)()


tma = SimpleNamespace(
    store_wait=_store_wait, async_copy_global_to_shared=tma_load, async_copy_shared_to_global=tma_store
)


def _copy(shared: Shared, pointers: Pointer, mask: Any = None) -> None:
    places, counts = pointers.places(mask)
    _kernel.reads(pointers.memory)

    def land() -> None:
        values = torch.zeros(places.shape, dtype=pointers.memory.dtype)
        values[counts] = pointers.memory[places[counts]]
        shared.store(Value(values))

    assert _block.scheduler.current is not None
    _block.scheduler.current.copies.append(land)


def _copy_wait(pendings: int) -> None:
    assert pendings == 0
    assert _block.scheduler.current is not None
    copies = _block.scheduler.current.copies
    while copies:
        copies.pop(0)()


async_copy = SimpleNamespace(async_copy_global_to_shared=_copy, commit_group=_nothing, wait_group=_copy_wait)


def add_to_tile(half: Pointer, acc: Value, layout: Any, columns: Any) -> None:
    """Half a tile of the workspace of `cross_attention_backward_once`, in the order of the registers."""
    rows, width = acc.shape
    assert (rows, width) == (64, number(columns))
    values = acc.x.reshape(4, 2, 8, width // 8, 4, 2).permute(3, 0, 2, 4, 1, 5).reshape(-1)
    first = number(half.offset)
    assert 0 <= first <= half.memory.numel() - values.numel(), "behind the end of the workspace"
    _kernel.writes(half.memory)
    half.memory[first : first + values.numel()] += values
    _block.scheduler.pause()


# ---- matrix products -------------------------------------------------------------------------------------------------


def warpgroup_mma(a: Any, b: Shared, acc: Value, *, use_acc: Any = True, is_async: bool = False) -> Product:
    """`a @ b (+ acc)` in fp32, made at some time before it is waited for, from what shared memory holds then."""
    task = _block.scheduler.current
    assert task is not None
    assert is_async
    adds = bool(raw(use_acc))
    assert isinstance(a, Shared) or a.x.dtype != torch.float32
    assert a.shape[1] == b.shape[0], (a.shape, b.shape)
    assert acc.shape == [a.shape[0], b.shape[1]], (acc.shape, a.shape, b.shape)

    def compute() -> Tensor:
        left = a.read_by_hardware() if isinstance(a, Shared) else a.x
        out = left.float() @ b.read_by_hardware().float()
        before = acc.made if isinstance(acc, Product) else acc.x
        return out + before if adds else out

    product = Product(compute, acc.shape)
    task.matmuls.append(product)
    _block.scheduler.pause()
    return product


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    task = _block.scheduler.current
    assert task is not None
    while len(task.matmuls) > num_outstanding:
        task.matmuls.pop(0)()
    for value in deps:
        if isinstance(value, Product) and all(value is not product for product in task.matmuls):
            value.waited_for = True
    return deps[0] if len(deps) == 1 else tuple(deps)


# ---- running a kernel ------------------------------------------------------------------------------------------------


def _range(*bounds: Any) -> Iterator[Value]:
    """Loop variables are tensors."""
    return map(Value, range(*map(number, bounds)))


_STAND_INS: Mapping[str, Any] = {
    "range": _range,
    "gl": gl,
    "mbarrier": mbarrier,
    "tma": tma,
    "async_copy": async_copy,
    "fence_async_shared": fence_async_shared,
    "eights": Eights,
    "beside": Beside,
    "tma_load": tma_load,
    "tma_store": tma_store,
    "add_to_tile": add_to_tile,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
}


class _Namespace(dict):  # type: ignore[type-arg]
    """The globals of a module of device code, with stand-ins for the language and plain functions for the kernels."""

    def __init__(self, module: dict[str, Any]) -> None:
        super().__init__()
        _namespaces[id(module)] = self
        self.update((name, _plain(value)) for name, value in module.items() if name not in _STAND_INS)
        self.update(_STAND_INS)


_namespaces: dict[int, _Namespace] = {}
_functions: dict[int, Any] = {}


def _plain(value: Any) -> Any:
    from triton.language.core import constexpr

    if isinstance(value, constexpr):
        return value.value
    function = getattr(value, "fn", None)
    if not isinstance(function, types.FunctionType) or isinstance(value, types.FunctionType):
        return value
    # First the names of its module, this function among them.
    module = function.__globals__
    names = _namespaces.get(id(module))
    names = _Namespace(module) if names is None else names
    if id(value) not in _functions:
        plain = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        plain.__kwdefaults__ = function.__kwdefaults__
        _functions[id(value)] = plain
    return _functions[id(value)]


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Pointer.to(value)
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    return Value(value) if isinstance(value, int) and not isinstance(value, bool) else value


def emulate(
    kernel: Any,
    blocks: int,
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    *,
    seed: int,
    eager: float,
    backwards: bool = False,
    starved: int | None = None,
) -> None:
    """Run a kernel, block after block; the arguments behind its own as of `emulated`."""
    global _block, _kernel
    _kernel = Kernel(_kernel, bool(constants.get("launch_pdl")))
    function = _plain(kernel)
    names = inspect.signature(function).parameters
    given = {name: _argument(value) for name, value in zip(names, arguments, strict=False)}
    for number_of in reversed(range(blocks)) if backwards else range(blocks):
        _block = Block(number_of, blocks, Scheduler(seed * 1009 + number_of, eager, starved))
        function(**given, **{name: value for name, value in constants.items() if name in names})
