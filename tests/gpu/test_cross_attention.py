"""`cross_attention` on a GPU, path by path, against fp64 and against torch's own error in the same dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ikbo_recsys import CandidateIndex, kernels
from ikbo_recsys.kernels import _attention_shares, _backend, _plan
from tests import twins
from tests.cases import relative_error

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@contextlib.contextmanager
def backend_of(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """ "triton", or "gluon" with tiles of 128 rows for any number of them, or "gluon, tiles of 64 rows"."""
    backend = path.split(",")[0]
    if backend == "gluon":
        if _backend.hopper_refusal(torch.device("cuda", 0)) is not None:
            pytest.skip(str(_backend.hopper_refusal(torch.device("cuda", 0))))
        monkeypatch.setattr(_attention_shares, "has_wide_tiles", lambda problem: path == backend)
    _plan.forget()
    with _backend.use_backend(backend):
        yield backend
    _plan.forget()


@pytest.fixture(params=["triton", "gluon", "gluon, tiles of 64 rows"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with backend_of(request.param, monkeypatch) as backend:
        yield backend


class Call:
    """One attention problem: operands as views of larger buffers, NaN in the padding, an index of any kind.

    The user in the middle has no history, and some users have no candidates.
    """

    def __init__(
        self,
        users: int,
        cands: int,
        seeds: int,
        rows: int,
        heads: tuple[int, int],
        size: int,
        *,
        dtype: torch.dtype = FP16,
        layout: str = "lengths",
        grouped: bool = True,
        index_dtype: torch.dtype = torch.int64,
        scale: float | None = None,
    ) -> None:
        to_user = torch.randint(0, users, (cands,), device="cuda", dtype=index_dtype)
        to_user = to_user.sort()[0] if grouped else to_user
        self.index = CandidateIndex.from_user_ids(to_user, users, grouped=grouped)
        self.lengths = torch.randint(0, rows + 1, (users,), device="cuda")
        if users > 1:
            self.lengths[users // 2] = 0
        if layout == "full":
            self.lengths.fill_(rows)
        self.query = torch.randn(cands, seeds, heads[0], size, device="cuda").to(dtype)
        history = torch.randn(users, rows, 2, heads[1], size, device="cuda").to(dtype)
        self.valid = torch.arange(rows, device="cuda") < self.lengths[:, None]
        self.padded = history.unbind(2)
        buffer = history.masked_fill(~self.valid[:, :, None, None, None], float("nan"))
        self.options = {} if scale is None else {"scale": scale}
        if layout == "jagged":
            self.key, self.value = buffer[self.valid].unbind(1)
            offsets = torch.cat((self.lengths.new_zeros(1), self.lengths.cumsum(0)))
            self.options["kv_offsets"] = offsets.to(index_dtype)
        else:
            self.key, self.value = buffer.unbind(2)
            if layout == "lengths":
                self.options["kv_lengths"] = self.lengths.to(index_dtype)
        self.grad = torch.randn_like(self.query)
        self.scale = scale

    def ours(self) -> list[Tensor]:
        return _with_gradients(self.run, (self.query, self.key, self.value), self.grad)

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernels.cross_attention(query, key, value, self.index, **self.options)

    def twin(self, dtype: torch.dtype) -> list[Tensor]:
        """The broadcast twin in `dtype`: output and gradients, in the layout of the operands."""
        out = _with_gradients(
            lambda q, k, v: _twin(q, k, v, self.index.to_user, self.lengths, self.scale),
            [x.to(dtype) for x in (self.query, *self.padded)],
            self.grad.to(dtype),
        )
        return [*out[:2], *(x[self.valid] for x in out[2:])] if self.key.dim() == 3 else out

    def gradients_with_log_sum_exp(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Of query, key and value where the log-sum-exp has a gradient, too, but for users without history: ours, and
        exact ones of the padded operands."""
        to_user = self.index.to_user
        has_keys = (self.lengths[to_user] > 0)[:, None, None]
        leaves = [x.detach().requires_grad_() for x in (self.query, self.key, self.value)]
        outs = kernels.cross_attention(*leaves, self.index, return_lse=True, **self.options)
        grad_lse = torch.randn_like(outs[1]) * has_keys
        found = torch.autograd.grad(outs, leaves, (self.grad, grad_lse))
        exact = [x.double().requires_grad_() for x in (self.query, *self.padded)]
        with torch.device("cuda"):
            lse = twins.log_sum_exp(*exact[:2], to_user, self.lengths)
        loss = (_twin(*exact, to_user, self.lengths, self.scale) * self.grad).sum()
        loss = loss + (lse.masked_fill(~has_keys, 0) * grad_lse).sum()
        return found, torch.autograd.grad(loss, exact)

    def check(self) -> None:
        expected, theirs = self.twin(torch.float64), self.twin(self.query.dtype)
        for name, ours, torchs, exact in zip(("out", "dq", "dk", "dv"), self.ours(), theirs, expected, strict=True):
            error, allowed = relative_error(ours, exact), relative_error(torchs, exact)
            # Torch's own gradients of keys carry the rounding of a sum over copies, ours are summed in fp32.
            assert error <= 1.25 * allowed + 1e-6, f"{name}: {error:.2e}, torch has {allowed:.2e}"


