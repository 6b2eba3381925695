"""`python -m benchmarks.run OPERATOR [--case C] [--provider P] [--dtype T] [--json FILE]`: one row a case and provider.

All providers of a case are built and checked first, then timed in rounds in which each has its turn: power decides the
clock, so what ran before moves a time by more than many rivals are apart. A provider whose result is wrong is not
timed, and one that crashes does not end the run: its row says so, and the command ends with status 1 if that provider
is ours.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import logging
import math
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import OPERATORS, Benchmark, Case, Inputs, load
from benchmarks.providers import AbsentError, Provider
from benchmarks.timing import ROUNDS, Stopwatch, ceilings, host_us, launch_us, rest_alike, turns

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_COLUMNS = ("case", "dtype", "provider", "ms", "low-high", "host_us", "tflops", "gbs", "error", "to_best_rival")


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("benchmarks need a GPU\n")
        return 2
    # What IKBO_TUNE=1 finds is logged.
    logging.basicConfig(format="%(message)s")
    logging.getLogger("ikbo_recsys").setLevel(logging.INFO)
    benchmark = load(options.operator)
    rows: list[dict[str, Any]] = []
    status = 0
    environment = _environment() | {"command": "python -m benchmarks.run " + " ".join(arguments or sys.argv[1:])}
    _write(json.dumps(environment))
    for dtype_name in options.dtype:
        environment[f"ceilings_{dtype_name}"] = ceilings(DTYPES[dtype_name])
        _write(f"{dtype_name}: {environment[f'ceilings_{dtype_name}']}")
    _write(" ".join(f"{name:>14}" for name in _COLUMNS))
    for case in benchmark.cases:
        if not re.fullmatch(options.case, case.name):
            continue
        for dtype_name in options.dtype:
            measured = _run_case(benchmark, case, dtype_name, options.provider)
            gc.collect()
            torch.cuda.empty_cache()  # of what all providers held at once
            rows += measured
            status |= any(row["ours"] and ("wrong" in row or "failed" in row) for row in measured)
            if options.json:
                with open(options.json, "w") as file:
                    json.dump({"environment": environment, "rows": rows}, file, indent=1)
    return status


def _run_case(
    benchmark: Benchmark, case: Case, dtype_name: str, provider_pattern: str, device: str = "cuda"
) -> list[dict[str, Any]]:
    """Check every provider on one case, then time those that passed in turns; rows in the order of the providers."""
    dtype = DTYPES[dtype_name]
    torch.manual_seed(0)
    # Here and in no provider: with another case's programs still there torch.compile makes one for all sizes, and after
    # some cases none; what is reset while a later provider is built compiles again when it is timed.
    torch._dynamo.reset()
    check = Check(benchmark, benchmark.make_inputs(case, dtype, device), dtype)
    rows: list[dict[str, Any]] = []
    watches = []
    for provider in benchmark.providers:
        if re.fullmatch(provider_pattern, provider.name) and re.fullmatch(provider.cases, case.name):
            row = {"case": case.name, "group": case.group, "dtype": dtype_name, "provider": provider.name, **case.sizes}
            row |= {"ours": provider.name.startswith("ikbo_recsys"), "training": provider.training}
            row |= {"whole": provider.whole, "rival": provider.rival}
            rows.append(row)
            watch = _checked(provider, check, row)
            if watch is not None:
                watches.append((row, watch))
    for training in (False, True):
        _time_in_turns([(row, watch) for row, watch in watches if row["training"] is training])
    for row in rows:
        if "ms" in row and row["whole"] and not row["training"]:
            row["tflops"] = round(benchmark.flops(case) / row["ms"] / 1e9, 1)
            row["gbs"] = round(benchmark.bytes(case, dtype) / row["ms"] / 1e6, 1)
    for training in (False, True):
        _add_ratio([row for row in rows if row.get("training") is training])
    for row in rows:
        _write(_format(row))
    return rows


class Check:
    """A case's inputs and its results in fp64, made when first asked for."""

    def __init__(self, benchmark: Benchmark, inputs: Inputs, dtype: torch.dtype) -> None:
        self.inputs = inputs
        self._benchmark, self._tolerance = benchmark, benchmark.tolerance[dtype]

    @functools.cached_property
    def _expected(self) -> Tensor:
        return self._benchmark.reference(self.inputs)

    @functools.cached_property
    def _gradients(self) -> Sequence[Tensor]:
        assert self._benchmark.gradients is not None
        return self._benchmark.gradients(self.inputs)

    def error(self, provider: Provider, result: Any) -> tuple[float, bool] | None:
        """Relative error of a provider's result (the largest one of its gradients), and whether it is small enough.

        None for what is not checked: a part of the operator. A gradient is a sum of products that were rounded
        themselves, and plain torch adds up a user's in the working type: five times the error of a result.
        """
        if not provider.whole or (provider.training and self._benchmark.gradients is None):
            return None
        if not provider.training:
            error = _relative_error(self._benchmark.select(result), self._expected)
            return error, error <= self._tolerance
        found = self._benchmark.select_gradients(result)
        error = max(_relative_error(*pair) for pair in zip(found, self._gradients, strict=True))
        return error, error <= 5 * self._tolerance


