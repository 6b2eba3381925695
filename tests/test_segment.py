"""`broadcast` and `segment_sum`: values, adjointness, accumulation."""

from __future__ import annotations

import pytest
import torch

from ikbo_recsys import CandidateIndex, kernels
from tests.cases import BATCHES, INDEX_KINDS, gradients, make_index, to_user


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize(("users", "candidates"), BATCHES)
def test_values_and_adjointness(users: int, candidates: int, kind: str) -> None:
    index = make_index(users, candidates, kind)
    x_U, y_B = torch.randn(users, 3, 2).double(), torch.randn(candidates, 3, 2).double()
    spread, sums = kernels.broadcast(x_U, index), kernels.segment_sum(y_B, index, users)
    assert torch.equal(spread, x_U[to_user(index)])
    one_hot = torch.nn.functional.one_hot(to_user(index), max(users, 1)).double()[:, :users]
    torch.testing.assert_close(sums, torch.einsum("bu,bij->uij", one_hot, y_B))
    torch.testing.assert_close((spread * y_B).sum(), (x_U * sums).sum())
    torch.testing.assert_close(
        gradients(lambda x: kernels.broadcast(x, index), x_U)[1:],
        gradients(lambda x: x[to_user(index)], x_U)[1:],
    )
    torch.testing.assert_close(
        gradients(lambda y: kernels.segment_sum(y, index, users), y_B)[1:],
        gradients(lambda y: torch.einsum("bu,bij->uij", one_hot, y), y_B)[1:],
    )


def test_sums_accumulate_in_fp32() -> None:
    index = CandidateIndex.from_counts(torch.tensor([4096]))
    for dtype in (torch.float16, torch.bfloat16):
        # In half precision a running sum of ones stops at 2048 or 256.
        assert kernels.segment_sum(torch.ones(4096, dtype=dtype), index).item() == 4096
        x = torch.ones(1, dtype=dtype, requires_grad=True)
        kernels.broadcast(x, index).sum().backward()
        assert x.grad is not None
        assert x.grad.item() == 4096


def test_broadcast_takes_integers() -> None:
    index = CandidateIndex.from_counts(torch.tensor([2, 1]))
    assert kernels.broadcast(torch.tensor([7, 9]), index).tolist() == [7, 7, 9]


def test_errors_name_both_sizes() -> None:
    index = CandidateIndex.from_counts(torch.tensor([2, 1]))
    with pytest.raises(ValueError, match="index.num_users is 2 but the user batch size of x is 3"):
        kernels.broadcast(torch.randn(3, 1), index)
    with pytest.raises(ValueError, match="index has 3 entries but the candidate batch size of x is 4"):
        kernels.segment_sum(torch.randn(4, 1), index)
    with pytest.raises(ValueError, match="num_users is needed"):
        kernels.segment_sum(torch.randn(3, 1), index.to_user)
    with pytest.raises(ValueError, match="num_users is 3 but index.num_users is 2"):
        kernels.segment_sum(torch.randn(3, 1), index, 3)
    with pytest.raises(ValueError, match="num_users must not be negative, got -1"):
        kernels.segment_sum(torch.randn(0, 1), index.to_user[:0], -1)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        kernels.broadcast([1.0, 2.0], index)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x must have at least 1 dimension"):
        kernels.broadcast(torch.tensor(1.0), index)
    with pytest.raises(TypeError, match="x must be float32, float16, bfloat16 or float64, got torch.int64"):
        kernels.segment_sum(torch.tensor([1, 2, 3]), index)
