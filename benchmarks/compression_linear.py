"""The benchmark of `compression_linear`: cases and providers.

Shape letters: U users, B candidates, Ku/Kc features, D embedding size, M outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Benchmark, Case
from benchmarks.providers import FBGEMM_HINT, Provider, optional_import
from ikbo_recsys import CandidateIndex
from ikbo_recsys.kernels import compression_linear
from ikbo_recsys.kernels._backend import use_backend

Inputs = Mapping[str, Any]


def case(name: str, group: str = "", **sizes: int) -> Case:
    return Case(name, {"B": 1024, "ratio": 70, "M": 433, "D": 256, "Ku": 1178, "Kc": 866} | sizes, group)


CASES = (
    case("default"),
    *(case(f"B{batch}", "batch", B=batch) for batch in (256, 512, 2048, 3072, 4096)),
    *(case(f"ratio{ratio}", "ratio", ratio=ratio) for ratio in (2, 10, 100, 1000, 10000)),
    case("40x256x1956", "shape", M=40, Ku=1126, Kc=830),
    case("262x256x294", "shape", M=262, Ku=169, Kc=125),
)


def num_users(c: Case) -> int:
    return -(-c["B"] // c["ratio"])


def make_inputs(c: Case, dtype: torch.dtype, device: str) -> Inputs:
    """Random inputs; the first U - 1 users have `ratio` candidates each, the last one the rest."""
    users = num_users(c)
    to_user = torch.arange(c["B"], device=device, dtype=torch.int32) // c["ratio"]
    return {
        "user": torch.randn(users, c["Ku"], c["D"], device=device, dtype=dtype),
        "cand": torch.randn(c["B"], c["Kc"], c["D"], device=device, dtype=dtype),
        "weight": torch.randn(c["M"], c["Ku"] + c["Kc"], device=device, dtype=dtype),
        "index": CandidateIndex.from_user_ids(to_user, users, grouped=True),
    }


def some(batch: int) -> slice:
    """About 64 candidates, the last one among them: what is checked against fp64."""
    return slice((batch - 1) % max(1, batch // 64), None, max(1, batch // 64))


def reference(inputs: Inputs) -> Tensor:
    user, cand, weight = inputs["user"], inputs["cand"], inputs["weight"].double()
    rows = some(cand.shape[0])
    user_part = weight[:, : user.shape[1]] @ user.double()
    return user_part[inputs["index"].to_user[rows].long()] + weight[:, user.shape[1] :] @ cand[rows].double()


# ---- ours ----------------------------------------------------------------------------------------------------------


def ours(path: str) -> Callable[[Inputs], Callable[[], Tensor]]:
    def build(inputs: Inputs) -> Callable[[], Tensor]:
        arguments = [inputs[name] for name in ("user", "cand", "weight", "index")]

        def run() -> Tensor:
            with use_backend(path), torch.no_grad():
                return compression_linear(*arguments)

        return run

    return build


# ---- torch ---------------------------------------------------------------------------------------------------------


def broadcast(user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor) -> Tensor:
    return weight @ torch.cat((user[to_user], cand), 1)


def decomposed(user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor) -> Tensor:
    return (weight[:, : user.shape[1]] @ user)[to_user] + weight[:, user.shape[1] :] @ cand


def torch_way(function: Callable[..., Tensor], **compile_options: Any) -> Callable[[Inputs], Callable[[], Tensor]]:
    def build(inputs: Inputs) -> Callable[[], Tensor]:
        arguments = [inputs["user"], inputs["cand"], inputs["weight"], inputs["index"].to_user.long()]
        chosen = function
        if compile_options:
            torch._dynamo.reset()
            chosen = torch.compile(function, **compile_options)

        def run() -> Tensor:
            with torch.no_grad():
                return chosen(*arguments)

        return run

    return build


def padded(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(weight_cand, weight_user, cand, user)` with K padded to a multiple of 8: the copies are the caller's, not
    timed."""
    user_features = inputs["user"].shape[1]
    weights = (inputs["weight"][:, user_features:], inputs["weight"][:, :user_features])
    features = (inputs["cand"], inputs["user"])
    return (
        *(F.pad(weight, (0, -weight.shape[1] % 8)).contiguous() for weight in weights),
        *(F.pad(x, (0, 0, 0, -x.shape[1] % 8)).contiguous() for x in features),
    )  # type: ignore[return-value]


def decomposed_padded(inputs: Inputs) -> Callable[[], Tensor]:
    weight_cand, weight_user, cand, user = padded(inputs)
    to_user = inputs["index"].to_user.long()
    return lambda: (weight_user @ user)[to_user] + weight_cand @ cand


