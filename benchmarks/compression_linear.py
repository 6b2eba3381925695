"""The benchmark of `compression_linear`: cases and providers.

Shape letters: U users, B candidates, Ku/Kc features, D embedding size, M outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.builders import MAX_AUTOTUNE, make_index, num_users, ours, torch_way, training
from benchmarks.cases import Benchmark, Case, Inputs
from benchmarks.providers import FBGEMM_HINT, Provider, keep_configurations, optional_import, stand_in_for_tlx
from ikbo_recsys.kernels import compression_linear

OPERANDS = ("user", "cand", "weight")


def case(name: str, group: str = "", **sizes: int) -> Case:
    return Case(name, {"B": 1024, "ratio": 70, "M": 433, "D": 256, "Ku": 1178, "Kc": 866} | sizes, group)


CASES = (
    case("default"),
    *(case(f"B{batch}", "batch", B=batch) for batch in (256, 512, 2048, 3072, 4096)),
    *(case(f"ratio{ratio}", "ratio", ratio=ratio) for ratio in (2, 10, 100, 1000, 10000)),
    case("40x256x1956", "shape", M=40, Ku=1126, Kc=830),
    case("262x256x294", "shape", M=262, Ku=169, Kc=125),
)


def make_inputs(c: Case, dtype: torch.dtype, device: str) -> Inputs:
    return {
        "user": torch.randn(num_users(c), c["Ku"], c["D"], device=device, dtype=dtype),
        "cand": torch.randn(c["B"], c["Kc"], c["D"], device=device, dtype=dtype),
        "weight": torch.randn(c["M"], c["Ku"] + c["Kc"], device=device, dtype=dtype),
        "probe": torch.randn(c["B"], c["M"], c["D"], device=device, dtype=dtype),
        "index": make_index(c, device),
    }


def some(batch: int) -> slice:
    """About 64 candidates, the last one among them: what is checked against fp64."""
    return slice((batch - 1) % max(1, batch // 64), None, max(1, batch // 64))


def reference(inputs: Inputs) -> Tensor:
    user, cand, weight = inputs["user"], inputs["cand"], inputs["weight"].double()
    rows = some(cand.shape[0])
    user_part = weight[:, : user.shape[1]] @ user.double()
    return user_part[inputs["index"].to_user[rows].long()] + weight[:, user.shape[1] :] @ cand[rows].double()


def gradients(inputs: Inputs) -> tuple[Tensor, ...]:
    """Of user, some of cand, and weight, in fp64; a piece of the candidates at a time, which bounds the memory."""
    user, cand, weight, probe = (inputs[name] for name in ("user", "cand", "weight", "probe"))
    user_weight, cand_weight = (part.double() for part in weight.split((user.shape[1], cand.shape[1]), 1))
    to_user, rows = inputs["index"].to_user, some(cand.shape[0])
    of_user = probe.new_zeros(user.shape[0], *probe.shape[1:], dtype=torch.float64)
    of_weight = torch.zeros_like(cand_weight)
    for piece in torch.arange(cand.shape[0], device=cand.device).split(64):
        grad = probe[piece].double()
        of_user.index_add_(0, to_user[piece], grad)
        of_weight += torch.einsum("bmd,bkd->mk", grad, cand[piece].double())
    both = torch.cat((torch.einsum("umd,ukd->mk", of_user, user.double()), of_weight), 1)
    return user_weight.t() @ of_user, cand_weight.t() @ probe[rows].double(), both


def select_gradients(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    user, cand, weight = found
    return user, cand[some(cand.shape[0])], weight


# ---- torch ---------------------------------------------------------------------------------------------------------


def broadcast(user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor) -> Tensor:
    return weight @ torch.cat((user[to_user], cand), 1)


def decomposed(user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor) -> Tensor:
    return (weight[:, : user.shape[1]] @ user)[to_user] + weight[:, user.shape[1] :] @ cand


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


def fbgemm_triton(inputs: Inputs) -> Callable[[], Tensor]:
    with stand_in_for_tlx():
        module = optional_import("ikbo.ops.triton_ikbo_lce", FBGEMM_HINT)
    keep_configurations(
        module.triton_ikbo_lce_kernel, lambda config: config.kwargs["BK"] == 64 and config.num_stages in (3, 4)
    )
    arguments = (*padded(inputs), inputs["index"].to_user)
    return lambda: module.triton_ikbo_lce(*arguments)


def fbgemm_tlx(inputs: Inputs) -> Callable[[], Tensor]:
    # Where it was only stood in for, the module below may be there already.
    optional_import("triton.language.extra.tlx", FBGEMM_HINT)
    module = optional_import("ikbo.ops.tlx_ikbo_lce", FBGEMM_HINT)
    keep_configurations(
        module.tlx_ikbo_lce_kernel,
        lambda config: (config.kwargs["BN"], config.kwargs["BK"]) == (128, 64) and config.kwargs["NUM_STAGES"] >= 4,
    )
    weight_cand, weight_user, cand, user = padded(inputs)
    flag = module.create_user_flag(weight_user, user)
    return lambda: module.tlx_ikbo_lce(weight_cand, weight_user, cand, user, inputs["index"].to_user, flag)


# ---- the table -----------------------------------------------------------------------------------------------------


PROVIDERS = (
    Provider("ikbo_recsys", ours(compression_linear, "auto", OPERANDS), rival=False),
    Provider("ikbo_recsys portable", ours(compression_linear, "triton", OPERANDS), rival=False),
    Provider("fbgemm tlx (K padded by the caller)", fbgemm_tlx),
    Provider("fbgemm triton (K padded by the caller)", fbgemm_triton),
    Provider("torch decomposed (K padded by the caller)", decomposed_padded),
    Provider("torch decomposed", torch_way(decomposed, OPERANDS), cases="default|ratio.*|.*x.*"),
    Provider("torch decomposed, max-autotune", torch_way(decomposed, OPERANDS, **MAX_AUTOTUNE), cases="default"),
    Provider("torch broadcast", torch_way(broadcast, OPERANDS), cases="default|ratio.*|.*x.*"),
    Provider("cublas candidate GEMM alone (K padded)", candidate_gemm, whole=False, rival=False),
    Provider(
        "ikbo_recsys, training",
        training(compression_linear, OPERANDS, index="index"),
        training=True,
        rival=False,
        cases="default",
    ),
    Provider(
        "torch decomposed compiled, training",
        training(decomposed, OPERANDS, index="to_user", compiled=True),
        training=True,
        cases="default",
    ),
    Provider(
        "torch broadcast compiled, training",
        training(broadcast, OPERANDS, index="to_user", compiled=True),
        training=True,
        cases="default",
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
    gradients=gradients,
    select_gradients=select_gradients,
    flops=flops,
    bytes=least_bytes,
    providers=PROVIDERS,
    tolerance={torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float32: 1e-3},
)
