"""`compression_linear` on a GPU, path by path, against fp64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.deterministic
from torch import Tensor

from ikbo_recsys import CandidateIndex
from ikbo_recsys.kernels import _backend, compression_linear

PATHS = ["triton", "gluon", "auto"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# (U, B, M, D, Ku, Kc): primes, ones, U > B, K not a multiple of anything, tails only, no tail, several column tiles
SHAPES = [
    (1, 1, 1, 8, 1, 1),
    (3, 131, 433, 256, 100, 866),
    (7, 66, 40, 256, 1178, 97),
    (9, 5, 128, 128, 7, 64),
    (2, 37, 262, 512, 169, 125),
    (5, 30, 65, 72, 9, 511),
    (4, 300, 449, 64, 33, 1000),
]


def make(users: int, batch: int, m: int, d: int, user_k: int, cand_k: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((users, user_k, d), (batch, cand_k, d), (m, user_k + cand_k))
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


def make_index(users: int, batch: int, grouped: bool = True, dtype: torch.dtype = torch.int64) -> CandidateIndex:
    ids = torch.randint(0, users, (batch,), device="cuda", dtype=dtype)
    return CandidateIndex.from_user_ids(ids.sort().values if grouped else ids, users, grouped=grouped)


def terms_of(user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor) -> tuple[Tensor, Tensor]:
    """The user's part and the candidates' in fp64, both `[B, M, D]`."""
    user_part = weight[:, : user.shape[1]].double() @ user.double()
    return user_part[to_user.long()], weight[:, user.shape[1] :].double() @ cand.double()


def expected_of(user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, bias: Tensor | None = None) -> Tensor:
    user_part, cand_part = terms_of(user, cand, weight, to_user)
    out = user_part + cand_part
    return out if bias is None else out + bias.double()[:, None]


def decomposed(user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor) -> Tensor:
    """What torch gives in the working dtype: its error is the measure."""
    return (weight[:, : user.shape[1]] @ user)[to_user.long()] + weight[:, user.shape[1] :] @ cand


def error(result: Tensor, expected: Tensor, *terms: Tensor) -> float:
    """Relative to the norm of the result, or to that of the largest of `terms` which it is the sum of: they are rounded
    before they cancel each other."""
    assert result.shape == expected.shape
    assert bool(result.isfinite().all())
    scale = max(float(x.detach().double().norm()) for x in (expected, *terms))
    return float((result.detach().double() - expected.detach()).norm()) / max(scale, 1e-30)


def allowed(torch_error: float, dtype: torch.dtype, terms: int, elements: int | None = None) -> float:
    """torch's own error, or what rounding gives: one of the result, and in fp32 a sum of `terms` in another order.

    In a result of few `elements` the errors do not average: both roundings, of the user's part too, count in full.
    """
    rounding = torch.finfo(dtype).eps / 2 * (2 if elements is not None and elements < 64 else 1)
    return max(torch_error, rounding * (terms**0.5 if dtype is torch.float32 else 1))


def skip_unless(path: str, dtype: torch.dtype) -> None:
    if path == "gluon":
        reason = _backend.hopper_refusal(torch.device("cuda", torch.cuda.current_device()))
        if reason or dtype is torch.float32:
            pytest.skip(reason or "float32")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_forward(path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    skip_unless(path, dtype)
    user, cand, weight = make(*shape, dtype)
    bias = torch.randn(shape[2], device="cuda", dtype=dtype)
    for grouped, index_dtype, with_bias in ((True, torch.int32, False), (False, torch.int64, True)):
        index = make_index(shape[0], shape[1], grouped, index_dtype)
        with _backend.use_backend(path):
            result = compression_linear(user, cand, weight, index, bias if with_bias else None)
        given = bias if with_bias else None
        expected = expected_of(user, cand, weight, index.to_user, given)
        terms = terms_of(user, cand, weight, index.to_user)
        torch_error = error(decomposed(user, cand, weight, index.to_user), terms[0] + terms[1], *terms)
        found = error(result, expected, *terms, *([] if given is None else [given[:, None].expand_as(expected)]))
        assert found <= allowed(torch_error, dtype, weight.shape[1], result.numel())


@pytest.mark.parametrize("path", ["triton", "auto"])
def test_strided_and_unaligned(path: str) -> None:
    for dtype in DTYPES:
        user = torch.randn(3, 17, 33, device="cuda", dtype=dtype)[:, 1:, 1:]
        cand = torch.randn(21, 32, 12, device="cuda", dtype=dtype).mT[1:, 1:]
        weight = torch.randn(27, 30, device="cuda", dtype=dtype).t()[:, :27]
        index = make_index(3, 20, False)
        with _backend.use_backend(path):
            result = compression_linear(user, cand, weight, index)
        assert error(result, expected_of(user, cand, weight, index.to_user)) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("path", PATHS)
def test_wrong_index_is_clamped(path: str) -> None:
    skip_unless(path, torch.float16)
    user, cand, weight = make(3, 5, 433, 256, 64, 866, torch.float16)
    index = torch.tensor([-1, 3, 2**31 - 1, -(2**31), 1], device="cuda", dtype=torch.int32)
    with _backend.use_backend(path):
        result = compression_linear(user, cand, weight, index)
    clamped = index.clamp(0, 2)
    assert error(result, expected_of(user, cand, weight, clamped)) <= 1e-3


@pytest.mark.parametrize("empty", range(6))
def test_empty(empty: int) -> None:
    sizes = [3, 5, 4, 8, 6, 7]
    sizes[empty] = 0
    if empty == 0:
        sizes[1] = 0
    user, cand, weight = make(*sizes, torch.float16)
    index = torch.zeros(sizes[1], device="cuda", dtype=torch.int64)
    result = compression_linear(user, cand, weight, index)
    assert error(result, expected_of(user, cand, weight, index)) <= 1e-3


@pytest.mark.parametrize("path", PATHS)
def test_many_candidates(path: str) -> None:
    """Offsets beyond 2^31 elements: B = 10,000 with K = 872 and D = 256, and B = 70,000."""
    skip_unless(path, torch.float16)
    for batch, m, d, k in ((10_000, 64, 256, 872), (70_000, 24, 64, 40)):
        user, cand, weight = make(100, batch, m, d, 16, k, torch.float16)
        index = make_index(100, batch, False)
        with _backend.use_backend(path):
            result = compression_linear(user, cand, weight, index)
        some = torch.tensor([0, 1, batch // 2, batch - 2, batch - 1], device="cuda")
        assert error(result[some], expected_of(user, cand[some], weight, index.to_user[some])) <= 1e-3
        assert bool(result.isfinite().all())


def clones(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_gradients(path: str, dtype: torch.dtype, grouped: bool) -> None:
    skip_unless(path, dtype)
    for shape in (SHAPES[1], SHAPES[3], SHAPES[5]):
        tensors = [*make(*shape, dtype), torch.randn(shape[2], device="cuda", dtype=dtype)]
        index = make_index(shape[0], shape[1], grouped)
        probe = torch.randn(shape[1], shape[2], shape[3], device="cuda", dtype=dtype)
        ours, exact, torchs = clones(*tensors), clones(*(t.double() for t in tensors)), clones(*tensors)
        with _backend.use_backend(path):
            compression_linear(*ours[:3], index, ours[3]).backward(probe)
        expected_of(*exact[:3], index.to_user, exact[3]).backward(probe.double())
        (decomposed(*torchs[:3], index.to_user) + torchs[3][:, None]).backward(probe)
        for mine, true, theirs in zip(ours, exact, torchs, strict=True):
            terms = shape[1] * max(shape[2:])
            assert error(mine.grad, true.grad) <= allowed(1.15 * error(theirs.grad, true.grad), dtype, terms)


def test_gradients_of_expanded_and_sliced() -> None:
    user, cand, weight = clones(*make(3, 40, 33, 64, 9, 17, torch.float16))
    index = make_index(3, 40)
    compression_linear(user, cand, weight, index).sum().backward()
    exact = clones(user.double(), cand.double(), weight.double())
    expected_of(*exact, index.to_user).sum().backward()
    for mine, true in zip((user, cand, weight), exact, strict=True):
        assert error(mine.grad, true.grad) <= 2e-3
        mine.grad = None
    torch.cat((compression_linear(user, cand, weight, index), cand[:, :1]), 1)[:, 1:-1, 3:].sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in (user, cand, weight))


@pytest.mark.parametrize("wanted", range(8))
def test_needs_input_grad(wanted: int) -> None:
    tensors = make(3, 20, 33, 64, 9, 17, torch.float16)
    for bit, tensor in enumerate(tensors):
        tensor.requires_grad_(bool(wanted >> bit & 1))
    out = compression_linear(*tensors, make_index(3, 20))
    assert out.requires_grad == (wanted > 0)
    if wanted:
        out.sum().backward()
    assert [t.grad is not None for t in tensors] == [bool(wanted >> bit & 1) for bit in range(3)]


@pytest.mark.parametrize("grouped", [True, False])
def test_deterministic(grouped: bool) -> None:
    tensors = make(5, 200, 130, 256, 64, 100, torch.bfloat16)
    index, probe = make_index(5, 200, grouped), torch.randn(200, 130, 256, device="cuda", dtype=torch.bfloat16)
    runs = []
    for _ in range(3):
        leaves = clones(*tensors)
        out = compression_linear(*leaves, index)
        out.backward(probe)
        runs.append([out.detach(), *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_weight_changes_are_seen() -> None:
    """In-place updates, `.data`, load_state_dict and a copy, with a weight that is padded (Ku = 9)."""
    user, cand, weight = make(3, 10, 33, 64, 9, 17, torch.float16)
    index, weight = make_index(3, 10), torch.nn.Parameter(weight)

    def check(w: Tensor) -> None:
        assert (
            error(compression_linear(user, cand, w, index), expected_of(user, cand, w.detach(), index.to_user)) <= 1e-3
        )

    with torch.no_grad():
        check(weight)
        weight.mul_(2)
        check(weight)
        weight.data = torch.randn_like(weight)
        check(weight)
        weight.data.copy_(torch.randn_like(weight))
        check(copy.deepcopy(weight))
    with torch.inference_mode():
        inference = torch.randn_like(weight)
        check(inference)
        inference.mul_(3)
        check(inference)


@pytest.mark.parametrize("path", PATHS)
def test_cuda_graph_replays_with_other_contents(path: str) -> None:
    skip_unless(path, torch.float16)
    user, cand, weight = make(3, 70, 433, 256, 65, 866, torch.float16)
    index = torch.randint(0, 3, (70,), device="cuda")
    with _backend.use_backend(path), torch.no_grad():
        compression_linear(user, cand, weight, index)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compression_linear(user, cand, weight, index)
        for tensor in (user, cand, weight):
            tensor.copy_(torch.randn_like(tensor))
        index.copy_(torch.randint(0, 3, (70,), device="cuda"))
        graph.replay()
    assert error(out, expected_of(user, cand, weight, index)) <= 1e-3


@pytest.mark.parametrize("users", [3, 300])
@pytest.mark.parametrize("path", ["triton", "gluon"])
def test_the_second_kernel_waits_for_the_first(path: str, users: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may begin before the user's part is complete, whose memory holds that of the call before. Elsewhere in these
    tests memory is filled between the two, by a kernel that ends before the second begins."""
    skip_unless(path, torch.float16)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    user, cand, weight = make(users, 37, 433, 256, 1000, 8, torch.float16)
    index, others = make_index(users, 37), [torch.randn_like(user) for _ in range(5)]
    busy = torch.zeros(8192, 8192, device="cuda", dtype=torch.float16)
    with _backend.use_backend(path), torch.no_grad():
        for _ in range(3):  # the last time nothing is compiled, and no memory is new
            torch.cuda.synchronize()
            _ = busy @ busy  # meanwhile all calls are queued, and follow each other without a gap
            results = [compression_linear(other, cand, weight, index) for other in others]
    for other, result in zip(others, results, strict=True):
        assert error(result, expected_of(other, cand, weight, index.to_user)) <= 1e-3


