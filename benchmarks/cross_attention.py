"""Target attention: cases, inputs, and everyone who is measured on them.

What an informed user would take instead of this library is varlen attention with the candidates grouped by user, so
those rows stand next to ours: FlashAttention-3 and -4, torch's own. cuDNN takes a group as one long query and needs
equal groups. Where candidates are not grouped, a rival has to bring them into order and back, with the order given to
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Benchmark, Case
from benchmarks.providers import FBGEMM_HINT, AbsentError, Provider, optional_import
from ikbo_recsys import CandidateIndex, kernels
from ikbo_recsys.kernels._backend import use_backend

_CHECKED = 3  # candidates whose result is compared with fp64


def _case(name: str, group: str, history: int, seeds: int, heads: int, size: int, **more: int) -> Case:
    sizes = {"B": 2048, "U": 32, "S": seeds, "H": heads, "D": size, "T": history, "jagged": 0, "shuffled": 0}
    return Case(name, sizes | more, group)


CASES = (
    *(_case(f"history{t}", "history", t, 64, 2, 128) for t in (1024, 512, 2048, 4096, 8192)),
    _case("seeds1", "seeds", 1024, 1, 8, 64),
    _case("seeds8", "seeds", 1024, 8, 2, 128),
    _case("seeds16", "seeds", 1024, 16, 4, 64),
    _case("seeds32", "seeds", 1024, 32, 2, 128),
    _case("jagged64", "jagged", 2000, 64, 2, 128, U=58, B=2030, jagged=1),
    _case("jagged16", "jagged", 2000, 16, 4, 64, U=58, B=2030, jagged=1),
    _case("jagged1", "jagged", 2000, 1, 8, 64, U=58, B=2030, jagged=1),
    _case("shuffled64", "ungrouped", 1024, 64, 2, 128, shuffled=1),
    _case("shuffled32", "ungrouped", 1024, 32, 2, 128, shuffled=1),
)


def _counts_and_lengths(case: Case) -> tuple[list[int], list[int]]:
    """Candidates and history rows per user: equal ones, or 30-40 and 200-2000 when jagged. The same at each call."""
    users = case["U"]
    if not case["jagged"]:
        return [case["B"] // users] * users, [case["T"]] * users
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(30, 41, (users,), generator=generator)
    counts[-1] += case["B"] - counts.sum()
    return counts.tolist(), torch.randint(200, case["T"] + 1, (users,), generator=generator).tolist()


def _make_inputs(case: Case, dtype: torch.dtype, device: str) -> dict[str, Any]:
    counts, lengths = (torch.tensor(x) for x in _counts_and_lengths(case))
    assert int(counts.min()) >= 0, "the last user took what was left"
    index = CandidateIndex.from_counts(counts.int()).to(device)
    order = torch.arange(case["B"], device=device)
    if case["shuffled"]:
        order = torch.randperm(case["B"], device=device)
        index = CandidateIndex(index.to_user[order], case["U"])
    query = torch.randn(case["B"], case["S"], case["H"], case["D"], device=device, dtype=dtype)
    shape = (int(lengths.sum()), case["H"], case["D"])
    key, value = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int().to(device)
    rows = torch.cat((counts.new_zeros(1), counts.cumsum(0) * case["S"])).int().to(device)
    return {
        "case": case, "query": query, "key": key, "value": value, "index": index, "offsets": offsets, "rows": rows,
        "order": order, "max_rows": int(counts.max()) * case["S"], "max_keys": int(lengths.max()),
    }  # fmt: skip


def _history(x: Tensor, case: Case) -> Tensor:
    """Padded where all lengths are equal, jagged as it is otherwise."""
    return x if case["jagged"] else x.view(case["U"], case["T"], *x.shape[1:])


def _select(result: Tensor) -> Tensor:
    return result[torch.linspace(0, result.shape[0] - 1, _CHECKED, device=result.device).long()]


def _reference(inputs: Mapping[str, Any]) -> Tensor:
    query, offsets = inputs["query"], inputs["offsets"].tolist()
    out = []
    for cand in torch.linspace(0, query.shape[0] - 1, _CHECKED).long().tolist():
        user = int(inputs["index"].to_user[cand])
        rows = slice(offsets[user], offsets[user + 1])
        key, value = (inputs[name][rows].double() for name in ("key", "value"))
        scores = torch.einsum("shd,thd->hst", query[cand].double(), key) / math.sqrt(query.shape[3])
        out.append(torch.einsum("hst,thd->shd", scores.softmax(-1), value))
    return torch.stack(out)


def _flops(case: Case) -> float:
    pairs = sum(count * length for count, length in zip(*_counts_and_lengths(case), strict=True))
    return 4.0 * pairs * case["S"] * case["H"] * case["D"]


def _bytes(case: Case, dtype: torch.dtype) -> float:
    rows = 2 * case["B"] * case["S"] + 2 * sum(_counts_and_lengths(case)[1])
    return float(rows * case["H"] * case["D"] * dtype.itemsize)


# ---- providers: each builder gives `attend(query, key, value)`, from [B, S, H, D] and the history to [B, S, H, D]
# --------


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _ours(backend: str) -> Callable[[Mapping[str, Any]], Attend]:
    def build(inputs: Mapping[str, Any]) -> Attend:
        case, index, offsets = inputs["case"], inputs["index"], inputs["offsets"]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if case["jagged"]:
                return kernels.cross_attention(query, key, value, index, kv_offsets=offsets)
            return kernels.cross_attention(query, _history(key, case), _history(value, case), index)

        def by_backend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with use_backend(backend):
                return attend(query, key, value)

        return attend if backend == "auto" else by_backend

    return build


def _varlen(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Attend]:
    """Varlen attention by `function(q, k, v, row_offsets, key_offsets, most_rows, most_keys)`, over grouped rows."""

    def build(inputs: Mapping[str, Any]) -> Attend:
        case = inputs["case"]
        back = inputs["order"]  # the i-th candidate is number `order[i]` of the grouped order
        there = back.argsort()
        numbers = (inputs["rows"], inputs["offsets"], inputs["max_rows"], inputs["max_keys"])

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            grouped = query[there] if case["shuffled"] else query
            out = function(grouped.flatten(0, 1), key, value, *numbers)
            out = (out[0] if isinstance(out, tuple) else out).view(query.shape)
            return out[back] if case["shuffled"] else out

        return attend

    return build


def _flash3(inputs: Mapping[str, Any]) -> Attend:
    module = optional_import("fa3_fwd_interface", "pip install fa3-fwd")
    return _varlen(module.flash_attn_varlen_func)(inputs)


def _flash4(inputs: Mapping[str, Any]) -> Attend:
    module = optional_import("flash_attn.cute", "pip install flash-attn-4")

    def function(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, most_rows: int, most_keys: int) -> Any:
        return module.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=rows, cu_seqlens_k=keys, max_seqlen_q=most_rows, max_seqlen_k=most_keys
        )

    return _varlen(function)(inputs)


def _torch_varlen(inputs: Mapping[str, Any]) -> Attend:
    module = optional_import("torch.nn.attention.varlen", "PyTorch 2.10 or newer")
    return _varlen(module.varlen_attn)(inputs)


def _cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def _cudnn_grouped(inputs: Mapping[str, Any]) -> Attend:
    case = inputs["case"]
    if case["jagged"] or case["shuffled"]:
        raise AbsentError("needs grouped candidates, as many for each user, and equal histories")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        long = query.view(case["U"], -1, case["H"], case["D"]).transpose(1, 2)
        out = _cudnn(long, _history(key, case).transpose(1, 2), _history(value, case).transpose(1, 2))
        return out.transpose(1, 2).reshape(query.shape)

    return attend


def _broadcast_twin(inputs: Mapping[str, Any]) -> Attend:
    """Every candidate's copy of its user's keys and values, as models have it today, the copying counted."""
    case, to_user = inputs["case"], inputs["index"].to_user
    copied = 2 * case["B"] * case["T"] * case["H"] * case["D"] * 2
    if case["jagged"] or copied > 20e9:
        raise AbsentError(f"jagged, or {copied / 1e9:.0f} GB of copies")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (_history(x, case).index_select(0, to_user).transpose(1, 2) for x in (key, value))
        return _cudnn(query.transpose(1, 2), key, value).transpose(1, 2)

    return attend


def _fbgemm(name: str) -> Callable[[Mapping[str, Any]], Attend]:
    def build(inputs: Mapping[str, Any]) -> Attend:
        case, to_user = inputs["case"], inputs["index"].to_user
        if case["jagged"] or case["shuffled"] or case["H"] != 2:
            raise AbsentError("takes one history length and grouped candidates")
        module = optional_import(f"ikbo.ops.{name}", FBGEMM_HINT)
        pairs = torch.arange(0, case["B"], 2, dtype=torch.int32, device=to_user.device)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            rows, numbers = query.flatten(0, 1), (case["S"], case["T"])
            if name == "triton_ikbo_fa":
                out = module.triton_flash_attn_ikbo_tma(rows, key, value, to_user, *numbers)
            else:
                out = module.tlx_flash_attn_ikbo_tma_persistent(rows, key, value, to_user, *numbers, pairs)
            return (out[0] if isinstance(out, tuple) else out).view(query.shape)

        return attend

    return build


def _forward(build: Callable[[Mapping[str, Any]], Attend]) -> Callable[[Mapping[str, Any]], Callable[[], Tensor]]:
    def make(inputs: Mapping[str, Any]) -> Callable[[], Tensor]:
        attend, operands = build(inputs), (inputs["query"], inputs["key"], inputs["value"])
        return lambda: attend(*operands)

    return make


def _training(build: Callable[[Mapping[str, Any]], Attend]) -> Callable[[Mapping[str, Any]], Callable[[], None]]:
    """Forward and backward, all three gradients. The gradients themselves are checked against fp64 by the test
    suite."""

    def make(inputs: Mapping[str, Any]) -> Callable[[], None]:
        attend = build(inputs)
        leaves = [inputs[name].detach().requires_grad_() for name in ("query", "key", "value")]
        grad = torch.randn_like(leaves[0])

        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            attend(*leaves).backward(grad)

        return step

    return make


_TRAINED = {
    "ikbo_recsys": _ours("auto"),
    "ikbo_recsys[triton]": _ours("triton"),
    "fa4_varlen_grouped": _flash4,
    "torch_varlen_grouped": _torch_varlen,
    "cudnn_grouped": _cudnn_grouped,
    "cudnn_on_copies": _broadcast_twin,
}
_BUILDERS = {
    **_TRAINED,
    "fa3_varlen_grouped": _flash3,
    "fbgemm_ikbo_triton": _fbgemm("triton_ikbo_fa"),
    "fbgemm_ikbo_tlx": _fbgemm("tlx_ikbo_fa_ws"),
}
PROVIDERS = (
    *(Provider(name, _forward(build), rival=not name.startswith("ikbo_recsys")) for name, build in _BUILDERS.items()),
    *(
        Provider(f"{name} fwd+bwd", _training(build), training=True, rival=not name.startswith("ikbo_recsys"))
        for name, build in _TRAINED.items()
    ),
)

BENCHMARK = Benchmark(
    cases=CASES,
    make_inputs=_make_inputs,
    reference=_reference,
    select=_select,
    flops=_flops,
    bytes=_bytes,
    providers=PROVIDERS,
    tolerance={torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5},
)
