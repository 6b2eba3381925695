"""Training under torchrec's DistributedModelParallel on the CPU: other numbers of users and candidates on each rank."""

from __future__ import annotations

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.ranking import CANDIDATE_KEYS, USER_KEYS, make_dlrm, make_inputs, make_ranker

TABLES = [f"t_{name}" for name in (*USER_KEYS, *CANDIDATE_KEYS, "item")]
# For each step (users, candidates) of each rank; a rank without candidates, and one without users too, are among them.
STEPS = [[(3, 7), (5, 20)], [(1, 50), (9, 2)], [(4, 0), (2, 6)], [(2, 9), (0, 0)]]


def shard(model: torch.nn.Module, world: int) -> DistributedModelParallel:
    apply_optimizer_in_backward(RowWiseAdagrad, model.sparse.parameters(), {"lr": 0.05})
    # Left to itself the planner gives small tables to kernels that do not train these collections on the CPU.
    constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in TABLES}
    sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def worker(rank: int, world: int, name: str, store: str, queue) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=90)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=patience)
    queue.put((rank, *train(rank, world, name)))
    dist.barrier()
    dist.destroy_process_group()
    # The sharded model lies in reference cycles and holds the process groups. Their threads must have ended before the
    # interpreter does: one that then asks for its lock is killed, and gloo aborts the process.
    gc.collect()


def train(rank: int, world: int, name: str):
    """Losses of the steps, whether each local table moved, whether all are finite, the dense weights."""
    torch.manual_seed(0)
    model = shard((make_dlrm if name == "dlrm" else make_ranker)(), world)
    optimizer = torch.optim.SGD(dense_parameters(model), lr=0.1)
    before = local_tables(model)
    losses = []
    for step, sizes in enumerate(STEPS):
        torch.manual_seed(100 * step + rank)
        users, candidates = sizes[rank]
        inputs = make_inputs(users, candidates, history=name == "ranker")
        labels = torch.rand(candidates, 1).round()
        loss = F.binary_cross_entropy_with_logits(model(*inputs), labels, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    after = local_tables(model)
    moved = {key: bool((after[key] != before[key]).any()) for key in before}
    finite = all(bool(torch.isfinite(value).all()) for value in after.values())
    weights = torch.cat([p.detach().flatten() for p in dense_parameters(model)])
    return losses, moved, finite, weights.numpy()


def dense_parameters(model: DistributedModelParallel) -> list[torch.nn.Parameter]:
    return [parameter for key, parameter in model.named_parameters() if "dense." in key]


def local_tables(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Copies of the tables that are on this rank."""
    tables = {key: value for key, value in model.state_dict().items() if "sparse" in key}
    return {key: shard.tensor.clone() for key, value in tables.items() for shard in value.local_shards()}


@pytest.mark.parametrize("name", ["dlrm", "ranker"])
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_trains_sharded(name: str, world: int, tmp_path) -> None:
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    mp.spawn(worker, (world, name, str(tmp_path / "store"), queue), nprocs=world)
    results = sorted((queue.get() for _ in range(world)), key=lambda result: result[0])
    moved = {key: value for _, _, of_rank, _, _ in results for key, value in of_rank.items()}
    assert len(moved) == len(USER_KEYS) + len(CANDIDATE_KEYS) + (name == "ranker")
    assert all(moved.values()), moved
    for rank, losses, _, finite, weights in results:
        assert finite
        assert [loss > 0 for loss in losses] == [sizes[rank][1] > 0 for sizes in STEPS]
        # Data parallel: the ranks hold the same dense weights although their batches differ, one being empty.
        torch.testing.assert_close(torch.from_numpy(weights), torch.from_numpy(results[0][4]))
