"""What reaches the driver, on a GPU that is not there (`tests/standin`): repeated calls launch what first calls launch.

A first call looks at everything and goes through Triton's own `kernel[grid](...)`; a repeated one goes by what was
remembered. Both must launch the same kernels with the same arguments, byte for byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ikbo_recsys.kernels import (
    _compression_weight,
    _plan,
    compression_linear,
    linear,
    segment_sum,
    use_backend,
)
from tests import standin
from tests.standin import StandIn, inside, outside
from tests.standin.calls import Call, check, first, make, make_index, train

PATHS = ["gluon", "triton"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@outside
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the launch code needs it")
    standin.run_in_a_process_of_its_own(__file__, tmp_path)


# ---- compression ----------------------------------------------------------------------------------------------------


@inside
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_compression(gpu: StandIn, path: str, dtype: torch.dtype) -> None:
    if path == "gluon" and dtype is torch.float32:
        pytest.skip("the kernels take 16 bits")
    user, cand, weight = make(gpu, dtype)
    bias, grad = gpu.randn(70, dtype=dtype), gpu.randn(40, 70, 64, dtype=dtype)
    indices = {
        "grouped": make_index(gpu, 9, 40),
        "shuffled": make_index(gpu, 9, 40, False),
        "narrow": make_index(gpu, 9, 40, True, torch.int32),
        "bare": make_index(gpu, 9, 40).to_user,
        "one off": make_index(gpu, 9, 41).to_user[1:],
    }
    if dtype is torch.float32:  # slow to compile
        indices = {"grouped": indices["grouped"]}
    calls: dict[str, Call] = {}
    for name, index in indices.items():
        calls[name] = lambda index=index: compression_linear(user, cand, weight, index)
        calls[f"{name}, bias"] = lambda index=index: compression_linear(user, cand, weight, index, bias)
        calls[f"{name}, trained"] = train(
            lambda u, c, w, b, index=index: compression_linear(u, c, w, index, b), grad, user, cand, weight, bias
        )
    with use_backend(path):
        found = check(gpu, calls)
    names = [launch.kernel for launch in found["grouped"]]
    assert names == (["user_part_kernel", "candidate_kernel"] if path == "gluon" else ["mix_kernel"] * 2)
    names = [launch.kernel for launch in found["grouped, trained"]][2:]
    # The gradients of user and cand by the forward pass's kernel (in fp32 by cuBLAS), then the weight's in two parts.
    of_inputs = [] if dtype is torch.float32 else ["candidate_kernel" if path == "gluon" else "mix_kernel"] * 2
    assert names == ["segment_sum_kernel", *of_inputs, "outer_sum_kernel", "outer_sum_kernel"]
    if path == "gluon":
        # The second kernel waits for the first by itself.
        assert [launch.is_dependent for launch in found["grouped"]] == [False, True]


@inside
def test_many_users(gpu: StandIn) -> None:
    """Their part is made by the other kernel's code: with a bias of any alignment, any M, users of any stride."""
    users, index = gpu.randn(600, 9, 72), make_index(gpu, 600, 40)
    cand, weight, bias = gpu.randn(40, 40, 64), gpu.randn(128, 49), gpu.randn(129)
    calls: dict[str, Call] = {}
    for outputs in (128, 127, 65):
        for name, given in (("", None), (", bias", bias[:outputs]), (", unaligned bias", bias[1 : outputs + 1])):
            for kind, user in (("", users[..., :64].contiguous()), (", strided", users[..., 8:])):
                calls[f"{outputs}{name}{kind}"] = lambda m=outputs, b=given, u=user: compression_linear(
                    u, cand, weight[:m], index, b
                )
    with use_backend("gluon"):
        found = check(gpu, calls, launches=2)
    for name, launches in found.items():
        assert [launch.kernel for launch in launches] == ["candidate_kernel"] * 2, name
        assert [launch.is_dependent for launch in launches] == [False, True], name


