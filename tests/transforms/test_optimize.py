"""`optimize`: both worlds, what it returns and says, export, packages, and its errors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ikbo_recsys.export import check_program, export, package
from ikbo_recsys.transforms import NothingToOptimize, optimize

PAIRS = ((3, 7), (1, 1), (1, 50), (9, 2))


class Inside(nn.Module):
    """Broadcasts inside; returns a dictionary with a user-rate output."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.LayerNorm(8))
        self.items = nn.Embedding(20, 4)
        self.over = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, user: Tensor, item: Tensor, index: Tensor) -> dict[str, Any]:
        hidden = self.tower(user)
        score = self.over(torch.cat([hidden[index], self.items(item)], 1)) * self.scale
        return {"score": score.squeeze(1), "user": hidden, "unused": None, "rows": [hidden[index]]}


class Outside(nn.Module):
    """Knows nothing of users: B rows of everything, in a dictionary and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(6, 8)
        self.ids = nn.Embedding(20, 4)
        self.over = nn.Linear(16, 3)

    def forward(self, x: dict[str, Tensor], item: Tensor, *, bias: Tensor) -> Tensor:
        user = torch.relu(self.tower(x["user"]))
        return self.over(torch.cat([user, self.ids(x["user_id"]), self.ids(item)], 1)) + bias


def inside_batch(users: int, candidates: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(users, 6), torch.randint(0, 20, (candidates,)), torch.randint(0, users, (candidates,))


def outside_batch(users: int, candidates: int) -> tuple[Any, Any, Tensor]:
    x = {"user": torch.randn(users, 6), "user_id": torch.randint(0, 20, (users,))}
    index = torch.randint(0, users, (candidates,))
    full = {name: rows[index] for name, rows in x.items()}
    item, bias = torch.randint(0, 20, (candidates,)), torch.randn(candidates, 3)
    return ((x, item), {"bias": bias}), ((full, item), {"bias": bias}), index


@pytest.fixture(scope="module")
def inside() -> tuple[Inside, Any]:
    model = Inside().eval()
    return model, optimize(model, inside_batch(3, 24))


@pytest.fixture(scope="module")
def outside() -> tuple[Outside, Any]:
    model = Outside().eval()
    _, (args, kwargs), _ = outside_batch(3, 24)
    return model, optimize(model, args, kwargs, user_inputs=["user", "x.user_id"])


@pytest.mark.parametrize("pair", PAIRS)
def test_the_model_broadcasts(inside: tuple[Inside, Any], pair: tuple[int, int]) -> None:
    model, optimized = inside
    batch = inside_batch(*pair)
    found = optimized.module()(*batch)
    torch.testing.assert_close(found, model(*batch), rtol=1e-5, atol=1e-6)
    assert found["unused"] is None
    assert optimized.report.mode == "inside"


@pytest.mark.parametrize("pair", PAIRS)
def test_the_caller_broadcast(outside: tuple[Outside, Any], pair: tuple[int, int]) -> None:
    model, optimized = outside
    (args, kwargs), (full_args, full_kwargs), index = outside_batch(*pair)
    found = optimized.module()(*args, **kwargs, to_user=index)
    torch.testing.assert_close(found, model(*full_args, **full_kwargs), rtol=1e-5, atol=1e-6)
    assert optimized.report.mode == "caller"
    assert "forward" not in model.__dict__


def test_an_exported_program_gains_the_index() -> None:
    model = Outside().eval()
    (args, kwargs), (full_args, full_kwargs), index = outside_batch(3, 24)
    rows = {0: torch.export.Dim("B")}
    shapes = {"x": {"user": rows, "user_id": rows}, "item": rows, "bias": rows}
    program = torch.export.export(model, full_args, full_kwargs, dynamic_shapes=shapes)
    optimized = optimize(program, user_inputs=["x"])
    torch.testing.assert_close(
        optimized.module()(*args, **kwargs, to_user=index), model(*full_args, **full_kwargs), rtol=1e-5, atol=1e-6
    )
    assert optimized.program.state_dict.keys() == model.state_dict().keys()


def test_parameters_are_the_models_own(inside: tuple[Inside, Any]) -> None:
    model, optimized = inside
    module = optimized.module()
    assert module.state_dict().keys() == model.state_dict().keys()
    mine, theirs = dict(module.named_parameters()), dict(model.named_parameters())
    assert all(mine[name] is theirs[name] for name in theirs)


def test_the_input_program_is_not_changed() -> None:
    model = Inside().eval()
    program = export(model, inside_batch(3, 24))
    before = str(program.graph)
    optimized = optimize(program)
    assert optimized.report.changed
    assert str(program.graph) == before
    batch = inside_batch(4, 9)
    torch.testing.assert_close(program.module(check_guards=False)(*batch), model(*batch))


def test_training_step() -> None:
    """Statistics of batch norm, gradients and one step of an optimizer, with the model's own parameters."""
    torch.manual_seed(0)
    model, twin = Inside().train(), Inside().train()
    twin.load_state_dict(model.state_dict())
    optimized = optimize(model, inside_batch(3, 24)).module()
    batch = inside_batch(4, 30)
    for run, parameters in ((optimized, model), (twin, twin)):
        step = torch.optim.SGD(parameters.parameters(), lr=0.1)
        run(*batch)["score"].square().mean().backward()
        step.step()
    for (name, mine), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_save_and_load(inside: tuple[Inside, Any], tmp_path: Path) -> None:
    model, optimized = inside
    torch.export.save(optimized.program, tmp_path / "optimized.pt2")
    loaded = torch.export.load(tmp_path / "optimized.pt2").module(check_guards=False)
    batch = inside_batch(5, 11)
    torch.testing.assert_close(loaded(*batch), model(*batch), rtol=1e-5, atol=1e-6)


