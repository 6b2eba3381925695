"""What holds for every operator: registration, gradients, compile, meta, autocast, arithmetic, memory, errors.

Shape letters: U users, B candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ikbo_recsys.kernels.flops  # noqa: F401  (counts attention on the CPU)
from ikbo_recsys import CandidateIndex, kernels
from tests import twins
from tests.cases import gradients, make_index, subsets, to_user


class Case(NamedTuple):
    """One operator with inputs of given batch sizes; `call` and `twin` take the floating inputs and the index."""

    shapes: Callable[[int, int], list[tuple[int, ...]]]
    call: Callable[..., Tensor]
    twin: Callable[..., Tensor]
    op: Callable[..., Tensor]


OPS = torch.ops.ikbo
CASES = {
    "compression_linear": Case(
        lambda u, b: [(u, 6, 4), (b, 3, 4), (5, 9), (5,)],
        lambda u, c, w, bias, i: kernels.compression_linear(u, c, w, i, bias),
        lambda u, c, w, bias, i: twins.compression_linear(u, c, w, i, bias),
        lambda u, c, w, bias, i: OPS.compression_linear(u, c, w, i, bias),
    ),
    "linear": Case(
        lambda u, b: [(u, 6), (b, 3), (5, 9), (5,)],
        lambda u, c, w, bias, i: kernels.linear(u, c, w, i, bias, "gelu"),
        lambda u, c, w, bias, i: twins.linear(u, c, w, i, bias, "gelu"),
        lambda u, c, w, bias, i: OPS.linear(u, c, w, i, bias, "gelu"),
    ),
    "dot_interaction": Case(
        lambda u, b: [(u, 4, 6), (b, 3, 6)],
        kernels.dot_interaction,
        twins.dot_interaction,
        OPS.dot_interaction,
    ),
    "cross_attention": Case(
        lambda u, b: [(b, 2, 4, 6), (u, 5, 2, 6), (u, 5, 2, 6)],
        kernels.cross_attention,
        twins.cross_attention,
        OPS.cross_attention,
    ),
    "broadcast": Case(lambda u, b: [(u, 3)], kernels.broadcast, lambda x, i: x[i], OPS.broadcast),
}
MIXING = [name for name in CASES if name != "broadcast"]
named = pytest.mark.parametrize("name", CASES)
mixing = pytest.mark.parametrize("name", MIXING)


def inputs_of(name: str, users: int, candidates: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in CASES[name].shapes(users, candidates)]


@named
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [True, False])
def test_opcheck(name: str, grad: bool, dtype: torch.dtype) -> None:
    inputs = [x.requires_grad_(grad) for x in inputs_of(name, 3, 7, dtype)]
    index = torch.randint(0, 3, (7,))
    op = getattr(OPS, name).default
    extra: tuple[Any, ...] = (inputs[3],) if len(inputs) == 4 else ()
    result = torch.library.opcheck(op, (*inputs[:3], index, *extra))
    assert set(result.values()) == {"SUCCESS"}


def test_opcheck_segment_sum() -> None:
    x = torch.randn(7, 2, requires_grad=True)
    result = torch.library.opcheck(OPS.segment_sum.default, (x, torch.randint(0, 3, (7,)), 3))
    assert set(result.values()) == {"SUCCESS"}


@named
def test_the_registered_operator_is_the_function(name: str) -> None:
    inputs, index = inputs_of(name, 3, 7), torch.randint(0, 3, (7,))
    assert torch.equal(CASES[name].op(*inputs, index), CASES[name].call(*inputs, index))


@named
@pytest.mark.parametrize("kind", ["grouped", "shuffled"])
def test_gradcheck(name: str, kind: str) -> None:
    index = make_index(3, 5, kind)
    inputs = [x.requires_grad_() for x in inputs_of(name, 3, 5, torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: CASES[name].call(*x, index), inputs)
    if name != "cross_attention":  # torch's attention kernel for the CPU has no second derivative
        assert torch.autograd.gradgradcheck(lambda *x: CASES[name].call(*x, index), inputs, atol=1e-4)


@named
def test_every_subset_of_requires_grad(name: str) -> None:
    index = make_index(3, 5, "shuffled")
    inputs = inputs_of(name, 3, 5, torch.float64)
    everything = gradients(lambda *x: CASES[name].call(*x, index), *inputs)
    torch.manual_seed(5)
    weight = torch.randn(everything[0].shape, dtype=torch.float64)
    for chosen in subsets([str(i) for i in range(len(inputs))]):
        leaves = [x.clone().requires_grad_(str(i) in chosen) for i, x in enumerate(inputs)]
        (CASES[name].call(*leaves, index) * weight).sum().backward()
        for i, (leaf, expected) in enumerate(zip(leaves, everything[1:], strict=True)):
            assert (leaf.grad is not None) == (str(i) in chosen)
            if leaf.grad is not None:
                torch.testing.assert_close(leaf.grad, expected)


@mixing
def test_expanded_and_sliced_gradients(name: str) -> None:
    index = make_index(3, 5, "grouped")
    inputs = inputs_of(name, 3, 5, torch.float64)
    for reduce in (lambda out: out.sum(), lambda out: torch.cat((out, out * 2), -1)[..., 1:-1].pow(2).sum()):
        ours = [x.clone().requires_grad_() for x in inputs]
        twin = [x.clone().requires_grad_() for x in inputs]
        reduce(CASES[name].call(*ours, index)).backward()
        reduce(CASES[name].twin(*twin, to_user(index))).backward()
        for got, expected in zip(ours, twin, strict=True):
            torch.testing.assert_close(got.grad, expected.grad)


@pytest.mark.slow
def test_a_compiled_program_clamps_a_wrong_index() -> None:
    """It must neither read foreign memory nor, as Python would, count a negative entry from the end."""
    torch._dynamo.reset()
    compiled = torch.compile(CASES["linear"].call, fullgraph=True, dynamic=True)
    inputs = inputs_of("linear", 3, 5)
    wrong, clamped = torch.tensor([0, -1, 2**31, 3, 1]), torch.tensor([0, 0, 2, 2, 1])
    torch.testing.assert_close(compiled(*inputs, wrong), CASES["linear"].call(*inputs, clamped))


@mixing
@pytest.mark.slow
def test_compile_has_no_break_and_no_recompile(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: CASES[name].call(*x), fullgraph=True, dynamic=True)
    for count, (users, candidates) in enumerate([(11, 29), (13, 37), (2, 300), (97, 31)]):
        inputs, index = inputs_of(name, users, candidates), make_index(users, candidates, "grouped")
        with torch._dynamo.config.patch(error_on_recompile=count > 0):
            ours = gradients(lambda *x, i=index: compiled(*x, i), *inputs)
        twin = gradients(lambda *x, i=index: CASES[name].twin(*x, to_user(i)), *inputs)
        for got, expected in zip(ours, twin, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_compile_of_jagged_attention_with_a_bound() -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True)
    def attend(query: Tensor, key: Tensor, index: Tensor, offsets: Tensor, longest: int) -> Tensor:
        return kernels.cross_attention(query, key, key, index, kv_offsets=offsets, max_kv_length=longest)

    for lengths in ([3, 0, 5], [7, 7, 1, 2, 2]):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        query, key = torch.randn(17, 1, 2, 8), torch.randn(sum(lengths), 2, 8)
        index = torch.randint(0, len(lengths), (17,))
        expected = kernels.cross_attention(query, key, key, index, kv_offsets=offsets)
        torch.testing.assert_close(attend(query, key, index, offsets, max(lengths)), expected)


@named
def test_meta_tensors_give_shapes(name: str) -> None:
    inputs, index = inputs_of(name, 3, 7, torch.float16), torch.randint(0, 3, (7,))
    out = CASES[name].call(*(x.to("meta") for x in inputs), index.to("meta"))
    real = CASES[name].call(*inputs, index)
    assert (out.device.type, out.shape, out.dtype, out.stride()) == ("meta", real.shape, real.dtype, real.stride())


@mixing
def test_autocast_is_respected(name: str) -> None:
    inputs, index = inputs_of(name, 3, 7), torch.randint(0, 3, (7,))
    with torch.autocast("cpu", torch.bfloat16):
        out = CASES[name].call(*inputs, index)
    assert out.dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert CASES[name].call(*(x.double() for x in inputs), index).dtype is torch.float64
    assert torch.equal(out, CASES[name].call(*(x.bfloat16() for x in inputs), index))


@mixing
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_index_dtypes_agree(name: str, index_dtype: torch.dtype) -> None:
    inputs, index = inputs_of(name, 3, 7), torch.randint(0, 3, (7,))
    assert torch.equal(CASES[name].call(*inputs, index.to(index_dtype)), CASES[name].call(*inputs, index))


@mixing
def test_wrong_indices_are_refused(name: str) -> None:
    inputs, call = inputs_of(name, 3, 4), CASES[name].call
    for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool):
        with pytest.raises(TypeError, match=f"index must be int32 or int64, got {dtype}"):
            call(*inputs, torch.zeros(4, dtype=dtype))
    for entry in (-1, 3, 4, 2**31):
        with pytest.raises(ValueError, match=rf"to_user\[2\] is {entry} but num_users is 3"):
            call(*inputs, torch.tensor([0, 1, entry, 2]))
    with pytest.raises(ValueError, match="index has 3 entries but the candidate batch size of (cand|query) is 4"):
        call(*inputs, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="index.num_users is 2 but the user batch size of (user|key) is 3"):
        call(*inputs, CandidateIndex.from_counts(torch.tensor([2, 2])))
    with pytest.raises(ValueError, match="index is on meta but (cand|query) is on cpu"):
        call(*inputs, torch.zeros(4, dtype=torch.int64, device="meta"))


@mixing
def test_wrong_tensors_are_refused(name: str) -> None:
    inputs, index = inputs_of(name, 3, 4), torch.tensor([0, 1, 2, 2])
    for position, bad in enumerate(inputs):
        for wrong in (bad.to("meta"), bad.long(), bad[None]):
            changed = [*inputs[:position], wrong, *inputs[position + 1 :]]
            with pytest.raises((ValueError, TypeError)) as error:
                CASES[name].call(*changed, index)
            assert any(word in str(error.value) for word in ("is on", "must be", "dimensions", "has"))


def test_wrong_sizes_name_both() -> None:
    index = torch.tensor([0, 1, 2, 2])
    user, cand, weight = torch.randn(3, 6, 4), torch.randn(4, 2, 4), torch.randn(5, 8)
    with pytest.raises(ValueError, match="embedding size of user is 4 but embedding size of cand is 3"):
        kernels.compression_linear(user, cand[..., :3], weight, index)
    with pytest.raises(ValueError, match=r"weight has 7 columns but user and cand have 6 \+ 2 features"):
        kernels.compression_linear(user, cand, weight[:, :7], index)
    with pytest.raises(ValueError, match="output size of bias is 4 but output size of weight is 5"):
        kernels.compression_linear(user, cand, weight, index, torch.randn(4))
    with pytest.raises(ValueError, match=r"user must be \[U, Ku\], got 3 dimensions"):
        kernels.linear(user, cand[:, :, 0], weight, index)


@mixing
def test_arithmetic_of_the_user_is_done_once_per_user(name: str) -> None:
    """At ratio 64: each user's part once, each candidate's once, plus what tiles leave empty where there are any."""
    inputs, index = inputs_of(name, 2, 128), make_index(2, 128, "grouped")
    with FlopCounterMode(display=False) as ours:
        CASES[name].call(*inputs, index)
    with FlopCounterMode(display=False) as twin:
        CASES[name].twin(*inputs, to_user(index))
    exact = {
        "compression_linear": 2 * 5 * 4 * (2 * 6 + 128 * 3),
        "linear": 2 * 5 * (2 * 6 + 128 * 3),
        "dot_interaction": 2 * 6 * (2 * 16 + 128 * 9 + (128 * 5 // 4 + 128 // 4 * 2) * 12),
        "cross_attention": 4 * 128 * 2 * 4 * 5 * 6,
    }[name]
    assert 0 < ours.get_total_flops() <= 1.6 * exact
    if name != "cross_attention":
        assert ours.get_total_flops() < 0.7 * twin.get_total_flops()


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest storage that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


@mixing
@pytest.mark.parametrize("kind", ["grouped", "shuffled"])
def test_no_user_tensor_exists_at_the_candidate_batch_size(name: str, kind: str) -> None:
    """At B=4096, U=4 with a wide user: neither forward nor backward allocates B x (user features)."""
    users, candidates = 4, 4096
    shapes = {
        "compression_linear": [(users, 96, 8), (candidates, 4, 8), (4, 100), (4,)],
        "linear": [(users, 1024), (candidates, 8), (8, 1032), (8,)],
        "dot_interaction": [(users, 8, 512), (candidates, 1, 512)],
        "cross_attention": [(candidates, 1, 2, 8), (users, 300, 2, 8), (users, 300, 2, 8)],
    }[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    wide = inputs[1] if name == "cross_attention" else inputs[0]
    copied = candidates * wide[0].numel() * wide.element_size()
    with LargestTensor() as largest:
        CASES[name].call(*inputs, make_index(users, candidates, kind)).square().sum().backward()
    assert 0 < largest.bytes < copied / 4
    with LargestTensor() as twin:
        CASES[name].twin(*inputs, to_user(make_index(users, candidates, kind)))
    assert twin.bytes >= copied


@pytest.mark.slow
def test_generated_code_has_no_fp64() -> None:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    index = make_index(5, 23, "grouped")
    for name in ("linear", "cross_attention"):
        compiled = torch.compile(CASES[name].call, fullgraph=True, dynamic=True)
        _, code = run_and_get_code(compiled, *inputs_of(name, 5, 23), index)
        assert code
        assert not any("double" in text or "float64" in text for text in code)


@named
def test_plain_export_takes_an_index(name: str) -> None:
    """`torch.export` itself, with the `CandidateIndex` as an input and its number of users dynamic."""
    auto = torch.export.Dim.AUTO

    class Call(torch.nn.Module):
        def forward(self, inputs: list[Tensor], index: CandidateIndex) -> Tensor:
            return CASES[name].call(*inputs, index)

    fixed = CASES[name].shapes(2, 2), CASES[name].shapes(3, 3)
    inputs = inputs_of(name, 5, 23)
    moving = [{0: auto} if a[0] != b[0] else None for a, b in zip(*fixed, strict=True)]
    shapes = (moving, [{0: auto}, auto, {0: auto}])
    with torch.no_grad():
        program = torch.export.export(Call(), (inputs, make_index(5, 23, "grouped")), dynamic_shapes=shapes)
    for users, candidates in [(5, 23), (3, 7), (9, 4), (7, 301)]:
        inputs, index = inputs_of(name, users, candidates), make_index(users, candidates, "grouped")
        torch.testing.assert_close(program.module()(inputs, index), Call()(inputs, index))
