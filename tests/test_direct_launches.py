"""What repeated launches keep, and how they reach the driver (`kernels/_direct.py`): memory, threads, profilers, other
launchers; on a GPU that is not there (`tests/standin`).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ikbo_recsys.kernels import _backend, _direct, _plan, compression_linear, linear, segment_sum, use_backend
from tests import standin
from tests.standin import Launch, StandIn, inside, outside
from tests.standin.calls import Call, assert_nothing_is_kept, first, make, make_index, train


@outside
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the launch code needs it")
    standin.run_in_a_process_of_its_own(__file__, tmp_path)


@inside
@pytest.mark.parametrize("path", ["auto", "triton"])
def test_no_tensor_is_kept(gpu: StandIn, path: str) -> None:
    def call() -> list[weakref.ref[Any]]:
        user, cand, weight = (x.clone().requires_grad_() for x in make(gpu, torch.float16, (9, 40, 70, 64, 9, 31)))
        bias, index = gpu.randn(70).clone().requires_grad_(), make_index(gpu, 9, 40, False)
        out = compression_linear(user, cand, weight, index, bias)
        out.backward(gpu.randn(40, 70, 64))
        vectors = (x[..., 0] for x in (user, cand))
        linear(*vectors, weight, index, bias, "relu").sum().backward()
        summed = segment_sum(cand, index)
        tensors = (user, cand, weight, bias, index.to_user, out, user.grad, cand.grad, weight.grad, summed)
        return [weakref.ref(x) for x in tensors]

    gpu.elsewhere = 0
    with use_backend(path):
        assert_nothing_is_kept(call)


@inside
def test_two_threads(gpu: StandIn) -> None:
    """Calls of two threads at once, from empty memories: each launches its own."""
    calls = []
    for dtype, batch in ((torch.float16, 40), (torch.bfloat16, 41)):
        user, cand, weight = make(gpu, dtype, (9, batch, 70, 64, 72, 40))
        index, grad = make_index(gpu, 9, batch), gpu.randn(batch, 70, 64, dtype=dtype)
        calls.append(train(lambda u, c, w, index=index: compression_linear(u, c, w, index), grad, user, cand, weight))
    expected = Counter(shape(launch) for call in calls for launch in first(gpu, call))
    _plan.forget()
    failures: list[BaseException] = []

    def work(call: Call) -> None:
        try:
            for _ in range(20):
                for arena in gpu.arenas:
                    arena.restart()
                call()
        except BaseException as error:
            failures.append(error)

    with gpu.recording() as launches:
        threads = [threading.Thread(target=work, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert Counter(map(shape, launches)) == Counter({launch: 20 * count for launch, count in expected.items()})


def shape(launch: Launch) -> tuple[Any, ...]:
    """What of a launch does not depend on where its thread allocates."""
    numbers = tuple(a for a in launch.arguments if isinstance(a, int))
    layouts = tuple(a[2][:88] for a in launch.arguments if isinstance(a, tuple) and a[0] == "descriptor")
    return launch.kernel, launch.grid, numbers, layouts


@inside
def test_a_profiler_sees_repeated_launches(gpu: StandIn) -> None:
    import triton

    user, cand, weight = make(gpu, torch.float16)
    index, seen = make_index(gpu, 9, 40), []
    call = lambda: compression_linear(user, cand, weight, index)  # noqa: E731
    expected = first(gpu, call)
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert gpu.launches(call) == expected
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["user_part_kernel", "candidate_kernel"]
    assert gpu.launches(call) == expected
    assert len(seen) == 2


@inside
@pytest.mark.parametrize("change", ["no wrapper", "another order", "in Python", "scratch memory"])
def test_another_launcher(gpu: StandIn, change: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """What lies between a compiled kernel and Triton's function in C is left out only where it is the one known."""
    from triton.backends.nvidia import driver

    user, cand, weight = make(gpu, torch.float16)
    index = make_index(gpu, 9, 40)
    call = lambda: compression_linear(user, cand, weight, index)  # noqa: E731
    expected = first(gpu, call)
    caplog.set_level(logging.DEBUG, "ikbo_recsys")
    assert [gpu.launches(call) for _ in range(2)] == [expected] * 2
    assert all(kernel._native for kernel in _plan._compiled.values())
    assert not caplog.records

    assert first(gpu, call) == expected
    kernels = list(_plan._compiled.values())
    for run in (kernel._compiled.run for kernel in kernels):
        if change == "in Python":
            monkeypatch.setattr(run, "launch", lambda *given, launch=run.launch: launch(*given))
        elif change == "scratch memory":
            monkeypatch.setattr(run, "profile_scratch_size", -1)  # nothing is allocated for that
    if change == "no wrapper":
        monkeypatch.delattr(driver, "wrap_handle_tensordesc")
    elif change == "another order":
        monkeypatch.setattr(driver, "wrap_handle_tensordesc", lambda f, *_: lambda *given: f(*reversed(given)))
    assert [gpu.launches(call) for _ in range(3)] == [expected] * 3
    assert [kernel._native for kernel in kernels] == [None, None]
    assert len(caplog.records) == 2


@inside
def test_descriptors_of_many_addresses(gpu: StandIn) -> None:
    """Those of the last addresses are kept, each under its own, and no more than so many."""
    user, _, weight = make(gpu, torch.float16)
    index, many = make_index(gpu, 9, 40), 3 * _direct._MOST_ADDRESSES // 2
    cands = [gpu.randn(40, 40, 64) for _ in range(many)]
    for _ in range(2):
        for cand in cands:
            _, launch = gpu.launches(lambda cand=cand: compression_linear(user, cand, weight, index))
            assert launch.arguments[5][:2] == ("descriptor", gpu.place(cand.data_ptr(), b""))
    (plan,) = _plan._plans.values()
    seen = held(plan._forward._cand._launch._run)
    memories = held(seen["descriptors"])["memories"]
    assert len(memories[0]) == 1
    for memory in (memories[1], seen["together"]):
        assert 1 < len(memory) <= _direct._MOST_ADDRESSES


def held(function: Any) -> dict[str, Any]:
    """What a closure holds, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells}


@inside
def test_the_stand_in_is_believed() -> None:
    assert _backend.capability(torch.device("cuda", 0)) == (9, 0)
    assert _backend.hopper_refusal(torch.device("cuda", 0)) is None
