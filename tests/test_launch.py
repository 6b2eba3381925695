"""What the kernels share, without a GPU: the path choice, the tile tables, the cache of weights."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from typing import Any

import pytest
import torch

from ikbo_recsys import CandidateIndex
from ikbo_recsys.kernels import _backend, _launch, _plan, _tiles, compression_linear, linear, segment_sum
from ikbo_recsys.kernels._backend import BackendError, choose, explain, use_backend

ORDER = [("gluon", "fast"), ("triton", "portable"), ("torch", "plain")]


def test_auto_takes_the_first_that_can() -> None:
    choice = choose({"torch": None, "triton": None, "gluon": "no Hopper"}, ORDER)
    assert (choice.path, choice.reason, dict(choice.refused)) == ("triton", "portable", {"gluon": "no Hopper"})
    assert "not gluon: no Hopper" in str(choice)


def test_launches_are_chained_where_kernels_can_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for others to launch, nor for Triton's interpreter, nor on GPUs whose kernels cannot."""
    triton = pytest.importorskip("triton")
    x = torch.empty(1)
    for capability, chains in (((9, 0), True), ((10, 0), True), ((8, 0), False), ((0, 0), False)):
        with monkeypatch.context() as patch:
            patch.setattr(_backend, "capability", lambda device, capability=capability: capability)
            patch.setattr(triton.knobs.runtime, "interpret", False)
            assert _plan.can_chain(x) == chains
            with _plan.traceable():
                assert not _plan.can_chain(x)
            patch.setattr(triton.knobs.runtime, "interpret", True)
            assert not _plan.can_chain(x)


