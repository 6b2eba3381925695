"""What a Gluon kernel computes with: tensors in registers, pointers, shared memory, TMA descriptors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def raw(value: Any) -> Any:
    """The torch tensor or number behind a value; reading a product that is still under way is an error."""
    return value.x if isinstance(value, Value) else value


def number(value: Any) -> int:
    return int(raw(value))


class Value:
    """A tensor in registers, or a scalar: a torch tensor with the methods of Gluon's."""

    def __init__(self, x: Any) -> None:
        self._x = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int32 if type(x) is int else None)

    @property
    def x(self) -> Tensor:
        return self._x

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def shape(self) -> list[int]:
        return list(self._x.shape)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None, element_ty=self._x.dtype)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        return Value(self.x.view(dtype) if bitcast else self.x.to(dtype))

    def reshape(self, *shape: Any) -> Value:
        return Value(self.x.reshape(_sizes(shape)))

    def permute(self, *dims: Any) -> Value:
        return Value(self.x.permute(_sizes(dims)))

    def broadcast_to(self, *shape: Any) -> Value:
        return Value(self.x.broadcast_to(_sizes(shape)))

    def split(self) -> tuple[Value, Value]:
        left, right = self.x.unbind(-1)
        return Value(left), Value(right)

    def __getitem__(self, places: Any) -> Value:
        return Value(self.x[places])

    def __bool__(self) -> bool:
        return bool(self.x)

    def __index__(self) -> int:
        return int(self.x)

    def __int__(self) -> int:
        return int(self.x)

    def __float__(self) -> float:
        return float(self.x)

    def __neg__(self) -> Value:
        return Value(-self.x)

    def __invert__(self) -> Value:
        return Value(~self.x)

    def __hash__(self) -> int:
        return id(self)


def _sizes(given: tuple[Any, ...]) -> list[int]:
    return [number(x) for x in (given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given)]


def _divide(a: Any, b: Any) -> Any:
    """As the hardware divides integers: towards zero."""
    return torch.div(_tensor(a), b, rounding_mode="trunc")


def _remainder(a: Any, b: Any) -> Any:
    return torch.fmod(_tensor(a), b)


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int32)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge", "eq", "ne")},
    **{name: getattr(operator, name) for name in ("xor", "lshift", "rshift")},
    **{"and": operator.and_, "or": operator.or_, "floordiv": _divide, "mod": _remainder},
}