def _twin(query: Tensor, key: Tensor, value: Tensor, to_user: Tensor, *more: object) -> Tensor:
    with torch.device("cuda"):
        return twins.cross_attention(query, key, value, to_user.long(), *more)  # type: ignore[arg-type]


def _with_gradients(function: object, operands: object, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in operands]  # type: ignore[attr-defined]
    out = function(*leaves)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("layout", ["full", "lengths", "jagged"])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("seeds", "dtype"), [(64, FP16), (17, BF16), (1, FP16)])
def test_against_fp64(path: str, layout: str, grouped: bool, seeds: int, dtype: torch.dtype) -> None:
    Call(5, 37, seeds, 301, (4, 2), 128, dtype=dtype, layout=layout, grouped=grouped).check()


def test_the_kernel_waits_for_its_tile_table(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may begin before the table is complete, whose memory holds that of the call before. Elsewhere in these tests
    memory is filled between the two, by a kernel that ends before the second begins."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    call = Call(5, 37, 64, 301, (4, 2), 128, layout="lengths")
    ids = [torch.randint(0, 5, (37,), device="cuda").sort()[0] for _ in range(5)]
    busy = torch.zeros(8192, 8192, device="cuda", dtype=FP16)
    for _ in range(3):  # the last time nothing is compiled, and no memory is new
        indices = [CandidateIndex.from_user_ids(x.clone(), 5, grouped=True) for x in ids]
        torch.cuda.synchronize()
        _ = busy @ busy  # meanwhile all calls are queued, and follow each other without a gap
        results = [
            kernels.cross_attention(call.query, call.key, call.value, index, **call.options) for index in indices
        ]
    for to_user, result in zip(ids, results, strict=True):
        exact = _twin(*(x.double() for x in (call.query, *call.padded)), to_user, call.lengths)
        assert relative_error(result, exact) < 1e-3


@pytest.mark.parametrize("size", [8, 24, 48, 64, 96, 128])
def test_head_sizes(path: str, size: int) -> None:
    Call(4, 50, 8, 130, (3, 3), size, layout="jagged", index_dtype=torch.int32).check()


@pytest.mark.parametrize(("size", "dtype"), [(256, FP16), (33, BF16), (200, FP32), (64, FP32), (7, FP32)])
def test_what_only_the_portable_kernels_take(size: int, dtype: torch.dtype) -> None:
    with _backend.use_backend("triton"):
        Call(3, 20, 5, 77, (2, 1), size, dtype=dtype, grouped=False).check()


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 300, 2, 9), (70, 70, 1, 40), (200, 500, 2, 140), (2, 3, 200, 1)])
def test_batch_shapes(path: str, sizes: tuple[int, int, int, int]) -> None:
    call = Call(*sizes, (2, 2), 64, layout="full")
    expected, ours = call.twin(torch.float64), call.ours()
    for got, exact in zip(ours, expected, strict=True):
        # With one key dq and dk are exactly 0: what is left is measured against dv.
        assert float((got.double() - exact).norm()) <= 2e-3 * float(exact.norm().clamp_min(expected[3].norm()))


