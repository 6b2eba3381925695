"""`CandidateIndex`: which user each candidate belongs to.

Shape letters: U users, B candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["CandidateIndex"]

_INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class CandidateIndex:
    """The candidate-to-user index of one batch: candidate `b` belongs to user `to_user[b]`.

    A small immutable value. It is a pytree (leaves `to_user`, `num_users`, `offsets`), so it passes through
    `torch.compile`, `torch.export` and `.to(device)` like any other input.

    Args:
        to_user: int32 or int64 `[B]`, values in `[0, num_users)`, in any order.
        num_users: U. Users without candidates are allowed, and so are `U = 0` and `B = 0`.
        offsets: same dtype as `to_user`, `[U + 1]`, when the candidates are *grouped* (those of one user are
            adjacent, users in order): the candidates of user `u` are `offsets[u]:offsets[u + 1]`. `None` when they
            are not, or not known to be.

    Shapes, dtypes and devices are always checked. Values are checked, as `validate()` does, for tensors in host memory;
    for tensors on a GPU that would be a synchronisation, so there `validate()` is yours to call.

    Raises:
        TypeError: `to_user` or `offsets` is not int32/int64, their dtypes differ, or `num_users` is not an integer.
        ValueError: a wrong number of dimensions or a wrong length, tensors on two devices, or as `validate()`.

    Example::

        >>> index = CandidateIndex.from_counts(torch.tensor([2, 0, 3]))
        >>> index.to_user
        tensor([0, 0, 2, 2, 2])
        >>> index.num_users, index.num_candidates, index.is_grouped
        (3, 5, True)
    """

    to_user: Tensor
    num_users: int
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        check_index_tensor("to_user", self.to_user)
        check_count("num_users", self.num_users)
        if self.offsets is not None:
            self._check_offsets_tensor(self.offsets)
        if on_host(self.to_user):
            self.validate()

    def _check_offsets_tensor(self, offsets: Tensor) -> None:
        check_index_tensor("offsets", offsets)
        if offsets.dtype != self.to_user.dtype:
            raise TypeError(f"offsets is {offsets.dtype} but to_user is {self.to_user.dtype}: they must be equal")
        if offsets.device != self.to_user.device:
            raise ValueError(f"offsets is on {offsets.device} but to_user is on {self.to_user.device}")
        if offsets.shape[0] != self.num_users + 1:
            raise ValueError(f"offsets has {offsets.shape[0]} entries but num_users + 1 is {self.num_users + 1}")

    @property
    def num_candidates(self) -> int:
        """B."""
        return self.to_user.shape[0]

    @property
    def is_grouped(self) -> bool:
        """Whether the candidates of one user are known to be adjacent, users in order."""
        return self.offsets is not None

    @property
    def device(self) -> torch.device:
        return self.to_user.device

    @property
    def dtype(self) -> torch.dtype:
        return self.to_user.dtype

    def counts(self) -> Tensor:
        """Candidates per user `[U]`, in the dtype of the index."""
        if self.offsets is not None:
            return self.offsets.diff()
        zeros = self.to_user.new_zeros(self.num_users)
        return zeros.index_add(0, self.to_user, torch.ones_like(self.to_user))

    @classmethod
    def from_user_ids(cls, ids: Tensor, num_users: int, *, grouped: bool = False) -> CandidateIndex:
        """From the row of each candidate's user.

        Args:
            ids: int32 or int64 `[B]`.
            num_users: U.
            grouped: state that `ids` is non-decreasing. The kernels then need no permutation and their gradients are
                deterministic. It is a promise and not a guess: nothing reads `ids` to find out.

        Raises:
            ValueError: an entry outside `[0, num_users)`, or `ids` that fall although `grouped` (in host memory).
        """
        check_index_tensor("ids", ids)
        check_count("num_users", num_users)
        offsets = None
        if grouped:
            if on_host(ids):
                check_not_falling("ids", ids)
            bounds = torch.arange(num_users + 1, dtype=ids.dtype, device=ids.device)
            offsets = torch.searchsorted(ids, bounds, out_int32=ids.dtype == torch.int32)
        return cls(ids, num_users, offsets)

    @classmethod
    def from_counts(cls, counts: Tensor, *, num_candidates: int | None = None) -> CandidateIndex:
        """From the number of candidates of each user: grouped.

        Args:
            counts: int32 or int64 `[U]`, not negative.
            num_candidates: their sum B. Give it where you know it (the candidates' own batch size): without it the
                sum is read from the device once, which waits for the GPU.

        Raises:
            ValueError: a negative count, or counts whose sum is not `num_candidates`.
        """
        check_index_tensor("counts", counts)
        if on_host(counts):
            if counts.numel() and int(counts.min()) < 0:
                position = int((counts < 0).nonzero()[0])
                raise ValueError(f"counts[{position}] is {int(counts[position])}: a count must not be negative")
            total = int(counts.sum())
            if num_candidates is not None and total != num_candidates:
                raise ValueError(f"counts sum to {total} but num_candidates is {num_candidates}")
            if total > torch.iinfo(counts.dtype).max:
                raise ValueError(f"counts sum to {total}, which {counts.dtype} cannot hold: give int64 counts")
        zero = counts.new_zeros(1)
        return cls.from_offsets(torch.cat((zero, counts.cumsum(0, dtype=counts.dtype))), num_candidates=num_candidates)

    @classmethod
    def from_offsets(cls, offsets: Tensor, *, num_candidates: int | None = None) -> CandidateIndex:
        """From the position of each user's first candidate, as in a jagged tensor: grouped.

        Args:
            offsets: int32 or int64 `[U + 1]`, from 0 to B, non-decreasing.
            num_candidates: B, as in `from_counts`.

        Raises:
            ValueError: offsets that do not start at 0, that fall, or that do not end at `num_candidates`.
        """
        check_index_tensor("offsets", offsets)
        if offsets.shape[0] == 0:
            raise ValueError("offsets has 0 entries but needs num_users + 1 of them, at least 1")
        if on_host(offsets):
            _check_offset_values(offsets, num_candidates)
        total = int(offsets[-1]) if num_candidates is None else num_candidates
        positions = torch.arange(total, dtype=offsets.dtype, device=offsets.device)
        to_user = torch.searchsorted(offsets[1:], positions, right=True, out_int32=offsets.dtype == torch.int32)
        return cls(to_user, offsets.shape[0] - 1, offsets)

    @classmethod
    def from_inverse_indices(cls, features: KeyedJaggedTensor, key: str) -> CandidateIndex:
        """From a variable-batch `KeyedJaggedTensor`: the row of `inverse_indices` of a user feature *is* the index.

        Args:
            features: a torchrec `KeyedJaggedTensor` with `inverse_indices`, which `KeyedJaggedTensor.split` drops:
                read it first.
            key: a user feature; its own batch size is U.

        Raises:
            ValueError: no `inverse_indices`, or none for `key`.
        """
        inverse = features.inverse_indices_or_none()
        if inverse is None:
            raise ValueError(
                "features has no inverse_indices: only a variable-batch KeyedJaggedTensor carries an index"
            )
        keys, indices = inverse
        if key not in keys:
            raise ValueError(f"key {key!r} is not among the keys of inverse_indices {list(keys)}")
        num_users = features.stride_per_key()[features.keys().index(key)]
        return cls.from_user_ids(indices[list(keys).index(key)], num_users)

    def then(self, child: CandidateIndex) -> CandidateIndex:
        """Compose two levels: `self` maps vendors to users, `child` maps items to vendors, the result maps items to
        users.

        It is grouped when both levels are.

        Raises:
            ValueError: `child.num_users` is not `self.num_candidates`, or the two are on different devices.
            TypeError: their dtypes differ.
        """
        if child.num_users != self.num_candidates:
            raise ValueError(
                f"child.num_users is {child.num_users} but the parent level has {self.num_candidates} candidates"
            )
        if child.dtype != self.dtype:
            raise TypeError(f"child is {child.dtype} but the parent level is {self.dtype}: they must be equal")
        if child.device != self.device:
            raise ValueError(f"child is on {child.device} but the parent level is on {self.device}")
        offsets = None
        if self.offsets is not None and child.offsets is not None:
            offsets = child.offsets.index_select(0, self.offsets)
        return CandidateIndex(self.to_user.index_select(0, child.to_user), self.num_users, offsets)

    def to(self, *args: Any, **kwargs: Any) -> CandidateIndex:
        """A copy on another device or in another integer dtype, with the arguments of `torch.Tensor.to`."""
        offsets = None if self.offsets is None else self.offsets.to(*args, **kwargs)
        return CandidateIndex(self.to_user.to(*args, **kwargs), self.num_users, offsets)

    def pin_memory(self) -> CandidateIndex:
        """A copy in page-locked host memory, as a `DataLoader` with `pin_memory=True` asks for."""
        offsets = None if self.offsets is None else self.offsets.pin_memory()
        return CandidateIndex(self.to_user.pin_memory(), self.num_users, offsets)

    def validate(self) -> CandidateIndex:
        """Check the values and return `self`. It reads the device, so no `forward` calls it.

        Raises:
            ValueError: an entry outside `[0, num_users)`; offsets that do not start at 0, that decrease, that do not
                end at `num_candidates`, or that disagree with `to_user`. The message has the position and both numbers.
        """
        outside = (self.to_user < 0) | (self.to_user >= self.num_users)
        if bool(outside.any()):
            position = int(outside.nonzero()[0])
            raise ValueError(f"to_user[{position}] is {int(self.to_user[position])} but num_users is {self.num_users}")
        if self.offsets is None:
            return self
        _check_offset_values(self.offsets, self.num_candidates)
        implied = torch.repeat_interleave(self.offsets.diff(), output_size=self.num_candidates)
        differs = implied != self.to_user
        if bool(differs.any()):
            position = int(differs.nonzero()[0])
            expected, got = int(implied[position]), int(self.to_user[position])
            raise ValueError(f"to_user[{position}] is {got} but offsets put that candidate under user {expected}")
        return self


def on_host(tensor: Tensor) -> bool:
    """Whether the values can be read now without waiting for a GPU and without leaving a traced graph."""
    if torch.compiler.is_compiling() or tensor.device.type != "cpu":
        return False
    # Fake and functional tensors are subclasses; make_fx may also trace with real ones, and vmap wraps them.
    plain = type(tensor) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return plain and get_proxy_mode() is None


def check_count(name: str, number: int) -> None:
    """Raise unless `number` is an integer (or a traced one) that is not negative."""
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, got {type(number).__name__}")
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {number}")


def check_not_falling(name: str, values: Tensor) -> None:
    """Raise, with the position and both numbers, if a value is less than the one before it. Reads the device."""
    falls = values.diff() < 0
    if bool(falls.any()):
        position = int(falls.nonzero()[0])
        before, after = int(values[position]), int(values[position + 1])
        raise ValueError(f"{name}[{position + 1}] is {after}, less than {name}[{position}] which is {before}")


def _check_offset_values(offsets: Tensor, num_candidates: int | None) -> None:
    if int(offsets[0]) != 0:
        raise ValueError(f"offsets[0] is {int(offsets[0])} but must be 0")
    check_not_falling("offsets", offsets)
    if num_candidates is not None and int(offsets[-1]) != num_candidates:
        raise ValueError(f"offsets[-1] is {int(offsets[-1])} but num_candidates is {num_candidates}")


def check_index_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have 1 dimension, got {tensor.dim()} (shape {tuple(tensor.shape)})")


def _flatten(index: CandidateIndex) -> tuple[list[Any], None]:
    return [index.to_user, index.num_users, index.offsets], None


def _flatten_with_keys(index: CandidateIndex) -> tuple[list[tuple[Any, Any]], None]:
    names = ("to_user", "num_users", "offsets")
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, _flatten(index)[0], strict=True)], None


def _unflatten(leaves: Any, _: None) -> CandidateIndex:
    # Leaves are not always tensors (torch.export puts dynamic shapes there), so this skips the checks of __init__.
    index = object.__new__(CandidateIndex)
    for name, leaf in zip(("to_user", "num_users", "offsets"), leaves, strict=True):
        object.__setattr__(index, name, leaf)
    return index


pytree.register_pytree_node(
    CandidateIndex,
    _flatten,
    _unflatten,
    serialized_type_name="ikbo_recsys.CandidateIndex",
    flatten_with_keys_fn=_flatten_with_keys,
)
torch.serialization.add_safe_globals([CandidateIndex])
