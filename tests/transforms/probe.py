"""How much of a model's arithmetic is repeated, found by running it: nothing here knows the pass.

The model runs on one user and several random candidates. A multiplication whose two operands have equal values for
every candidate is one that need be done once. For each matmul the share of such multiplications is counted,
element by element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Repeated(TorchDispatchMode):
    """Adds up the multiplications of matmuls and convolutions, and those that repeat among `candidates` rows."""

    def __init__(self, candidates: int) -> None:
        super().__init__()
        self.candidates = candidates
        self.total = 0.0
        self.repeated = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.relu.default, aten.relu_.default):
            return args[0] * 1.0  # a unit that is off would look the same for all candidates
        if func in (aten.mm.default, aten.bmm.default):
            self._product(*args[:2])
        elif func in (aten.addmm.default, aten.baddbmm.default):
            self._product(*args[1:3])
        elif func is aten.convolution.default and args[1].shape[2:].numel() == 1:
            weight = args[1].flatten(1)
            self._product(weight.expand(args[0].shape[0], -1, -1), args[0].flatten(2))
        return func(*args, **kwargs)

    def _product(self, a: Tensor, b: Tensor) -> None:
        """`a [.., M, K] @ b [.., K, N]`: the rows of candidates lie along the batch or M, whole blocks for each
        candidate."""
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        batch = a.shape[0] if a.dim() == 3 else 1
        count = batch * m * k * n
        self.total += count
        c = self.candidates
        if a.dim() == 3 and batch % c == 0:
            equal_a = _equal_rows(a.reshape(c, batch // c, m, k))
            equal_b = _equal_rows(b.reshape(c, batch // c, k, n))
            self.repeated += c * torch.einsum("gmk,gkn->", equal_a, equal_b).item()
        elif a.dim() == 2 and m % c == 0:
            self.repeated += c * n * _equal_rows(a.reshape(c, m // c, k)).sum().item()
        elif a.dim() == 2 and n % c == 0:
            self.repeated += c * m * _equal_rows(b.t().reshape(c, n // c, k)).sum().item()


def _equal_rows(x: Tensor) -> Tensor:
    """1.0 where all entries along axis 0 are one value; a zero (an empty bag) says nothing about what it depends on."""
    return ((x == x[:1]).all(0) & (x[0] != 0)).double()


def repeated_flops(call: Callable[[], Any], candidates: int) -> tuple[float, float]:
    """(FLOPs that repeat and need not, all FLOPs) of a call on one user and `candidates` candidates."""
    with torch.no_grad(), Repeated(candidates) as mode:
        call()
    spare = 2 * mode.repeated * (1 - 1 / candidates)
    return spare, 2 * mode.total
