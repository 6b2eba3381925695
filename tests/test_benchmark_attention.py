"""The benchmark of attention without a GPU: every provider's plumbing on small cases, checked as on a GPU."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import attention_providers as by
from benchmarks import cross_attention as bench
from benchmarks import run
from benchmarks.cases import Case
from tests.test_benchmarks import clock

__all__ = ["clock"]

SIZES = {"B": 12, "U": 3, "S": 2, "H": 2, "D": 16, "T": 24, "X": 0, "jagged": 0, "shuffled": 0}
CASES = {
    "history1024": {},
    "shuffled64": {"shuffled": 1},
    "self1024": {"X": 24},
    "self512": {"X": 5},
    "jagged64": {"jagged": 1, "B": 105, "T": 230},
}


def rows_of(case: str, providers: Any) -> dict[str, Any]:
    benchmark = dataclasses.replace(bench.BENCHMARK, providers=providers)
    rows = run._run_case(benchmark, Case(case, SIZES | CASES[case]), "fp32", ".*", device="cpu")
    return {row["provider"]: row for row in rows}


def varlen(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, most_rows: int, most_keys: int) -> Tensor:
    """What FlashAttention's varlen functions compute, with their arguments."""
    assert int(rows.diff().max()) == most_rows
    assert int(keys.diff().max()) == most_keys
    out = []
    for i in range(rows.shape[0] - 1):
        mine, seen = slice(int(rows[i]), int(rows[i + 1])), slice(int(keys[i]), int(keys[i + 1]))
        side = [x.transpose(0, 1) for x in (q[mine], k[seen], v[seen])]
        out.append(torch.nn.functional.scaled_dot_product_attention(*side).transpose(0, 1))
    return torch.cat(out)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(by, "_cudnn", torch.nn.functional.scaled_dot_product_attention)


BUILDERS = {
    "ikbo_recsys": by.ours("auto"),
    "ikbo_recsys two launches": by.twice(by.ours("auto")),
    "varlen": by.twice(by._varlen(varlen)),
    "flex": by.twice(by.flex()),
    "grouped": by.twice(by.cudnn_grouped),
    "copies": by.twice(by.broadcast_twin),
}


@pytest.mark.parametrize("case", CASES)
def test_everyone_computes_the_operator_and_its_gradients(case: str) -> None:
    providers = [bench._provider(name, bench._forward(build), ".*", False) for name, build in BUILDERS.items()]
    providers += [
        bench._provider(name, bench._training(build), ".*", True)
        for name, build in BUILDERS.items()
        if name != "flex"  # it has no gradients where it is not compiled on a CPU
    ]
    rows = rows_of(case, providers)
    # Those take equal groups and histories only, in order.
    absent = {"grouped", "grouped fwd+bwd"} if case in ("shuffled64", "jagged64") else set()
    absent |= {"copies", "copies fwd+bwd"} if case == "jagged64" else set()
    assert {name for name, row in rows.items() if "absent" in row} == absent
    for name in rows.keys() - absent:
        assert "ms" in rows[name], rows[name]
        assert 0 < rows[name]["error"] < 1e-5, rows[name]


def test_a_wrong_result_of_either_kind_of_rows_is_not_timed(clock: list[object]) -> None:
    def spoiled(which: int) -> Any:
        def build(inputs: Any) -> Any:
            attend = by.ours("auto")(inputs)

            def spoil(*operands: Tensor) -> Any:
                results = list(attend(*operands))
                results[which] = results[which] * 1.01
                return tuple(results)

            return spoil

        return build

    providers = [bench._provider(f"ikbo_recsys {i}", bench._forward(spoiled(i)), ".*", False) for i in range(2)]
    providers += [bench._provider(f"ikbo_recsys {i}", bench._training(spoiled(i)), ".*", True) for i in range(2)]
    rows = rows_of("self1024", providers)
    assert len(rows) == 4
    assert all(row.get("wrong") for row in rows.values()), rows
    assert not clock


@pytest.mark.parametrize("case", bench.CASES, ids=lambda case: case.name)
def test_every_case_has_its_providers(case: Case) -> None:
    names = {p.name for p in bench.PROVIDERS if re.fullmatch(p.cases, case.name)}
    assert {"ikbo_recsys", "fa3_varlen_grouped", "fa4_varlen_grouped", "cudnn_grouped"} <= names
    assert ("ikbo_recsys two launches" in names) == (case.sizes["X"] > 0)
    assert ("ikbo_recsys, candidates grouped" in names) == (case.sizes["shuffled"] > 0)
    assert bench.BENCHMARK.flops(case) > 0


def test_the_benchmarks_providers_fail_one_by_one() -> None:
    """All of them, where none but ours can run: a row each, and nothing raised."""
    rows = rows_of("history1024", bench.PROVIDERS)
    assert len(rows) == sum(bool(re.fullmatch(p.cases, "history1024")) for p in bench.PROVIDERS)
    assert all({"ms", "absent", "failed", "wrong"} & row.keys() for row in rows.values())
    assert "ms" in rows["ikbo_recsys"]
    assert "ms" in rows["ikbo_recsys fwd+bwd"]


@pytest.mark.parametrize("lengths", [[128, 256, 128], [100, 0, 300, 28, 1], [5], [700, 3]])
def test_block_mask_of_users(lengths: list[int]) -> None:
    """Blocks: none that holds a pair of one user is left out, none is called full that holds a pair of two."""
    module = pytest.importorskip("torch.nn.attention.flex_attention")
    counts = [(i * 37 + 90) % 200 for i in range(len(lengths))]
    rows, keys = (torch.tensor([0, *n]).cumsum(0).int() for n in (counts, lengths))
    mask = by.user_blocks(module, rows, keys)
    of_row, of_key = (torch.repeat_interleave(x.long().diff()) for x in (rows, keys))
    same = of_row[:, None] == of_key
    most = [-(-n // 128) for n in same.shape]
    padded = torch.zeros(most[0] * 128, most[1] * 128, dtype=torch.bool)
    padded[: same.shape[0], : same.shape[1]] = same
    blocks = padded.unflatten(1, (most[1], 128)).unflatten(0, (most[0], 128)).transpose(1, 2).flatten(2)
    some, all_of_it = blocks.any(2), blocks.all(2)
    partial, full = (
        _dense(mask.kv_num_blocks, mask.kv_indices, most[1]),
        _dense(mask.full_kv_num_blocks, mask.full_kv_indices, most[1]),
    )
    assert not (partial & full).any()
    assert not (some & ~(partial | full)).any()
    assert torch.equal(full, all_of_it)


def _dense(counts: Tensor, places: Tensor, width: int) -> Tensor:
    out = torch.zeros(counts.shape[2], width, dtype=torch.bool)
    for i, n in enumerate(counts[0, 0].tolist()):
        out[i, places[0, 0, i, :n].long()] = True
    return out
