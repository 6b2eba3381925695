"""`torch.compile(backend="ikbo")`, in training too, and the pass inside Inductor's ahead-of-time path."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ikbo_recsys.export import export, package
from ikbo_recsys.transforms import GraphPass, NothingToOptimize, Report
from ikbo_recsys.transforms.report import node_flops


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True))
        self.items = nn.Embedding(20, 4)
        self.over = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user: Tensor, item: Tensor, index: Tensor) -> Tensor:
        return self.over(torch.cat([self.tower(user[index]), self.items(item)], 1))


def batch(users: int, candidates: int) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.randint(0, users, (candidates,))
    return torch.randn(users, 6, requires_grad=True), torch.randint(0, 20, (candidates,)), index


def compiled(model: nn.Module, inner: str, **options: Any) -> tuple[Any, list[Report]]:
    reports: list[Report] = []
    chosen = {"inner": inner, "on_report": reports.append}
    return torch.compile(model, backend="ikbo", options=chosen, **options), reports


@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_training(inner: str) -> None:
    torch.manual_seed(0)
    model = Ranker().train()
    twin = copy.deepcopy(model)
    fast, reports = compiled(model, inner, dynamic=True, fullgraph=True)
    compilations = []
    for users, candidates in ((3, 24), (5, 31), (2, 40)):
        given = batch(users, candidates)
        found, expected = fast(*given), twin(*given)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        wanted = [given[0], *model.parameters()], [given[0], *twin.parameters()]
        mine = torch.autograd.grad(found.square().sum(), wanted[0])
        theirs = torch.autograd.grad(expected.square().sum(), wanted[1])
        for m, t in zip(mine, theirs, strict=True):
            torch.testing.assert_close(m, t, rtol=1e-3, atol=1e-4)
        compilations.append(len(reports))
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()), rtol=1e-4, atol=1e-5)
    assert compilations[0] == compilations[-1], "another batch size was compiled for again"
    assert {e.outcome for e in reports[0].entries if e.flops_before} >= {"sunk", "replaced"}
    assert "test_backend.py:" in str(reports[0])


def test_what_the_inner_compiler_gets() -> None:
    """The arithmetic of the compiled graph, from the graph itself."""
    seen: list[torch.fx.GraphModule] = []

    def spy(module: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(module)
        return module.forward

    model = Ranker().eval()
    torch.compile(model, backend="ikbo", options={"inner": spy})(*batch(2, 64))
    counted = sum(node_flops(n) for n in seen[0].graph.nodes if n.op == "call_function")
    tower, over = 2 * 2 * 6 * 8, 2 * 16 * (2 * 8 + 64 * 4)
    assert counted == tower + over + 2 * 64 * 16


def test_without_a_broadcast_it_says_so_and_runs() -> None:
    model = nn.Linear(4, 2)
    fast, reports = compiled(model, "eager")
    x = torch.randn(3, 4)
    with pytest.warns(NothingToOptimize, match="no broadcast"):
        found = fast(x)
    torch.testing.assert_close(found, model(x))
    assert reports[0].refused is not None


def test_autocast_inside_is_refused_and_runs() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Ranker().eval()

        def forward(self, *given: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(*given)

    model = Mixed()
    fast, reports = compiled(model, "eager")
    given = batch(3, 24)
    with pytest.warns(NothingToOptimize, match="autocast"):
        found = fast(*given)
    torch.testing.assert_close(found, model(*given))
    assert "autocast" in str(reports[0].refused)


def test_autocast_outside() -> None:
    model = Ranker().eval()
    fast, reports = compiled(model, "eager")
    given = batch(3, 24)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = fast(*given), model(*given)
    assert found.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=0.05)
    assert reports[0].refused is None


def test_a_region_without_gradients() -> None:
    """The same product inside and outside `no_grad` is two products."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Ranker().eval()

        def forward(self, *given: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.model(*given)
            return (self.model(*given) - 2.0 * target).square()

    model = Frozen()
    fast, reports = compiled(model, "eager")
    given = batch(3, 24)
    found, expected = fast(*given), model(*given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    mine, theirs = (torch.autograd.grad(out.sum(), [given[0], *model.parameters()]) for out in (found, expected))
    for m, t in zip(mine, theirs, strict=True):
        torch.testing.assert_close(m, t, rtol=1e-3, atol=1e-4)
    assert reports[0].refused is None


def test_a_copy_made_without_gradients_has_none() -> None:
    class Detached(nn.Module):
        def forward(self, user: Tensor, index: Tensor) -> Tensor:
            with torch.no_grad():
                target = torch.relu(user)[index]
                wide = user[index]
            return torch.cat([target, wide], 1).square() + torch.cat([user, user], 1)[index].relu()

    fast, reports = compiled(Detached(), "eager")
    user, _, index = batch(3, 24)
    found, expected = fast(user, index), Detached()(user, index)
    torch.testing.assert_close(found, expected)
    (mine,), (theirs,) = (torch.autograd.grad(out.sum(), [user]) for out in (found, expected))
    torch.testing.assert_close(mine, theirs)
    assert reports[0].refused is None


def test_an_unknown_inner_compiler() -> None:
    fast, _ = compiled(Ranker().eval(), "outductor")
    with pytest.raises(Exception, match="'outductor'"):
        fast(*batch(3, 24))


@pytest.mark.slow
def test_the_pass_inside_a_package(tmp_path: Path) -> None:
    """Inductor runs it on the way to a package, which then runs where this library is never imported."""
    model = Ranker().eval()
    reports: list[Report] = []
    program = export(model, batch(3, 24))
    package(
        program, tmp_path / "model.pt2", options={"pre_grad_custom_pass": GraphPass(["user"], on_report=reports.append)}
    )
    assert reports[0].count("replaced") >= 1
    batches = [(given := batch(*pair), model(*given)) for pair in ((3, 7), (1, 1), (1, 50), (9, 2))]
    torch.save([([t.detach() for t in given], out.detach()) for given, out in batches], tmp_path / "batches.pt")
    script = """
        import sys, torch
        model = torch._inductor.aoti_load_package("model.pt2")
        for args, expected in torch.load("batches.pt"):
            torch.testing.assert_close(model(*args), expected, rtol=1e-4, atol=1e-5)
        assert not any(name.startswith("ikbo_recsys") for name in sys.modules)
        print("equal")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "equal", done.stderr
