"""TorchInductor for a GPU that is not there, up to the point where it would generate code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from ikbo_recsys.kernels import _backend


class Passed(BaseException):
    """All graph passes are done. Not an Exception: TorchInductor wraps those."""


@contextmanager
def stopped_before_code() -> Iterator[list[GraphModule]]:
    """Within, TorchInductor raises `Passed` in place of generating code, and the path is that of the portable kernels,
    which take tensors in host memory, for an sm_90 as far as anybody asks. Gives the list of graphs that code was to be
    generated for."""
    import torch._inductor.compile_fx as inductor
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    graphs: list[GraphModule] = []

    def stop(graph: GraphModule, *_: Any, **__: Any) -> Any:
        graphs.append(graph)
        raise Passed

    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    torch._dynamo.reset()
    with (
        pytest.MonkeyPatch.context() as patch,
        inductor.config.patch(force_disable_caches=True),
        _backend.use_backend("triton"),
    ):
        patch.setattr(inductor, "GraphLowering", stop)
        patch.setattr(type(driver), "active", target)
        patch.setattr(_backend, "portable_refusal", lambda *_: None)
        yield graphs


def every_graph(graph: GraphModule, inputs: Any) -> Any:
    """A backend for `torch.compile` that goes on after `Passed`, to the graph of the backward pass; it compiles to a
    function that raises it."""
    import torch._inductor.compile_fx as inductor

    def compile_graph(graph: GraphModule, inputs: Any, **options: Any) -> Any:
        with pytest.raises(Passed):
            inductor.compile_fx_inner(graph, inputs, **options)

        def run(inputs: list[Any]) -> Any:
            raise Passed

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return inductor.compile_fx(graph, inputs, inner_compile=compile_graph)