@inside
@pytest.mark.parametrize("path", PATHS)
def test_other_tensors_are_other_arguments(gpu: StandIn, path: str) -> None:
    """Same shapes at other addresses; other sizes, strides, alignment; gradients of other strides."""
    user, cand, weight = make(gpu, torch.float16)
    user2, cand2, weight2 = make(gpu, torch.float16)
    index, index2 = make_index(gpu, 9, 40), make_index(gpu, 9, 40)
    wide = gpu.randn(40, 41, 128)
    bias = gpu.randn(71)
    calls: dict[str, Call] = {
        "first": lambda: compression_linear(user, cand, weight, index),
        "second": lambda: compression_linear(user2, cand2, weight2, index2),
        "mixed": lambda: compression_linear(user, cand2, weight, index2),
        "strided": lambda: compression_linear(user, wide[:, :40, :64], weight, index),
        "later": lambda: compression_linear(user, wide[:, 1:, 64:], weight, index),
        "fewer candidates": lambda: compression_linear(user, cand[:39], weight, index.to_user[:39]),
        "fewer users": lambda: compression_linear(user[:5], cand, weight, index.to_user),
        "aligned weight": lambda: compression_linear(user, cand, gpu_weight, index),
        "unaligned weight": lambda: compression_linear(user, cand, odd_weight, index),
        "transposed weight": lambda: compression_linear(user, cand, turned_weight, index),
        "fewer outputs": lambda: compression_linear(user, cand, weight[:64], index),
        "bias": lambda: compression_linear(user, cand, weight, index, bias[:70]),
        "unaligned bias": lambda: compression_linear(user, cand, weight, index, bias[1:]),
    }
    gpu_weight, odd_weight = gpu.randn(70, 112), gpu.randn(70 * 112 + 1)[1:].view(70, 112)
    turned_weight = gpu.randn(112, 70).t()
    if path == "triton":
        odd = gpu.randn(40 * 40 * 64 + 1)[1:].view(40, 40, 64)
        calls["unaligned"] = lambda: compression_linear(user, odd, weight, index)
        calls["transposed"] = lambda: compression_linear(user, gpu_turned.mT, weight, index)
        gpu_turned = gpu.randn(40, 64, 40)
    grads = {
        "whole": gpu.randn(40, 70, 64),
        "slice": gpu.randn(40, 72, 64)[:, 1:-1],
        "columns": gpu.randn(40, 70, 65)[..., 1:],
        "expanded": gpu.randn(1, 1, 1).expand(40, 70, 64),
        "transposed": gpu.randn(40, 64, 70).mT,
    }
    for name, grad in grads.items():
        calls[f"gradient: {name}"] = train(lambda u, c, w: compression_linear(u, c, w, index), grad, user, cand, weight)
    for wanted in range(1, 8):
        leaves = [x.detach().requires_grad_(bool(wanted >> i & 1)) for i, x in enumerate((user, cand, weight))]
        some = [x for x in leaves if x.requires_grad]
        calls[f"gradients {wanted}"] = lambda leaves=leaves, some=some: torch.autograd.grad(
            compression_linear(*leaves, index), some, grads["whole"]
        )
    with use_backend(path):
        found = check(gpu, calls)
    assert found["first"] != found["second"]
    assert found["bias"] != found["unaligned bias"]


@inside
def test_hopper_arguments(gpu: StandIn) -> None:
    """What the kernels are told, written out once: descriptors, sizes, grid."""
    user, cand, weight = gpu.randn(8, 65, 256), gpu.randn(70, 866, 256), gpu.randn(433, 931)
    index = make_index(gpu, 8, 70)
    user_part, candidates = first(gpu, lambda: compression_linear(user, cand, weight, index))
    assert (user_part.grid, user_part.threads) == ((112, 1, 1), 256)
    assert (candidates.grid, candidates.threads) == ((132, 1, 1), 384)
    weight_user, user_desc = user_part.arguments[0], user_part.arguments[5]
    weight_cand, cand_desc, out_desc = (candidates.arguments[i] for i in (0, 5, 12))
    assert describe(weight_user) == (2, 128, [64, 64], [72, 433], [144])
    assert describe(user_desc) == (3, 128, [64, 64, 1], [256, 65, 8], [512, 65 * 512])
    assert describe(weight_cand) == (2, 64, [32, 64], [872, 433], [1744])
    assert describe(cand_desc) == (3, 128, [64, 32, 1], [256, 866, 70], [512, 866 * 512])
    assert describe(out_desc) == (3, 128, [64, 64, 1], [256, 433, 70], [512, 433 * 512])
    assert user_desc[1] == gpu.place(user.data_ptr(), b"")
    assert cand_desc[1] == gpu.place(cand.data_ptr(), b"")
    part = user_part.arguments[13]
    # (user part or bias, user part, M, tiles, strips of 64 columns in each), then (user part, index, absent bias, M, U,
    # B, tail blocks).
    assert user_part.arguments[12:17] == (part, part, 433, 112, 2)
    index_place = gpu.place(index.to_user.data_ptr(), b"")
    assert candidates.arguments[19:26] == (part, index_place, out_desc[1], 433, 8, 70, 21)


