"""All gradients in one pass on Hopper, on a GPU: see `test_cross_attention.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ikbo_recsys.kernels import _attention_backward_hopper
from tests.cases import relative_error
from tests.gpu.test_cross_attention import BF16, FP16, Call, backend_of


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """All gradients in one pass; gives what ran."""
    ran = []

    class Counted(_attention_backward_hopper.OnePass):
        def __call__(self, *arguments: object) -> tuple[Tensor, Tensor, Tensor]:
            ran.append("once")
            return super().__call__(*arguments)  # type: ignore[arg-type]

    # Whatever these tests ask of sums: that memory is filled depends on it.
    monkeypatch.setattr(_attention_backward_hopper, "one_pass", lambda problem, needs: all(needs))
    monkeypatch.setattr(_attention_backward_hopper, "OnePass", Counted)
    with backend_of("gluon", monkeypatch):
        yield ran


@pytest.mark.parametrize("layout", ["full", "lengths", "jagged"])
@pytest.mark.parametrize(("grouped", "seeds"), [(True, 64), (False, 64), (True, 17), (True, 1)])
@pytest.mark.parametrize(("size", "dtype"), [(128, BF16), (64, FP16), (104, FP16), (40, BF16)])
def test_gradients_in_one_pass(
    ways: list[str], layout: str, grouped: bool, seeds: int, size: int, dtype: torch.dtype
) -> None:
    Call(5, 37, seeds, 301, (4, 2), size, dtype=dtype, layout=layout, grouped=grouped).check()
    assert ways == ["once"]


@pytest.mark.parametrize("size", [64, 128])
def test_gradients_in_one_pass_of_many_blocks(ways: list[str], size: int) -> None:
    """Several blocks to each multiprocessor, sums by many of them at a time, the first ones with nothing compiled."""
    for _ in range(3):
        Call(40, 400, 64, 700, (2, 2), size, dtype=BF16, layout="jagged").check()
    assert ways == ["once"] * 3


def test_gradients_in_one_pass_of_the_log_sum_exp(ways: list[str]) -> None:
    call = Call(5, 37, 64, 301, (4, 2), 128, dtype=BF16)
    for ours, true in zip(*call.gradients_with_log_sum_exp(), strict=True):
        assert relative_error(ours, true) < torch.finfo(BF16).eps
    assert ways == ["once"]
