"""The modules on a GPU: against an fp64 copy on the CPU, trained, under autocast, compiled, packaged, served."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ikbo_recsys import CandidateIndex, IKBOCompressionLinear, IKBOCrossAttention, IKBOInteraction, IKBOLinear
from ikbo_recsys.export import export, package
from tests.cases import relative_error
from tests.processes import outcome_alone, run_alone


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    user: tuple[int, ...]
    candidate: tuple[int, ...]


CASES = {
    "compression": Case(lambda: IKBOCompressionLinear(40, 30, 17, bias=True), (40, 64), (30, 64)),
    "linear": Case(lambda: IKBOLinear(60, 33, 48, activation="silu"), (60,), (33,)),
    "attention": Case(lambda: IKBOCrossAttention(128, 2, user_dim=40), (300, 40), (64, 128)),
    "interaction": Case(IKBOInteraction, (9, 64), (5, 64)),
}
every = pytest.mark.parametrize("name", CASES)
with_weights = pytest.mark.parametrize("name", [name for name in CASES if name != "interaction"])
PACKAGES = {"IKBO_TEST_PACKAGES": "1"}
IN_PROCESS_OF_ITS_OWN = PACKAGES.items() <= os.environ.items()
in_process_of_its_own = pytest.mark.skipif(
    not IN_PROCESS_OF_ITS_OWN, reason="test_package_runs_other_sizes runs it in a process of its own"
)
# What the working type rounds a result to, a few times over; autocast rounds as its lower type does.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def batch(name: str, users: int = 5, cands: int = 67) -> tuple[Tensor, Tensor, CandidateIndex]:
    """In fp64, on the CPU."""
    case, ids = CASES[name], torch.randint(0, users, (cands,)).sort()[0]
    index = CandidateIndex.from_user_ids(ids, users, grouped=True)
    return (
        torch.randn(users, *case.user, dtype=torch.float64),
        torch.randn(cands, *case.candidate, dtype=torch.float64),
        index,
    )


def on_gpu(module: nn.Module, inputs: tuple[Tensor, Tensor, CandidateIndex], dtype: torch.dtype) -> tuple:
    user, cand, index = inputs
    return copy.deepcopy(module).to("cuda", dtype), (user.to("cuda", dtype), cand.to("cuda", dtype), index.to("cuda"))


def gradients(module: nn.Module, inputs: tuple[Tensor, Tensor, CandidateIndex]) -> list[Tensor]:
    """Output and gradients of the inputs and weights."""
    leaves = [x.detach().requires_grad_() for x in inputs[:2]]
    out = module(*leaves, inputs[2])
    found = torch.autograd.grad(out.double().square().sum(), [*leaves, *module.parameters()])
    return [out.detach(), *found]


@every
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("autocast", [False, True])
def test_against_the_cpu_in_fp64(name: str, dtype: torch.dtype, autocast: bool) -> None:
    if autocast and dtype is torch.float32:
        pytest.skip("autocast is to a lower type")
    module, inputs = CASES[name].build().double(), batch(name)
    there, given = on_gpu(module, inputs, torch.float32 if autocast else dtype)
    with torch.autocast("cuda", dtype, enabled=autocast):
        found = gradients(there, given)
    for ours, exact in zip(found, gradients(module, inputs), strict=True):
        assert relative_error(ours.cpu(), exact) < TOLERANCE[dtype]


@with_weights
def test_training_lowers_the_loss_and_new_weights_count(name: str) -> None:
    module, inputs = on_gpu(CASES[name].build(), batch(name), torch.bfloat16)
    target = torch.randn_like(module(*inputs).detach())
    optimizer, losses = torch.optim.Adam(module.parameters(), lr=1e-2), []
    for _ in range(20):
        loss = (module(*inputs) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    # What is derived from a weight and kept (its padded form) follows the optimizer: a fresh copy gives the same.
    assert torch.equal(module(*inputs), copy.deepcopy(module)(*inputs))


@every
def test_compiled_with_gradients_and_other_sizes(name: str) -> None:
    torch._dynamo.reset()
    module, _ = on_gpu(CASES[name].build(), batch(name), torch.float32)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for users, cands in ((5, 67), (3, 40), (9, 9)):
        _, inputs = on_gpu(module, batch(name, users, cands), torch.float32)
        for got, expected in zip(gradients(compiled, inputs), gradients(module, inputs), strict=True):
            assert relative_error(got, expected.double()) < 2e-3


@functools.cache
def torch_loads_no_package() -> str | None:
    """Why PyTorch cannot load and run a package without anything of ours in it on this machine, or None."""
    tests = f"{__file__}::test_package_of_a_plain_linear"
    failure, output = outcome_alone(tests, PACKAGES, timeout=300)
    if failure is None:
        return None
    why = next((line for line in output.splitlines() if line.startswith(("E  ", "Fatal"))), "")
    return f"PyTorch {torch.__version__} cannot load the package of a plain nn.Linear here: {failure}; {why}"


@with_weights
@pytest.mark.skipif(IN_PROCESS_OF_ITS_OWN, reason="this is that process")
def test_package_runs_other_sizes(name: str) -> None:
    """In a process of its own, which loading a package may end."""
    reason = torch_loads_no_package()
    if reason:
        pytest.skip(reason)
    run_alone(f"{__file__}::test_packaged[{name}]", PACKAGES, timeout=600)


@in_process_of_its_own
def test_package_of_a_plain_linear(tmp_path: Path) -> None:
    """No module of ours: whether PyTorch's own packages work on this machine."""
    module, x = nn.Linear(60, 48).to("cuda", torch.float16).eval(), torch.randn(67, 60, device="cuda").half()
    with torch.no_grad():
        program = torch.export.export(module, (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "plain.pt2"))
        served = torch._inductor.aoti_load_package(path)
        assert relative_error(served(x), module(x).double()) < 2e-3


@in_process_of_its_own
@with_weights
def test_packaged(name: str, tmp_path: Path) -> None:
    module, (user, cand, index) = on_gpu(CASES[name].build().eval(), batch(name), torch.float16)
    with torch.no_grad():
        program = export(module, (user, cand, index))
        served = torch._inductor.aoti_load_package(package(program, tmp_path / "module.pt2"))
        for users, cands in ((5, 67), (1, 300), (7, 7)):
            _, inputs = on_gpu(module, batch(name, users, cands), torch.float16)
            found = served(*inputs[:2], inputs[2].to_user)
            assert relative_error(found, module(*inputs).double()) < 2e-3


@with_weights
def test_captured_and_replayed_with_other_inputs(name: str) -> None:
    module, inputs = on_gpu(CASES[name].build(), batch(name), torch.float16)
    with torch.no_grad():
        module(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(*inputs)
        for into, new in zip(inputs[:2], batch(name)[:2], strict=True):
            into.copy_(new)
        graph.replay()
        assert relative_error(out, module(*inputs).double()) < 1e-3
