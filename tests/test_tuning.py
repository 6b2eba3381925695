"""Tuning happens when it is asked for, once per shape, and never in a first call that did not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ikbo_recsys.kernels import _plan, _tuning, compression_linear, cross_attention, use_backend
from tests import standin
from tests.standin import StandIn, inside, outside
from tests.standin.calls import make_index


@outside
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the launch code needs it")
    standin.run_in_a_process_of_its_own(__file__, tmp_path)


@pytest.fixture
def gpu(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The one of all tests, on which no choice is remembered either."""
    monkeypatch.setattr(_tuning, "_chosen", {})
    return gpu


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tail blocks each timed option launched; the second option is the fastest."""
    seen: list[int] = []

    def milliseconds(run: Callable[[], Any]) -> float:
        launches = standin.install().launches(run)
        seen.append(launches[1].arguments[25])
        return 1.0 if len(seen) % 5 == 2 else 2.0

    monkeypatch.setattr(_tuning, "milliseconds", milliseconds)
    return seen


def call(gpu: StandIn, batch: int = 64) -> Any:
    user, cand, weight = gpu.randn(3, 64, 256), gpu.randn(batch, 864, 256), gpu.randn(433, 928)
    index = make_index(gpu, 3, batch)
    return lambda: compression_linear(user, cand, weight, index)


def tail_blocks(gpu: StandIn, run: Callable[[], Any]) -> int:
    """Of a call, after whatever its first one did."""
    run()
    return gpu.launches(run)[1].arguments[25]


@inside
def test_nothing_is_timed_by_default(gpu: StandIn, timed: list[int]) -> None:
    assert tail_blocks(gpu, call(gpu)) == 21
    assert not timed
    assert not _tuning._chosen


@inside
def test_the_fastest_is_kept(
    gpu: StandIn, timed: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("IKBO_TUNE", "1")
    with torch.no_grad(), caplog.at_level(logging.INFO, "ikbo_recsys.tuning"):
        run = call(gpu)
        assert tail_blocks(gpu, run) == 19
        assert timed == [21, 19, 20, 22, 23]
        assert tail_blocks(gpu, run) == 19
        _plan.forget()
        assert tail_blocks(gpu, call(gpu)) == 19, "another plan of the same shape"
        assert len(timed) == 5
        tail_blocks(gpu, call(gpu, 65))
        assert len(timed) == 10, "another shape"
    assert sum("ms" in record.message for record in caplog.records) == 10
    monkeypatch.delenv("IKBO_TUNE")
    _plan.forget()
    assert tail_blocks(gpu, call(gpu)) == 21


@inside
def test_not_while_a_graph_is_captured(gpu: StandIn, timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IKBO_TUNE", "1")
    monkeypatch.setattr(gpu, "is_capturing", True)
    tail_blocks(gpu, call(gpu))
    assert not timed

    # What was found before is taken.
    monkeypatch.setattr(gpu, "is_capturing", False)
    _plan.forget()
    assert tail_blocks(gpu, call(gpu)) == 19
    monkeypatch.setattr(gpu, "is_capturing", True)
    _plan.forget()
    assert tail_blocks(gpu, call(gpu)) == 19


@inside
def test_attention_shares_tiles_where_that_is_faster(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that the rule has, or what is measured to be faster when asked."""
    calls = {
        # A last round of which little is to be done; parts; and parts that are predicted to gain too little.
        "round": (gpu.randn(400, 64, 2, 64), gpu.randn(1, 4096, 2, 64), make_index(gpu, 1, 400)),
        "parts": (gpu.randn(8, 64, 2, 64), gpu.randn(1, 8192, 2, 64), make_index(gpu, 1, 8)),
        "few": (gpu.randn(8, 64, 2, 64), gpu.randn(1, 2048, 2, 64), make_index(gpu, 1, 8)),
    }
    times: list[float] = []
    monkeypatch.setattr(_tuning, "milliseconds", lambda run: run() and times.pop(0))
    whole, shared = ["attention_forward"], ["attention_forward_shared"]
    parts = [*shared, "merge_parts"]

    def kernels(name: str, *measured: float) -> list[str]:
        """What a call launches, where its ways take this long: the default first."""
        query, key, index = calls[name]
        times[:] = measured
        _plan.forget()
        monkeypatch.setattr(_tuning, "_chosen", {})
        with use_backend("gluon"), torch.no_grad():
            cross_attention(query, key, key, index)
            assert not times
            return [launch.kernel for launch in gpu.launches(lambda: cross_attention(query, key, key, index))]

    assert [kernels(name) for name in calls] == [shared, parts, whole]
    monkeypatch.setenv("IKBO_TUNE", "1")
    assert [kernels(name, 1.0, 2.0) for name in calls] == [shared, parts, whole]
    assert [kernels(name, 2.0, 1.0) for name in calls] == [whole, whole, parts]
