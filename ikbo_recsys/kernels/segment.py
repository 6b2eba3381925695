"""The explicit broadcast from users to candidates, and its adjoint.

Shape letters: U users, B candidates.
"""

from __future__ import annotations

from torch import Tensor

from ikbo_recsys.candidate_index import CandidateIndex, check_count
from ikbo_recsys.kernels import _backend, _checks, _plan, _segment_launch, reference
from ikbo_recsys.kernels._library import register_operator


def broadcast(x: Tensor, index: CandidateIndex | Tensor) -> Tensor:
    """Copy each user's row to its candidates: `out[b] = x[u(b)]`.

    This is the copy that the other operators avoid; use it where a result per candidate really is wanted. Its
    gradient is `segment_sum`.

    Args:
        x: `[U, ...]`, any dtype.
        index: a `CandidateIndex`, or `to_user` int32/int64 `[B]`.

    Returns:
        `[B, ...]`, a new tensor.

    Raises:
        ValueError: `x` without dimensions, sizes that do not fit, different devices, an index outside `[0, U)`.
        TypeError: an index that is not int32/int64.
    """
    _check_rows("x", x)
    to_user, offsets = _checks.resolve_index(index, user=("x", x.shape[0]))
    _checks.check_same_device(x=x, index=to_user)
    if x.is_cuda:
        return _segment_launch.broadcast(x, to_user, offsets)
    return reference.broadcast(x, to_user)


def segment_sum(x: Tensor, index: CandidateIndex | Tensor, num_users: int | None = None) -> Tensor:
    r"""Add up the rows of each user's candidates: :math:`out[u] = \sum_{b: u(b) = u} x[b]`, zeros for a user without
    any.

    Sums accumulate in fp32 (fp64 for fp64) and are rounded once. The adjoint of `broadcast`, and differentiable itself.

    Args:
        x: `[B, ...]`, fp32, fp16, bf16 (fp64 on the CPU).
        index: a `CandidateIndex`, or `to_user` int32/int64 `[B]`.
        num_users: U; needed with a bare `to_user` only.

    Returns:
        `[U, ...]` in the dtype of `x`.

    Raises:
        ValueError: `x` without dimensions, sizes that do not fit, a bare tensor without `num_users`, different
            devices, an index outside `[0, U)`.
        TypeError: an index that is not int32/int64, a dtype that is not supported.
    """
    known = None
    if isinstance(x, Tensor) and x.is_cuda:
        known = _plan.signature("segment_sum", (x,), index, num_users)
        plan = _plan.recall(known)
        if plan is not None:
            return plan(x, index)
    _check_rows("x", x)
    if num_users is None:
        if not isinstance(index, CandidateIndex):
            raise ValueError("num_users is needed when index is a bare tensor")
        num_users = index.num_users
    check_count("num_users", num_users)
    if isinstance(index, CandidateIndex) and num_users != index.num_users:
        raise ValueError(f"num_users is {num_users} but index.num_users is {index.num_users}")
    to_user, offsets = _checks.resolve_index(index, user=("num_users", num_users), candidate=("x", x.shape[0]))
    _checks.check_same_device(x=x, index=to_user)
    if x.dtype not in _checks.FLOAT_DTYPES:
        raise TypeError(f"x must be float32, float16, bfloat16 or float64, got {x.dtype}")
    if x.is_cuda or _backend.requested_backend() not in ("auto", "torch"):
        return _segment_launch.segment_sum(x, to_user, offsets, num_users, known)
    return reference.segment_sum(x, to_user, num_users)


def _check_rows(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have at least 1 dimension, got shape ()")


def _explain(x: Tensor, index: CandidateIndex | Tensor, num_users: int | None = None) -> _backend.Choice:
    return _segment_launch.choose(x)


_backend.register_chooser("broadcast", _explain)
_backend.register_chooser("segment_sum", _explain)
register_operator("broadcast(Tensor x, Tensor index) -> Tensor", broadcast)
register_operator("segment_sum(Tensor x, Tensor index, SymInt num_users) -> Tensor", segment_sum)
