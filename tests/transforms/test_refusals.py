"""What must not be sunk is not, with the reason; and the results stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.transforms.helper import must_rewrite, trace
from tests.transforms.test_broadcasts import INDEX, B, D, U, linear_rows, optimized


def reasons(report: Any) -> str:
    return " ".join(entry.reason for entry in report.entries)


def test_dropout_in_training() -> None:
    """The same draws for the same seed: one for each candidate."""

    def model(w: Tensor, user: Tensor, index: Tensor) -> Tensor:
        return F.linear(F.dropout(torch.relu(user[index]), 0.5, training=True), w)

    tensors = torch.randn(4, D), torch.randn(U, D), INDEX
    module = trace(model, tensors)
    report = must_rewrite(module, skip=1)
    torch.manual_seed(3)
    expected = model(*tensors)
    torch.manual_seed(3)
    torch.testing.assert_close(module(*tensors), expected)
    assert linear_rows(module) == [B]
    assert "dropout in training" in reasons(report)


def test_two_draws_are_not_one() -> None:
    def model(user: Tensor, index: Tensor) -> Tensor:
        wide = user[index].relu()
        return F.dropout(wide, 0.5, training=True) - F.dropout(wide, 0.5, training=True)

    tensors = torch.ones(U, 50), INDEX
    module = trace(model, tensors)
    must_rewrite(module)
    assert module(*tensors).abs().sum() > 0


def test_attention_dropout() -> None:
    def model(rows: Tensor, index: Tensor) -> Tensor:
        wide = torch.tanh(rows[index])
        return F.scaled_dot_product_attention(wide, wide, wide, dropout_p=0.25)

    module = trace(model, (torch.randn(U, 2, 7, 4), INDEX))
    report = must_rewrite(module)
    name = torch.ops.aten.scaled_dot_product_attention.default
    assert [n.meta["val"].shape[0] for n in module.graph.nodes if n.target is name] == [B]
    assert "dropout" in reasons(report)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm(training: bool) -> None:
    """Its statistics in training are over the candidates: a user with more of them weighs more."""

    def model(w: Tensor, mean: Tensor, var: Tensor, user: Tensor, index: Tensor) -> Tensor:
        return F.batch_norm(F.linear(user[index], w), mean.clone(), var.clone(), training=training)

    report, _ = optimized(
        model, torch.randn(4, D), torch.randn(4), torch.rand(4) + 1, torch.randn(U, D), INDEX, params=3
    )
    assert ("batch norm in training" in reasons(report)) == training


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "sort": lambda x: x.sort(0).values,
    "mean": lambda x: x - x.mean(0),
    "all": lambda x: x * x.sum(),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "shift": lambda x: torch.cat([x[1:], x[:1]]),
    "gram": lambda x: x @ x.t(),
    "layer norm": lambda x: F.layer_norm(x, x.shape),
    "reshape across": lambda x: x.t().reshape(x.shape[0], -1) * 1.0,
    "channels": lambda x: F.softmax(x.unsqueeze(0), 1)[0],
    "every second": lambda x: x[::2].repeat_interleave(2, 0)[: x.shape[0]],
    "convolution": lambda x: F.conv1d(x.t().unsqueeze(0), torch.ones(1, D, 3), padding=1)[0].t().expand(-1, D),
    "unbatched convolution": lambda x: F.conv2d(x.unsqueeze(0), torch.ones(1, 1, 3, 3), padding=1)[0],
    "padding": lambda x: F.pad(x, (0, 0, 1, 0))[1:] + F.pad(x, (0, 0, 1, 0))[:-1],
    "outer": lambda x: torch.einsum("bi,ci->bc", x, x),
    "scatter": lambda x: torch.zeros_like(x).index_add(0, torch.arange(x.shape[0]) % 2, x),
    "unfold": lambda x: x.unfold(0, 3, 1).sum(-1),
    "positions": lambda x: x + torch.arange(x.shape[0]).unsqueeze(1),
}


@pytest.mark.parametrize("mixing", MIXING.values(), ids=MIXING.keys())
def test_row_mixing(mixing: Callable[[Tensor], Tensor]) -> None:
    def model(w: Tensor, user: Tensor, cand: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.tanh(user)[index]
        return mixing(wide), mixing(torch.cat([wide, cand], 1)[:, :D] * 2.0)

    tensors = torch.randn(4, D), torch.randn(U, D), torch.randn(B, D), INDEX
    module = trace(model, tensors)
    must_rewrite(module, skip=1)
    torch.testing.assert_close(module(*tensors), model(*tensors), rtol=1e-5, atol=1e-6)


# ---- in-place ------------------------------------------------------------------------------------------------------


def _overwritten_source(user: Tensor, index: Tensor) -> Tensor:
    fresh = user * 1.0
    wide = fresh[index]
    fresh.zero_()
    return wide * 2.0 + fresh.sum()


def _overwritten_index(user: Tensor, index: Tensor) -> Tensor:
    own = index + 0
    wide = user[own]
    own.zero_()
    return torch.relu(wide) + user[own]


def _written_through_a_view(user: Tensor, index: Tensor) -> Tensor:
    wide = user[index]
    wide[:, 0] = 7.0
    wide.view(-1)[3:5].mul_(2.0)
    return torch.tanh(wide)


def _read_after_the_write(user: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    wide = user[index]
    first = wide[:, :2]
    wide.relu_()
    return first * 2.0, wide + 1.0


def _dropout_returns_its_input(user: Tensor, index: Tensor) -> Tensor:
    wide = user[index]
    same = F.dropout(wide, 0.5, training=False)
    same.add_(1.0)
    return wide * same


def _accumulates(user: Tensor, index: Tensor) -> Tensor:
    total = user.new_zeros(index.shape[0], D)
    total += user[index]
    total += torch.sigmoid(user)[index]
    return F.relu(total, inplace=True)


def _index_put(user: Tensor, index: Tensor) -> Tensor:
    wide = user[index]
    wide[torch.arange(3), 1] = 0.0
    return wide.cos()


IN_PLACE = (
    _overwritten_source,
    _overwritten_index,
    _written_through_a_view,
    _read_after_the_write,
    _dropout_returns_its_input,
    _accumulates,
    _index_put,
)


@pytest.mark.parametrize("model", IN_PLACE, ids=lambda f: f.__name__.strip("_"))
def test_in_place(model: Callable[..., Any]) -> None:
    tensors = torch.randn(U, D), INDEX
    module = trace(model, tensors)
    must_rewrite(module)
    torch.testing.assert_close(module(*tensors), model(*tensors), rtol=1e-5, atol=1e-6)


def test_an_input_that_is_written() -> None:
    def model(user: Tensor, index: Tensor) -> Tensor:
        wide = user[index]
        user.mul_(2.0)
        return wide + user[index]

    given = torch.randn(U, D)
    module = trace(model, (given.clone(), INDEX))
    must_rewrite(module)
    mine, theirs = given.clone(), given.clone()
    torch.testing.assert_close(module(mine, INDEX), model(theirs, INDEX))
    torch.testing.assert_close(mine, theirs)


def test_memory_layout_is_not_guessed() -> None:
    def model(user: Tensor, index: Tensor) -> Tensor:
        return torch.as_strided(torch.relu(user[index]), (B, 2), (D, 1))

    tensors = torch.randn(U, D), INDEX
    module = trace(model, tensors)
    report = must_rewrite(module)
    assert "as_strided" in str(report.refused)
    torch.testing.assert_close(module(*tensors), model(*tensors))


def test_a_view_of_a_stretched_tensor() -> None:
    """`expand().contiguous().view()`: what stands for the contiguous copy need not be contiguous."""

    def model(user: Tensor, cand: Tensor) -> Tensor:
        wide = user.unsqueeze(1).expand(-1, 4, -1).contiguous()
        return wide.view(U, 2, 2 * D).flip(1).transpose(1, 2).contiguous().view(U, -1) * cand

    optimized(model, torch.randn(U, D), torch.randn(U, 4 * D))


def test_data_dependent_counts() -> None:
    def model(user: Tensor, counts: Tensor) -> Tensor:
        return torch.relu(torch.repeat_interleave(user, counts, dim=0))

    tensors = torch.randn(U, D), torch.tensor([2, 0, 3])
    program = torch.export.export(_Module(model), tensors)
    from ikbo_recsys.transforms import NothingToOptimize, optimize

    with pytest.warns(NothingToOptimize, match="changed nothing"):
        result = optimize(program)
    torch.testing.assert_close(result.module()(*tensors), model(*tensors))


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, user: Tensor, counts: Tensor) -> Any:
        return self.function(user, counts)