def _method(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Value, Any], Any]:
    def method(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        pair = (raw(other), self.x) if swapped else (self.x, raw(other))
        return Value(function(*pair))

    return method


for _name, _function in _OPERATORS.items():
    setattr(Value, f"__{_name}__", _method(_function, False))
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__r{_name}__", _method(_function, True))


class UnfencedError(AssertionError):
    """What ordinary stores wrote is read by TMA or wgmma without a fence between."""


class Product(Value):
    """The result of a `warpgroup_mma`, which nobody may read before it is waited for."""

    def __init__(self, compute: Callable[[], Tensor], shape: list[int]) -> None:
        self._compute: Callable[[], Tensor] | None = compute
        self._shape = shape
        self._error: UnfencedError | None = None
        self.waited_for = False

    def __call__(self) -> None:
        """Make it: what an asynchronous product does at some time before it is waited for."""
        assert self._compute is not None
        try:
            self._x = self._compute()
        except UnfencedError as error:
            self._error = error  # harmless where the result is dropped
        self._compute = None

    @property
    def made(self) -> Tensor:
        """For the next product on the same accumulator, which needs no wait: products are made in order."""
        assert self._compute is None
        return self._known

    @property
    def x(self) -> Tensor:
        assert self.waited_for, "a product is read that was not waited for"
        return self._known

    @property
    def _known(self) -> Tensor:
        if self._error is not None:
            raise self._error
        return self._x

    @property
    def shape(self) -> list[int]:
        return self._shape


class Pointer:
    """Addresses into the memory that a tensor lies in."""

    def __init__(self, memory: Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, tensor: Tensor) -> Pointer:
        whole = torch.empty(0, dtype=tensor.dtype)
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(whole.set_(tensor.untyped_storage(), 0, (size,)), Value(tensor.storage_offset()))

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    __radd__ = __add__

    def __getitem__(self, places: Any) -> Pointer:
        return Pointer(self.memory, self.offset[places])

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Indices into the memory, and which of them count; these must lie inside."""
        places = raw(self.offset).long()
        counts = torch.ones_like(places, dtype=torch.bool)
        if mask is not None:
            places, counts = torch.broadcast_tensors(places, torch.as_tensor(raw(mask)))
        used = places[counts]
        if used.numel() and (int(used.min()) < 0 or int(used.max()) >= self.memory.numel()):
            raise IndexError(f"elements {int(used.min())} to {int(used.max())} of {self.memory.numel()}")
        return places, counts


class Shared:
    """A view of shared memory. `dirty` marks what was written by ordinary stores and not fenced since, by whom."""

    def __init__(self, memory: Tensor, dirty: Tensor, layout: Any = None) -> None:
        self.memory, self.dirty, self.layout = memory, dirty, layout

    @classmethod
    def allocate(cls, dtype: torch.dtype, shape: Any, layout: Any) -> Shared:
        sizes = [number(x) for x in shape]
        poison = (
            torch.full(sizes, float("nan"), dtype=dtype) if dtype.is_floating_point else torch.zeros(sizes, dtype=dtype)
        )
        return cls(poison, torch.zeros(sizes, dtype=torch.int8), layout)

    @property
    def shape(self) -> list[int]:
        return list(self.memory.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def _view(self, function: Callable[[Tensor], Tensor]) -> Shared:
        return Shared(function(self.memory), function(self.dirty), self.layout)

    def index(self, i: Any) -> Shared:
        place = number(i)
        assert 0 <= place < self.shape[0], f"buffer {place} of {self.shape[0]}"
        return self._view(lambda x: x[place])

    def reshape(self, shape: Any) -> Shared:
        return self._view(lambda x: x.view([number(n) for n in shape]))

    def permute(self, dims: Any) -> Shared:
        return self._view(lambda x: x.permute(list(dims)))

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        return self._view(lambda x: x.narrow(dim, number(start), number(length)))

    def load(self, layout: Any = None) -> Value:
        return Value(self.memory.clone())

    def store(self, value: Any) -> None:
        self.memory.copy_(raw(value))
        self.dirty.fill_(_writer())
        # Others may store to the same place before it is read.
        _pause()

    def read_by_hardware(self) -> Tensor:
        """What TMA and wgmma see: ordinary stores only after their fence."""
        if self.dirty.any():
            raise UnfencedError("written by ordinary stores and read by TMA or wgmma without a fence between")
        return self.memory


class Eights:
    """What `_compat.eights` gives of a block: pieces of 8 rows and 64 columns, as int32.

    Here columns are in their order; on a GPU they are swizzled within a row, which code may not depend on.
    """

    def __init__(self, block: Shared, rows: Any, columns: Any) -> None:
        self._rows, self._columns = number(rows), number(columns)
        assert block.shape == [self._rows, self._columns]
        assert block.dtype.itemsize == 2
        swizzle = getattr(block.layout, "swizzle_byte_width", None)
        assert swizzle == 128, f"a swizzle of {swizzle} bytes"
        self._block = block

    def index(self, i: Any) -> Shared:
        half, eight = divmod(number(i), self._rows // 8)
        assert 0 <= half < self._columns // 64, f"piece {i} of {self._rows // 8 * self._columns // 64}"
        piece = self._block.slice(eight * 8, 8).slice(half * 64, 64, dim=1)
        return Shared(piece.memory.view(torch.int32), piece.dirty[:, ::2], None)


class Beside:
    """What `_compression_tiles.beside` gives: a wide block that is read, of blocks of 64 columns."""

    def __init__(self, blocks: Shared, i: Any, count: Any) -> None:
        assert blocks.shape[1] == 1
        assert blocks.shape[3] == 64
        assert blocks.dtype.itemsize == 2
        swizzle = getattr(blocks.layout, "swizzle_byte_width", None)
        assert swizzle == 128, f"a swizzle of {swizzle} bytes"
        assert blocks.shape[0] % number(count) == 0
        first = number(i) * number(count)
        self._blocks = [blocks.index(first + j).reshape(blocks.shape[2:]) for j in range(number(count))]
        self.shape = [blocks.shape[2], 64 * number(count)]

    def read_by_hardware(self) -> Tensor:
        return torch.cat([block.read_by_hardware() for block in self._blocks], 1)


def _pause() -> None:
    """Let other partitions run, if this is one."""
    from tests.emulator import language

    if language._block is not None and language._block.scheduler.current is not None:
        language._block.scheduler.pause()


def _writer() -> int:
    from tests.emulator import language

    return language.writer()


class Descriptor:
    """A TMA descriptor: boxes of a tensor, zeros outside of it."""

    def __init__(self, given: Any) -> None:
        base = given.base
        whole = torch.empty(0, dtype=base.dtype).set_(
            base.untyped_storage(), base.storage_offset(), tuple(given.shape), tuple(given.strides)
        )
        assert whole.data_ptr() % 16 == 0, "TMA: the base is not aligned"
        assert all(stride * base.element_size() % 16 == 0 for stride in given.strides[:-1]), (
            "TMA: a stride is not aligned"
        )
        self.tensor, self.block_shape, self.layout = whole, list(given.block_shape), given.layout

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def box(self, corner: Any) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of the tensor, and the part of the box, where the two overlap."""
        inside, part = [], []
        for start, length, size in zip(map(number, corner), self.block_shape, self.tensor.shape, strict=True):
            low, high = max(start, 0), min(start + length, size)
            high = max(high, low)
            inside.append(slice(low, high))
            part.append(slice(low - start, high - start))
        return tuple(inside), tuple(part)
