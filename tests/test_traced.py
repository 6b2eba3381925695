"""What traced calls become on a GPU, traced without one: the operators, their kernels, their gradients, no guard on a
batch size. Tensors lie on the CPU, and the paths are told that they may take them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ikbo_recsys.kernels import _backend, compression_linear, linear, use_backend

pytest.importorskip("triton")

U, B, M, D, KU, KC = 3, 7, 70, 64, 9, 31


@pytest.fixture(autouse=True)
def every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backend, "portable_refusal", lambda device, dtype: None)
    monkeypatch.setattr(_backend, "hopper_refusal", lambda device: None)


def matrices(users: int = U, batch: int = B, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    shapes = ((users, KU, D), (batch, KC, D), (M, KU + KC))
    return [*(torch.randn(shape, dtype=dtype) for shape in shapes), torch.zeros(batch, dtype=torch.int64)]


def vectors(users: int = U, batch: int = B) -> list[Tensor]:
    user, cand, weight, index = matrices(users, batch)
    return [user[..., 0], cand[..., 0], weight, index]


def calls(graph: GraphModule) -> list[str]:
    """What the graph calls, kernels by their names."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    names = []
    for node in graph.graph.nodes:
        if node.op == "call_function":
            kernel = node.kwargs.get("kernel_idx")
            names.append(str(node.target) if kernel is None else kernel_side_table.get_kernel(kernel).fn.__name__)
    return names


def count(graph: GraphModule, name: str) -> int:
    return sum(name in call for call in calls(graph))


def lowered(function: Callable[..., Any], *arguments: Any) -> GraphModule:
    """The forward graph that a compiler gets."""
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        aot_function(function, fw_compiler=keep, bw_compiler=nop, dynamic=True)(*arguments)
    return graphs[0]


class Compression(torch.nn.Module):
    def forward(self, user: Tensor, cand: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        return compression_linear(user, cand, weight, index)


class Linear(torch.nn.Module):
    def forward(self, user: Tensor, cand: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        return linear(user, cand, weight, index, None, "silu")


OPERATORS = [(Compression(), matrices, "mix_kernel"), (Linear(), vectors, "linear_kernel")]


@pytest.mark.parametrize(("module", "make", "kernel"), OPERATORS)
def test_fake_tensors(module: torch.nn.Module, make: Callable[..., Any], kernel: str) -> None:
    with use_backend("triton"):
        graph = make_fx(module, tracing_mode="symbolic")(*make())
    assert count(graph, kernel) == 2 or count(graph, "_portable") == 1, calls(graph)


@pytest.mark.parametrize("path", ["triton", "gluon"])
def test_lowered(path: str) -> None:
    """The compiler sees the portable kernels, and an operator in place of the Hopper ones."""
    tensors = matrices()
    leaves = [x.requires_grad_() for x in tensors[:3]]
    with use_backend(path):
        graph = lowered(compression_linear, *leaves, tensors[3])
    assert count(graph, "mix_kernel") == (2 if path == "triton" else 0), calls(graph)
    assert count(graph, "compression_linear_hopper") == (0 if path == "triton" else 1), calls(graph)
    assert "float64" not in str(graph.code)


@pytest.mark.parametrize(("module", "make", "kernel"), OPERATORS)
def test_joint_graph(module: torch.nn.Module, make: Callable[..., Any], kernel: str) -> None:
    """Forward and backward in one graph: the gradients are one operator, for what is asked for."""

    def train(user: Tensor, cand: Tensor, weight: Tensor, index: Tensor) -> Any:
        user, weight = user.requires_grad_(), weight.requires_grad_()
        return torch.autograd.grad(module(user, cand, weight, index).sum(), (user, weight))

    with use_backend("triton"):
        graph = make_fx(train, tracing_mode="symbolic")(*make())
    (backward,) = [node for node in graph.graph.nodes if "_backward" in str(node.target) and "ikbo" in str(node.target)]
    assert backward.args[-1] == [True, False, True, False]
    shapes = [tuple(x.shape) for x in backward.meta["val"]]
    assert [len(shape) for shape in shapes] == ([3, 2] if kernel == "mix_kernel" else [2, 2])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("module", "make", "kernel"), OPERATORS)
def test_export(module: torch.nn.Module, make: Callable[..., Any], kernel: str, strict: bool) -> None:
    """An exported program carries the portable kernels, and both batch sizes stay apart and dynamic."""
    users, batch = torch.export.Dim("users"), torch.export.Dim("batch")
    shapes = ({0: users}, {0: batch}, {}, {0: batch})
    with use_backend("triton"):
        program = torch.export.export(module, tuple(make()), dynamic_shapes=shapes, strict=strict)
    assert count(program.graph_module, "_portable") == 1, calls(program.graph_module)
    assert len(program.range_constraints) == 2
    with use_backend("triton"), torch.no_grad():
        graph = lowered(program.module(), *make(5, 20))
    assert count(graph, kernel) == 2, calls(graph)


@pytest.mark.parametrize("strict", [False, True])
def test_export_leaves_the_opaque_kernels_out(strict: bool) -> None:
    with use_backend("gluon"), pytest.raises(Exception, match="an exported program carries the portable kernel"):
        torch.export.export(Compression(), tuple(matrices()), strict=strict)


@pytest.mark.parametrize("path", ["triton", "gluon"])
def test_compiled_once_for_all_batch_sizes(path: str) -> None:
    graphs: list[GraphModule] = []

    def backend(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return lambda *arguments: (torch.zeros(1),)

    torch._dynamo.reset()
    compiled = torch.compile(compression_linear, fullgraph=True, dynamic=True, backend=backend)
    with use_backend(path), torch.no_grad():
        for users, batch in ((3, 7), (9, 64), (2, 37), (5, 5)):
            compiled(*matrices(users, batch))
    (graph,) = graphs
    name = "compression_linear_portable" if path == "triton" else "compression_linear_hopper"
    assert count(graph, name) == 1, calls(graph)


def test_a_traced_path_is_marked_as_torch_marks_it() -> None:
    assert vars(torch.compiler.assume_constant_result(lambda: 0)) == vars(_backend.constant_while_tracing(lambda: 0))


def test_the_eager_paths_do_not_import_the_compiler() -> None:
    """TorchDynamo and TorchInductor take longer to import than the kernels to compile."""
    modules = ("_compression_launch", "_linear_launch", "_segment_launch", "_attention_paths")
    code = "import sys, torch\n" + "".join(f"import ikbo_recsys.kernels.{module}\n" for module in modules)
    code += "assert not {'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