@inside
def test_new_batch_sizes_compile_nothing(gpu: StandIn) -> None:
    """Another number of users may have tiles of the user's part of another width."""
    weight, tiles = gpu.randn(433, 105), {}
    for users, batch in ((15, 20), (1, 20), (4, 7), (8, 1), (9, 20), (10, 3), (64, 2)):
        user, cand = gpu.randn(users, 65, 256), gpu.randn(batch, 40, 256)
        index = make_index(gpu, users, batch)
        user_part, _ = gpu.launches(lambda u=user, c=cand, i=index: compression_linear(u, c, weight, i))
        assert len(_plan._compiled) == 2
        tiles[users] = user_part.arguments[15:17]
    # (tiles, strips)
    assert tiles == {15: (105, 4), 1: (28, 1), 4: (112, 1), 8: (112, 2), 9: (126, 2), 10: (70, 4), 64: (448, 4)}


def describe(descriptor: Any) -> tuple[Any, ...]:
    """Rank, swizzle in bytes, box, sizes and strides in bytes, innermost first: as `libcuda.c` writes them."""
    data = bytes(8) + descriptor[2]
    rank = data[9]
    box = [int.from_bytes(data[12 + 2 * i : 14 + 2 * i], "little") for i in range(rank)]
    sizes = [int.from_bytes(data[24 + 8 * i : 32 + 8 * i], "little") for i in range(rank)]
    strides = [int.from_bytes(data[64 + 8 * i : 72 + 8 * i], "little") for i in range(rank - 1)]
    return rank, (0, 32, 64, 128)[data[10]], box, sizes, strides


@inside
@pytest.mark.parametrize("path", PATHS)
def test_strided_vectors(gpu: StandIn, path: str) -> None:
    """The columns of matrices as bias and index: the kernels get contiguous copies."""
    user, cand, weight = make(gpu, torch.float16)
    bias, index = gpu.randn(70, 3)[:, 1], gpu.put(torch.randint(0, 9, (40, 2)))[:, 1]
    with use_backend(path), torch.no_grad():
        for _ in range(2):
            user_part, candidates = gpu.launches(lambda: compression_linear(user, cand, weight, index, bias))
            places = [a for launch in (user_part, candidates) for a in launch.arguments if isinstance(a, tuple)]
            copies = [place[2] for place in places if place[0] == "elsewhere"]
            for vector in (bias, index):
                assert bytes(vector.contiguous().view(torch.uint8)[:32].tolist()) in copies


@inside
@pytest.mark.parametrize("path", PATHS)
def test_a_weight_that_changes(gpu: StandIn, path: str) -> None:
    """The padded copy of a weight whose rows are not aligned is that of its present contents."""
    user, cand, _ = make(gpu, torch.float16, (9, 40, 70, 64, 9, 31))
    weight, index = torch.nn.Parameter(gpu.randn(70, 40)[:, :40]), make_index(gpu, 9, 40)
    call = lambda: compression_linear(user, cand, weight, index)  # noqa: E731

    def contents() -> list[Any]:
        """First bytes of both padded parts."""
        launches = gpu.launches(call)
        arguments = [launch.arguments[0] for launch in launches]
        return [(a[1] if path == "gluon" else a)[2] for a in arguments]

    def expected() -> list[bytes]:
        parts = weight.detach()[:, :9], weight.detach()[:, 9:]
        return [bytes(torch.nn.functional.pad(p[0], (0, 9))[:16].view(torch.uint8).tolist()) for p in parts]

    with use_backend(path), torch.no_grad():
        for change in (
            lambda: None,
            lambda: weight.add_(1),
            lambda: weight.copy_(torch.randn(70, 40)),
            lambda: setattr(weight, "data", gpu.randn(70, 40)),
            lambda: None,
        ):
            change()
            assert contents() == expected()
        mine = _compression_weight.aligned_parts(weight, 9)
        assert _compression_weight.aligned_parts(weight, 9) is mine
        gpu.stream = 8
        assert _compression_weight.aligned_parts(weight, 9) is not mine, "each stream has its own copy"
        assert contents() == expected()
        gpu.stream = 7
        assert _compression_weight.aligned_parts(weight, 9) is mine
        copies = gpu.launched
        gpu.is_capturing = True
        weight.data.copy_(torch.randn(70, 40))
        assert contents() == expected(), "within a captured graph the copy is made anew"
        gpu.is_capturing = False
        assert gpu.launched == copies + 2


