"""The operators that traced graphs have on a GPU, on fake tensors: schemas, autograd, arithmetic. Nothing runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from ikbo_recsys import CandidateIndex, kernels
from ikbo_recsys.kernels import _backend
from tests.inductor import Passed, every_graph, stopped_before_code

pytest.importorskip("triton")

CANDS, SEEDS, USERS, OWN, ROWS, HEADS, KEY_HEADS, SIZE = 60, 32, 4, 33, 200, 4, 2, 64


@pytest.fixture(params=["triton", "gluon"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(_backend, "portable_refusal", lambda *_: None)
    monkeypatch.setattr(_backend, "hopper_refusal", lambda *_: None)
    with _backend.use_backend(request.param), FakeTensorMode():
        yield request.param


def make(layout: str) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """query, key, value, user_query; index; lengths or offsets."""
    history = (777, KEY_HEADS, SIZE) if layout == "jagged" else (USERS, ROWS, KEY_HEADS, SIZE)
    shapes = ((CANDS, SEEDS, HEADS, SIZE), history, history, (USERS, OWN, HEADS, SIZE))
    operands = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    options = {
        "full": {},
        "lengths": {"kv_lengths": torch.empty(USERS, dtype=torch.int32)},
        "jagged": {"kv_offsets": torch.empty(USERS + 1, dtype=torch.int64)},
    }[layout]
    return operands, torch.empty(CANDS, dtype=torch.int64), options


@pytest.mark.parametrize("layout", ["full", "lengths", "jagged"])
@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_shapes_gradients_and_flops(path: str, layout: str, has_own: bool, return_lse: bool) -> None:
    import ikbo_recsys.kernels.flops  # noqa: F401

    (q, k, v, own), index, options = make(layout)
    leaves = [q, k, v, own] if has_own else [q, k, v]
    options |= {"user_query": own} if has_own else {}
    with FlopCounterMode(display=False) as forward:
        results = kernels.cross_attention(q, k, v, index, return_lse=return_lse, **options)
    results = [results] if isinstance(results, Tensor) else list(results)
    queries = [q, own] if has_own else [q]
    shapes = [x.shape for x in queries] + ([x.shape[:3] for x in queries] if return_lse else [])
    assert [x.shape for x in results] == shapes
    assert [x.dtype for x in results[len(queries) :]] == [torch.float32] * (len(results) - len(queries))
    history = 777 / USERS if layout == "jagged" else ROWS
    pairs = (CANDS * SEEDS + (USERS * OWN if has_own else 0)) * history
    assert forward.get_total_flops() == pytest.approx(4 * HEADS * SIZE * pairs, rel=1e-6)
    with FlopCounterMode(display=False) as backward:
        grads = torch.autograd.grad(sum(x.float().sum() for x in results), leaves)
    assert [x.shape for x in grads] == [x.shape for x in leaves]
    assert backward.get_total_flops() == pytest.approx(2.5 * forward.get_total_flops(), rel=1e-6)


@pytest.mark.parametrize("used", [(True, False), (False, True), (True, True)])
def test_a_gradient_that_is_not_there_is_not_made(path: str, used: tuple[bool, bool]) -> None:
    """A loss without the log-sum-exp gives its operator no gradient of it, one without the output zeros."""
    (q, k, v, _), index, _ = make("full")

    def step(q: Tensor, k: Tensor, v: Tensor, index: Tensor) -> list[Tensor]:
        results = kernels.cross_attention(q, k, v, index, return_lse=True)
        return list(
            torch.autograd.grad(sum(x.float().sum() for x, u in zip(results, used, strict=True) if u), (q, k, v))
        )

    graph = make_fx(step)(q, k, v, index).graph
    name = "cross_attention_" + ("portable" if path == "triton" else "hopper")
    backward = [node for node in graph.nodes if str(node.target) == f"ikbo.{name}_backward.default"]
    assert len(backward) == 1, graph
    assert (backward[0].args[-1] is not None) == used[1]


def test_own_rows_are_one_operator_each_way(path: str) -> None:
    (q, k, v, own), index, options = make("lengths")

    def step(q: Tensor, k: Tensor, v: Tensor, own: Tensor, index: Tensor, lengths: Tensor) -> list[Tensor]:
        outs = kernels.cross_attention(q, k, v, index, user_query=own, kv_lengths=lengths)
        return list(torch.autograd.grad(sum(x.float().sum() for x in outs), (q, k, v, own)))

    graph = make_fx(step)(q, k, v, own, index, options["kv_lengths"]).graph
    name = "cross_attention_" + ("portable" if path == "triton" else "hopper")
    ours = [str(node.target) for node in graph.nodes if "ikbo.cross" in str(node.target)]
    assert ours == [f"ikbo.{name}_both.default", f"ikbo.{name}_both_backward.default"]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("has_own", [False, True])
def test_two_layers_on_one_index_are_compiled_without_a_copy_of_it(grouped: bool, has_own: bool) -> None:
    """Of a tensor that it takes a kernel to write into, and that is read later, TorchInductor makes a copy first; with
    dynamic sizes it fails to. So nothing but outputs may look written to."""

    def step(q: Tensor, k: Tensor, v: Tensor, own: Tensor, index: Any, lengths: Tensor) -> Any:
        options = {"kv_lengths": lengths, "user_query": own} if has_own else {"kv_lengths": lengths}
        out = kernels.cross_attention(q, k, v, index, return_lse=True, **options)
        return kernels.cross_attention(out[0], k, v, index, return_lse=True, **options)

    (q, k, v, own), _, options = make("lengths")
    index: Any = CandidateIndex.from_offsets(torch.arange(USERS + 1) * (CANDS // USERS), num_candidates=CANDS)
    arguments = (q, k, v, own, index if grouped else index.to_user, options["kv_lengths"].zero_())
    with stopped_before_code() as graphs, pytest.raises(Passed):
        torch.compile(step, fullgraph=True, dynamic=True, backend=every_graph)(*arguments)
    forward, _ = graphs
    assert sum("triton_kernel_wrapper" in str(node.target) for node in forward.graph.nodes) == 2
    for graph in graphs:
        called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert not [name for name in called if "clone" in name or "as_strided" in name], called
