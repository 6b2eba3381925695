"""Choosing between prepared launches by measurement, for whoever asks for it with `IKBO_TUNE=1`.

By default the first option is taken, which is what the tables say, and nothing is timed: a first call is not a tuning
session. With `IKBO_TUNE=1` every option is timed at a shape's first call, on the tensors of that call, and the fastest
is kept for the process. What was found is logged (logger `ikbo_recsys.tuning`, level INFO), to be written into a table.
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

Option = TypeVar("Option")

_LOGGER = logging.getLogger("ikbo_recsys.tuning")
_FLUSH_BYTES = 256 << 20
_chosen: dict[Hashable, Any] = {}


def is_on() -> bool:
    """Whether `IKBO_TUNE=1` asked for it."""
    return os.environ.get("IKBO_TUNE", "0") not in ("", "0")


def fastest(
    operator: str, shape: Hashable, options: Sequence[Option], run: Callable[[Option], Callable[[], Any]]
) -> Option:
    """The option to take for a shape: the first one, or the fastest if tuning was asked for.

    Args:
        operator: its name, for the log.
        shape: sizes, dtype, device: what a choice is remembered for.
        options: the default first.
        run: makes a function without arguments that launches an option's work.
    """
    if len(options) == 1 or not is_on():
        return options[0]
    key = (operator, shape)
    if key not in _chosen:
        # A graph that is being captured records launches and does not run them.
        if torch.cuda.is_current_stream_capturing():
            return options[0]
        times = []
        for option in options:
            times.append(milliseconds(run(option)))
            _LOGGER.info("%s %s %s: %.4f ms", operator, shape, option, times[-1])
        _chosen[key] = options[times.index(min(times))]
        _LOGGER.info("%s %s: %s", operator, shape, _chosen[key])
    choice: Option = _chosen[key]
    return choice


def milliseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of a call on the current stream, the L2 flushed before each."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        run()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times)