@inside
@pytest.mark.parametrize("path", PATHS)
def test_autocast(gpu: StandIn, path: str) -> None:
    """Parameters in fp32 are converted at each call; the rest of the call is remembered."""
    user, cand, weight = make(gpu, torch.float32)
    half, index = gpu.randn(70, 112), make_index(gpu, 9, 40)
    bias = gpu.randn(70, dtype=torch.float32)
    vectors = user[..., 0], cand[..., 0]

    def autocast(function: Call, dtype: torch.dtype) -> Call:
        def call() -> Any:
            with torch.autocast("cuda", dtype):
                return function()

        return call

    calls = {
        "bf16": autocast(lambda: compression_linear(user, cand, weight, index, bias), torch.bfloat16),
        "fp16": autocast(lambda: compression_linear(user, cand, weight, index, bias), torch.float16),
        "mixed": autocast(lambda: compression_linear(user, cand, half, index), torch.float16),
        "none": lambda: compression_linear(user.half(), cand.half(), half, index),
    }
    with use_backend(path):
        check(gpu, calls)
        plans = len(_plan._plans)
        for call in calls.values():
            call()
        assert len(_plan._plans) == plans
    with use_backend("triton"):
        check(gpu, {"linear": autocast(lambda: linear(*vectors, weight, index, bias, "relu"), torch.bfloat16)})


@inside
def test_transforms_of_torch_func(gpu: StandIn) -> None:
    """They are not for kernels: such a call is made of plain torch, and right."""
    user, cand, weight = make(gpu, torch.float32)
    index = make_index(gpu, 9, 40)
    ids = index.to_user
    for operator, u, c in ((compression_linear, user, cand), (linear, user[..., 0], cand[..., 0])):
        before = gpu.launched
        grad = torch.func.grad(lambda w, f=operator, u=u, c=c: f(u.half(), c.half(), w, index).float().sum())(
            weight.half()
        )
        both = torch.cat((u[ids], c), 1).half().double()
        expected = both.sum((0, 2) if both.dim() == 3 else 0)
        torch.testing.assert_close(grad.double(), expected.expand(70, -1), rtol=1e-2, atol=0.1)
        rows = torch.func.vmap(lambda c, f=operator, u=u: f(u.half(), c, weight.half(), index))(
            torch.stack((c, c)).half()
        )
        assert rows.shape[0] == 2
        assert gpu.launched == before


@inside
@pytest.mark.parametrize("path", PATHS)
def test_another_gpu(gpu: StandIn, path: str) -> None:
    tensors = [make(gpu, torch.float16, device=i) for i in range(2)]
    indices = [make_index(gpu, 9, 40, device=i) for i in range(2)]

    def call(i: int) -> Any:
        gpu.elsewhere = i
        compression_linear(*tensors[i], indices[i])
        gpu.elsewhere = 0

    with use_backend(path):
        found = check(gpu, {"first": lambda: call(0), "second": lambda: call(1)})
        assert {launch.stream for launch in found["first"]} == {7}
        assert {launch.stream for launch in found["second"]} == {107}
        gpu.current = 1
        assert gpu.launches(lambda: call(0)) == found["first"]
        assert gpu.launches(lambda: call(1)) == found["second"]
        assert gpu.current == 1
        gpu.current = 0
        gpu.stream = 8
        assert {launch.stream for launch in gpu.launches(lambda: call(0))} == {8}
        gpu.stream = 7


