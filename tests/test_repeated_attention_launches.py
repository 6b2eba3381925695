"""`test_repeated_launches.py` for target attention: repeated calls launch what first calls launch, byte for byte."""

from __future__ import annotations

import gc
import logging
import struct
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ikbo_recsys import CandidateIndex
from ikbo_recsys.kernels import (
    _attention_backward_hopper,
    _attention_shares,
    _plan,
    cross_attention,
    explain,
    use_backend,
)
from tests import standin
from tests.standin import StandIn, inside, outside
from tests.standin.calls import Call, assert_nothing_is_kept, check, make_index, train

U, B, T = 9, 40, 70


@outside
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the launch code needs it")
    standin.run_in_a_process_of_its_own(__file__, tmp_path)


def make(gpu: StandIn, dtype: torch.dtype, seeds: int, heads: int = 2, size: int = 64) -> list[Tensor]:
    """Query, key, value."""
    shapes = ((B, seeds, heads, size), (U, T, 1, size), (U, T, 1, size))
    return [gpu.randn(*shape, dtype=dtype) for shape in shapes]


def lengths(gpu: StandIn, dtype: torch.dtype = torch.int64) -> Tensor:
    return gpu.put(torch.randint(0, T + 1, (U,), dtype=dtype))


def jagged(gpu: StandIn, dtype: torch.dtype = torch.int64) -> Tensor:
    return gpu.put(
        torch.cat((torch.zeros(1, dtype=dtype), torch.randint(0, T + 1, (U,), dtype=dtype).cumsum(0).to(dtype)))
    )


@inside
@pytest.mark.parametrize(("path", "seeds", "dtype"), [("gluon", 16, torch.bfloat16), ("triton", 1, torch.float16)])
def test_layouts(gpu: StandIn, path: str, seeds: int, dtype: torch.dtype) -> None:
    query, key, value = make(gpu, dtype, seeds)
    grad = gpu.randn(B, seeds, 2, 64, dtype=dtype)
    rows = gpu.randn(500, 1, 64, dtype=dtype), gpu.randn(500, 1, 64, dtype=dtype)
    padded = key, value
    grouped, shuffled = make_index(gpu, U, B), make_index(gpu, U, B, False)
    kinds: dict[str, tuple[CandidateIndex, tuple[Tensor, Tensor], dict[str, Any]]] = {
        "full": (grouped, padded, {}),
        "padded": (grouped, padded, {"kv_lengths": lengths(gpu)}),
        "narrow": (grouped, padded, {"kv_lengths": lengths(gpu, torch.int32)}),
        "jagged": (grouped, rows, {"kv_offsets": jagged(gpu)}),
        "shuffled": (shuffled, padded, {"kv_lengths": lengths(gpu)}),
        "scaled": (grouped, padded, {"scale": 0.25}),
    }
    calls: dict[str, Call] = {}
    for kind, (index, history, options) in kinds.items():
        calls[kind] = lambda i=index, h=history, o=options: cross_attention(query, *h, i, **o)
        if kind in ("padded", "shuffled", "jagged"):
            calls[f"{kind} trained"] = train(
                lambda q, k, v, i=index, o=options: cross_attention(q, k, v, i, **o), grad, query, *history
            )
    with use_backend(path):
        check(gpu, calls)
        assert explain(cross_attention, query, key, value, grouped).path == path


@inside
def test_shared_tiles(gpu: StandIn) -> None:
    """Few tiles over long histories, and a last round of which little is to be done, as the rule has it."""
    calls: dict[str, Call] = {}
    for name, batch, grouped in (("parts", 8, True), ("parts, shuffled", 8, False), ("last round", 400, True)):
        query, key, value = (gpu.randn(*shape) for shape in ((batch, 64, 2, 64), (1, 4096, 2, 64), (1, 4096, 2, 64)))
        index, grad = make_index(gpu, 1, batch, grouped), gpu.randn(batch, 64, 2, 64)
        call = lambda q, k, v, index=index: cross_attention(q, k, v, index)  # noqa: E731
        calls[name] = lambda call=call, given=(query, key, value): call(*given)
        calls[f"{name}, trained"] = train(call, grad, query, key, value)
    with use_backend("gluon"):
        found = check(gpu, calls)
    assert [launch.kernel for launch in found["parts"]] == ["attention_forward_shared", "merge_parts"]
    assert [launch.kernel for launch in found["last round"]] == ["attention_forward_shared"]
    assert "merge_parts" not in [launch.kernel for launch in found["last round, trained"]]


