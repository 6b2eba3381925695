"""What a benchmark is made of: cases (shapes), and one `Benchmark` for each operator, in the module of its name.

`benchmarks/<operator>.py` defines `BENCHMARK`; `run.py` does the rest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.providers import Provider

Inputs = Mapping[str, Any]

OPERATORS = ("compression_linear", "linear", "cross_attention")


@dataclass(frozen=True)
class Case:
    """One shape. `sizes` are printed as they are; `group` gathers the cases of one sweep ("batch", "ratio", ...)."""

    name: str
    sizes: Mapping[str, int]
    group: str = ""

    def __getitem__(self, size: str) -> int:
        return self.sizes[size]


@dataclass(frozen=True)
class Benchmark:
    """One operator's benchmark.

    Attributes:
        cases: the first one is the default case.
        make_inputs: fresh random inputs of a case, in a dtype, on a device.
        reference: the result in fp64, or the part of it that `select` picks, on the GPU.
        select: the same part of a provider's result; the whole of it where the fp64 result is small enough.
        flops, bytes: what the operator has to do and the least that it has to move: each input read and each output
        written once.
        providers: ours by path, and the rivals.
        tolerance: largest relative error (Frobenius norm) that may be timed, by dtype.
        gradients, select_gradients: the same two for the gradients that a training provider gives; where there are
        none, training providers give nothing and are not checked.
    """

    cases: Sequence[Case]
    make_inputs: Callable[[Case, torch.dtype, str], Inputs]
    reference: Callable[[Inputs], Tensor]
    select: Callable[[Tensor], Tensor]
    flops: Callable[[Case], float]
    bytes: Callable[[Case, torch.dtype], float]
    providers: Sequence[Provider]
    tolerance: Mapping[torch.dtype, float]
    gradients: Callable[[Inputs], Sequence[Tensor]] | None = None
    select_gradients: Callable[[Any], Sequence[Tensor]] = tuple


def load(operator: str) -> Benchmark:
    """The benchmark of an operator.

    Raises:
        ValueError: no such operator.
    """
    if operator not in OPERATORS:
        raise ValueError(f"{operator!r} is not one of {', '.join(OPERATORS)}")
    benchmark: Benchmark = importlib.import_module(f"benchmarks.{operator}").BENCHMARK
    return benchmark
