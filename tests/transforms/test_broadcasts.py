"""Every spelling of a broadcast is found, several indices and levels included; what is none is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ikbo_recsys import kernels
from ikbo_recsys.transforms.report import Report
from tests.transforms.helper import must_rewrite, trace

U, B, D = 3, 12, 5
COUNTS = torch.tensor([5, 0, 7])
INDEX = torch.repeat_interleave(COUNTS)


def optimized(function: Callable[..., Any], *tensors: Tensor, params: int = 0) -> tuple[Report, Any]:
    """The report, and the rewritten function, found equal to the original. The first `params` are parameters."""
    module = trace(function, tensors)
    report = must_rewrite(module, skip=params)
    expected, found = function(*tensors), module(*tensors)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return report, module


def linear_rows(module: Any) -> list[int]:
    """The number of rows that each linear layer of the graph runs on."""
    return [n.args[0].meta["val"].shape[0] for n in module.graph.nodes if n.target is torch.ops.aten.linear.default]


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_select": lambda x, i: x.index_select(0, i),
    "index": lambda x, i: x[i],
    "index of an ellipsis": lambda x, i: x[i, ...],
    "index with a slice": lambda x, i: x[i, :],
    "cast": lambda x, i: x[i.int().long()],
    "viewed index": lambda x, i: x[i.view(-1, 1).squeeze(1)],
    "embedding": lambda x, i: F.embedding(i, x),
    "gather": lambda x, i: torch.gather(x, 0, i.unsqueeze(1).expand(-1, D)),
    "gather, view": lambda x, i: x.gather(0, i.view(-1, 1).expand(i.shape[0], D)),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i[:, None].expand(-1, D), 0),
    "repeat_interleave counts": lambda x, i: torch.repeat_interleave(x, COUNTS.to(x.device), dim=0, output_size=B),
    "transposed": lambda x, i: x.t()[:, i].t(),
    "library": lambda x, i: torch.ops.ikbo.broadcast(x, i),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_spellings(spelling: Callable[[Tensor, Tensor], Tensor]) -> None:
    def model(weight: Tensor, counts: Tensor, x: Tensor, index: Tensor) -> Tensor:
        rows = (
            torch.repeat_interleave(x, counts, dim=0, output_size=B)
            if spelling is SPELLINGS["repeat_interleave counts"]
            else spelling(x, index)
        )
        return torch.relu(F.linear(rows, weight))

    report, module = optimized(model, torch.randn(4, D), COUNTS, torch.randn(U, D), INDEX, params=1)
    assert len(report.broadcasts) == 1
    assert linear_rows(module) == [U]


FIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat_interleave": lambda x: x.repeat_interleave(4, 0),
    "unsqueeze, expand, reshape": lambda x: x.unsqueeze(1).expand(-1, 4, -1).reshape(-1, D),
    "unsqueeze, repeat, view": lambda x: x[:, None].repeat(1, 4, 1).view(-1, D),
    "repeat": lambda x: x.repeat(4, 1),
    "tile": lambda x: x.tile((4, 1)),
    "expand in front": lambda x: x.unsqueeze(0).expand(4, -1, -1).reshape(-1, D),
}


@pytest.mark.parametrize("spelling", FIXED.values(), ids=FIXED.keys())
def test_a_fixed_number_of_candidates(spelling: Callable[[Tensor], Tensor]) -> None:
    def model(weight: Tensor, x: Tensor, cand: Tensor) -> Tensor:
        return F.linear(torch.relu(spelling(x)), weight) * cand

    report, module = optimized(model, torch.randn(4, D), torch.randn(U, D), torch.randn(B, 4), params=1)
    assert report.changed
    assert linear_rows(module) == [U]


@pytest.mark.parametrize("users", [1, U])
def test_candidates_on_an_axis_of_their_own(users: int) -> None:
    """`[U, 1, D]` beside `[U, R, D]`: no index at all."""

    def model(weight: Tensor, user: Tensor, cand: Tensor) -> Tensor:
        wide = user.unsqueeze(1).expand(-1, cand.shape[1], -1)
        return F.linear(torch.cat([wide, cand], -1), weight)

    report, module = optimized(model, torch.randn(4, 2 * D), torch.randn(users, D), torch.randn(users, 4, D), params=1)
    assert report.changed
    sizes = [n.args[0].meta["val"].shape[1] for n in module.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert sorted(sizes) == [1, 4]


def test_one_user_expanded() -> None:
    def model(weight: Tensor, user: Tensor, cand: Tensor) -> Tensor:
        return F.linear(torch.cat([user.expand(cand.shape[0], -1), cand], 1), weight)

    report, module = optimized(model, torch.randn(4, 2 * D), torch.randn(1, D), torch.randn(B, D), params=1)
    assert report.changed
    assert sorted(linear_rows(module)) == [1, B]


def test_group_index_select() -> None:
    """What torchrec's embedding bag collection does with a variable batch."""
    pytest.importorskip("fbgemm_gpu")

    def model(weight: Tensor, a: Tensor, b: Tensor, cand: Tensor, index: Tensor) -> Tensor:
        inverse = torch.stack([index, index, torch.arange(B)])
        rows = torch.ops.fbgemm.group_index_select_dim0([a, b, cand], list(torch.unbind(inverse)))
        return F.linear(torch.cat(rows, 1), weight)

    tensors = torch.randn(4, 3 * D), torch.randn(U, D), torch.randn(U, D), torch.randn(B, D), INDEX
    report, module = optimized(model, *tensors, params=1)
    assert report.count("replaced") == 1
    assert not linear_rows(module)