@pytest.mark.parametrize("path", PATHS)
def test_two_streams(path: str) -> None:
    """1,000 launches on two streams at once: none waits for the other, and all results are right."""
    skip_unless(path, torch.float16)
    inputs = [make(3, 70, 433, 256, 65, 866, torch.float16) for _ in range(2)]
    index, streams, results = make_index(3, 70), [torch.cuda.Stream() for _ in range(2)], [None, None]
    with _backend.use_backend(path), torch.no_grad():
        for tensors in inputs:
            compression_linear(*tensors, index)
        torch.cuda.synchronize()
        for _ in range(500):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    results[i] = compression_linear(*inputs[i], index)
        torch.cuda.synchronize()
    for tensors, result in zip(inputs, results, strict=True):
        assert error(result, expected_of(*tensors, index.to_user)) <= 1e-3


@pytest.mark.parametrize("path", PATHS)
def test_compiled_with_gradients(path: str) -> None:
    skip_unless(path, torch.float16)
    with _backend.use_backend(path):
        torch._dynamo.reset()
        compiled = torch.compile(compression_linear, fullgraph=True, dynamic=True)
        for users, batch in ((3, 131), (9, 64), (2, 37)):
            shape = (users, batch, 433, 256, 65, 866)
            tensors, index = make(*shape, torch.float16), make_index(users, batch)
            leaves, exact = clones(*tensors), clones(*(t.double() for t in tensors))
            probe = torch.randn(batch, 433, 256, device="cuda", dtype=torch.float16)
            out = compiled(*leaves, index)
            out.backward(probe)
            expected = expected_of(*exact, index.to_user)
            expected.backward(probe.double())
            assert error(out, expected) <= 1e-3
            for mine, true in zip(leaves, exact, strict=True):
                assert error(mine.grad, true.grad) <= 2e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_number_of_users_changes_no_bit(dtype: torch.dtype) -> None:
    """Though it chooses the width of the tiles of the user's part: on 132 multiprocessors 64, 64, 128, 256 columns."""
    skip_unless("gluon", dtype)
    user, cand, weight = make(15, 40, 433, 256, 1126, 97, dtype)
    bias, index = torch.randn(433, device="cuda", dtype=dtype), torch.zeros(40, device="cuda", dtype=torch.int64)
    with _backend.use_backend("gluon"), torch.no_grad():
        results = [compression_linear(user[:users], cand, weight, index, bias) for users in (1, 4, 8, 15)]
    assert error(results[0], expected_of(user, cand, weight, index, bias)) <= torch.finfo(dtype).eps
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("path", ["triton", "gluon"])
def test_new_sizes_compile_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless(path, torch.float16)
    import triton

    with _backend.use_backend(path), torch.no_grad():
        _, _, weight = make(1, 1, 433, 256, 65, 866, torch.float16)
        for users, batch in ((15, 100), (15, 101)):
            user, cand, _ = make(users, batch, 433, 256, 65, 866, torch.float16)
            compression_linear(user, cand, weight, make_index(users, batch))
        monkeypatch.setattr(triton.compiler.compiler, "compile", None)
        monkeypatch.setattr("triton.runtime.jit.compile", None, raising=False)
        for users, batch in ((1, 1), (16, 128), (17, 1), (1, 333), (64, 7)):
            user, cand, _ = make(users, batch, 433, 256, 65, 866, torch.float16)
            index = make_index(users, batch, False)
            result = compression_linear(user, cand, weight, index)
            assert error(result, expected_of(user, cand, weight, index.to_user)) <= 1e-3


def test_no_copy_of_the_user() -> None:
    """Forward and backward allocate less than one copy of the user at the candidate batch size."""
    user, cand, weight = clones(*make(4, 512, 64, 128, 2000, 10, torch.float16))
    index = make_index(4, 512)
    compression_linear(user, cand, weight, index).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compression_linear(user, cand, weight, index).sum().backward()
    copied = 512 * user[0].numel() * user.element_size()
    assert torch.cuda.max_memory_allocated() - before < copied / 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu_while_the_first_is_current() -> None:
    user, cand, weight = (t.to("cuda:1") for t in make(3, 70, 433, 256, 65, 866, torch.float16))
    index = make_index(3, 70).to("cuda:1")
    result = compression_linear(user, cand, weight, index)
    assert error(result, expected_of(user, cand, weight, index.to_user)) <= 1e-3
