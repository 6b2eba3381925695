"""The table of `docs/transforms.md`: `python -m tests.transforms.table`. One thread, before and after in one run.

FLOPs at one user and 64 candidates, as `FlopCounterMode` counts them; "repeated" is what running the model shows to be
computed more than once (`probe.py`). Milliseconds at one user and 512 candidates: the fastest run, before and after in
turn; first the model and the optimized module as they run in Python, then both as ahead-of-time packages.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ikbo_recsys.transforms import optimize
from ikbo_recsys.transforms.tracing import export_model
from tests.transforms import models
from tests.transforms.probe import repeated_flops

COLUMNS = (
    *("model", "broadcasts", "sunk", "split", "replaced", "left"),
    *("FLOPs before", "after", "repeated", "removed", "ms before", "after", "packaged before", "after"),
)


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops()


def latencies(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Milliseconds of each call's fastest run, taken in turn: other jobs on the machine only ever add to it."""
    times: list[list[float]] = [[] for _ in calls]
    with torch.no_grad():
        for repeat in range(repeats + 2):
            for call, found in zip(calls, times, strict=True):
                start = time.perf_counter()
                call()
                if repeat >= 2:
                    found.append(1000 * (time.perf_counter() - start))
    return [min(found) for found in times]


def _package(program: torch.export.ExportedProgram) -> Callable[..., Any]:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        with torch.fx.experimental._config.patch(backed_size_oblivious=True):
            path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
        return torch._inductor.aoti_load_package(path)


def row(case: models.ModelCase, repeats: int, compiled: bool) -> str:
    model = case.make()
    args, kwargs, full = case.batch(3, 24)
    given = full if case.caller else args
    original = export_model(model, given, {}, case.dynamic)
    optimized = optimize(model, given, **case.options())
    module, report = optimized.module(), optimized.report
    args, kwargs, full = case.batch(1, 64)
    before, after = flops(lambda: model(*full)), flops(lambda: module(*args, **kwargs))
    repeated, _ = repeated_flops(lambda: model(*full), 64)
    given, named, whole = case.batch(1, 512)
    eager = latencies([lambda: model(*whole), lambda: module(*given, **named)], repeats)
    packaged = ("", "")
    if compiled:
        before_package, after_package = _package(original), _package(optimized.program)
        found = latencies([lambda: before_package(*whole), lambda: after_package(*given, **named)], repeats)
        packaged = tuple(f"{ms:.2f}" for ms in found)
    cells = [case.name, len(report.broadcasts), *(report.count(o) for o in ("sunk", "split", "replaced", "left"))]
    cells += [f"{number / 1e6:.2f} M" for number in (before, after, repeated)]
    cells += [f"{(before - after) / repeated:.0%}", *(f"{ms:.2f}" for ms in eager), *packaged]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=32, help="embedding size; layers are 4 and 2 times as wide")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--eager", action="store_true", help="leave the packages out: compiling takes most of the time")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    models.DIM = arguments.dim
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for case in [*models.torchrec_cases(), *models.rechub_cases(), *models.deepctr_cases()]:
        if arguments.only in case.name:
            print(row(case, arguments.repeats, not arguments.eager), flush=True)


if __name__ == "__main__":
    main()
