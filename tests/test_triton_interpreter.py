"""The portable kernels on the CPU, in Triton's interpreter, against fp64.

The interpreter replaces the kernels when they are defined, so these tests need a process of their own, with
TRITON_INTERPRET=1; `test_in_a_process_of_its_own` starts it. fp32 and fp16 only: the interpreter's bf16 `tl.dot` is
wrong.
"""

from __future__ import annotations

import math

import pytest
import torch

from ikbo_recsys import CandidateIndex
from ikbo_recsys.kernels import _backend, _launch, reference
from ikbo_recsys.kernels._compression_launch import Plan as CompressionPlan
from ikbo_recsys.kernels._compression_portable import Mix, OuterSum
from ikbo_recsys.kernels._linear_launch import Part
from ikbo_recsys.kernels._linear_launch import Plan as LinearPlan
from ikbo_recsys.kernels._segment_launch import SegmentSum, grouping
from tests.processes import INTERPRETED, interpreted, run_interpreted

pytest.importorskip("triton")

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius, NaN if either side has one."""
    assert result.shape == expected.shape
    return float((result.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def random_index(num_users: int, batch: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, num_users, (batch,), dtype=dtype)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("users", "batch", "m", "k", "d"), [(1, 1, 1, 1, 1), (3, 5, 7, 9, 5), (2, 3, 70, 33, 17), (4, 3, 65, 130, 64)]
)
def test_mix(dtype: torch.dtype, users: int, batch: int, m: int, k: int, d: int) -> None:
    weight = torch.randn(m, k + 3, dtype=dtype)[:, 3:]
    x = torch.randn(batch, d, k, dtype=dtype).mT
    user = torch.randn(users, m, d, dtype=dtype)
    bias = torch.randn(m, dtype=dtype)
    index = random_index(users, batch, torch.int32)
    product = weight.double() @ x.double()
    assert relative_error(Mix(weight, x, dtype)(weight, x), product) < TOLERANCE[dtype]
    expected = product + user.double()[index.long()] + bias.double()[:, None]
    mix = Mix(weight, x, dtype, has_user=True, has_bias=True)
    assert relative_error(mix(weight, x, user, index, bias), expected) < TOLERANCE[dtype]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 6, 12, 24, 32])
@pytest.mark.parametrize("gap", [0, 1, 4])
def test_rows_of_every_alignment(dtype: torch.dtype, size: int, gap: int) -> None:
    """Rows of `size` elements, `size + gap` apart: the kernels count them in units of what both are multiples of."""
    unit = 16 // dtype.itemsize
    while size % unit or (size + gap) % unit:
        unit //= 2
    x, weight = torch.randn(3, 10, size + gap, dtype=dtype)[..., :size], torch.randn(5, 10, dtype=dtype)
    assert _launch.row_unit(x) == unit
    assert _launch.row_unit(x.mT) == 1
    expected = weight.double() @ x.double()
    assert relative_error(Mix(weight, x, dtype)(weight, x), expected) < TOLERANCE[dtype]
    rows, weight = x[1], torch.randn(5, size, dtype=dtype)
    assert _launch.row_unit(rows) == unit
    part = Part(rows, weight, dtype, None, weight_padded=False)
    assert relative_error(part(rows, weight), rows.double() @ weight.double().t()) < TOLERANCE[dtype]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("user_k", "cand_k"), [(1, 1), (9, 70), (64, 128), (100, 33)])
def test_padded_weight(dtype: torch.dtype, user_k: int, cand_k: int) -> None:
    """The whole portable forward pass, with the weight padded so that its loads have no masks."""
    user, cand = torch.randn(3, user_k, 20, dtype=dtype), torch.randn(5, cand_k, 20, dtype=dtype)
    weight, bias, index = (
        torch.randn(35, user_k + cand_k, dtype=dtype),
        torch.randn(35, dtype=dtype),
        random_index(3, 5),
    )
    user_part = weight[:, :user_k].double() @ user.double() + bias.double()[:, None]
    expected = user_part[index] + weight[:, user_k:].double() @ cand.double()
    result = CompressionPlan("triton").forward(user, cand, weight, index, bias)
    assert relative_error(result, expected) < TOLERANCE[dtype]
    result = LinearPlan(None).forward(user[:, :, 0], cand[:, :, 0], weight, index, bias)
    assert relative_error(result, expected[:, :, 0]) < TOLERANCE[dtype]


@interpreted
@pytest.mark.parametrize("needs", [(True,) * 4, (True, False, False, False), (False, True, False, True)])
def test_backward(needs: tuple[bool, ...]) -> None:
    tensors = torch.randn(3, 6, 4), torch.randn(7, 9, 4), torch.randn(5, 15)
    index, grad = random_index(3, 7), torch.randn(7, 5, 4)
    exact = [x.double().requires_grad_() for x in (*tensors, torch.zeros(5))]
    user, cand, weight, bias = exact
    ((weight[:, :6] @ user)[index] + weight[:, 6:] @ cand + bias[:, None]).backward(grad.double())
    grads = CompressionPlan("triton").backward(grad, *tensors, index, None, needs)
    for mine, true, needed in zip(grads, exact, needs, strict=True):
        assert (mine is not None) == needed
        assert mine is None or relative_error(mine, true.grad) < 1e-6
    for leaf in exact:
        leaf.grad = None
    ((user[:, :, 0] @ weight[:, :6].t())[index] + cand[:, :, 0] @ weight[:, 6:].t() + bias).backward(
        grad[:, :, 0].double()
    )
    vectors = (tensors[0][:, :, 0], tensors[1][:, :, 0], tensors[2])
    grads = LinearPlan(None).backward(grad[:, :, 0], *vectors, index, None, needs)
    true_grads = (user.grad[:, :, 0], cand.grad[:, :, 0], weight.grad, bias.grad)
    for mine, true, needed in zip(grads, true_grads, needs, strict=True):
        assert (mine is not None) == needed
        assert mine is None or relative_error(mine, true) < 1e-6


@interpreted
def test_mix_clamps_a_wrong_index() -> None:
    weight, x, user = torch.randn(4, 3), torch.randn(5, 3, 2), torch.randn(2, 4, 2)
    index = torch.tensor([-1, 2, 2**31 - 1, -(2**31), 1], dtype=torch.int32)
    expected = weight.double() @ x.double() + user.double()[[0, 1, 1, 0, 1]]
    mix = Mix(weight, x, torch.float32, has_user=True)
    assert relative_error(mix(weight, x, user, index), expected) < 1e-6


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("batch", "m", "k", "d"), [(1, 1, 1, 1), (5, 7, 9, 5), (9, 67, 65, 70)])
def test_outer_sum(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, batch: int, m: int, k: int, d: int) -> None:
    monkeypatch.setattr(_launch, "multiprocessors", lambda device: 3)
    grad, x = torch.randn(batch, d, m, dtype=dtype).mT, torch.randn(batch, k, d, dtype=dtype)
    expected = torch.einsum("bmd,bkd->mk", grad.double(), x.double())
    assert relative_error(OuterSum(grad, x)(grad, x), expected) < 1e-6
    same = grad[:1].expand_as(grad)
    expected = torch.einsum("md,bkd->mk", grad[0].double(), x.double())
    assert relative_error(OuterSum(same, x)(same, x), expected) < 1e-6


@interpreted
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("has_user", [False, True])
@pytest.mark.parametrize(("m", "k", "size"), [(40, 300, 256), (130, 300, 64), (250, 260, 100), (250, 70, 200)])
def test_mix_with_every_tile(
    monkeypatch: pytest.MonkeyPatch, large: bool, has_user: bool, m: int, k: int, size: int
) -> None:
    """Behind the weight's last row there is nothing to be read."""
    monkeypatch.setattr(_backend, "has_large_shared_memory", lambda device: large)
    weight = torch.full((m + 128, k), math.nan, dtype=torch.float16)[:m].normal_()
    x, user = (torch.randn(*shape, size, dtype=torch.float16) for shape in ((3, k), (2, m)))
    index = torch.tensor([1, 0, 1])
    expected = weight.double() @ x.double() + (user.double()[index] if has_user else 0)
    result = Mix(weight, x, torch.float32, has_user=has_user)(weight, x, *((user, index) if has_user else ()))
    assert relative_error(result, expected) < 1e-6