def test_large_logits_and_negative_scale() -> None:
    Call(3, 20, 8, 200, (2, 2), 64, scale=4.0).check()
    Call(3, 20, 8, 200, (2, 2), 64, scale=-0.2).check()


def test_strided_expanded_and_misaligned_operands(path: str) -> None:
    users, cands, size = 4, 60, 64
    to_user = torch.randint(0, users, (cands,), device="cuda").sort()[0]
    index = CandidateIndex.from_user_ids(to_user, users, grouped=True)
    key, value = torch.randn(users, 2, 90, 2 * size, device="cuda", dtype=FP16).transpose(1, 2).chunk(2, -1)
    seeds = torch.randn(4, 2, size, device="cuda", dtype=FP16)
    wide = torch.randn(cands, 5, 2, 2 * size, device="cuda", dtype=FP16)
    odd = torch.randn(cands, 4, 2, size + 1, device="cuda", dtype=FP16)
    rows_apart, heads_apart = wide[:, :4, :, size:], wide.transpose(1, 2)[..., :4, :size].transpose(1, 2)
    for query in (rows_apart, heads_apart, seeds.expand(cands, -1, -1, -1), odd[..., 1:]):
        if path == "gluon" and (query.stride(2) % 8 or query.stride(0) == 0):
            with pytest.raises(_backend.BackendError, match="aligned"):
                kernels.cross_attention(query, key, value, index)
            continue
        out = kernels.cross_attention(query, key, value, index)
        exact = _twin(query.double(), key.double(), value.double(), index.to_user)
        assert relative_error(out, exact) < 1e-3
    with _backend.use_backend("auto"):
        out = kernels.cross_attention(odd[..., 1:], key, value, index)
        exact = _twin(odd[..., 1:].double(), key.double(), value.double(), index.to_user)
        assert relative_error(out, exact) < 1e-3


def test_no_history_gives_zeros_and_zero_gradients(path: str) -> None:
    call = Call(3, 40, 16, 50, (2, 2), 64)
    call.options["kv_lengths"] = torch.zeros_like(call.options["kv_lengths"])
    for x in call.ours():
        assert torch.equal(x, torch.zeros_like(x))


def test_a_result_does_not_depend_on_the_order_of_candidates(path: str) -> None:
    call = Call(3, 61, 16, 300, (2, 2), 128)
    user = torch.randint(0, 3, (), device="cuda")
    mine = (call.index.to_user == user).nonzero()[:, 0]
    order = torch.arange(61, device="cuda")
    order[mine] = mine.flip(0)
    out = call.run(call.query, call.key, call.value)
    assert torch.equal(call.run(call.query[order], call.key, call.value), out[order])
    # Nor on being grouped: the same rows by the permutation of an ungrouped index.
    shuffle = torch.randperm(61, device="cuda")
    ungrouped = CandidateIndex(call.index.to_user[shuffle], 3)
    assert torch.equal(
        kernels.cross_attention(call.query[shuffle], call.key, call.value, ungrouped, **call.options), out[shuffle]
    )


