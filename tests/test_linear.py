"""`linear` and `IKBOLinear` against their broadcast twins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ikbo_recsys import CandidateIndex, IKBOLinear, kernels
from tests import twins
from tests.cases import BATCHES, INDEX_KINDS, gradients, make_index, relative_error, strided, to_user

ACTIVATIONS = [None, "relu", "gelu", "silu"]


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize(("users", "candidates"), BATCHES)
def test_equals_the_twin_forward_and_backward(users: int, candidates: int, kind: str) -> None:
    index = make_index(users, candidates, kind)
    inputs = strided(users, 7), strided(candidates, 3), torch.randn(11, 10).double(), torch.randn(11).double()
    for activation in ACTIVATIONS:
        ours = gradients(lambda u, c, w, b, a=activation: kernels.linear(u, c, w, index, b, a), *inputs)
        twin = gradients(lambda u, c, w, b, a=activation: twins.linear(u, c, w, to_user(index), b, a), *inputs)
        for got, expected in zip(ours, twin, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 2, 0), (0, 0, 4), (511, 1, 1)])
def test_sizes_of_zero_and_one(sizes: tuple[int, int, int]) -> None:
    user_in, cand_in, outputs = sizes
    index = make_index(2, 5, "shuffled")
    user, cand, weight = torch.randn(2, user_in), torch.randn(5, cand_in), torch.randn(outputs, user_in + cand_in)
    out = kernels.linear(user, cand, weight, index)
    torch.testing.assert_close(out, twins.linear(user, cand, weight, to_user(index)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_accuracy_is_not_below_the_twins(dtype: torch.dtype, activation: str | None) -> None:
    index = make_index(3, 200, "shuffled")
    inputs = [torch.randn(*shape).to(dtype) for shape in ((3, 50), (200, 30), (20, 80), (20,))]
    wide = [x.double() for x in inputs]
    exact = twins.linear(*wide[:3], to_user(index), wide[3], activation)
    out = kernels.linear(*inputs[:3], index, inputs[3], activation)
    twin = twins.linear(*inputs[:3], to_user(index), inputs[3], activation)
    assert out.dtype is dtype
    assert relative_error(out, exact) <= 1.05 * relative_error(twin, exact) + 1e-8


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation must be one of .*, got 'tanh'"):
        IKBOLinear(2, 3, 4, activation="tanh")
    with pytest.raises(ValueError, match="activation must be one of .*, got 'tanh'"):
        kernels.linear(torch.randn(1, 2), torch.randn(2, 3), torch.randn(4, 5), torch.tensor([0, 0]), None, "tanh")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_module_loads_a_dense_checkpoint_and_back(activation: str | None) -> None:
    dense = twins.LinearTwin(10, 4)
    module = IKBOLinear(7, 3, 4, activation=activation)
    module.load_state_dict(dense.state_dict())
    adopted = IKBOLinear.from_dense(dense, 7, activation=activation)
    assert adopted.bias is dense.bias
    index = CandidateIndex.from_counts(torch.tensor([2, 0, 4]))
    user, cand = torch.randn(3, 7), torch.randn(6, 3)
    expected = dense(user, cand, index.to_user)
    expected = expected if activation is None else getattr(torch.nn.functional, activation)(expected)
    torch.testing.assert_close(module(user, cand, index), expected)
    torch.testing.assert_close(adopted(user, cand, index.to_user), expected)
    back = nn.Linear(10, 4)
    back.load_state_dict(module.state_dict())
    assert torch.equal(back.weight, dense.weight)
    assert not IKBOLinear.from_dense(dense.eval(), 7).training
    with pytest.raises(ValueError, match="user_in is -1 but the dense layer has 10 inputs"):
        IKBOLinear.from_dense(dense, -1)


def test_the_module_refuses_what_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="user_in must not be negative, got -1"):
        IKBOLinear(-1, 3, 4)
    with pytest.raises(TypeError, match=r"dense must be an nn\.Linear, got Conv1d"):
        IKBOLinear.from_dense(nn.Conv1d(3, 4, 1), 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dense\.weight is computed"):
        IKBOLinear.from_dense(nn.utils.parametrizations.weight_norm(nn.Linear(10, 4)), 7)
    index = torch.tensor([0, 2, 2])
    with pytest.raises(ValueError, match="user has 24 features but user_in is 40"):
        IKBOLinear(40, 24, 8)(torch.randn(3, 24), torch.randn(3, 40), index)