def test_a_program_in_core_operators() -> None:
    """Later stages break layers up; what is left of them is still recognised."""
    model = Inside().eval()
    program = export(model, inside_batch(3, 24)).run_decompositions()
    assert not any("linear" in str(node.target) for node in program.graph.nodes)
    optimized = optimize(program)
    batch = inside_batch(5, 11)
    torch.testing.assert_close(optimized.module()(*batch), model(*batch), rtol=1e-5, atol=1e-6)
    assert optimized.report.saved >= 0.9 * optimized.report.savable > 0


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_towers(kind: Any, batch_first: bool) -> None:
    """A recurrent network over the user's history runs once per user."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = kind(4, 6, num_layers=2, bidirectional=True, batch_first=batch_first)
            self.over = nn.Linear(12 + 6 + 4, 1)

        def forward(self, user: Tensor, item: Tensor, index: Tensor) -> Tensor:
            history = user[index] if batch_first else user[index].transpose(0, 1)
            steps, last = self.tower(history)
            last = last[0] if isinstance(last, tuple) else last
            return self.over(torch.cat([steps.mean(1 if batch_first else 0), last[1], item], 1))

    model = Recurrent().eval()

    def batch(users: int, candidates: int) -> tuple[Tensor, ...]:
        return torch.randn(users, 5, 4), torch.randn(candidates, 4), torch.randint(0, users, (candidates,))

    optimized = optimize(model, batch(3, 24))
    outcomes = {entry.operator: entry.outcome for entry in optimized.report.entries}
    assert outcomes[{nn.GRU: "gru", nn.LSTM: "lstm", nn.RNN: "rnn_tanh"}[kind]] == "sunk"
    for pair in PAIRS:
        given = batch(*pair)
        torch.testing.assert_close(optimized.module()(*given), model(*given), rtol=1e-5, atol=1e-6)


def test_multi_head_attention() -> None:
    """PyTorch's own module as target attention: its projections of the history and its attention."""

    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, user: Tensor, item: Tensor, index: Tensor) -> Tensor:
            history = user[index]
            return self.attention(item.unsqueeze(1), history, history, need_weights=False)[0].squeeze(1)

    model = Target().eval()

    def batch(users: int, candidates: int) -> tuple[Tensor, ...]:
        return torch.randn(users, 5, 8), torch.randn(candidates, 8), torch.randint(0, users, (candidates,))

    optimized = optimize(model, batch(3, 24))
    assert "ikbo.cross_attention" in str(optimized.report)
    for pair in PAIRS:
        given = batch(*pair)
        torch.testing.assert_close(optimized.module()(*given), model(*given), rtol=1e-5, atol=1e-5)


