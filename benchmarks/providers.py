"""Who is measured: a `Provider` makes, from the inputs of a case, a function to time."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

FBGEMM_HINT = (
    "clone https://github.com/pytorch/FBGEMM and put fbgemm_gpu/experimental/ikbo on PYTHONPATH; its TLX kernels need "
    "a Triton with TLX (facebookexperimental/triton, package fbtriton)"
)


class AbsentError(Exception):
    """A provider cannot run here; the message says how to get it."""


@dataclass(frozen=True)
class Provider:
    """One way to compute the operator.

    Attributes:
        name: as printed. Ours begin with "ikbo_recsys".
        build: takes the inputs (and does whatever may be done once: padding a weight, compiling) and gives the
            function to time, without arguments. Raises `AbsentError` when it cannot run here.
        whole: False when it leaves out part of the operator (a floor, not a rival): its result is then not checked and
            it is no candidate for the best rival.
        training: whether the function also runs the backward pass.
        rival: whether "ratio to the best rival" counts it. Our own paths do not count.
        cases: regular expression on the names of the cases it takes part in: compiling for minutes is for few of them.
    """

    name: str
    build: Callable[[Mapping[str, Any]], Callable[[], Any]]
    whole: bool = True
    training: bool = False
    rival: bool = True
    cases: str = ".*"


def optional_import(module: str, hint: str) -> Any:
    """The module, or `AbsentError` with the hint."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a rival may fail to import in any way it likes
        raise AbsentError(f"{module}: {type(error).__name__}: {str(error)[:80]}. To get it: {hint}") from error


@contextmanager
def stand_in_for_tlx() -> Iterator[None]:
    """Where Triton has no TLX, an empty module of that name: FBGEMM's Triton kernels do not use it, but take a function
    from the module of the TLX ones, which imports it."""
    from triton.language import extra

    name = "triton.language.extra.tlx"
    try:
        importlib.import_module(name)
    except ImportError:
        tlx = types.ModuleType(name)
        tlx.__getattr__ = lambda attribute: None  # type: ignore[method-assign]
        sys.modules[name] = extra.tlx = tlx
        try:
            yield
        finally:
            del sys.modules[name], extra.tlx
    else:
        yield


def keep_configurations(kernel: Any, keep: Callable[[Any], bool]) -> None:
    """Let one of FBGEMM's kernels tune itself over a part of its hundreds of configurations: all take minutes."""
    kernel.configs = [config for config in kernel.configs if keep(config)] or kernel.configs
