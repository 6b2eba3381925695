"""What holds for every module: state, copies, wrappers, precision, order of candidates."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ikbo_recsys
from ikbo_recsys import CandidateIndex, IKBOCompressionLinear, IKBOCrossAttention, IKBOInteraction, IKBOLinear
from tests.cases import make_index, to_user


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    user: tuple[int, ...]
    candidate: tuple[int, ...]


CASES = {
    "compression": Case(lambda: IKBOCompressionLinear(6, 3, 4, bias=True), (6, 8), (3, 8)),
    "linear": Case(lambda: IKBOLinear(6, 3, 4, activation="silu"), (6,), (3,)),
    "attention": Case(lambda: IKBOCrossAttention(8, 2, user_dim=6), (5, 6), (2, 8)),
    "interaction": Case(IKBOInteraction, (4, 8), (3, 8)),
}
every = pytest.mark.parametrize("name", CASES)
with_weights = pytest.mark.parametrize("name", [name for name in CASES if name != "interaction"])


def batch(
    name: str, users: int = 3, candidates: int = 7, kind: str = "shuffled"
) -> tuple[Tensor, Tensor, CandidateIndex]:
    case = CASES[name]
    return torch.randn(users, *case.user), torch.randn(candidates, *case.candidate), make_index(users, candidates, kind)


def test_public_names() -> None:
    assert len(ikbo_recsys.__all__) <= 12
    for name in ikbo_recsys.__all__:
        assert getattr(ikbo_recsys, name).__doc__


@every
def test_index_or_bare_tensor(name: str) -> None:
    module, (user, cand, index) = CASES[name].build(), batch(name)
    assert torch.equal(module(user, cand, index), module(user, cand, to_user(index)))


@every
def test_other_order_same_scores(name: str) -> None:
    module, (user, cand, index) = CASES[name].build(), batch(name, 3, 50, "grouped")
    order = torch.randperm(50)
    shuffled = module(user, cand[order], index.to_user[order])
    torch.testing.assert_close(shuffled, module(user, cand, index)[order], rtol=1e-5, atol=1e-6)


@every
def test_batches_are_independent(name: str) -> None:
    """A candidate's result depends on itself and its user only: scored alone it is the same."""
    module, (user, cand, index) = CASES[name].build(), batch(name)
    together = module(user, cand, index)
    for b in range(7):
        u = int(index.to_user[b])
        alone = module(user[u : u + 1], cand[b : b + 1], torch.zeros(1, dtype=torch.int64))
        torch.testing.assert_close(alone[0], together[b], rtol=1e-5, atol=1e-6)


@with_weights
def test_copies_and_checkpoints(name: str) -> None:
    module, inputs = CASES[name].build(), batch(name)
    expected = module(*inputs)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = CASES[name].build()
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(*inputs), expected)
    assert torch.equal(copy.deepcopy(module)(*inputs), expected)
    doubled = {key: 2 * value for key, value in module.named_parameters()}
    functional = torch.func.functional_call(module, doubled, inputs)
    assert not torch.equal(functional, expected)
    assert torch.equal(module(*inputs), expected)


@with_weights
def test_precision_and_device_moves(name: str) -> None:
    module, (user, cand, index) = CASES[name].build(), batch(name)
    expected = module(user, cand, index)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        low = copy.deepcopy(module).to(dtype)(user.to(dtype), cand.to(dtype), index)
        assert low.dtype is dtype
        torch.testing.assert_close(low.float(), expected, rtol=0.1, atol=0.1)
    meta = copy.deepcopy(module).to("meta")(user.to("meta"), cand.to("meta"), index.to("meta"))
    assert meta.shape == expected.shape
    assert next(CASES[name].build().to(torch.bfloat16).parameters()).dtype is torch.bfloat16


@with_weights
def test_frozen_weights_get_no_gradient(name: str) -> None:
    module, (user, cand, index) = CASES[name].build().requires_grad_(False), batch(name)
    user.requires_grad_()
    module(user, cand, index).sum().backward()
    assert user.grad is not None
    assert all(parameter.grad is None for parameter in module.parameters())


@every
@pytest.mark.parametrize(("users", "candidates"), [(0, 0), (3, 0), (1, 1)])
def test_empty_batches_train(name: str, users: int, candidates: int) -> None:
    module, (user, cand, index) = CASES[name].build(), batch(name, users, candidates)
    user.requires_grad_()
    module(user, cand, index).sum().backward()
    assert user.grad is not None
    assert user.grad.shape == user.shape
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@with_weights
def test_a_few_steps_of_training_learn(name: str) -> None:
    module, (user, cand, index) = CASES[name].build(), batch(name)
    target = module(user, cand, index).detach() + 1
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        loss = (module(user, cand, index) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]


@pytest.fixture
def one_process_group(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    # A wrapped module is in reference cycles; gloo's threads end with it, and must before the interpreter.
    gc.collect()


@with_weights
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.usefixtures("one_process_group")
def test_distributed_wrappers(name: str, wrapper: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    module, (user, cand, index) = CASES[name].build(), batch(name)
    expected = module(user, cand, index)
    expected.square().sum().backward()
    gradient = {key: value.grad.clone() for key, value in module.named_parameters()}
    module.zero_grad()
    if wrapper == "ddp":
        wrapped: nn.Module = DistributedDataParallel(module)
    else:
        from torch.distributed.device_mesh import init_device_mesh

        wrapped = fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    out = wrapped(user, cand, index)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    for key, parameter in module.named_parameters():
        got = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        torch.testing.assert_close(got, gradient[key])


def test_reprs_name_the_sizes() -> None:
    assert "user_features=6" in repr(IKBOCompressionLinear(6, 3, 4))
    assert "activation='relu'" in repr(IKBOLinear(6, 3, 4, activation="relu"))
    assert "num_kv_heads=1" in repr(IKBOCrossAttention(8, 2, num_kv_heads=1))
