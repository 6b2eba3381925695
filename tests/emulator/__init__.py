"""Gluon kernels on the CPU: what Triton's interpreter is to its own language, for the part of Gluon that is used here.

The device code itself runs, as Python, on torch tensors: partitions of a block take turns in random order, TMA loads
land and products are made at random times between their start and what waits for them. So it finds wrong results,
deadlocks, stages overwritten while they are read, results read before they are there, missing fences, accesses
behind the end of a tensor, and what a kernel that overlaps with the one before reads or writes before it has waited
for that one. What it cannot find is what the compiler does: see tests/compile.

In a process of its own, with TRITON_INTERPRET=1 for the other kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def emulated(
    seed: int = 0,
    eager: float = 0.3,
    multiprocessors: int = 1,
    backwards: bool = False,
    starved: int | None = None,
) -> Iterator[list[str]]:
    """Within, Gluon kernels run here, and tensors on the CPU may take every path: `use_backend("gluon")` asks for one.

    Args:
        seed: of the order in which things happen.
        eager: how often work under way is done at once rather than as late as it can be, 0 to 1.
        multiprocessors: of the GPU, which is the number of blocks of a persistent kernel.
        backwards: whether the last block runs first.
        starved: the number of a partition that goes on only where nothing else does.

    Gives the names of the Gluon kernels that ran.
    """
    from triton.experimental.gluon._runtime import GluonJITFunction

    from ikbo_recsys.kernels import _backend, _checks
    from ikbo_recsys.kernels._triton import cross_attention_merge, schedule
    from tests.emulator.language import emulate

    ran: list[str] = []

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            ran.append(kernel.fn.__name__)
            emulate(kernel, grid[0], arguments, constants, seed=seed, eager=eager, backwards=backwards, starved=starved)

        return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GluonJITFunction, "__getitem__", launcher)
        # Triton's interpreter does not know it: here one kernel ends before the next begins.
        patch.setattr(schedule, "gdc_launch_dependents", lambda: None)
        patch.setattr(cross_attention_merge, "gdc_wait", lambda: None)
        patch.setattr(_checks, "on_host", lambda tensor: False)
        patch.setattr(_backend, "hopper_refusal", lambda device: None)
        patch.setattr(_backend, "portable_refusal", lambda device, dtype: None)
        for name, module in list(sys.modules.items()):
            if name.startswith("ikbo_recsys.kernels.") and hasattr(module, "multiprocessors"):
                patch.setattr(module, "multiprocessors", lambda device: multiprocessors)
        yield ran
