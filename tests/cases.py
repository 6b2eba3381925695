"""Inputs that tests share: awkward batch sizes, indices of every kind, and the error measure.

Shape letters: U users, B candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ikbo_recsys import CandidateIndex

BATCHES = [(1, 1), (1, 50), (3, 7), (7, 7), (9, 2), (13, 131), (4, 0), (0, 0), (64, 64)]
"""(U, B): one user, one candidate, primes, equal, more users than candidates, none."""

INDEX_KINDS = ["grouped", "shuffled", "int32", "tensor"]


def make_index(num_users: int, num_candidates: int, kind: str) -> CandidateIndex | Tensor:
    """A random index: grouped with offsets, shuffled, grouped int32, or a bare shuffled tensor."""
    ids = torch.randint(0, max(num_users, 1), (num_candidates,))
    if kind == "tensor":
        return ids
    if kind == "shuffled":
        return CandidateIndex.from_user_ids(ids, num_users)
    ids = ids.sort()[0].to(torch.int32 if kind == "int32" else torch.int64)
    return CandidateIndex.from_user_ids(ids, num_users, grouped=True)


def to_user(index: CandidateIndex | Tensor) -> Tensor:
    return (index.to_user if isinstance(index, CandidateIndex) else index).long()


def strided(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor that is a slice of a larger one in its last two dimensions, its base off by one element."""
    larger = torch.randn(*shape[:-2], shape[-2] + 2, shape[-1] + 3, dtype=dtype)
    return larger[..., 1:-1, 1:-2]


def relative_error(out: Tensor, expected: Tensor) -> float:
    """`||out - expected|| / ||expected||` in fp64; infinite where either has a NaN."""
    out, expected = out.double(), expected.double()
    if out.shape != expected.shape or not bool(out.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    scale = expected.norm().clamp_min(1e-30)
    return float((out - expected).norm() / scale)


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output and the gradient of a fixed random projection of it for each floating input."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = function(*leaves)
    torch.manual_seed(5)
    weight = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    wanted = [x for x in leaves if x.requires_grad]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), wanted)]


def subsets(names: list[str]) -> Iterator[set[str]]:
    """Every non-empty subset."""
    for bits in range(1, 2 ** len(names)):
        yield {name for i, name in enumerate(names) if bits >> i & 1}
