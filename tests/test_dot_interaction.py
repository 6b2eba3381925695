"""`dot_interaction` and `IKBOInteraction` against their broadcast twins and torchrec's interaction."""

from __future__ import annotations

import pytest
import torch

from ikbo_recsys import IKBOInteraction, kernels
from tests import twins
from tests.cases import BATCHES, INDEX_KINDS, gradients, make_index, relative_error, strided, to_user


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize(("users", "candidates"), BATCHES)
def test_equals_the_twin_forward_and_backward(users: int, candidates: int, kind: str) -> None:
    index = make_index(users, candidates, kind)
    inputs = strided(users, 4, 5), strided(candidates, 3, 5)
    ours = gradients(lambda u, c: kernels.dot_interaction(u, c, index), *inputs)
    twin = gradients(lambda u, c: twins.dot_interaction(u, c, to_user(index)), *inputs)
    for got, expected in zip(ours, twin, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 2, 0), (1, 0, 4), (0, 0, 4), (1, 1, 1)])
def test_sizes_of_zero_and_one(sizes: tuple[int, int, int]) -> None:
    user_features, cand_features, embedding = sizes
    index = make_index(2, 5, "shuffled")
    user, cand = torch.randn(2, user_features, embedding), torch.randn(5, cand_features, embedding)
    out = kernels.dot_interaction(user, cand, index)
    torch.testing.assert_close(out, twins.dot_interaction(user, cand, to_user(index)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_accuracy_is_not_below_the_twins(dtype: torch.dtype) -> None:
    index = make_index(3, 40, "grouped")
    user, cand = torch.randn(3, 5, 64).to(dtype), torch.randn(40, 4, 64).to(dtype)
    exact = twins.dot_interaction(user.double(), cand.double(), to_user(index))
    out, twin = kernels.dot_interaction(user, cand, index), twins.dot_interaction(user, cand, to_user(index))
    assert out.dtype is dtype
    assert relative_error(out, exact) <= 1.05 * relative_error(twin, exact) + 1e-8


def test_the_order_is_torchrecs() -> None:
    dlrm = pytest.importorskip("torchrec.models.dlrm")
    index = make_index(3, 8, "grouped")
    user, cand = torch.randn(3, 4, 6), torch.randn(8, 3, 6)
    both = torch.cat((user[to_user(index)], cand), 1)
    theirs = dlrm.InteractionArch(num_sparse_features=6)(both[:, 0], both[:, 1:])
    ours = torch.cat((both[:, 0], IKBOInteraction()(user, cand, index)), 1)
    torch.testing.assert_close(ours, theirs)