def candidate_gemm(inputs: Inputs) -> Callable[[], Tensor]:
    weight_cand, _, cand, _ = padded(inputs)
    return lambda: weight_cand @ cand


# ---- FBGEMM's experimental IKBO kernels ----------------------------------------------------------------------------


# They tune themselves over a space of hundreds of configurations. Every best one found on an H200 is in the part kept
# here.


def narrow(kernel: Any, keep: Callable[[Any], bool]) -> None:
    kept = [config for config in kernel.configs if keep(config)]
    kernel.configs = kept or kernel.configs


def fbgemm_triton(inputs: Inputs) -> Callable[[], Tensor]:
    module = optional_import("ikbo.ops.triton_ikbo_lce", FBGEMM_HINT)
    narrow(module.triton_ikbo_lce_kernel, lambda config: config.kwargs["BK"] == 64 and config.num_stages in (3, 4))
    arguments = (*padded(inputs), inputs["index"].to_user)
    return lambda: module.triton_ikbo_lce(*arguments)


def fbgemm_tlx(inputs: Inputs) -> Callable[[], Tensor]:
    module = optional_import("ikbo.ops.tlx_ikbo_lce", FBGEMM_HINT)
    narrow(
        module.tlx_ikbo_lce_kernel,
        lambda config: (config.kwargs["BN"], config.kwargs["BK"]) == (128, 64) and config.kwargs["NUM_STAGES"] >= 4,
    )
    weight_cand, weight_user, cand, user = padded(inputs)
    flag = module.create_user_flag(weight_user, user)
    return lambda: module.tlx_ikbo_lce(weight_cand, weight_user, cand, user, inputs["index"].to_user, flag)


# ---- forward and backward ------------------------------------------------------------------------------------------


def training(function: Callable[..., Tensor], index: str, compiled: bool) -> Callable[[Inputs], Callable[[], None]]:
    def build(inputs: Inputs) -> Callable[[], None]:
        leaves = [inputs[name].detach().clone().requires_grad_() for name in ("user", "cand", "weight")]
        who = inputs["index"] if index == "index" else inputs["index"].to_user.long()
        shape = (leaves[1].shape[0], leaves[2].shape[0], leaves[1].shape[2])
        probe = torch.randn(shape, device="cuda", dtype=leaves[1].dtype)
        chosen = function
        if compiled:
            torch._dynamo.reset()
            chosen = torch.compile(function)

        def run() -> None:
            for leaf in leaves:
                leaf.grad = None
            chosen(*leaves, who).backward(probe)

        return run

    return build


MAX_AUTOTUNE = {"mode": "max-autotune-no-cudagraphs", "dynamic": False}

PROVIDERS = (
    Provider("ikbo_recsys", ours("auto"), rival=False),
    Provider("ikbo_recsys portable", ours("triton"), rival=False),
    Provider("fbgemm tlx (K padded by the caller)", fbgemm_tlx),
    Provider("fbgemm triton (K padded by the caller)", fbgemm_triton),
    Provider("torch decomposed (K padded by the caller)", decomposed_padded),
    Provider("torch decomposed", torch_way(decomposed), cases="default|ratio.*|.*x.*"),
    Provider("torch decomposed, max-autotune", torch_way(decomposed, **MAX_AUTOTUNE), cases="default"),
    Provider("torch broadcast", torch_way(broadcast), cases="default|ratio.*|.*x.*"),
    Provider("cublas candidate GEMM alone (K padded)", candidate_gemm, whole=False, rival=False),
    Provider(
        "ikbo_recsys, training",
        training(compression_linear, "index", False),
        training=True,
        rival=False,
        cases="default",
    ),
    Provider(
        "torch decomposed compiled, training", training(decomposed, "to_user", True), training=True, cases="default"
    ),
    Provider(
        "torch broadcast compiled, training", training(broadcast, "to_user", True), training=True, cases="default"
    ),
)


def flops(c: Case) -> float:
    return 2.0 * c["M"] * c["D"] * (c["B"] * c["Kc"] + num_users(c) * c["Ku"])


def least_bytes(c: Case, dtype: torch.dtype) -> float:
    elements = c["B"] * c["D"] * (c["Kc"] + c["M"]) + num_users(c) * c["Ku"] * c["D"] + c["M"] * (c["Ku"] + c["Kc"])
    return float(elements * torch.empty((), dtype=dtype).element_size())


BENCHMARK = Benchmark(
    cases=CASES,
    make_inputs=make_inputs,
    reference=reference,
    select=lambda out: out[some(out.shape[0])],
    flops=flops,
    bytes=least_bytes,
    providers=PROVIDERS,
    tolerance={torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float32: 1e-3},
)
