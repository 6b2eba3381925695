"""`compression_linear` and `IKBOCompressionLinear` against their broadcast twins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ikbo_recsys import CandidateIndex, IKBOCompressionLinear, kernels
from tests import twins
from tests.cases import BATCHES, INDEX_KINDS, gradients, make_index, relative_error, strided, to_user


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize(("users", "candidates"), BATCHES)
def test_equals_the_twin_forward_and_backward(users: int, candidates: int, kind: str) -> None:
    index = make_index(users, candidates, kind)
    inputs = strided(users, 7, 5), strided(candidates, 3, 5), torch.randn(11, 10).double(), torch.randn(11).double()
    ours = gradients(lambda u, c, w, b: kernels.compression_linear(u, c, w, index, b), *inputs)
    twin = gradients(lambda u, c, w, b: twins.compression_linear(u, c, w, to_user(index), b), *inputs)
    assert ours[0].is_contiguous()
    for got, expected in zip(ours, twin, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "sizes", [(0, 3, 4, 5), (3, 0, 4, 5), (3, 2, 0, 5), (3, 2, 4, 0), (0, 0, 4, 5), (511, 1, 1, 1)]
)
def test_sizes_of_zero_and_one(sizes: tuple[int, int, int, int]) -> None:
    user_features, cand_features, embedding, outputs = sizes
    index = make_index(2, 5, "shuffled")
    inputs = torch.randn(2, user_features, embedding), torch.randn(5, cand_features, embedding)
    weight = torch.randn(outputs, user_features + cand_features)
    out = kernels.compression_linear(*inputs, weight, index)
    torch.testing.assert_close(out, twins.compression_linear(*inputs, weight, to_user(index)), rtol=1e-4, atol=1e-4)
    if user_features + cand_features == 0:
        assert not out.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_accuracy_is_not_below_the_twins(dtype: torch.dtype) -> None:
    index = make_index(3, 40, "grouped")
    inputs = [torch.randn(*shape).to(dtype) for shape in ((3, 50, 16), (40, 30, 16), (20, 80), (20,))]
    exact = twins.compression_linear(*(x.double() for x in inputs[:3]), to_user(index), inputs[3].double())
    out = kernels.compression_linear(*inputs[:3], index, inputs[3])
    twin = twins.compression_linear(*inputs[:3], to_user(index), inputs[3])
    assert out.dtype is dtype
    assert relative_error(out, exact) <= 1.05 * relative_error(twin, exact) + 1e-8


def test_mixed_dtypes_promote() -> None:
    user, cand = torch.randn(2, 3, 4, dtype=torch.float16), torch.randn(5, 2, 4)
    out = kernels.compression_linear(user, cand, torch.randn(6, 5, dtype=torch.bfloat16), make_index(2, 5, "tensor"))
    assert out.dtype is torch.float32


def test_chained_with_transposed_and_sliced_operands() -> None:
    index = make_index(3, 8, "grouped")
    user, cand, weight = torch.randn(3, 6, 4), torch.randn(8, 2, 6), torch.randn(5, 6)
    first = kernels.compression_linear((user @ torch.randn(4, 4)).mT, cand, weight, index)
    second = kernels.compression_linear(user, first[:, 1:, 2:], torch.randn(3, 10), index)
    assert second.shape == (8, 3, 4)
    expected = twins.compression_linear(user, first[:, 1:, 2:].contiguous(), torch.ones(3, 10), to_user(index))
    torch.testing.assert_close(
        kernels.compression_linear(user, first[:, 1:, 2:], torch.ones(3, 10), index), expected, rtol=1e-5, atol=1e-5
    )


def test_the_module_loads_a_dense_checkpoint_and_back() -> None:
    dense = twins.CompressionTwin(10, 4)
    module = IKBOCompressionLinear(7, 3, 4, bias=True)
    module.load_state_dict(dense.state_dict())
    adopted = IKBOCompressionLinear.from_dense(dense, 7)
    assert adopted.weight is dense.weight
    index = CandidateIndex.from_counts(torch.tensor([2, 0, 4]))
    user, cand = torch.randn(3, 7, 5), torch.randn(6, 3, 5)
    expected = dense(user, cand, index.to_user)
    torch.testing.assert_close(module(user, cand, index), expected)
    torch.testing.assert_close(adopted(user, cand, index.to_user), expected)
    back = nn.Linear(10, 4)
    back.load_state_dict(module.state_dict())
    assert torch.equal(back.weight, dense.weight)


def test_the_module_refuses_the_wrong_split_of_features() -> None:
    with pytest.raises(ValueError, match="user has 4 features but user_features is 6"):
        IKBOCompressionLinear(6, 4, 3)(torch.randn(2, 4, 5), torch.randn(3, 6, 5), torch.tensor([0, 1, 1]))


def test_from_dense_refuses_an_impossible_split() -> None:
    with pytest.raises(ValueError, match="user_features is 11 but the dense layer has 10 inputs"):
        IKBOCompressionLinear.from_dense(nn.Linear(10, 4), 11)
