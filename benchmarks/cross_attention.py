"""Target attention: cases, inputs, and everyone who is measured on them.

What an informed user would take instead of this library is varlen attention with the candidates grouped by user, so
those rows stand next to ours: FlashAttention-3 and -4, torch's own. cuDNN takes a group as one long query and needs
equal groups. FlexAttention takes all rows as one sequence, with a mask of blocks by user made beforehand, not timed.
Where candidates are not grouped, a rival has to bring them into order and back, with the order given to it.

In the cases "self..." each user has X query rows of its own over the same history: ours is one launch, everybody else,
ours by two calls included, two of what they do without. Shape letters as in `kernels.cross_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import attention_providers as by
from benchmarks.builders import MAX_AUTOTUNE
from benchmarks.cases import Benchmark, Case
from benchmarks.providers import Provider
from ikbo_recsys import CandidateIndex

_CHECKED = 3  # candidates whose result is compared with fp64


def _case(name: str, group: str, history: int, seeds: int, heads: int, size: int, **more: int) -> Case:
    sizes = {"B": 2048, "U": 32, "S": seeds, "H": heads, "D": size, "T": history, "X": 0, "jagged": 0, "shuffled": 0}
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
    _case("few8x8192", "few", 8192, 64, 2, 128, U=1, B=8),
    _case("few32x4096", "few", 4096, 64, 2, 128, U=2, B=32),
    *(_case(f"self{t}", "self", t, 64, 2, 128, X=t) for t in (512, 1024)),
    _case("self1024few", "self", 1024, 4, 2, 128, X=1024),
)
_TRAINED_CASES = "history(1024|4096)|seeds(1|16)|jagged(64|16)|self1024"


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
    own = torch.randn(case["U"], case["X"], case["H"], case["D"], device=device, dtype=dtype)
    shape = (int(lengths.sum()), case["H"], case["D"])
    key, value = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int().to(device)
    rows = torch.cat((counts.new_zeros(1), counts.cumsum(0) * case["S"])).int().to(device)
    probes = [torch.randn_like(x) for x in ((query, own) if case["X"] else (query,))]
    return {
        "case": case, "query": query, "own": own, "key": key, "value": value, "index": index, "offsets": offsets,
        "rows": rows, "order": order, "max_rows": int(counts.max()) * case["S"], "max_keys": int(lengths.max()),
        "probes": probes,
    }  # fmt: skip


def _picked(rows: int) -> list[int]:
    """Candidates, or users, whose results are compared with fp64."""
    return torch.linspace(0, rows - 1, min(_CHECKED, rows)).long().tolist()


def _select(result: Any) -> Tensor:
    results = result if isinstance(result, tuple) else (result,)
    return torch.cat([x[_picked(x.shape[0])].flatten() for x in results])


def _attend_exactly(query_SHD: Tensor, key_THD: Tensor, value_THD: Tensor) -> Tensor:
    scores = torch.einsum("shd,thd->hst", query_SHD, key_THD) / math.sqrt(query_SHD.shape[2])
    return torch.einsum("hst,thd->shd", scores.softmax(-1), value_THD)


def _sides(inputs: Mapping[str, Any]) -> list[tuple[Tensor, list[int]]]:
    """The query tensors, each with the user of every entry."""
    sides = [(inputs["query"], inputs["index"].to_user.tolist())]
    if inputs["case"]["X"]:
        sides.append((inputs["own"], list(range(inputs["case"]["U"]))))
    return sides


def _keys_of(inputs: Mapping[str, Any], user: int) -> slice:
    return slice(int(inputs["offsets"][user]), int(inputs["offsets"][user + 1]))


def _reference(inputs: Mapping[str, Any]) -> Tensor:
    out = []
    for query, to_user in _sides(inputs):
        for i in _picked(query.shape[0]):
            rows = _keys_of(inputs, to_user[i])
            out.append(_attend_exactly(query[i].double(), inputs["key"][rows].double(), inputs["value"][rows].double()))
    return torch.cat([x.flatten() for x in out])


def _gradients(inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Of the first user's keys and values, and of some of its query rows, in fp64; entry by entry, which bounds the
    memory."""
    rows = _keys_of(inputs, 0)
    history = [inputs[name][rows].double().requires_grad_() for name in ("key", "value")]
    sums = [torch.zeros_like(x) for x in history]
    of_queries = []
    for (query, to_user), probe in zip(_sides(inputs), inputs["probes"], strict=True):
        mine = [i for i, user in enumerate(to_user) if user == 0]
        found = {}
        for i in mine:
            leaf = query[i].double().requires_grad_()
            grads = torch.autograd.grad(_attend_exactly(leaf, *history), (leaf, *history), probe[i].double())
            found[i] = grads[0]
            for total, grad in zip(sums, grads[1:], strict=True):
                total += grad
        of_queries.append(torch.stack([found[mine[j]] for j in _picked(len(mine))]))
    return (*of_queries, *sums)


def _operands(inputs: Mapping[str, Any]) -> list[str]:
    return ["query", *(["own"] if inputs["case"]["X"] else []), "key", "value"]


