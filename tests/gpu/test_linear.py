"""`linear`, `broadcast` and `segment_sum` on a GPU against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.utils.deterministic
from torch import Tensor

from ikbo_recsys import CandidateIndex
from ikbo_recsys.kernels import _backend, broadcast, linear, reference, segment_sum

from .test_compression_linear import DTYPES, allowed, clones, error, make_index, terms_of

SHAPES = [(1, 1, 1, 1, 1), (3, 131, 433, 100, 67), (9, 5, 128, 7, 511), (50, 70_001, 65, 9, 33)]


def make(users: int, batch: int, m: int, user_k: int, cand_k: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((users, user_k), (batch, cand_k), (m, user_k + cand_k), (m,))
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


def expected_of(
    user: Tensor, cand: Tensor, weight: Tensor, bias: Tensor, index: CandidateIndex, activation: str | None
) -> Tensor:
    both = torch.cat((user[index.to_user.long()], cand), 1).double()
    return reference.ACTIVATIONS[activation](both @ weight.double().t() + bias.double())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", ["triton", "auto"])
def test_forward(path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    user, cand, weight, bias = make(*shape, dtype)
    # In 16 bits the user's part and the result are rounded; in fp32 every step of an activation is.
    roundings = torch.finfo(dtype).eps * (3 if dtype is torch.float32 else 1)
    for activation in (None, "relu", "gelu", "silu"):
        index = make_index(shape[0], shape[1], activation is None, torch.int32 if activation else torch.int64)
        with _backend.use_backend(path), torch.no_grad():
            result = linear(user, cand, weight, index, bias, activation)
        expected = expected_of(user, cand, weight, bias, index, activation)
        parts = terms_of(user[..., None], cand[..., None], weight, index.to_user)
        terms = [part.squeeze(-1) for part in parts] + [bias.expand_as(expected)]
        assert error(result, expected, *terms) <= allowed(roundings, dtype, weight.shape[1])


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", ["triton", "auto"])
def test_gradients(path: str, dtype: torch.dtype, grouped: bool) -> None:
    for activation in (None, "relu", "gelu", "silu"):
        tensors, index = make(3, 131, 433, 100, 67, dtype), make_index(3, 131, grouped)
        ours, exact, torchs = clones(*tensors), clones(*(t.double() for t in tensors)), clones(*tensors)
        probe = torch.randn(131, 433, device="cuda", dtype=dtype)
        with _backend.use_backend(path):
            linear(*ours[:3], index, ours[3], activation).backward(probe)
        expected_of(*exact, index, activation).backward(probe.double())
        plain = torch.nn.functional.linear(torch.cat((torchs[0][index.to_user], torchs[1]), 1), torchs[2], torchs[3])
        reference.ACTIVATIONS[activation](plain).backward(probe)
        for mine, true, theirs in zip(ours, exact, torchs, strict=True):
            torch_error = 1.5 * error(theirs.grad, true.grad)
            assert error(mine.grad, true.grad) <= allowed(max(torch_error, torch.finfo(dtype).eps), dtype, 131)


def test_the_second_kernel_waits_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `compression_linear`: the user's part takes far longer than the candidates' products."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    user, cand, weight, bias = make(300, 131, 433, 4096, 8, torch.float16)
    index, others = make_index(300, 131), [torch.randn_like(user) for _ in range(5)]
    busy = torch.zeros(8192, 8192, device="cuda", dtype=torch.float16)
    with _backend.use_backend("triton"), torch.no_grad():
        for _ in range(3):
            torch.cuda.synchronize()
            _ = busy @ busy
            results = [linear(other, cand, weight, index, bias, "relu") for other in others]
    for other, result in zip(others, results, strict=True):
        assert error(result, expected_of(other, cand, weight, bias, index, "relu")) <= 2e-3


def test_compiled_with_gradients() -> None:
    compiled = torch.compile(linear, fullgraph=True, dynamic=True)
    for users, batch in ((3, 131), (9, 64)):
        tensors, index = make(users, batch, 433, 100, 67, torch.bfloat16), make_index(users, batch)
        leaves, exact = clones(*tensors), clones(*(t.double() for t in tensors))
        out = compiled(*leaves[:3], index, leaves[3], "silu")
        expected = expected_of(*exact, index, "silu")
        probe = torch.randn(batch, 433, device="cuda", dtype=torch.bfloat16)
        out.backward(probe)
        expected.backward(probe.double())
        assert error(out, expected) <= 1e-2
        assert all(error(mine.grad, true.grad) <= 2e-2 for mine, true in zip(leaves, exact, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("users", "batch", "width"), [(1, 1, 1), (13, 1000, 257), (1, 5000, 3), (5, 64, 110_848)])
def test_segment_sum_and_broadcast(dtype: torch.dtype, grouped: bool, users: int, batch: int, width: int) -> None:
    index = make_index(users, batch, grouped)
    x = torch.randn(batch, width, device="cuda", dtype=dtype, requires_grad=True)
    with _backend.use_backend("triton"):
        out = segment_sum(x, index)
        spread = broadcast(out, index)
        spread.backward(torch.ones_like(spread))
    zeros = torch.zeros(users, width, device="cuda", dtype=torch.float64)
    expected = zeros.index_add(0, index.to_user, x.detach().double())
    assert error(out, expected) <= allowed(torch.finfo(dtype).eps, dtype, batch)
    assert torch.equal(spread, out[index.to_user])
    counts = index.counts().to(torch.float64)
    assert error(x.grad, counts[index.to_user][:, None].expand(batch, width)) <= torch.finfo(dtype).eps