def test_a_requested_path_is_taken_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = {"torch": None, "triton": None, "gluon": "no Hopper"}
    with use_backend("torch"):
        assert choose(refusals, ORDER).path == "torch"
        with use_backend("gluon"), pytest.raises(BackendError, match="gluon.*no Hopper"):
            choose(refusals, ORDER)
        assert choose(refusals, ORDER).path == "torch"
    monkeypatch.setenv("IKBO_BACKEND", "triton")
    assert choose(refusals, ORDER).path == "triton"
    with pytest.raises(BackendError, match="no such path"):
        choose({"torch": None}, ORDER)
    with use_backend("auto"):
        assert choose(refusals, ORDER).path == "triton"
    monkeypatch.setenv("IKBO_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"IKBO_BACKEND.*'cuda'"):
        choose(refusals, ORDER)
    with pytest.raises(ValueError, match="'cuda'"), use_backend("cuda"):
        pass


def test_operators_on_the_cpu() -> None:
    user, cand, weight = torch.randn(2, 3, 4), torch.randn(5, 2, 4), torch.randn(6, 5)
    index = torch.zeros(5, dtype=torch.int64)
    choice = explain(compression_linear, user, cand, weight, index)
    assert choice.path == "torch"
    assert set(choice.refused) == {"triton", "gluon"}
    assert explain("linear", user[..., 0], cand[..., 0], weight, index).path == "torch"
    assert explain("segment_sum", cand, index, 2).path == "torch"
    for path in ("triton", "gluon"):
        with use_backend(path), pytest.raises(BackendError, match=path):
            compression_linear(user, cand, weight, index)
    with use_backend("triton"), pytest.raises(BackendError, match="triton"):
        linear(user[..., 0], cand[..., 0], weight, index)
    with use_backend("triton"), pytest.raises(BackendError, match="triton"):
        segment_sum(cand, index, 2)
    with use_backend("torch"):
        compression_linear(user, cand, weight, index)
        segment_sum(cand, index, 2)
    with pytest.raises(ValueError, match="'nothing'"):
        explain("nothing")


def test_every_shape_has_a_tile() -> None:
    for rows in (1, 63, 64, 65, 433, 5000):
        for cols in (1, 64, 65, 256, 1000):
            for contracted in (1, 15, 17, 866):
                for size in (2, 4):
                    # One block has 99 KiB on the smallest target, 163 KiB and more elsewhere; an outer sum's limit is
                    # H100's, compiled for in tests/compile.
                    tiles = [
                        (_tiles.mix_tile(rows, cols, contracted, size, False, True), 99),
                        (_tiles.mix_tile(rows, cols, contracted, size, True, True), 163),
                        (_tiles.mix_tile(rows, cols, contracted, size, False, False), 99),
                        (_tiles.mix_tile(rows, cols, contracted, size, True, False), 163),
                        (_tiles.outer_tile(rows, cols, contracted, size, False), 99),
                        (_tiles.outer_tile(rows, cols, contracted, size, True), 227),
                        (_tiles.linear_tile(cols, contracted, size), 99),
                    ]
                    for tile, kilobytes in tiles:
                        assert 16 <= tile.step <= 64
                        assert all(n & (n - 1) == 0 for n in (tile.rows, tile.cols, tile.step))
                        bytes_ = (tile.rows + tile.cols) * tile.step * size * tile.stages
                        assert bytes_ * tile.blocks <= max(kilobytes, 227 * (tile.blocks > 1)) * 1024


@pytest.mark.parametrize(
    ("rows", "cols", "contracted", "tile"),
    [
        (433, 256, 866, (128, 256)),  # 512 rows of tiles, not 448
        (262, 256, 866, (64, 256)),  # 320, not 384
        (433, 256, 125, (64, 256)),  # a short sum
        (96, 256, 400, (128, 256)),
        (40, 256, 830, (64, 256)),
        (433, 128, 866, (128, 128)),
        (433, 64, 866, (128, 64)),
    ],
)
def test_tall_tiles_where_they_fill_up_little(rows: int, cols: int, contracted: int, tile: tuple[int, int]) -> None:
    """What was faster on an H200 (docs/performance.md); where a block has less shared memory it does not fit."""
    found = _tiles.mix_tile(rows, cols, contracted, 2, True, True)
    assert (found.rows, found.cols) == tile
    assert _tiles.mix_tile(rows, 256, contracted, 2, False, True).rows == 64
    assert _tiles.mix_tile(rows, 256, contracted, 4, True, True).rows == 64


def test_users_parts_for_few_outputs_have_narrow_tiles() -> None:
    tiles = [_tiles.mix_tile(40, cols, 1126, 2, True, False) for cols in (64, 128, 256)]
    assert [(tile.cols, tile.stages) for tile in tiles] == [(64, 4), (128, 4), (128, 4)]
    assert _tiles.mix_tile(433, 256, 1178, 2, True, False) == _tiles.mix_tile(433, 256, 1178, 2, True, True)


def test_first_row_that_fits() -> None:
    table = (_tiles.Row("small", {"m": 4, "n": 4}), _tiles.Row("flat", {"m": 4}), _tiles.Row("any"))
    assert [_tiles.pick(table, m=m, n=n) for m, n in ((4, 4), (4, 5), (5, 4))] == ["small", "flat", "any"]
    with pytest.raises(LookupError):
        _tiles.pick(table[:2], m=9, n=9)


def test_splits_fill_the_gpu_and_keep_work_for_each() -> None:
    for tiles in (1, 10, 14, 28, 140, 1000):
        for steps in (1, 60, 4096, 100_000):
            splits = _tiles.splits(tiles, steps, 132)
            assert 1 <= splits <= max(1, steps // 8)
            if steps == 4096:
                # At least 85% of the multiprocessors' time is used.
                blocks = tiles * splits
                assert blocks / (132 * -(-blocks // 132)) > (0.85 if tiles > 1 else 0.45)
    for programs in (1, 100, 10_000):
        for batch, users in ((1, 1), (1000, 1), (70_000, 7), (10, 100)):
            splits = _tiles.segment_splits(programs, batch, users, 132)
            assert splits >= 1
            assert splits & (splits - 1) == 0


@pytest.fixture
def made() -> list[torch.Tensor]:
    return []


@pytest.fixture
def cache(made: list[torch.Tensor]) -> _launch.WeightCache:
    def make(weight: torch.Tensor, times: float) -> torch.Tensor:
        made.append(weight)
        return weight * times

    return _launch.WeightCache(make)


def change_in_place(w: Any) -> None:
    with torch.no_grad():
        w.add_(1)


def change_data(w: Any) -> None:
    w.data = torch.randn_like(w)


def step(w: Any) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=0.1).step()


def load(w: Any) -> None:
    module = torch.nn.Module()
    module.weight = w
    module.load_state_dict({"weight": torch.randn_like(w)})


@pytest.mark.parametrize("change", [change_in_place, change_data, step, load])
def test_weight_cache(cache: _launch.WeightCache, made: list[Any], change: Any) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    assert cache.get(weight, 2.0) is cache.get(weight, 2.0)
    assert len(made) == 1
    change(weight)
    assert torch.equal(cache.get(weight, 2.0), weight.detach() * 2)
    assert torch.equal(cache.get(weight, 3.0), weight.detach() * 3)
    assert not cache.get(weight, 3.0).requires_grad


def test_weight_cache_dies_with_the_weight(cache: _launch.WeightCache) -> None:
    module = torch.nn.Linear(3, 4)
    watch = weakref.ref(cache.get(module.weight, 2.0))
    assert list(module.state_dict()) == ["weight", "bias"]
    twin = copy.deepcopy(module)
    assert torch.equal(cache.get(twin.weight, 2.0), watch())
    del module
    gc.collect()
    assert watch() is None


def test_weight_cache_does_not_keep_inference_tensors(cache: _launch.WeightCache) -> None:
    with torch.inference_mode():
        weight = torch.randn(3)
        first = cache.get(weight, 2.0)
        weight.add_(1)
        assert not torch.equal(cache.get(weight, 2.0), first)


def test_tma_alignment() -> None:
    x = torch.zeros(4, 6, 16, dtype=torch.float16)
    assert _launch.is_tma_ready(x)
    assert not _launch.is_tma_ready(x[..., 1:])
    assert not _launch.is_tma_ready(x.mT)
    assert _launch.is_tma_ready(torch.zeros(1, 5, 8, dtype=torch.float16)[:, ::5])
    assert not _launch.is_tma_ready(x[:1].expand(3, 6, 16))
    assert not _launch.is_tma_ready(torch.zeros(3, 5, dtype=torch.float16))


def test_facts_without_a_gpu() -> None:
    cpu = torch.device("cpu")
    assert _backend.capability(cpu) == (0, 0)
    assert "on a GPU" in str(_backend.portable_refusal(cpu, torch.float16))
    assert _backend.hopper_refusal(cpu) is not None


def test_a_weight_that_took_the_number_of_a_dead_one(cache: _launch.WeightCache, made: list[Any]) -> None:
    weight = torch.randn(3)
    cache.get(weight, 2.0)
    (entry,) = cache._entries.values()
    other = torch.randn(3)
    cache._entries = {id(other): entry}
    assert torch.equal(cache.get(other, 2.0), other * 2)
    assert torch.equal(cache.get(other, 3.0), other * 3)
    assert len(made) == 3


def test_precision_follows_both_of_torchs_switches() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for value, expected in (("tf32", "tf32"), ("ieee", "ieee")):
            torch.backends.cuda.matmul.fp32_precision = value
            assert _launch.input_precision(torch.float32) == expected
            assert _launch.input_precision(torch.float16) == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    torch.set_float32_matmul_precision("high")
    try:
        assert _launch.input_precision(torch.float32) == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert _launch.input_precision(torch.float32) == "ieee"


def test_a_signature_holds_what_the_checks_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    user, cand, weight = torch.randn(2, 3, 4), torch.randn(5, 2, 4), torch.randn(6, 5)
    bias, ids = torch.randn(6), torch.zeros(5, dtype=torch.int64)
    index = CandidateIndex.from_user_ids(ids, 2)
    grouped = CandidateIndex.from_user_ids(ids, 2, grouped=True)
    call = (cand, user, weight, bias)

    def signature(tensors: Any, index: Any, *more: Any) -> Any:
        return _plan.signature("compression_linear", tensors, index, *more)

    known = signature(call, index)
    assert known == signature(tuple(x.clone() for x in call), index)
    assert hash(known) is not None
    others = [
        ((cand, torch.randn(3, 3, 4), weight, bias), index),
        ((cand, user.mT.contiguous().mT, weight, bias), index),
        ((torch.randn(6, 2, 4), user, weight, bias), index),
        ((cand, user, torch.randn(5, 6).t(), bias), index),
        ((cand, user, weight, None), index),
        ((cand.half(), user.half(), weight.half(), bias.half()), index),
        ((cand, user, torch.randn(31)[1:].view(6, 5), bias), index),
        (call, CandidateIndex.from_user_ids(ids.int(), 2)),
        (call, CandidateIndex.from_user_ids(ids, 3)),
        (call, grouped),
        (call, ids),
        (call, index, "relu"),
    ]
    signatures = [known, *(signature(*other) for other in others)]
    assert len(set(signatures)) == len(signatures)
    with use_backend("torch"):
        assert signature(call, index) != known
    assert signature((cand, [1], weight, bias), index) is None
    assert signature(call, [0] * 5) is None

    class Special(torch.Tensor):
        pass

    assert signature((cand, user.as_subclass(Special), weight, bias), index) is None
    torch.set_float32_matmul_precision("high")
    try:
        assert signature(call, index) != known
    finally:
        torch.set_float32_matmul_precision("highest")
    monkeypatch.setenv("IKBO_CHECK", "1")
    assert signature(call, index) is None


def test_calls_that_only_the_dispatcher_understands() -> None:
    from torch._subclasses import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    plain = torch.randn(3)
    assert not _plan.is_dispatched(plain, None, torch.nn.Parameter(plain))
    assert _plan.is_dispatched(plain, TwoTensor(plain, plain))
    with FakeTensorMode():
        assert _plan.is_dispatched(plain)
        fake = torch.empty(3)
    assert _plan.is_dispatched(fake)
    seen = []
    torch.func.grad(lambda x: (seen.append(_plan.is_dispatched(plain)), x.sum())[1])(plain)
    assert seen == [True]


def test_a_launch_while_another_thread_stops_collecting_its_own() -> None:
    """Whatever instruction of it is the last before the other thread is done."""
    ran: list[Any] = []
    launch = _plan.Launch(None, (), 1, {})
    launch._run = ran.append

    def stopped_after(instructions: int) -> None:
        left = instructions

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            frame.f_trace_opcodes = frame.f_code is _plan.Launch.__call__.__code__
            left -= event == "opcode"
            if left == 0:
                _plan._together = None
            return trace

        _plan._together = _plan._Together()
        _plan._together._thread = -1
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            launch((instructions,))
        finally:
            sys.settrace(before)
            _plan._together = None

    for instructions in range(1, 40):
        stopped_after(instructions)
    assert ran == [(instructions,) for instructions in range(1, 40)]
