"""Builders that the dense operators share: from the inputs of a case to the function that is timed.

`names` are the operands in `inputs`, in the order the function takes them; the index follows them: a `CandidateIndex`
for this library's operators, an int64 tensor for plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, Inputs
from ikbo_recsys import CandidateIndex
from ikbo_recsys.kernels._backend import use_backend

Build = Callable[[Inputs], Callable[[], Any]]


def num_users(case: Case) -> int:
    """Users of `B` candidates: the first U - 1 have `ratio` each, the last one the rest."""
    return -(-case["B"] // case["ratio"])


def make_index(case: Case, device: str) -> CandidateIndex:
    to_user = torch.arange(case["B"], device=device, dtype=torch.int32) // case["ratio"]
    return CandidateIndex.from_user_ids(to_user, num_users(case), grouped=True)


def ours(function: Callable[..., Tensor], path: str, names: Sequence[str]) -> Build:
    """This library's operator by a path, without gradients."""

    def build(inputs: Inputs) -> Callable[[], Tensor]:
        arguments = [*(inputs[name] for name in names), inputs["index"]]

        @torch.no_grad()
        def run() -> Tensor:
            return function(*arguments)

        return run if path == "auto" else use_backend(path)(run)

    return build


def torch_way(function: Callable[..., Tensor], names: Sequence[str], **compile_options: Any) -> Build:
    """Plain torch without gradients, compiled where options are given."""

    def build(inputs: Inputs) -> Callable[[], Tensor]:
        arguments = [*(inputs[name] for name in names), inputs["index"].to_user.long()]
        chosen = torch.compile(function, **compile_options) if compile_options else function

        def run() -> Tensor:
            with torch.no_grad():
                return chosen(*arguments)

        return run

    return build


def training(function: Callable[..., Tensor], names: Sequence[str], *, index: str, compiled: bool = False) -> Build:
    """Forward and backward; gives the gradients of `names`.

    `inputs["probe"]` is the output's gradient. `index` is "index" or "to_user", for the one and the other kind of
    function.
    """

    def build(inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
        leaves = [inputs[name].detach().clone().requires_grad_() for name in names]
        who = inputs["index"] if index == "index" else inputs["index"].to_user.long()
        chosen = torch.compile(function) if compiled else function

        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(chosen(*leaves, who), leaves, inputs["probe"])

        return run

    return build


MAX_AUTOTUNE: Mapping[str, Any] = {"mode": "max-autotune-no-cudagraphs", "dynamic": False}