def test_custom_operators_are_called_as_often_as_before() -> None:
    calls = []

    @torch.library.custom_op("ikbo_test::count", mutates_args=())
    def count(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x * 2.0

    @count.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    class Counting(nn.Module):
        def forward(self, user: Tensor, item: Tensor, index: Tensor) -> Tensor:
            return count(user[index]) + count(user[index]) + torch.relu(user[index])

    given = torch.randn(3, 4), torch.randn(24, 4), torch.arange(24) % 3
    module = optimize(Counting().eval(), given).module()
    calls.clear()
    torch.testing.assert_close(module(*given), 4.0 * given[0][given[2]] + torch.relu(given[0])[given[2]])
    assert calls == [24, 24]


def test_optimizing_twice_finds_less(inside: tuple[Inside, Any]) -> None:
    _, optimized = inside
    with pytest.warns(NothingToOptimize):
        again = optimize(optimized.program)
    batch = inside_batch(5, 11)
    torch.testing.assert_close(again.module()(*batch), optimized.module()(*batch))


PAIRWISE_USERS = 3


class Dots(nn.Module):
    """Needs a constant of its own: the pairs are not in the order of the operator that computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pairs", torch.triu_indices(5, 5, 1), persistent=False)
        self.over = nn.Linear(10, 1)

    def forward(self, user: Tensor, item: Tensor, index: Tensor) -> Tensor:
        x = torch.cat([item[:, :1], user[index], item[:, 1:]], 1)
        return self.over(torch.bmm(x, x.mT)[:, self.pairs[0], self.pairs[1]])


def test_new_constants_travel_with_the_program(tmp_path: Path) -> None:
    model = Dots().eval()

    def batch(users: int, candidates: int) -> tuple[Tensor, ...]:
        index = torch.randint(0, users, (candidates,))
        return torch.randn(users, PAIRWISE_USERS, 4), torch.randn(candidates, 2, 4), index

    optimized = optimize(model, batch(3, 24))
    assert optimized.report.count("replaced") == 3
    assert optimized.program.state_dict.keys() == model.state_dict().keys()
    torch.export.save(optimized.program, tmp_path / "dots.pt2")
    loaded = torch.export.load(tmp_path / "dots.pt2").module(check_guards=False)
    for pair in PAIRS:
        given = batch(*pair)
        torch.testing.assert_close(optimized.module()(*given), model(*given), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(loaded(*given), model(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["inside", "outside"])
def test_packages_run_in_a_fresh_process(world: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """At four pairs of batch sizes, one user included, where this library is never imported."""
    model, optimized = request.getfixturevalue(world)
    check_program(optimized.program)
    package(optimized.program, tmp_path / "model.pt2")
    batches = []
    for pair in PAIRS:
        if world == "inside":
            batch = inside_batch(*pair)
            batches.append((batch, {}, model(*batch)["score"]))
        else:
            (args, kwargs), (full_args, full_kwargs), index = outside_batch(*pair)
            batches.append((args, {**kwargs, "to_user": index}, model(*full_args, **full_kwargs)))
    torch.save(batches, tmp_path / "batches.pt")
    script = """
        import sys, torch
        model = torch._inductor.aoti_load_package("model.pt2")
        for args, kwargs, expected in torch.load("batches.pt"):
            found = model(*args, **kwargs)
            found = found["score"] if isinstance(found, dict) else found
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert not any(name.startswith("ikbo_recsys") for name in sys.modules)
        print("equal")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "equal", done.stderr


# ---- what it says --------------------------------------------------------------------------------------------------


class NoBroadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_it_says_that_it_did_nothing() -> None:
    model = NoBroadcast()
    with pytest.warns(NothingToOptimize, match="no broadcast"):
        optimized = optimize(model, (torch.randn(24, 6),))
    assert not optimized.report.changed
    assert "NOTHING WAS DONE" in str(optimized.report)
    x = torch.randn(3, 6)
    torch.testing.assert_close(optimized.module()(x), model(x))


def test_the_report_names_places(inside: tuple[Inside, Any]) -> None:
    _, optimized = inside
    text = str(optimized.report)
    assert "test_optimize.py:" in text
    assert "ikbo.linear" in text
    assert optimized.report.to_dict()["broadcasts"][0]["rows"] == 24


def test_user_inputs_restrict_the_pass() -> None:
    class Two(nn.Module):
        def forward(self, user: Tensor, other: Tensor, index: Tensor) -> Tensor:
            return F.relu(user[index]) + F.gelu(other[index])

    given = (torch.randn(3, 6), torch.randn(3, 6), torch.randint(0, 3, (24,)))
    dynamic = {"user": "U", "other": "V", "index": "B"}
    optimized = optimize(Two(), given, user_inputs=["user"], dynamic=dynamic)
    rows = {entry.operator: entry.outcome for entry in optimized.report.entries}
    assert rows["relu"] == "sunk"
    assert "gelu" not in rows
    torch.testing.assert_close(optimized.module()(*given), Two()(*given))


def test_errors() -> None:
    model = Outside()
    _, (args, kwargs), _ = outside_batch(3, 24)
    with pytest.raises(ValueError, match=r"'visitor', which is not among the inputs"):
        optimize(model, args, kwargs, user_inputs=["visitor"])
    with pytest.raises(ValueError, match="needs example inputs"):
        optimize(model)
    with pytest.raises(ValueError, match="needs user_inputs"):
        optimize(model, args, kwargs, caller_broadcasts=True)
    uneven = ({"user": args[0]["user"][:5], "user_id": args[0]["user_id"]}, args[1])
    with pytest.raises(ValueError, match=r"\[5, 24\] rows"):
        optimize(model, uneven, kwargs, user_inputs=["x"], caller_broadcasts=True)
