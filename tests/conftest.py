"""Shared by all tests: seeds of their own, few threads where several test processes run, a GPU that is not there."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.standin import StandIn

# Its assertions say what they compared, as those of test files do.
pytest.register_assert_rewrite("tests.standin.calls")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_random_inputs(request: pytest.FixtureRequest) -> None:
    """Another seed for every test, the same one when it is run again, alone or in the suite."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN, so that an element nobody wrote shows."""
    from ikbo_recsys.kernels import _launch

    def poisoned(make: Callable[..., torch.Tensor], *arguments: object, **options: object) -> torch.Tensor:
        out = make(*arguments, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    for name in ("empty", "empty_strided"):
        monkeypatch.setattr(torch, name, functools.partial(poisoned, getattr(torch, name)))
    if _launch._empty_strided_cuda is not None:
        quick = functools.partial(poisoned, _launch._empty_strided_cuda)
        monkeypatch.setattr(_launch, "_empty_strided_cuda", quick)


@pytest.fixture
def gpu() -> Iterator[StandIn]:
    """The GPU that is not there (`tests/standin`), with nothing remembered of earlier calls."""
    from ikbo_recsys.kernels import _plan
    from tests import standin

    installed = standin.install()
    installed.fresh()
    yield installed
    _plan.forget()