@inside
def test_whole_numbers_as_scales(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are arguments as all scales are: Triton would compile an int into the kernel, for the others too."""
    monkeypatch.setattr(_attention_backward_hopper, "fills_the_gpu", lambda problem: True)
    (query, key, value), index = make(gpu, torch.float16, 128), make_index(gpu, U, B)
    grad = gpu.randn(B, 128, 2, 64)
    with use_backend("gluon"):
        for scales in ((1, 0.5, 2), (0.25, 3)):
            _plan.forget()
            for scale in scales:
                call = train(lambda q, k, v, s=scale: cross_attention(q, k, v, index, scale=s), grad, query, key, value)
                _, of_query, of_history = gpu.launches(call)[-3:]
                for launch in (of_query, of_history):
                    assert _bits(scale) in launch.arguments, (scale, launch.kernel)


def _bits(number: float) -> int:
    """Of an fp32 argument, as `Launch` shows it."""
    return int.from_bytes(struct.pack("<f", number), "little")


@inside
@pytest.mark.parametrize(("path", "seeds"), [("gluon", 16), ("triton", 1)])
def test_other_tensors_are_other_arguments(gpu: StandIn, path: str, seeds: int) -> None:
    query, key, value = make(gpu, torch.float16, seeds)
    query2, key2, value2 = make(gpu, torch.float16, seeds)
    index, grad = make_index(gpu, U, B), gpu.randn(B, seeds, 2, 64)
    wide = gpu.randn(B, seeds, 4, 64)
    both = gpu.randn(U, T, 2, 64)
    calls: dict[str, Call] = {
        "first": lambda: cross_attention(query, key, value, index),
        "second": lambda: cross_attention(query2, key2, value2, index),
        "heads of a wider one": lambda: cross_attention(wide[:, :, 1:3], key, value, index),
        "one buffer": lambda: cross_attention(query, both[:, :, :1], both[:, :, 1:], index),
        "fewer keys": lambda: cross_attention(query, key[:, 1:], value[:, 1:], index),
        "fewer candidates": lambda: cross_attention(query[1:], key, value, index.to_user[1:]),
        "bare": lambda: cross_attention(query, key, value, index.to_user),
        "log-sum-exp": lambda: cross_attention(query, key, value, index, return_lse=True),
        "own rows": lambda: cross_attention(query, key, value, index, user_query=own),
    }
    own = gpu.randn(U, 3, 2, 64)
    grads = {
        "whole": grad,
        "heads": gpu.randn(B, seeds, 4, 64)[:, :, 1:3],
        "expanded": gpu.randn(1, 1, 1, 1).expand(B, seeds, 2, 64),
        "shared": gpu.randn(1, seeds, 2, 64).expand(B, seeds, 2, 64),
    }
    for name, given in grads.items():
        calls[f"gradient: {name}"] = train(lambda q, k, v: cross_attention(q, k, v, index), given, query, key, value)
    for wanted in (1, 2, 6):
        leaves = [x.detach().requires_grad_(bool(wanted >> i & 1)) for i, x in enumerate((query, key, value))]
        some = [x for x in leaves if x.requires_grad]
        calls[f"gradients {wanted}"] = lambda leaves=leaves, some=some: torch.autograd.grad(
            cross_attention(*leaves, index), some, grad
        )
    leaves = [x.detach().requires_grad_() for x in (query, own, key, value)]

    def train_both() -> Any:
        q, o, k, v = leaves
        return torch.autograd.grad(cross_attention(q, k, v, index, user_query=o), leaves, (grad, gpu_own_grad))

    gpu_own_grad = gpu.randn(U, 3, 2, 64)
    calls["own rows trained"] = train_both
    with use_backend(path):
        found = check(gpu, calls)
    assert found["first"] != found["second"]


@inside
@pytest.mark.parametrize(("path", "seeds"), [("gluon", 16), ("triton", 1)])
def test_contents_that_change(gpu: StandIn, path: str, seeds: int) -> None:
    """What is derived from an index is derived anew after it was written to, and on another stream."""
    query, key, value = make(gpu, torch.float16, seeds)
    index, valid = make_index(gpu, U, B, False), lengths(gpu)
    call = lambda: cross_attention(query, key, value, index, kv_lengths=valid)  # noqa: E731
    with use_backend(path), torch.no_grad():
        first = gpu.launches(call)
        again = gpu.launches(call)
        kernels = [launch.kernel for launch in again]
        index.to_user.copy_(torch.randint(0, U, (B,)))
        changed = gpu.launches(call)
        assert [launch.kernel for launch in changed] == [launch.kernel for launch in first]
        assert changed != again
        gpu.stream = 8
        assert {launch.stream for launch in gpu.launches(call)} == {8}
        gpu.stream = 7
        assert [launch.kernel for launch in gpu.launches(call)] == kernels


@inside
@pytest.mark.parametrize(("path", "seeds"), [("gluon", 16), ("triton", 1)])
def test_new_sizes_compile_nothing(gpu: StandIn, path: str, seeds: int) -> None:
    def call(users: int, batch: int, history: int, grouped: bool = True) -> None:
        query, key, value = (
            gpu.randn(*shape) for shape in ((batch, seeds, 2, 64), (users, history, 1, 64), (users, history, 1, 64))
        )
        cross_attention(query, key, value, make_index(gpu, users, batch, grouped))

    with use_backend(path):
        # Between 33 and 64 query rows per user with one seed: one class of row tiles.
        for grouped in (True, False):
            call(9, 300, 64, grouped)
        loaded = gpu.loaded
        for users, batch in ((9, 301), (1, 40), (16, 560), (17, 600), (10, 333)):
            for grouped in (True, False):
                call(users, batch, 64, grouped)
        assert gpu.loaded == loaded


@inside
@pytest.mark.parametrize(("path", "seeds"), [("gluon", 16), ("triton", 1)])
def test_no_tensor_is_kept(gpu: StandIn, path: str, seeds: int) -> None:
    def call() -> list[weakref.ref[Any]]:
        query, key, value = (x.clone().requires_grad_() for x in make(gpu, torch.float16, seeds))
        index: CandidateIndex = make_index(gpu, U, B, False)
        valid = lengths(gpu)
        out = cross_attention(query, key, value, index, kv_lengths=valid)
        out.sum().backward()
        return [weakref.ref(x) for x in (query, key, value, index.to_user, valid, out, query.grad, key.grad)]

    with use_backend(path):
        assert_nothing_is_kept(call)


@inside
def test_kernels_of_a_first_call_are_compiled_at_the_same_time(gpu: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    import triton

    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("this Triton compiles one kernel after the other")
    began = {"fill_tile_table": threading.Event(), "attention_forward": threading.Event()}
    together: list[bool] = []
    collecting: list[bool] = []

    def listen(src: Any, **_: Any) -> None:
        """Called as a kernel is compiled: waits until the other one is, too."""
        began[src.name].set()
        collecting.append(gc.isenabled())
        together.append(all(event.wait(60) for event in began.values()))

    # int32 and this head size: compiled by no other test of this process.
    query, key, value = make(gpu, torch.float16, 128, size=24)
    index = make_index(gpu, U, B, dtype=torch.int32)
    with use_backend("gluon"), torch.no_grad(), pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.DEBUG):
        patch.setattr(triton.knobs.compilation, "listener", listen)
        launches = gpu.launches(lambda: cross_attention(query, key, value, index))
    assert [launch.kernel for launch in launches] == ["fill_tile_table", "attention_forward"]
    assert together == [True, True]
    assert (collecting, gc.isenabled()) == ([False, False], True)
    assert not [record for record in caplog.records if record.name.startswith("ikbo_recsys")]


@inside
@pytest.mark.parametrize(("size", "error"), [(56, InterruptedError), (72, KeyboardInterrupt)])
def test_a_call_succeeds_after_one_whose_kernels_were_not_made(
    gpu: StandIn, size: int, error: type[BaseException]
) -> None:
    """Neither its kernels' failure stays, nor what Triton compiles them under."""
    import triton

    def fail(**_: Any) -> None:
        raise error

    # Head sizes that no other test of this process has, and an index of its own for each call, whose table it makes.
    calls = [(*make(gpu, torch.float16, 128, size=size), make_index(gpu, U, B)) for _ in range(2)]
    with use_backend("gluon"), torch.no_grad():
        _plan.forget()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton.knobs.compilation, "listener", fail)
            with pytest.raises(error):
                cross_attention(*calls[0])
        _plan.forget()
        launches = gpu.launches(lambda: cross_attention(*calls[1]))
    assert [launch.kernel for launch in launches] == ["fill_tile_table", "attention_forward"]


