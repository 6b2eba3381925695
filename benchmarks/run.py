"""`python -m benchmarks.run OPERATOR [--case C] [--provider P] [--dtype T] [--json FILE]`: one row a case and provider.

A provider whose result is wrong is not timed, and one that crashes does not end the run: its row says so, and the
command ends with status 1 if that provider is ours.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import platform
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import OPERATORS, Benchmark, Case, Inputs, load
from benchmarks.providers import AbsentError, Provider
from benchmarks.timing import ceilings, device_ms, host_us, launch_us

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_COLUMNS = ("case", "dtype", "provider", "ms", "host_us", "tflops", "gbs", "error", "to_best_rival")


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
            rows += measured
            status |= any(row["ours"] and ("wrong" in row or "failed" in row) for row in measured)
            if options.json:
                with open(options.json, "w") as file:
                    json.dump({"environment": environment, "rows": rows}, file, indent=1)
    return status


def _run_case(
    benchmark: Benchmark, case: Case, dtype_name: str, provider_pattern: str, device: str = "cuda"
) -> list[dict[str, Any]]:
    """Check and time every provider on one case; rows in the order of the providers."""
    dtype = DTYPES[dtype_name]
    torch.manual_seed(0)
    inputs = benchmark.make_inputs(case, dtype, device)
    check = Check(benchmark, inputs, dtype)
    rows = []
    for provider in benchmark.providers:
        if re.fullmatch(provider_pattern, provider.name) and re.fullmatch(provider.cases, case.name):
            row = {"case": case.name, "group": case.group, "dtype": dtype_name, "provider": provider.name, **case.sizes}
            row["ours"] = provider.name.startswith("ikbo_recsys")
            rows.append(row | _measure(benchmark, case, dtype, provider, check))
            if device == "cuda":
                torch.cuda.empty_cache()
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


def _measure(benchmark: Benchmark, case: Case, dtype: torch.dtype, provider: Provider, check: Check) -> dict[str, Any]:
    row: dict[str, Any] = {"training": provider.training, "whole": provider.whole, "rival": provider.rival}
    try:
        function = provider.build(check.inputs)
        checked = check.error(provider, function())
        if checked is not None:
            row["error"] = checked[0]
            if not checked[1]:
                return row | {"wrong": True}
        ms = device_ms(function)
        row |= {"ms": round(ms, 5), "host_us": round(host_us(function), 1)}
    except AbsentError as reason:
        return row | {"absent": str(reason)}
    except Exception as error:  # a crash is a result too, and must not end the run
        return row | {"failed": f"{type(error).__name__}: {str(error)[:160]}"}
    if provider.whole and not provider.training:
        row["tflops"] = round(benchmark.flops(case) / ms / 1e9, 1)
        row["gbs"] = round(benchmark.bytes(case, dtype) / ms / 1e6, 1)
    return row


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
        "timing": "CUDA events, L2 flushed before each call, median",
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
        f"{row['ms']:8.4f} ms {row['host_us']:7.1f} us host {row.get('tflops', float('nan')):6.1f} TFLOP/s "
        f"{row.get('gbs', float('nan')):7.1f} GB/s"
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