@interpreted
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("m", "k"), [(64, 64), (65, 130), (130, 129), (300, 257)])
def test_outer_sum_with_every_tile(monkeypatch: pytest.MonkeyPatch, large: bool, m: int, k: int) -> None:
    monkeypatch.setattr(_launch, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(_backend, "has_large_shared_memory", lambda device: large)
    grad, x = torch.randn(5, m, 100, dtype=torch.float16), torch.randn(5, k, 100, dtype=torch.float16)
    expected = torch.einsum("bmd,bkd->mk", grad.double(), x.double())
    assert relative_error(OuterSum(grad, x)(grad, x), expected) < 1e-6


@interpreted
@pytest.mark.parametrize("multiprocessors", [1, 200])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("users", "batch", "width"), [(1, 1, 1), (5, 37, 33), (2, 130, 3), (3, 0, 4)])
def test_segment_sum(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, grouped: bool, users: int, batch: int, width: int
) -> None:
    monkeypatch.setattr(_launch, "multiprocessors", lambda device: multiprocessors)
    ids = random_index(users, batch)
    index = CandidateIndex.from_user_ids(ids.sort().values if grouped else ids, users, grouped=grouped)
    x = torch.randn(batch, width)
    expected = torch.zeros(users, width, dtype=torch.float64).index_add(0, index.to_user, x.double())
    order, offsets = grouping(index.to_user, index.offsets, users)
    assert (order is None) == grouped
    result = SegmentSum(x, order, users, torch.float32)(x, order, offsets)
    assert relative_error(result, expected) < 1e-6


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize(("users", "batch", "m", "k"), [(1, 1, 1, 1), (3, 70, 65, 33)])
def test_linear(dtype: torch.dtype, activation: str | None, users: int, batch: int, m: int, k: int) -> None:
    x, weight = torch.randn(batch, k + 1, dtype=dtype)[:, 1:], torch.randn(k, m, dtype=dtype).t()
    user, bias, index = torch.randn(users, m, dtype=dtype), torch.randn(m, dtype=dtype), random_index(users, batch)
    plain = x.double() @ weight.double().t()
    expected = reference.ACTIVATIONS[activation](plain + user.double()[index] + bias.double())
    part = Part(x, weight, dtype, activation, has_user=True, has_bias=True, weight_padded=False)
    assert relative_error(part(x, weight, user, index, bias), expected) < TOLERANCE[dtype]
    part = Part(x, weight, dtype, None, weight_padded=False)
    assert relative_error(part(x, weight), plain) < TOLERANCE[dtype]


@interpreted
def test_an_index_that_is_the_column_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    from ikbo_recsys import kernels
    from ikbo_recsys.kernels import _plan

    monkeypatch.setattr(_backend, "portable_refusal", lambda *_: None)
    column = torch.randint(0, 3, (7, 2))[:, 0]
    user, cand, weight = torch.randn(3, 6, 16), torch.randn(7, 3, 16), torch.randn(5, 9)
    assert _plan.signature("linear", (cand, user), column) is None
    with _backend.use_backend("triton"):
        for index in (column, CandidateIndex(column, 3)):
            for operator, operands in (
                (kernels.compression_linear, (user, cand, weight)),
                (kernels.linear, (user[..., 0], cand[..., 0], weight)),
            ):
                torch.testing.assert_close(operator(*operands, index), operator(*operands, column.contiguous()))