def _flops(case: Case) -> float:
    counts, lengths = _counts_and_lengths(case)
    pairs = sum((count * case["S"] + case["X"]) * length for count, length in zip(counts, lengths, strict=True))
    return 4.0 * pairs * case["H"] * case["D"]


def _bytes(case: Case, dtype: torch.dtype) -> float:
    rows = 2 * (case["B"] * case["S"] + case["U"] * case["X"]) + 2 * sum(_counts_and_lengths(case)[1])
    return float(rows * case["H"] * case["D"] * dtype.itemsize)


def _forward(build: by.Build) -> Callable[[Mapping[str, Any]], Callable[[], Any]]:
    def make(inputs: Mapping[str, Any]) -> Callable[[], Any]:
        names = _operands(inputs)
        attend, operands = build(inputs), [inputs[name] for name in names]
        return lambda: attend(*operands)

    return make


class Gradients(NamedTuple):
    """Of all operands, and the inputs, which say what of them is checked."""

    found: tuple[Tensor, ...]
    inputs: Mapping[str, Any]


def _select_gradients(gradients: Gradients) -> tuple[Tensor, ...]:
    """What `_gradients` gives, of a provider's."""
    *of_queries, key, value = gradients.found
    selected = []
    for grad, (_, to_user) in zip(of_queries, _sides(gradients.inputs), strict=True):
        mine = [i for i, user in enumerate(to_user) if user == 0]
        selected.append(grad[[mine[j] for j in _picked(len(mine))]])
    rows = _keys_of(gradients.inputs, 0)
    return (*selected, key[rows], value[rows])


def _training(build: by.Build) -> Callable[[Mapping[str, Any]], Callable[[], Gradients]]:
    """Forward and backward, the gradients of all operands."""

    def make(inputs: Mapping[str, Any]) -> Callable[[], Gradients]:
        attend, probes = build(inputs), inputs["probes"]
        leaves = [inputs[name].detach().requires_grad_() for name in _operands(inputs)]
        return lambda: Gradients(torch.autograd.grad(attend(*leaves), leaves, probes), inputs)

    return make


_TRAINED = {
    "ikbo_recsys": (by.ours("auto"), _TRAINED_CASES),
    "ikbo_recsys[triton]": (by.ours("triton"), _TRAINED_CASES),
    "ikbo_recsys two launches": (by.twice(by.ours("auto")), "self1024"),
    "cudnn_grouped": (by.twice(by.cudnn_grouped), _TRAINED_CASES),
    "torch_varlen_grouped": (by.twice(by.torch_varlen), _TRAINED_CASES),
    "cudnn_on_copies": (by.twice(by.broadcast_twin), _TRAINED_CASES),
    "fa4_varlen_grouped": (by.twice(by.flash4), _TRAINED_CASES),
    "flex_attention": (by.twice(by.flex()), "history(1024|4096)|self1024"),
}
_FORWARD: Mapping[str, tuple[by.Build, str]] = {
    "ikbo_recsys": (by.ours("auto"), ".*"),
    "ikbo_recsys[triton]": (by.ours("triton"), ".*"),
    "ikbo_recsys two launches": (by.twice(by.ours("auto")), "self.*"),
    "ikbo_recsys, candidates grouped": (by.ours_grouped, "shuffled.*"),
    "cudnn_grouped": (by.twice(by.cudnn_grouped), ".*"),
    "torch_varlen_grouped": (by.twice(by.torch_varlen), ".*"),
    "cudnn_on_copies": (by.twice(by.broadcast_twin), ".*"),
    "fa3_varlen_grouped": (by.twice(by.flash3), ".*"),
    "fa4_varlen_grouped": (by.twice(by.flash4), ".*"),
    "fbgemm_ikbo_triton": (by.fbgemm("triton_ikbo_fa"), "(?!self).*"),
    "fbgemm_ikbo_tlx": (by.fbgemm("tlx_ikbo_fa_ws"), "(?!self).*"),
    "flex_attention": (by.twice(by.flex()), "history(1024|4096)|seeds16|jagged64|shuffled64|self.*"),
    "flex_attention, max-autotune": (by.flex(**MAX_AUTOTUNE), "history1024"),
}


def _provider(name: str, make: Callable[..., Any], cases: str, training: bool) -> Provider:
    ours = name.startswith("ikbo_recsys")
    # Results in another order than the others' cannot be checked here, nor count.
    whole = not name.endswith("candidates grouped")
    return Provider(name + " fwd+bwd" * training, make, whole=whole, training=training, rival=not ours, cases=cases)


PROVIDERS = (
    *(_provider(name, _forward(build), cases, False) for name, (build, cases) in _FORWARD.items()),
    *(_provider(name, _training(build), cases, True) for name, (build, cases) in _TRAINED.items()),
)

BENCHMARK = Benchmark(
    cases=CASES,
    make_inputs=_make_inputs,
    reference=_reference,
    select=_select,
    gradients=_gradients,
    select_gradients=_select_gradients,
    flops=_flops,
    bytes=_bytes,
    providers=PROVIDERS,
    tolerance={torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5},
)
