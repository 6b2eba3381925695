"""The benchmark of `linear`: cases and providers.

Shape letters: U users, B candidates, Ku/Kc inputs, M outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.builders import MAX_AUTOTUNE, Build, make_index, num_users, ours, torch_way
from benchmarks.cases import Benchmark, Case, Inputs
from benchmarks.providers import Provider
from ikbo_recsys import CandidateIndex
from ikbo_recsys.kernels import linear

OPERANDS = ("user", "cand", "weight", "bias")

CASES = tuple(
    Case(f"B{batch}_ratio{ratio}", {"B": batch, "ratio": ratio, "M": 512, "Ku": 1178, "Kc": 866}, "batch")
    for batch, ratio in ((1024, 70), (4096, 70), (16384, 100), (65536, 100), (1024, 2))
)


def make_inputs(c: Case, dtype: torch.dtype, device: str) -> Inputs:
    return {
        "user": torch.randn(num_users(c), c["Ku"], device=device, dtype=dtype),
        "cand": torch.randn(c["B"], c["Kc"], device=device, dtype=dtype),
        "weight": torch.randn(c["M"], c["Ku"] + c["Kc"], device=device, dtype=dtype),
        "bias": torch.randn(c["M"], device=device, dtype=dtype),
        "index": make_index(c, device),
    }


def reference(inputs: Inputs) -> Tensor:
    both = torch.cat((inputs["user"][inputs["index"].to_user.long()], inputs["cand"]), 1).double()
    return F.relu(F.linear(both, inputs["weight"].double(), inputs["bias"].double()))


def broadcast(user: Tensor, cand: Tensor, weight: Tensor, bias: Tensor, to_user: Tensor) -> Tensor:
    return F.relu(F.linear(torch.cat((user[to_user], cand), 1), weight, bias))


def decomposed(user: Tensor, cand: Tensor, weight: Tensor, bias: Tensor, to_user: Tensor) -> Tensor:
    user_part = F.linear(user, weight[:, : user.shape[1]], bias)
    return F.relu(torch.addmm(user_part[to_user], cand, weight[:, user.shape[1] :].t()))


def ours_by_path(path: str) -> Build:
    def function(user: Tensor, cand: Tensor, weight: Tensor, bias: Tensor, index: CandidateIndex) -> Tensor:
        return linear(user, cand, weight, index, bias, activation="relu")

    return ours(function, path, OPERANDS)


def least_bytes(c: Case, dtype: torch.dtype) -> float:
    elements = c["B"] * (c["Kc"] + c["M"]) + num_users(c) * c["Ku"] + c["M"] * (c["Ku"] + c["Kc"] + 1)
    return float(elements * torch.empty((), dtype=dtype).element_size())


BENCHMARK = Benchmark(
    cases=CASES,
    make_inputs=make_inputs,
    reference=reference,
    select=lambda out: out,
    flops=lambda c: 2.0 * c["M"] * (c["B"] * c["Kc"] + num_users(c) * c["Ku"]),
    bytes=least_bytes,
    providers=(
        Provider("ikbo_recsys", ours_by_path("auto"), rival=False),
        Provider("ikbo_recsys portable", ours_by_path("triton"), rival=False),
        Provider("torch decomposed", torch_way(decomposed, OPERANDS)),
        Provider(
            "torch decomposed, max-autotune", torch_way(decomposed, OPERANDS, **MAX_AUTOTUNE), cases="B1024_ratio70"
        ),
        Provider("torch broadcast", torch_way(broadcast, OPERANDS)),
    ),
    tolerance={torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float32: 1e-3},
)
