"""The benchmark commands where there is no GPU: what they check, what they print. The clock is a stand-in."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import builders, compression_linear, plot, run, table, timing
from benchmarks.cases import Benchmark, Case, load
from benchmarks.providers import AbsentError, Provider, optional_import, stand_in_for_tlx

SMALL = {
    "compression_linear": {"B": 130, "ratio": 40, "M": 7, "D": 8, "Ku": 5, "Kc": 9},
    "linear": {"B": 70, "ratio": 30, "M": 7, "Ku": 5, "Kc": 9},
}
PLAN = timing._plan  # which the stand-in of the clock replaces
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every function is called once a turn and takes a millisecond; the functions that were timed, turn by turn."""
    timed: list[object] = []

    def samples(function: Callable[[], Any], calls: int, flushes: int) -> list[float]:
        timed.append(function)
        function()
        return [1.0] * calls

    monkeypatch.setattr(timing, "_plan", lambda function, budget_ms: (1, 1))
    monkeypatch.setattr(timing, "_samples", samples)
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


def instead(name: str, act: Callable[[], object]) -> Provider:
    """`linear` by plain torch, under this name; `act` comes before every call."""

    def build(inputs: Any) -> Callable[[], Any]:
        function = load("linear").providers[2].build(inputs)

        def named() -> Any:
            act()
            return function()

        return named

    return Provider(name, build)


def test_turns_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is timed before all are checked, or twice in a round; a wrong one never; the times are of all rounds."""
    called: list[str] = []
    names = ["a", "b", "wrong", "c"]
    providers = [instead(name, lambda name=name: called.append(name)) for name in names]
    right = providers[2].build
    providers[2] = dataclasses.replace(providers[2], build=lambda inputs: lambda: right(inputs)() + 1)
    taken = {name: iter(times) for name, times in (("a", [5, 1, 2, 9, 3]), ("b", [4] * 5), ("c", [7, 7, 7, 7, 6]))}

    def samples(function: Callable[[], Any], calls: int, flushes: int) -> list[float]:
        function()
        ms = float(next(taken[called[-1]]))
        return [ms, ms, ms + 20]

    monkeypatch.setattr(timing, "_samples", samples)
    rows = rows_of("linear", ".*", dataclasses.replace(load("linear"), providers=providers))
    assert called[:4] == names
    rounds = [called[i : i + 3] for i in range(4, len(called), 3)]
    assert [sorted(order) for order in rounds] == [["a", "b", "c"]] * timing.ROUNDS
    assert len(set(map(tuple, rounds))) > 1
    assert rows[2]["wrong"]
    times = [(row["ms"], row["ms_low"], row["ms_high"]) for row in rows if "ms" in row]
    assert times == [(5, 1, 9), (4, 4, 4), (7, 6, 7)]
    assert "5.0000 ms (1.0000-9.0000)" in run._format(rows[0])


@pytest.mark.parametrize("count", range(1, 17))
def test_nobody_always_follows_the_same(count: int) -> None:
    rounds = timing.turns(count)
    assert [sorted(order) for order in rounds] == [list(range(count))] * timing.ROUNDS
    order = [i for round_ in rounds for i in round_]
    most = max(Counter(itertools.pairwise(order)).values())
    assert count == 1 or most <= 3, rounds


@pytest.mark.parametrize(("ms", "calls"), [(0.001, 400), (0.3, 400), (1.2, 100), (8.0, 15), (60.0, 15)])
@pytest.mark.parametrize(("enqueued_us", "flushes"), [(30.0, 3), (320.0, 5)])
def test_rounds_share_the_calls(
    ms: float, calls: int, enqueued_us: float, flushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """120 ms, but 15 to 400 calls; flushes take half as long again as the host needs to enqueue a call, at least 0.3
    ms."""
    flush = torch.empty(1)
    monkeypatch.setattr(timing, "_flush_buffer", lambda: flush)
    monkeypatch.setattr(timing, "_elapsed_ms", lambda function, count: 0.1 if function == flush.zero_ else ms)
    monkeypatch.setattr(timing, "host_us", lambda function, calls, rounds: enqueued_us)
    assert PLAN(lambda: None, 120.0) == (calls // timing.ROUNDS, flushes)


def test_all_rest_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose host is slow has no more rest for it; training, which is slower, is not among those it is compared with."""
    seen: list[int] = []
    wanted = {"a": 2, "b": 5, "c": 7, "d": 1}
    providers = [dataclasses.replace(instead(name, int), training=name in "cd") for name in wanted]
    flushes_of = iter(wanted.values())
    monkeypatch.setattr(timing, "_plan", lambda function, budget_ms: (1, next(flushes_of)))
    monkeypatch.setattr(timing, "_samples", lambda function, calls, flushes: seen.append(flushes) or [1.0])
    rows_of("linear", ".*", dataclasses.replace(load("linear"), providers=providers, gradients=None))
    assert seen == [5] * 2 * timing.ROUNDS + [7] * 2 * timing.ROUNDS


