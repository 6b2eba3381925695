"""The checks, type promotion and index handling that every public operator begins with: written once.

Everything here looks at shapes, dtypes and devices, never at values, except `check_index_values` and `check_lengths`,
which read host tensors always (that costs microseconds) and GPU tensors only under `IKBO_CHECK=1` (asynchronously).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.candidate_index import CandidateIndex, check_index_tensor, check_not_falling, on_host
from ikbo_recsys.kernels import _backend

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_mode() -> bool:
    """Whether `IKBO_CHECK=1` asked for the value checks on the GPU."""
    return _backend.environment("IKBO_CHECK") not in ("", "0")


def check_dims(name: str, tensor: Tensor, layout: str) -> None:
    """Raise unless `tensor` has one dimension for each entry of `layout`, for example `"U, Ku, D"`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor [{layout}], got {type(tensor).__name__}")
    expected = layout.count(",") + 1
    if tensor.dim() != expected:
        raise ValueError(f"{name} must be [{layout}], got {tensor.dim()} dimensions {tuple(tensor.shape)}")


def check_equal_sizes(what: str, name_a: str, a: int, name_b: str, b: int) -> None:
    """Raise unless two sizes that must agree do."""
    if a != b:
        raise ValueError(f"{what} of {name_a} is {a} but {what} of {name_b} is {b}")


def check_weight(weight: Tensor, bias: Tensor | None, user_features: int, cand_features: int) -> None:
    """Raise unless `weight` is `[M, Ku + Kc]` and `bias` is `[M]` or absent."""
    if weight.shape[1] != user_features + cand_features:
        raise ValueError(
            f"weight has {weight.shape[1]} columns but user and cand have {user_features} + {cand_features} features"
        )
    if bias is not None:
        check_dims("bias", bias, "M")
        check_equal_sizes("output size", "bias", bias.shape[0], "weight", weight.shape[0])


def check_same_device(**tensors: Tensor | None) -> None:
    """Raise unless all the tensors given are on the first one's device."""
    present = [(name, t) for name, t in tensors.items() if t is not None]
    first_name, first = present[0]
    for name, tensor in present[1:]:
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device} but {first_name} is on {first.device}")


def promote(**tensors: Tensor | None) -> list[Any]:
    """Bring floating tensors to one dtype: autocast's when it is active, else the promoted one.

    Raises:
        TypeError: a dtype that is not fp32, fp16, bf16 (or fp64, on the CPU).
    """
    dtype: torch.dtype | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {tensor.dtype}")
        dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    device = next(t for t in tensors.values() if t is not None).device.type
    if device != "meta" and torch.is_autocast_enabled(device) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return [None if t is None else t.to(dtype) for t in tensors.values()]


def is_same(before: Sequence[Tensor | None], after: Sequence[Tensor | None]) -> bool:
    """Whether `promote` left every tensor as it was."""
    return all(x is y for x, y in zip(before, after, strict=True))


def no_autocast(like: Tensor) -> torch.autocast:
    """A region without autocast: the operands were cast already, and accumulation in fp32 is part of the contract."""
    device = "cpu" if like.device.type == "meta" else like.device.type
    return torch.autocast(device, enabled=False)


def resolve_index(
    index: CandidateIndex | Tensor, *, user: tuple[str, int], candidate: tuple[str, int] | None = None
) -> tuple[Tensor, Tensor | None]:
    """`(to_user, offsets)` of an index or a bare `to_user`, checked against (name, size) of both batch dimensions.

    Both contiguous: kernels step through them by one.
    """
    if isinstance(index, CandidateIndex):
        to_user, offsets = index.to_user, index.offsets
        if index.num_users != user[1]:
            raise ValueError(f"index.num_users is {index.num_users} but the user batch size of {user[0]} is {user[1]}")
    else:
        to_user, offsets = index, None
        check_index_tensor("index", to_user)
    to_user, offsets = to_user.contiguous(), None if offsets is None else offsets.contiguous()
    if candidate is not None and to_user.shape[0] != candidate[1]:
        raise ValueError(
            f"index has {to_user.shape[0]} entries but the candidate batch size of {candidate[0]} is {candidate[1]}"
        )
    if to_user.device.type == "cpu" and not on_host(to_user) and not check_mode():
        # Compiled look-ups on a CPU take a negative entry from the end. As in the kernels: clamp, and check on request.
        return to_user.clamp(0, user[1] - 1), offsets
    check_index_values(to_user, user[1])
    return to_user, offsets


def check_index_values(to_user_B: Tensor, num_users: int) -> None:
    """Raise, or on a GPU under `IKBO_CHECK=1` assert without waiting, that every entry is a user."""
    if on_host(to_user_B):
        if to_user_B.numel() == 0:
            return
        low, high = to_user_B.aminmax()
        if int(low) < 0 or int(high) >= num_users:
            CandidateIndex(to_user_B, num_users).validate()
    elif check_mode():
        inside = ((to_user_B >= 0) & (to_user_B < num_users)).all()
        torch._assert_async(inside, f"an entry of the candidate-to-user index is outside [0, {num_users})")


def check_lengths(name: str, lengths_U: Tensor, upper: int) -> None:
    """Raise, or on a GPU under `IKBO_CHECK=1` assert without waiting, that `0 <= lengths <= upper`."""
    if on_host(lengths_U):
        outside = (lengths_U < 0) | (lengths_U > upper)
        if bool(outside.any()):
            position = int(outside.nonzero()[0])
            raise ValueError(f"{name}[{position}] is {int(lengths_U[position])}, outside [0, {upper}]")
    elif check_mode():
        inside = ((lengths_U >= 0) & (lengths_U <= upper)).all()
        torch._assert_async(inside, f"an entry of {name} is outside [0, {upper}]")


def check_offsets(name: str, offsets: Tensor, total: int, max_length: int | None = None) -> None:
    """Raise, or on a GPU under `IKBO_CHECK=1` assert without waiting, that offsets rise from 0 to `total`."""
    upper = total if max_length is None else max_length
    if on_host(offsets):
        if int(offsets[0]) != 0 or int(offsets[-1]) != total:
            raise ValueError(f"{name} goes from {int(offsets[0])} to {int(offsets[-1])}, not from 0 to {total} rows")
        check_not_falling(name, offsets)
        longest = int(offsets.diff().max()) if offsets.shape[0] > 1 else 0
        if longest > upper:
            raise ValueError(f"{name} has a length of {longest} but max_kv_length is {upper}")
    elif check_mode():
        torch._assert_async((offsets[0] == 0) & (offsets[-1] == total), f"{name} does not go from 0 to {total} rows")
        check_lengths(f"the lengths of {name}", offsets.diff(), upper)