def test_gradients_are_deterministic(path: str) -> None:
    call = Call(3, 61, 64, 300, (2, 2), 128)
    for first, second in zip(call.ours(), call.ours(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
def test_only_the_gradients_asked_for(path: str, needs: tuple[int, int, int]) -> None:
    call = Call(4, 50, 64, 300, (2, 1), 64)
    every = call.ours()[1:]
    operands = (call.query, call.key, call.value)
    leaves = [x.detach().requires_grad_(bool(n)) for x, n in zip(operands, needs, strict=True)]
    call.run(*leaves).backward(call.grad)
    for leaf, expected, need in zip(leaves, every, needs, strict=True):
        assert (leaf.grad is not None) == bool(need)
        if need:
            assert torch.equal(leaf.grad, expected)


def test_index_dtypes_agree(path: str) -> None:
    call = Call(4, 50, 8, 300, (2, 2), 64, grouped=False)
    out = call.run(call.query, call.key, call.value)
    narrow = {name: x.int() for name, x in call.options.items()}
    index = call.index.to(torch.int32)
    assert torch.equal(kernels.cross_attention(call.query, call.key, call.value, index, **narrow), out)


@pytest.mark.parametrize("grouped", [True, False])
def test_nothing_waits_for_the_gpu_and_new_contents_count(path: str, grouped: bool) -> None:
    """Called again after the index and the lengths were written to: no stale schedule, and no synchronisation."""
    call = Call(4, 64, 64, 200, (2, 2), 64, grouped=grouped)
    other = Call(4, 64, 64, 200, (2, 2), 64, grouped=grouped)
    call.run(call.query, call.key, call.value)
    call.index.to_user.copy_(other.index.to_user)
    if grouped:
        call.index.offsets.copy_(other.index.offsets)
    call.options["kv_lengths"].copy_(other.options["kv_lengths"])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = call.run(other.query, other.key, other.value)
        grads = _with_gradients(call.run, (other.query, other.key, other.value), other.grad)[1:]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = other.twin(torch.float64)
    for got, expected in zip((out, *grads), exact, strict=True):
        assert relative_error(got, expected) < 2e-3


@pytest.mark.parametrize("grouped", [True, False])
def test_capture_and_replay_with_other_contents(path: str, grouped: bool) -> None:
    call = Call(4, 64, 64, 200, (2, 2), 64, grouped=grouped)
    operands = [x.clone() for x in (call.query, call.key, call.value)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call.run(*operands)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run(*operands)
    for _ in range(2):
        other = Call(4, 64, 64, 200, (2, 2), 64, grouped=grouped)
        for to, source in zip(operands, (other.query, other.key, other.value), strict=True):
            to.copy_(source)
        call.index.to_user.copy_(other.index.to_user)
        if grouped:
            call.index.offsets.copy_(other.index.offsets)
        call.options["kv_lengths"].copy_(other.options["kv_lengths"])
        graph.replay()
        assert relative_error(out, other.twin(torch.float64)[0]) < 1e-3


def test_compiled_with_another_batch_size(path: str) -> None:
    torch._dynamo.reset()

    def function(query: Tensor, key: Tensor, value: Tensor, to_user: Tensor, lengths: Tensor) -> Tensor:
        return kernels.cross_attention(query * 1.0, key, value, to_user, kv_lengths=lengths).tanh()

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for cands in (64, 96):
        call = Call(4, cands, 32, 200, (2, 2), 64, grouped=False)

        def run(how: object, call: Call = call) -> list[Tensor]:
            def on(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return how(q, k, v, call.index.to_user, call.options["kv_lengths"])  # type: ignore[operator]

            return _with_gradients(on, (call.query, call.key, call.value), call.grad)

        def exactly(q: Tensor, k: Tensor, v: Tensor, call: Call = call) -> Tensor:
            return _twin(q, k, v, call.index.to_user, call.lengths, None).tanh()

        operands = [x.double() for x in (call.query, *call.padded)]
        for got, expected in zip(run(compiled), _with_gradients(exactly, operands, call.grad.double()), strict=True):
            assert relative_error(got, expected) < 2e-3


def test_export_takes_the_portable_path() -> None:
    class Module(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, to_user: Tensor) -> Tensor:
            return kernels.cross_attention(query, key, value, to_user)

    call = Call(4, 40, 4, 100, (2, 2), 64, layout="full")
    cands, users = torch.export.Dim("cands", min=2), torch.export.Dim("users", min=2)
    operands = (call.query, call.key.contiguous(), call.value.contiguous(), call.index.to_user)
    shapes = ({0: cands}, {0: users}, {0: users}, {0: cands})
    program = torch.export.export(Module(), operands, dynamic_shapes=shapes)
    targets = {str(node.target) for node in program.graph.nodes}
    assert not any("hopper" in target for target in targets), targets
    other = Call(7, 90, 4, 100, (2, 2), 64, layout="full")
    out = program.module()(other.query, other.key.contiguous(), other.value.contiguous(), other.index.to_user)
    assert relative_error(out, other.twin(torch.float64)[0]) < 1e-3


def test_many_candidates_and_long_histories(path: str) -> None:
    for call in (
        Call(500, 70_000, 2, 20, (1, 1), 64, layout="full"),
        Call(3, 20, 64, 16_384, (2, 2), 128, layout="jagged"),
    ):
        out = call.run(call.query, call.key, call.value)
        picked = torch.randint(0, call.query.shape[0], (8,), device="cuda")
        history = (x.double() for x in call.padded)
        exact = _twin(call.query[picked].double(), *history, call.index.to_user[picked], call.lengths)
        assert relative_error(out[picked], exact) < 1e-3


def test_no_copy_of_the_user_per_candidate(path: str) -> None:
    """Peak memory of forward and backward stays far under one copy of the keys per candidate."""
    call = Call(2, 400, 16, 1000, (2, 2), 64, layout="full")
    call.ours()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call.ours()
    used = torch.cuda.max_memory_allocated() - before
    copies = 400 * 1000 * 2 * 64 * 2
    assert used < copies / 3, (used, copies)


def test_two_streams_share_an_index(path: str) -> None:
    call = Call(4, 64, 64, 300, (2, 2), 64)
    expected = call.run(call.query, call.key, call.value)
    fresh = CandidateIndex(call.index.to_user.clone(), 4, call.index.offsets.clone())
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for i in range(200):
        with torch.cuda.stream(streams[i % 2]):
            outs.append(kernels.cross_attention(call.query, call.key, call.value, fresh, **call.options))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


def test_lengths_and_offsets_that_are_columns_of_a_matrix(path: str) -> None:
    call = Call(4, 64, 64, 200, (2, 2), 64)
    expected = call.run(call.query, call.key, call.value)
    column = torch.stack((call.options["kv_lengths"], torch.zeros_like(call.lengths)), 1)[:, 0]
    offsets = torch.stack((call.index.offsets, call.index.offsets + 7), 1)[:, 0]
    index = CandidateIndex(call.index.to_user, 4, offsets)
    for _ in range(2):
        out = kernels.cross_attention(call.query, call.key, call.value, index, kv_lengths=column)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("grouped", [True, False])
def test_trained_after_inference_mode_on_the_same_index(path: str, grouped: bool) -> None:
    call = Call(4, 64, 64, 200, (2, 2), 64, grouped=grouped)
    with torch.inference_mode():
        expected = call.run(call.query, call.key, call.value)
    assert torch.equal(call.ours()[0], expected)


def test_saved_tensors_that_were_on_the_cpu(path: str) -> None:
    """They come back contiguous: not in the layout of the operands, which are views of one buffer here."""
    call = Call(4, 64, 64, 200, (2, 2), 64)
    expected = call.ours()
    with torch.autograd.graph.save_on_cpu():
        found = call.ours()
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


def test_which_path_and_why() -> None:
    call = Call(3, 96, 64, 300, (2, 2), 128)
    expected = "triton" if _backend.hopper_refusal(torch.device("cuda", 0)) else "gluon"
    for query in (call.query, call.query[:, :1]):
        choice = kernels._backend.explain(kernels.cross_attention, query, call.key, call.value, call.index)
        assert choice.path == expected, str(choice)