@pytest.mark.parametrize("calls_before", range(3), ids=["checked", "first round", "second round"])
def test_a_crash_in_any_call_is_a_row(calls_before: int) -> None:
    calls = Counter[str]()

    def crash() -> None:
        calls["crash"] += 1
        if calls["crash"] > calls_before:
            raise RuntimeError("an illegal address, say")

    providers = [instead("a", lambda: calls.update("a")), instead("ikbo_recsys", crash), instead("b", int)]
    rows = rows_of("linear", ".*", dataclasses.replace(load("linear"), providers=providers))
    assert "illegal address" in rows[1]["failed"]
    assert not {"ms", "host_us", "tflops", "to_best_rival"} & rows[1].keys()
    assert "illegal address" in run._format(rows[1])
    assert all(rows[i]["ms"] == 1.0 for i in (0, 2)), rows
    assert calls == {"a": 1 + timing.ROUNDS, "crash": calls_before + 1}


def test_nothing_of_a_case_stays(clock: list[object]) -> None:
    """All providers of a case hold their memory at once: the next case needs it, whatever became of them."""
    held: list[weakref.ref[torch.Tensor]] = []

    def build(fault: str) -> Callable[[Any], Callable[[], Any]]:
        def make(inputs: Any) -> Callable[[], Any]:
            weight = inputs["weight"] + (fault == "wrong")
            held.append(weakref.ref(weight))
            function = load("linear").providers[2].build({**inputs, "weight": weight})
            calls = itertools.count()
            return lambda: [][0] if fault == "crash" and next(calls) > 1 else function()

        return make

    providers = [Provider(name, build(name)) for name in ("right", "wrong", "crash")]
    rows = rows_of("linear", ".*", dataclasses.replace(load("linear"), providers=providers))
    assert ["ms" in rows[0], "wrong" in rows[1], "failed" in rows[2]] == [True] * 3
    clock.clear()
    gc.collect()
    assert [reference() for reference in held] == [None] * 3


def test_a_crash_in_host_time_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "host_us", lambda function: function(1))
    (row,) = rows_of("linear", "ikbo_recsys")
    assert "TypeError" in row["failed"]
    assert "ms" not in row


def test_compiled_once_a_case(monkeypatch: pytest.MonkeyPatch, clock: list[object]) -> None:
    """Neither while others are built nor in turns is a program compiled again, and none is for any size."""
    compiled: list[list[str]] = []
    real = torch.compile

    def backend(module: Any, inputs: list[Any], **options: Any) -> Any:
        compiled.append(["timed"] * bool(clock) + [str(x) for x in inputs if not isinstance(x, torch.Tensor)])
        return module.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend=backend))
    way = builders.torch_way(compression_linear.decomposed, compression_linear.OPERANDS, mode="default")
    benchmark = load("compression_linear")
    trained = [p for p in benchmark.providers if p.name.endswith("compiled, training")]
    benchmark = dataclasses.replace(benchmark, providers=[Provider("decomposed", way), *trained])
    for batch in (130, 91):
        compiled.clear()
        clock.clear()
        case = Case("default", SMALL["compression_linear"] | {"B": batch})
        rows = run._run_case(benchmark, case, "fp32", ".*", device="cpu")
        assert all("ms" in row for row in rows), rows
        assert compiled == [[]] * 3


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


def test_newer_files_win(tmp_path: Path) -> None:
    """For what they have; the rest is of the older ones."""
    old = [row("ikbo_recsys", "small", 3.0), row("rival", "small", 2.0), row("rival", "small", 4.0, training=True)]
    runs = [{"rows": [row("ikbo_recsys", "small", 2.5)]}, {"rows": [row("ikbo_recsys", "small", 1.0)]}]
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, content in zip(paths, ({"rows": old}, {"runs": runs}), strict=True):
        path.write_text(json.dumps(content))
    assert table.read(paths) == [runs[1]["rows"][0], *old[1:]]


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


@pytest.mark.parametrize("works", [True, False])
def test_what_stands_in_for_tlx_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    """So that who needs it is absent, and says how to get it."""
    pytest.importorskip("triton")
    name = f"a_rival_that_{'works' if works else 'fails'}"  # modules are imported once
    (tmp_path / f"{name}.py").write_text(
        "import triton.language.extra.tlx as tlx\nwanted = tlx.anything\n" + ("" if works else "raise ValueError")
    )
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.suppress(AbsentError), stand_in_for_tlx():
        optional_import(name, "a hint")
        assert works
    with pytest.raises(AbsentError, match="a hint"):
        optional_import("triton.language.extra.tlx", "a hint")
