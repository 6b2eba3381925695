"""`python -m benchmarks.first_call [OPERATOR ...]`: seconds of the first call in a fresh process.

With an empty kernel cache, which is what a new machine pays, and again with the cache that this left: what each worker
of a running service pays. The inputs lie on the GPU before the clock starts, and CUDA's own start is over.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

_DEFAULT = ("compression_linear", "linear", "cross_attention")


def measure(operator: str, dtype: str) -> float:
    """In this process, whose first call it must be."""
    import torch

    from benchmarks.cases import load
    from benchmarks.run import DTYPES

    benchmark = load(operator)
    inputs = benchmark.make_inputs(benchmark.cases[0], DTYPES[dtype], "cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    benchmark.providers[0].build(inputs)()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_call", description=__doc__)
    parser.add_argument("operators", nargs="*", default=_DEFAULT)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--here", action="store_true", help="time one call in this process and print the seconds")
    options = parser.parse_args()
    if options.here:
        sys.stdout.write(f"{measure(options.operators[0], options.dtype):.2f}\n")
        return 0
    for operator in options.operators:
        with tempfile.TemporaryDirectory() as cache:
            seconds = [_elsewhere(operator, options.dtype, cache) for _ in range(2)]
        sys.stdout.write(f"{operator}: {seconds[0]} s with an empty kernel cache, {seconds[1]} s with a filled one\n")
    return 0


def _elsewhere(operator: str, dtype: str, cache: str) -> str:
    command = [sys.executable, "-m", "benchmarks.first_call", operator, "--dtype", dtype, "--here"]
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()[-1]


if __name__ == "__main__":
    sys.exit(main())