@inside
def test_launches_are_made_although_the_call_fails(gpu: StandIn) -> None:
    """A table that others may share by then is written."""
    query, key, value = make(gpu, torch.float16, 128)
    index = make_index(gpu, U, B)

    def call() -> None:
        with _plan.compiled_together(query):
            cross_attention(query, key, value, index)
            raise InterruptedError

    with use_backend("gluon"), torch.no_grad():
        with pytest.raises(InterruptedError):
            call()
        repeated = gpu.launches(lambda: cross_attention(query, key, value, index))
    assert [launch.kernel for launch in repeated] == ["attention_forward"]


@inside
def test_a_table_is_shared_once_it_is_written(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread on the same stream does not get the table of a first call whose kernels are still compiled."""
    query, key, value = make(gpu, torch.float16, 128)
    index, wide = make_index(gpu, U, B), make(gpu, torch.float16, 128, size=128)
    begins, ends = threading.Event(), threading.Event()

    def compile_slowly(*_: Any) -> None:
        begins.set()
        assert ends.wait(60)

    with use_backend("gluon"), torch.no_grad():
        cross_attention(*wide, make_index(gpu, U, B))  # compiled, and planned
        monkeypatch.setattr(_plan._Together, "compile", compile_slowly)
        with gpu.recording() as launches:
            thread = threading.Thread(target=lambda: cross_attention(query, key, value, index))
            thread.start()
            try:
                assert begins.wait(60)
                cross_attention(*wide, index)
            finally:
                ends.set()
                thread.join()
        assert [launch.kernel for launch in launches] == ["fill_tile_table", "attention_forward"] * 2
        again = gpu.launches(lambda: cross_attention(*wide, index))
    assert [launch.kernel for launch in again] == ["attention_forward"]


@inside
def test_operators_of_traced_graphs_keep_no_table(gpu: StandIn) -> None:
    """Inductor writes other contents into an index tensor without raising its version counter."""
    from ikbo_recsys.kernels._attention_operators import cross_attention_hopper

    (query, key, value), index = make(gpu, torch.float16, 128), make_index(gpu, U, B)
    call = lambda: cross_attention_hopper(query, key, value, index.offsets, None, None, 0, 0.125)  # noqa: E731
    for _ in range(2):
        assert [launch.kernel for launch in gpu.launches(call)] == ["fill_tile_table", "attention_forward"]
    with use_backend("gluon"), torch.no_grad():
        eager = lambda: cross_attention(query, key, value, index)  # noqa: E731
        assert [launch.kernel for launch in gpu.launches(eager)] == ["fill_tile_table", "attention_forward"]
        assert [launch.kernel for launch in gpu.launches(eager)] == ["attention_forward"]


@inside
@pytest.mark.parametrize("grouped", [True, False])
def test_what_inference_mode_made_is_not_kept_for_training(gpu: StandIn, grouped: bool) -> None:
    query, key, value = make(gpu, torch.float16, 16)
    index = make_index(gpu, U, B, grouped)
    with use_backend("gluon"):
        with torch.inference_mode():
            cross_attention(query, key, value, index)
        train(lambda q, k, v: cross_attention(q, k, v, index), gpu.randn(B, 16, 2, 64), query, key, value)()


@inside
def test_gradients_in_one_pass(gpu: StandIn) -> None:
    """Where users have few query rows, with the gradients that are asked for, of the log-sum-exp, too, wherever that
    lies."""
    users, name = 64, "attention_backward_few"
    query, key, value = (gpu.randn(*shape) for shape in ((B, 1, 2, 64), (users, T, 2, 64), (users, T, 2, 64)))
    index, grad = make_index(gpu, users, B), gpu.randn(B, 1, 2, 64)
    given = (query, key, value)
    calls: dict[str, Call] = {"all": train(lambda q, k, v: cross_attention(q, k, v, index), grad, *given)}
    shuffled = make_index(gpu, users, B, False)
    calls["shuffled"] = train(lambda q, k, v: cross_attention(q, k, v, shuffled), grad, *given)
    for wanted in (1, 2, 6):
        leaves = [x.detach().requires_grad_(bool(wanted >> i & 1)) for i, x in enumerate(given)]
        some = [x for x in leaves if x.requires_grad]
        calls[f"gradients {wanted}"] = lambda leaves=leaves, some=some: torch.autograd.grad(
            cross_attention(*leaves, index), some, grad
        )
    of_lse = gpu.randn(2 * B + 1, dtype=torch.float32)
    for offset in (0, 1):
        leaves = [x.detach().requires_grad_() for x in given]
        grads = (grad, of_lse[offset : offset + 2 * B].view(B, 1, 2))
        calls[f"log-sum-exp {offset}"] = lambda leaves=leaves, grads=grads: torch.autograd.grad(
            cross_attention(*leaves, index, return_lse=True), leaves, grads
        )
    with use_backend("triton"):
        found = check(gpu, calls)
    assert all([launch.kernel for launch in launches] == ["attention_forward", name] for launches in found.values())
    assert found["all"] != found["log-sum-exp 0"]


@inside
@pytest.mark.parametrize("size", [64, 128])
def test_gradients_in_one_pass_on_hopper(gpu: StandIn, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Other launches where only sums in a fixed order are allowed, whatever calls were before."""
    monkeypatch.setattr(_attention_shares, "has_wide_tiles", lambda problem: True)
    monkeypatch.setattr(_attention_backward_hopper, "fills_the_gpu", lambda problem: True)
    monkeypatch.setattr(_attention_backward_hopper, "FEWEST_BLOCKS", 1)
    given, grad = make(gpu, torch.bfloat16, 64, size=size), gpu.randn(B, 64, 2, size, dtype=torch.bfloat16)
    index, shuffled = make_index(gpu, U, B), make_index(gpu, U, B, False)
    valid = lengths(gpu)
    calls: dict[str, Call] = {
        "all": train(lambda q, k, v: cross_attention(q, k, v, index), grad, *given),
        "shuffled": train(lambda q, k, v: cross_attention(q, k, v, shuffled, kv_lengths=valid), grad, *given),
        "scaled": train(lambda q, k, v: cross_attention(q, k, v, index, scale=0.5), grad, *given),
    }
    kernel = "attention_backward_staying" if size == 64 else "attention_backward_once"
    names = ["prepare_once", kernel, "finish_once"]
    with use_backend("gluon"):
        found = check(gpu, calls)
        assert all([launch.kernel for launch in launches[-3:]] == names for launches in found.values())
        torch.use_deterministic_algorithms(True)
        try:
            launches = gpu.launches(calls["all"])
        finally:
            torch.use_deterministic_algorithms(False)
        assert [launch.kernel for launch in launches[-2:]] == [
            "attention_backward_query",
            "attention_backward_key_value",
        ]
        assert gpu.launches(calls["all"]) == found["all"]
