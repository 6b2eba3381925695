"""The benchmark commands where there is no GPU: what they check, what they print. The clock is a stand-in."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import plot, run, table
from benchmarks.cases import Benchmark, Case, load
from benchmarks.providers import AbsentError, Provider

SMALL = {
    "compression_linear": {"B": 130, "ratio": 40, "M": 7, "D": 8, "Ku": 5, "Kc": 9},
    "linear": {"B": 70, "ratio": 30, "M": 7, "Ku": 5, "Kc": 9},
}
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every function takes a millisecond; the functions that were timed."""
    timed: list[object] = []

    def device_ms(function: object) -> float:
        timed.append(function)
        return 1.0

    monkeypatch.setattr(run, "device_ms", device_ms)
    monkeypatch.setattr(run, "host_us", lambda function: 10.0)
    return timed


def rows_of(operator: str, pattern: str, benchmark: Benchmark | None = None) -> list[dict[str, object]]:
    benchmark = benchmark or load(operator)
    case = Case(benchmark.cases[0].name, SMALL[operator])
    return run._run_case(benchmark, case, "fp32", pattern, device="cpu")


@pytest.mark.parametrize("operator", SMALL)
def test_providers_compute_the_operator(operator: str) -> None:
    rows = rows_of(operator, "ikbo_recsys|torch decomposed|torch broadcast|.*padded by the caller.*")
    timed = {row["provider"]: row for row in rows if "ms" in row}
    assert {"ikbo_recsys", "torch decomposed", "torch broadcast"} <= set(timed)
    assert all(0 < row["error"] < 1e-5 for row in timed.values()), timed
    # FBGEMM's kernels are not installed: their rows say so, with how to get them.
    assert all("FBGEMM" in row["absent"] for row in rows if "ms" not in row)


def test_gradients_are_checked() -> None:
    rows = rows_of("compression_linear", ".*training")
    assert rows[0]["provider"] == "ikbo_recsys, training"
    assert all(0 < row["error"] < 1e-5 for row in rows), rows


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fault", ["off", "nan", "shape"])
def test_wrong_result_is_not_timed(training: bool, fault: str, clock: list[object]) -> None:
    name = "ikbo_recsys, training" if training else "ikbo_recsys"
    benchmark = load("compression_linear")
    right = next(provider for provider in benchmark.providers if provider.name == name)

    def spoil(x: torch.Tensor) -> torch.Tensor:
        if fault == "shape":
            return x[..., :-1]
        x = x.clone()
        last = (-1,) * x.dim()
        x[last] = math.nan if fault == "nan" else x[last] + 100
        return x

    def build(inputs):  # type: ignore[no-untyped-def]
        function = right.build(inputs)
        return lambda: tuple(map(spoil, function())) if training else spoil(function())

    wrong = dataclasses.replace(right, build=build)
    (row,) = rows_of("compression_linear", name, dataclasses.replace(benchmark, providers=[wrong]))
    assert row["wrong"]
    assert "ms" not in row
    assert not clock
    assert "WRONG" in run._format(row)


def test_a_crash_is_a_row() -> None:
    def crash(inputs):  # type: ignore[no-untyped-def]
        raise RuntimeError("out of memory, say")

    def absent(inputs):  # type: ignore[no-untyped-def]
        raise AbsentError("not here. To get it: so and so")

    benchmark = load("linear")
    providers = [Provider("ikbo_recsys", crash), Provider("a rival", absent), *benchmark.providers[2:3]]
    rows = rows_of("linear", ".*", dataclasses.replace(benchmark, providers=providers))
    assert ["failed" in rows[0], "absent" in rows[1], "ms" in rows[2]] == [True] * 3
    assert "out of memory" in run._format(rows[0])
    assert "so and so" in run._format(rows[1])


def row(provider: str, case: str, ms: float, **more: object) -> dict[str, object]:
    facts = {"dtype": "fp16", "ours": provider.startswith("ikbo"), "training": False, "whole": True, "group": "batch"}
    return {"provider": provider, "case": case, "ms": ms, "rival": not facts["ours"], **facts, **more}


def test_table() -> None:
    rows = [
        row("ikbo_recsys", "small", 0.5),
        row("ikbo_recsys portable", "small", 0.4),
        row("rival", "small", 1.0),
        row("a part", "small", 0.1, whole=False),
        row("ikbo_recsys", "large", 2.0),
        row("rival", "large", 1.0),
    ]
    (text,) = table.tables(rows)
    assert text.splitlines() == [
        "| fp16, ms | ikbo_recsys | ikbo_recsys portable | rival | a part | best rival / ours |",
        "|---|---|---|---|---|---|",
        "| small | 0.500 | **0.400** | 1.00 | 0.100 | 2.00 |",
        "| large | 2.00 |  | **1.00** |  | 0.50 |",
    ]


def test_sweep_takes_the_default_case_in() -> None:
    rows = [row("ikbo_recsys", f"B{b}", b / 1e3, B=b) for b in (512, 256)]
    rows += [
        row("ikbo_recsys", "default", 1.0, B=1024, group=""),
        row("ikbo_recsys", "ratio2", 9.0, B=1024, group="ratio"),
    ]
    assert plot.sweep_of(rows, "batch", "fp16") == {"ikbo_recsys": [(256, 0.256), (512, 0.512), (1024, 1.0)]}


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_readable(path: Path) -> None:
    rows = table.read([path])
    assert rows
    assert all(text.count("\n") >= 2 for text in table.tables(rows))
    runs = json.loads(path.read_text()).get("runs") or [json.loads(path.read_text())]
    assert all({"gpu", "torch", "triton", "clock"} <= set(run["environment"]) for run in runs)
