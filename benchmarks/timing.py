"""Timing on a GPU: medians with a cold L2, host time per call, the ceilings of the card."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_FLUSH_BYTES = 256 << 20  # more than four times the L2 of an H200 (60 MB)


def device_ms(function: Callable[[], Any], *, budget_ms: float = 120.0, least: int = 15) -> float:
    """Median milliseconds between CUDA events around one call, the L2 flushed before each.

    The flush is repeated for as long as the host takes to enqueue the call: the GPU would wait for it between kernels
    otherwise, and that is what `host_us` is for.
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    enqueued_ms = host_us(function, calls=5, rounds=3) / 1e3
    flushes = max(1, math.ceil(1.5 * enqueued_ms / _elapsed_ms(flush.zero_, 5)))
    repeats = max(least, min(400, int(budget_ms / max(_elapsed_ms(function, 3), 1e-3))))
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    for start, end in zip(starts, ends, strict=True):
        for _ in range(flushes):
            flush.zero_()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True))


def _elapsed_ms(function: Callable[[], Any], calls: int) -> float:
    """Milliseconds per call of a few of them, one behind the other."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    function()
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def host_us(function: Callable[[], Any], calls: int = 50, rounds: int = 7) -> float:
    """Microseconds of host time that one call takes to return: the median over rounds of back-to-back calls.

    The GPU is idle at the start of a round and never waited for within it, so this is the time to enqueue the work.
    """
    function()
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        samples.append((time.perf_counter() - begin) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(samples)


def launch_us() -> float:
    """Host microseconds of a launch that does nothing, straight from a compiled kernel: what no operator can go
    below."""
    import triton

    @triton.jit
    def nothing(pointer):  # type: ignore[no-untyped-def]
        pass

    argument = torch.empty(1, device="cuda")
    run = nothing[(1,)](argument)[(1, 1, 1)]
    return host_us(lambda: run(argument))


def ceilings(dtype: torch.dtype) -> dict[str, float]:
    """The card's rates in this run: an 8192^3 matmul (TFLOP/s) and a device copy (GB/s, bytes read plus written)."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
    matmul = 2 * 8192**3 / device_ms(lambda: left @ right) / 1e9
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / device_ms(lambda: target.copy_(source)) / 1e6
    return {"matmul_tflops": round(matmul, 1), "copy_gbs": round(copy, 0)}
