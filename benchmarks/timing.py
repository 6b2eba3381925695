"""Timing on a GPU: medians with a cold L2, in turns, host time per call, the ceilings of the card."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ROUNDS = 5
_FLUSH_BYTES = 256 << 20  # more than four times the L2 of an H200 (60 MB)
_FLUSH_MS = 0.3  # at least, before each call
_CALLS = (15, 400)  # of a function in all rounds: at least and at most


class Stopwatch:
    """Times one function, a round at a time, so that others can have theirs in between.

    Making it warms the function up and finds how many calls are a round's share of `budget_ms`, and by how many flushes
    of the L2 each has to be preceded.
    """

    def __init__(self, function: Callable[[], Any], budget_ms: float = 120.0) -> None:
        self.function = function
        self._calls, self.flushes = _plan(function, budget_ms)
        self._rounds: list[list[float]] = []

    def take_turn(self) -> None:
        self._rounds.append(_samples(self.function, self._calls, self.flushes))

    def times(self) -> dict[str, float]:
        """`ms`: the median of all calls; `ms_low`, `ms_high`: the lowest and the highest median of a round."""
        medians = [statistics.median(samples) for samples in self._rounds]
        whole = statistics.median(sample for samples in self._rounds for sample in samples)
        return {"ms": whole, "ms_low": min(medians), "ms_high": max(medians)}


def rest_alike(watches: Sequence[Stopwatch]) -> None:
    """Flush for as long before all as before the one that needs it longest: a flush draws less than most functions, so
    that at its power limit a GPU is the faster behind it the longer it takes."""
    most = max((watch.flushes for watch in watches), default=0)
    for watch in watches:
        watch.flushes = most


def turns(count: int) -> list[list[int]]:
    """In which order `count` functions take their turns in each round.

    At its power limit a GPU is faster behind a function that drew less, so the next one is always who has followed the
    last one least often; among equals, a round begins its search one further on than the round before.
    """
    followed = Counter[tuple[int, int]]()
    rounds: list[list[int]] = []
    last = -1
    for begin in range(ROUNDS):
        waiting = sorted(range(count), key=lambda i: (i - begin) % count)
        rounds.append([])
        while waiting:
            chosen = min(waiting, key=lambda i: followed[last, i])
            waiting.remove(chosen)
            rounds[-1].append(chosen)
            followed[last, chosen] += 1
            last = chosen
    return rounds


def device_ms(function: Callable[[], Any], *, budget_ms: float = 120.0) -> float:
    """Median milliseconds of one call of a function that takes turns with nobody."""
    watch = Stopwatch(function, budget_ms)
    for _ in range(ROUNDS):
        watch.take_turn()
    return watch.times()["ms"]


def _plan(function: Callable[[], Any], budget_ms: float) -> tuple[int, int]:
    """Calls in a round, and flushes before each.

    The flush is repeated for as long as the host takes to enqueue the call: the GPU would wait for it between kernels
    otherwise, and that is what `host_us` is for. It takes as long before quicker ones, so that processes compare.
    """
    flush = _flush_buffer()
    enqueued_ms = host_us(function, calls=5, rounds=3) / 1e3
    flushes = math.ceil(max(_FLUSH_MS, 1.5 * enqueued_ms) / _elapsed_ms(flush.zero_, 5))
    least, most = _CALLS
    calls = max(least, min(most, int(budget_ms / max(_elapsed_ms(function, 3), 1e-3))))
    return calls // ROUNDS, flushes


def _samples(function: Callable[[], Any], calls: int, flushes: int) -> list[float]:
    """Milliseconds between CUDA events around each call, the L2 flushed before."""
    flush = _flush_buffer()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(calls)] for _ in range(2))
    for start, end in zip(starts, ends, strict=True):
        for _ in range(flushes):
            flush.zero_()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def _flush_buffer() -> Tensor:
    return torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")


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