# ---- what is no broadcast ------------------------------------------------------------------------------------------


def test_an_embedding_is_not_a_broadcast() -> None:
    def model(table: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return F.linear(F.normalize(table)[ids], weight) + F.linear(F.embedding(ids, table), weight)

    report, _ = optimized(model, torch.randn(9, D), torch.randn(4, D), torch.randint(0, 9, (B,)), params=2)
    assert not report.broadcasts
    assert "no broadcast" in str(report.refused)


def test_an_embedding_of_user_ids_is_looked_up_once_per_user() -> None:
    def model(table: Tensor, ids: Tensor, index: Tensor) -> Tensor:
        return F.embedding(ids[index], table) * 2.0

    report, module = optimized(model, torch.randn(9, D), torch.randint(0, 9, (U,)), INDEX, params=1)
    rows = [n.meta["val"].shape[0] for n in module.graph.nodes if n.target is torch.ops.aten.embedding.default]
    assert report.changed
    assert rows == [U]


def test_a_choice_of_rows_is_not_a_broadcast() -> None:
    def model(weight: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
        return F.linear(x[chosen], weight)

    report, module = optimized(model, torch.randn(4, D), torch.randn(B, D), torch.tensor([3, 1]), params=1)
    assert linear_rows(module) == [2]
    assert not report.changed


def test_a_mask_is_not_an_index() -> None:
    def model(x: Tensor, index: Tensor) -> Tensor:
        wide = x[index]
        return torch.where(wide > 0, wide, -wide).relu()

    report, _ = optimized(model, torch.randn(U, D), INDEX)
    assert report.changed


# ---- several indices and levels ------------------------------------------------------------------------------------


def test_two_indices() -> None:
    def model(
        w: Tensor, v: Tensor, user: Tensor, query: Tensor, cand: Tensor, to_user: Tensor, to_query: Tensor
    ) -> Tensor:
        x = torch.cat([user[to_user], cand, query[to_query]], 1)
        return F.linear(torch.relu(F.linear(x, w)), v)

    tensors = torch.randn(6, 3 * D), torch.randn(1, 6), torch.randn(U, D), torch.randn(4, D), torch.randn(B, D)
    report, module = optimized(model, *tensors, INDEX, torch.randint(0, 4, (B,)), params=2)
    assert report.count("replaced") == 1
    assert linear_rows(module) == [4, B]


@pytest.mark.parametrize("composed", [False, True], ids=["rows twice", "index of an index"])
def test_three_levels(composed: bool) -> None:
    """User to vendor to item: each layer runs at its own level's rate."""
    vendors = 6
    to_user, to_vendor = torch.randint(0, U, (vendors,)), torch.randint(0, vendors, (B,))

    def model(w: Tensor, v: Tensor, user: Tensor, vendor: Tensor, item: Tensor, i: Tensor, j: Tensor) -> Tensor:
        user_rows = user[i[j]] if composed else user[i][j]
        tower = torch.relu(F.linear(user_rows, v))
        return F.linear(torch.cat([tower, vendor[j], item], 1), w)

    tensors = (
        torch.randn(4, 4 + 2 * D),
        torch.randn(4, D),
        torch.randn(U, D),
        torch.randn(vendors, D),
        torch.randn(B, D),
    )
    report, module = optimized(model, *tensors, to_user, to_vendor, params=2)
    assert report.changed
    assert U in linear_rows(module)
    fused = [n for n in module.graph.nodes if n.target is torch.ops.ikbo.linear.default]
    found = sorted([*linear_rows(module), *(n.args[1].meta["val"].shape[0] for n in fused)])
    assert found in ([U, vendors, B], [U, U, vendors, B])


def test_an_index_over_two_sources_of_different_length() -> None:
    """Rows of `short` are enough for this index; the two cannot be joined at one user batch size."""

    def model(w: Tensor, short: Tensor, long: Tensor, index: Tensor) -> Tensor:
        return F.linear(torch.cat([short[index], long[index]], 1), w) + short[index].sum(1, keepdim=True)

    optimized(model, torch.randn(4, 2 * D), torch.randn(2, D), torch.randn(U, D), torch.randint(0, 2, (B,)), params=1)


def test_a_gather_used_twice_and_returned() -> None:
    def model(w: Tensor, user: Tensor, cand: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        wide = user[index]
        hidden = F.linear(torch.cat([wide, cand], 1), w)
        return hidden * wide[:, :4], wide, torch.relu(user), torch.relu(wide)

    report, _ = optimized(model, torch.randn(4, 2 * D), torch.randn(U, D), torch.randn(B, D), INDEX, params=1)
    assert report.changed


@pytest.mark.parametrize("bias", [False, True])
def test_compression(bias: bool) -> None:
    def model(w: Tensor, b: Tensor, user: Tensor, cand: Tensor, index: Tensor) -> Tensor:
        out = w @ torch.cat([user[index], cand], 1)
        return out + b if bias else out

    tensors = torch.randn(4, 6), torch.randn(4, 1), torch.randn(U, 2, D), torch.randn(B, 4, D), INDEX
    report, module = optimized(model, *tensors, params=2)
    assert torch.ops.ikbo.compression_linear.default in {n.target for n in module.graph.nodes}
    assert report.count("replaced") == 1


@pytest.mark.parametrize("order", ["user first", "interleaved", "lower"])
def test_pairwise_dots(order: str) -> None:
    def model(w: Tensor, user: Tensor, cand: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        wide = user[index]
        parts = [cand[:, :1], wide, cand[:, 1:]] if order == "interleaved" else [wide, cand]
        x = torch.cat(parts, 1)
        i, j = torch.tril_indices(5, 5, -1) if order == "lower" else torch.triu_indices(5, 5, 1)
        pairs = torch.bmm(x, x.transpose(1, 2))[:, i, j]
        return F.linear(torch.cat([cand[:, 0], pairs], 1), w), pairs

    tensors = torch.randn(4, D + 10), torch.randn(U, 3, D), torch.randn(B, 2, D), INDEX
    _, module = optimized(model, *tensors, params=1)
    targets = [n.target for n in module.graph.nodes]
    assert torch.ops.ikbo.dot_interaction.default in targets
    assert torch.ops.ikbo.linear.default in targets  # pairs of user features are a user's too
    assert not [n for n in module.graph.nodes if n.target is torch.ops.aten.bmm.default and n.meta["val"].shape[0] == B]


@pytest.mark.parametrize("mask", [None, "lengths", "any", "candidate"])
def test_target_attention(mask: str | None) -> None:
    history, lengths = 7, torch.tensor([7, 0, 3])
    allowed = torch.rand(U, history) < 0.7
    allowed[:, 0] = True

    def model(query: Tensor, rows: Tensor, index: Tensor, lengths: Tensor, allowed: Tensor, own: Tensor) -> Tensor:
        wide = rows[index].view(-1, history, 2, 4).transpose(1, 2)
        chosen = None
        if mask == "lengths":
            chosen = (torch.arange(history)[None] < lengths[:, None])[index][:, None, None]
        elif mask == "any":
            chosen = allowed[index][:, None, None]
        elif mask == "candidate":
            chosen = own[:, None, None]
        return F.scaled_dot_product_attention(query, wide, wide.tanh(), attn_mask=chosen)

    tensors = torch.randn(B, 2, 3, 4), torch.randn(U, history, 8), INDEX, lengths, allowed, allowed[INDEX]
    report, module = optimized(model, *tensors)
    replaced = torch.ops.ikbo.cross_attention.default in {n.target for n in module.graph.nodes}
    assert replaced == (mask in (None, "lengths"))
    if not replaced:
        assert "mask" in " ".join(entry.reason for entry in report.entries)


def test_attention_among_users() -> None:
    def model(rows: Tensor, index: Tensor) -> Tensor:
        wide = rows[index]
        return F.scaled_dot_product_attention(wide, wide, wide, is_causal=True)

    _, module = optimized(model, torch.randn(U, 2, 7, 4), INDEX)
    name = torch.ops.aten.scaled_dot_product_attention.default
    assert [n.meta["val"].shape[0] for n in module.graph.nodes if n.target is name] == [U]


def test_the_librarys_own_operators_stay() -> None:
    def model(w: Tensor, user: Tensor, cand: Tensor, index: Tensor) -> Tensor:
        return torch.ops.ikbo.linear(user, cand, w, index) + kernels.broadcast(user, index)[:, :4]

    optimized(model, torch.randn(4, 2 * D), torch.randn(U, D), torch.randn(B, D), INDEX, params=1)