@inside
@pytest.mark.parametrize("path", PATHS)
def test_new_sizes_compile_nothing(gpu: StandIn, path: str) -> None:
    """Another U, B, index, address or content: no kernel is compiled. Another dtype: one of each."""
    weight = gpu.randn(433, 931)

    def call(users: int, batch: int, dtype: torch.dtype = torch.float16, **more: Any) -> None:
        user, cand = gpu.randn(users, 65, 64, dtype=dtype), gpu.randn(batch, 866, 64, dtype=dtype)
        compression_linear(user, cand, weight.to(dtype), make_index(gpu, users, batch, **more))

    with use_backend(path):
        call(15, 100)
        loaded = gpu.loaded
        for users, batch in ((15, 101), (1, 1), (16, 128), (17, 1), (1, 333), (64, 7), (15, 100)):
            call(users, batch)
            call(users, batch, grouped=False)
        assert gpu.loaded == loaded
        call(15, 100, torch.bfloat16)
        assert gpu.loaded == loaded + 2
        call(15, 100, dtype=torch.float16)
        assert gpu.loaded == loaded + 2


# ---- linear, segment sum --------------------------------------------------------------------------------------------


@inside
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_linear(gpu: StandIn, dtype: torch.dtype) -> None:
    tensors = [gpu.randn(*shape, dtype=dtype) for shape in ((9, 72), (40, 40), (70, 112), (70,))]
    user, cand, weight, bias = tensors
    grad = gpu.randn(40, 70, dtype=dtype)
    odd = gpu.randn(40, 43, dtype=dtype)[:, 3:]
    calls: dict[str, Call] = {}
    for grouped in (True, False):
        index = make_index(gpu, 9, 40, grouped, torch.int64 if grouped else torch.int32)
        for act in (None, "silu") if grouped else (None, "gelu"):
            calls[f"{grouped} {act}"] = lambda index=index, act=act: linear(user, cand, weight, index, bias, act)
            calls[f"{grouped} {act} trained"] = train(
                lambda u, c, w, b, index=index, act=act: linear(u, c, w, index, b, act), grad, *tensors
            )
        calls[f"{grouped} no bias"] = lambda index=index: linear(user, cand, weight, index)
        calls[f"{grouped} odd"] = lambda index=index: linear(user, odd, weight, index)
        calls[f"{grouped} slice"] = lambda index=index: linear(user, cand[1:, :], weight, index.to_user[1:])
        calls[f"{grouped} expanded"] = train(
            lambda u, c, index=index: linear(u, c, weight, index), grad[:1, :1].expand(40, 70), user, cand
        )
    with use_backend("triton"):
        found = check(gpu, calls)
        loaded = gpu.loaded
        for users, batch in ((9, 41), (1, 1), (16, 128), (17, 1), (1, 333)):
            arguments = gpu.randn(users, 72, dtype=dtype), gpu.randn(batch, 40, dtype=dtype), weight
            linear(*arguments, make_index(gpu, users, batch), bias)
        assert gpu.loaded == loaded
    assert [launch.kernel for launch in found["True silu"]] == ["linear_kernel"] * 2
    assert [launch.kernel for launch in found["True silu trained"]][2:] == ["segment_sum_kernel"]


@inside
@pytest.mark.parametrize("dtype", DTYPES)
def test_segment_sum(gpu: StandIn, dtype: torch.dtype) -> None:
    x, grad = gpu.randn(40, 70, dtype=dtype), gpu.randn(9, 70, dtype=dtype)
    calls: dict[str, Call] = {}
    for grouped in (True, False):
        index = make_index(gpu, 9, 40, grouped)
        calls[f"{grouped}"] = lambda index=index: segment_sum(x, index)
        calls[f"{grouped} bare"] = lambda index=index: segment_sum(x, index.to_user, 9)
        calls[f"{grouped} more users"] = lambda index=index: segment_sum(x, index.to_user, 10)
        calls[f"{grouped} strided"] = lambda index=index: segment_sum(x[:, 3:].mT.contiguous().mT, index)
        calls[f"{grouped} trained"] = train(lambda x, index=index: segment_sum(x, index), grad, x)
    check(gpu, calls)
