"""Who computes target attention: builders that take a case's inputs and give `attend(query, key, value)`.

That goes from `[B, S, H, D]` and the history to `[B, S, H, D]`; with rows of the users' own it is
`attend(query, own, key, value)`, which gives both results. Shape letters as in `kernels.cross_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.providers import FBGEMM_HINT, AbsentError, keep_configurations, optional_import
from ikbo_recsys import CandidateIndex, kernels
from ikbo_recsys.kernels._backend import use_backend

Attend = Callable[..., Any]
Build = Callable[[Mapping[str, Any]], Attend]


def _of_users(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The users' own rows as a problem of its own, with one candidate for each user."""
    case, device = inputs["case"], inputs["query"].device
    sizes = dict(case.sizes) | {"B": case["U"], "S": case["X"], "X": 0, "shuffled": 0}
    rows = torch.arange(case["U"] + 1, dtype=torch.int32, device=device)
    return {
        **inputs,
        "case": Case(case.name, sizes, case.group),
        "query": inputs["own"],
        "index": CandidateIndex.from_offsets(rows, num_candidates=case["U"]),
        "rows": rows * case["X"],
        "order": torch.arange(case["U"], device=device),
        "max_rows": case["X"],
    }


def _grouped(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same candidates in the order of their users."""
    case, there = inputs["case"], inputs["order"].argsort()
    index = CandidateIndex.from_user_ids(inputs["index"].to_user[there], case["U"], grouped=True)
    sizes = dict(case.sizes) | {"shuffled": 0}
    return {**inputs, "case": Case(case.name, sizes, case.group), "query": inputs["query"][there], "index": index}


def _history(x: Tensor, case: Case) -> Tensor:
    """Padded where all lengths are equal, jagged as it is otherwise."""
    return x if case["jagged"] else x.view(case["U"], case["T"], *x.shape[1:])


def ours(backend: str) -> Build:
    def build(inputs: Mapping[str, Any]) -> Attend:
        case, index, offsets = inputs["case"], inputs["index"], inputs["offsets"]

        def attend(query: Tensor, *rest: Tensor) -> Any:
            *own, key, value = rest
            options = {"user_query": own[0]} if own else {}
            if case["jagged"]:
                return kernels.cross_attention(query, key, value, index, kv_offsets=offsets, **options)
            return kernels.cross_attention(query, _history(key, case), _history(value, case), index, **options)

        def by_backend(*operands: Tensor) -> Any:
            with use_backend(backend):
                return attend(*operands)

        return attend if backend == "auto" else by_backend

    return build


def twice(build: Build) -> Build:
    """Rows of the users' own by a second call."""

    def build_both(inputs: Mapping[str, Any]) -> Attend:
        if not inputs["case"]["X"]:
            return build(inputs)
        first, second = build(inputs), build(_of_users(inputs))

        def attend(query: Tensor, own: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return first(query, key, value), second(own, key, value)

        return attend

    return build_both


def _varlen(function: Callable[..., Any]) -> Build:
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


def flash3(inputs: Mapping[str, Any]) -> Attend:
    module = optional_import("fa3_fwd_interface", "pip install fa3-fwd")
    return _varlen(module.flash_attn_varlen_func)(inputs)


def flash4(inputs: Mapping[str, Any]) -> Attend:
    module = optional_import("flash_attn.cute", "pip install flash-attn-4")

    def function(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, most_rows: int, most_keys: int) -> Any:
        return module.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=rows, cu_seqlens_k=keys, max_seqlen_q=most_rows, max_seqlen_k=most_keys
        )

    return _varlen(function)(inputs)


def torch_varlen(inputs: Mapping[str, Any]) -> Attend:
    module = optional_import("torch.nn.attention.varlen", "PyTorch 2.10 or newer")
    return _varlen(module.varlen_attn)(inputs)


_FLEX_BLOCK = 128


def flex(**compile_options: Any) -> Build:
    """All rows one sequence, all histories another: a row sees its user's keys. `BlockMask` skips the other blocks, and
    leaves those of one user without a mask."""

    def build(inputs: Mapping[str, Any]) -> Attend:
        module = optional_import("torch.nn.attention.flex_attention", "PyTorch 2.5 or newer")
        case = inputs["case"]
        back = inputs["order"]
        there = back.argsort()
        mask = user_blocks(module, inputs["rows"], inputs["offsets"])
        flex = torch.compile(module.flex_attention, dynamic=False, **compile_options)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            grouped = query[there] if case["shuffled"] else query
            rows, key, value = (x.transpose(0, 1)[None] for x in (grouped.flatten(0, 1), key, value))
            out = flex(rows, key, value, block_mask=mask)[0].transpose(0, 1).reshape(query.shape)
            return out[back] if case["shuffled"] else out

        return attend

    return build


def user_blocks(module: Any, rows: Tensor, keys: Tensor) -> Any:
    """The `BlockMask` of rows and keys with these offsets: consecutive blocks of keys for each block of rows."""
    block, device = _FLEX_BLOCK, rows.device
    ends = [int(offsets[-1]) for offsets in (rows, keys)]
    user_of = [
        torch.repeat_interleave(offsets.long().diff(), output_size=end)
        for offsets, end in zip((rows, keys), ends, strict=True)
    ]
    count_rows, count_keys = (-(-end // block) for end in ends)
    first_row = torch.arange(count_rows, device=device) * block
    last_row = (first_row + block).clamp(max=ends[0]) - 1
    first_user, last_user = user_of[0][first_row], user_of[0][last_row]
    first_key, end_key = keys.long()[first_user], keys.long()[last_user + 1]
    at = torch.arange(count_keys, device=device)
    some = (at >= (first_key // block)[:, None]) & (at < ((end_key + block - 1) // block)[:, None])
    some &= (end_key > first_key)[:, None]
    is_whole = (first_user == last_user) & (first_row + block <= ends[0])
    inside = (at * block >= first_key[:, None]) & ((at + 1) * block <= end_key[:, None])
    full = some & inside & is_whole[:, None]
    partial = some & ~full

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Number and places of the blocks of each row, the places first."""
        order = torch.argsort((~chosen).int(), dim=1, stable=True)
        return chosen.sum(1).int()[None, None], order.int()[None, None].contiguous()

    def mask_mod(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return user_of[0][row] == user_of[1][key]

    return module.BlockMask.from_kv_blocks(
        *listed(partial), *listed(full), BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=tuple(ends)
    )


def _cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def cudnn_grouped(inputs: Mapping[str, Any]) -> Attend:
    case = inputs["case"]
    if case["jagged"] or case["shuffled"]:
        raise AbsentError("needs grouped candidates, as many for each user, and equal histories")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        long = query.view(case["U"], -1, case["H"], case["D"]).transpose(1, 2)
        out = _cudnn(long, _history(key, case).transpose(1, 2), _history(value, case).transpose(1, 2))
        return out.transpose(1, 2).reshape(query.shape)

    return attend


def broadcast_twin(inputs: Mapping[str, Any]) -> Attend:
    """Every candidate's copy of its user's keys and values, as models have it today, the copying counted."""
    case, to_user = inputs["case"], inputs["index"].to_user
    copied = 2 * case["B"] * case["T"] * case["H"] * case["D"] * 2
    if case["jagged"] or copied > 20e9:
        raise AbsentError(f"jagged, or {copied / 1e9:.0f} GB of copies")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (_history(x, case).index_select(0, to_user).transpose(1, 2) for x in (key, value))
        return _cudnn(query.transpose(1, 2), key, value).transpose(1, 2)

    return attend


def fbgemm(name: str) -> Build:
    def build(inputs: Mapping[str, Any]) -> Attend:
        case, to_user = inputs["case"], inputs["index"].to_user
        if case["jagged"] or case["shuffled"] or case["H"] != 2:
            raise AbsentError("takes one history length and grouped candidates")
        module = optional_import(f"ikbo.ops.{name}", FBGEMM_HINT)
        if name == "triton_ikbo_fa":
            keep_configurations(
                module._attn_fwd_tma,
                lambda config: (
                    config.kwargs["BLOCK_M"] == 64
                    and config.kwargs["BLOCK_N"] >= 64
                    and config.num_warps in (4, 8)
                    and config.num_stages in (2, 3)
                ),
            )
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


def ours_grouped(inputs: Mapping[str, Any]) -> Attend:
    """Ours on the same candidates in the order of their users: what an ungrouped index is to be compared with."""
    grouped = _grouped(inputs)
    attend = ours("auto")(grouped)
    return lambda query, key, value: attend(grouped["query"], key, value)