@contextlib.contextmanager
def _recorded(row: dict[str, Any]) -> Iterator[None]:
    """What a provider raises inside goes into its row: it is a result too, and must not end the run."""
    try:
        yield
    except AbsentError as reason:
        row["absent"] = str(reason)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error)[:160]}"


def _checked(provider: Provider, check: Check, row: dict[str, Any]) -> Stopwatch | None:
    """A stopwatch for the provider's function; None, and the row says why, where that is wrong or cannot run."""
    with _recorded(row):
        function = provider.build(check.inputs)
        checked = check.error(provider, function())
        if checked is not None:
            row["error"] = checked[0]
            if not checked[1]:
                row["wrong"] = True
                return None
        return Stopwatch(function)
    return None


def _time_in_turns(watches: Sequence[tuple[dict[str, Any], Stopwatch]]) -> None:
    """Add the times to each row. Who crashes takes no more turns and has no times."""
    rest_alike([watch for _, watch in watches])
    for order in turns(len(watches)):
        for row, watch in (watches[i] for i in order):
            if "failed" not in row:
                with _recorded(row):
                    watch.take_turn()
    for row, watch in watches:
        if "failed" not in row:
            with _recorded(row):
                times = {name: round(ms, 5) for name, ms in watch.times().items()}
                row |= times | {"host_us": round(host_us(watch.function), 1)}


def _relative_error(result: Tensor, expected: Tensor) -> float:
    """||result - expected|| / ||expected||; infinite, which passes no comparison, where either holds a NaN."""
    if result.shape != expected.shape:
        return math.inf
    norm = expected.norm()
    error = float((result.to(expected.dtype) - expected).norm() / (norm if norm > 0 else 1))
    return math.inf if math.isnan(error) else error


def _add_ratio(rows: list[dict[str, Any]]) -> None:
    times = [row["ms"] for row in rows if "ms" in row and row["rival"] and row["whole"]]
    for row in rows:
        if times and "ms" in row:
            row["to_best_rival"] = round(min(times) / row["ms"], 3)


def _environment() -> dict[str, Any]:
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "clock": _clocks(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "timing": "CUDA events, L2 flushed before each call, equally long for all, median of all calls; the providers "
        f"of a case took turns, {ROUNDS} rounds: ms_low and ms_high are the lowest and the highest median of a round",
        "launch_us": round(launch_us(), 1),
    }


def _clocks() -> str:
    """Clocks and power limit as the driver reports them."""
    import subprocess

    query = "clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return f"{query}: {done.stdout.strip()}"


def _format(row: dict[str, Any]) -> str:
    for trouble in ("absent", "failed"):
        if trouble in row:
            return f"{row['case']:>14} {row['dtype']:>5} {row['provider']:<40} {trouble}: {row[trouble]}"
    if row.get("wrong"):
        return f"{row['case']:>14} {row['dtype']:>5} {row['provider']:<40} WRONG, not timed: error {row['error']:.2e}"
    numbers = (
        f"{row['ms']:8.4f} ms ({row['ms_low']:.4f}-{row['ms_high']:.4f}) {row['host_us']:7.1f} us host "
        f"{row.get('tflops', float('nan')):6.1f} TFLOP/s {row.get('gbs', float('nan')):7.1f} GB/s"
    )
    error = f" err {row['error']:.2e}" if "error" in row else ""
    ratio = f" x{row['to_best_rival']:.2f}" if "to_best_rival" in row else ""
    return f"{row['case']:>14} {row['dtype']:>5} {row['provider']:<40} {numbers}{error}{ratio}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("operator", choices=OPERATORS)
    parser.add_argument("--case", default=".*", help="regular expression on case names (default: all)")
    parser.add_argument("--provider", default=".*", help="regular expression on provider names (default: all)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp16", "bf16"])
    parser.add_argument("--json", help="write environment and rows to this file")
    return parser.parse_args(arguments)


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
