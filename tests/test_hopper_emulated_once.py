"""All gradients of target attention in one pass, without a GPU: see `test_hopper_emulated.py`."""

from __future__ import annotations

import pytest
import torch

from ikbo_recsys import CandidateIndex, kernels
from tests import twins
from tests.cases import relative_error
from tests.processes import INTERPRETED, interpreted, run_interpreted
from tests.test_hopper_emulated import ATTENTION, EAGER, make_index

pytest.importorskip("triton.experimental.gluon")

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FP16, BF16 = torch.float16, torch.bfloat16
CASES = [(sizes, True, BF16 if sizes[5] == 128 else FP16) for sizes in ATTENTION]
# Of candidates in any order where a user's rows are adjacent: those of others are the portable kernels'.
CASES += [(sizes, False, BF16) for sizes in ATTENTION if sizes[2] % 64 == 0]


def kernels_of(size: int) -> list[str]:
    return ["attention_forward", "attention_backward_staying" if size <= 64 else "attention_backward_once"]


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass, for any number of rows and keys."""
    from ikbo_recsys.kernels import _attention_backward_hopper, _attention_shares

    monkeypatch.setattr(_attention_shares, "has_wide_tiles", lambda problem: True)
    monkeypatch.setattr(_attention_backward_hopper, "fills_the_gpu", lambda problem: True)
    monkeypatch.setattr(_attention_backward_hopper, "FEWEST_BLOCKS", 1)


@interpreted
@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("layout", ["full", "lengths", "jagged"])
@pytest.mark.parametrize(("sizes", "grouped", "dtype"), CASES)
def test_gradients(sizes: tuple, grouped: bool, dtype: torch.dtype, layout: str) -> None:
    """With NaN behind histories, users without rows and without keys, rows of several users in what is loaded."""
    from tests.emulator import emulated

    users, cands, seeds, rows, heads, size = sizes
    index = make_index(users, cands, grouped)
    lengths = torch.randint(1, rows + 1, (users,))
    lengths[users // 2] = 0
    if layout == "full":
        lengths.fill_(rows)
    valid = torch.arange(rows) < lengths[:, None]
    query, grad = (torch.randn(cands, seeds, heads[0], size).to(dtype) for _ in range(2))
    history = torch.randn(users, rows, 2, heads[1], size).to(dtype)
    buffer = history.masked_fill(~valid[:, :, None, None, None], float("nan"))
    options = {"lengths": {"kv_lengths": lengths}}.get(layout, {})
    if layout == "jagged":
        buffer = buffer[valid]
        options = {"kv_offsets": torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))}
    leaves = [x.clone().requires_grad_() for x in (query, *buffer.unbind(-3))]
    # The gradient of the log-sum-exp, of rows that have one.
    grad_lse = torch.randn(cands, seeds, heads[0]) * (lengths[index.to_user] > 0)[:, None, None]
    with emulated(seeds, EAGER[users % 3], 3, backwards=grouped) as ran, kernels.use_backend("gluon"):
        out, lse = kernels.cross_attention(*leaves, index, return_lse=True, **options)
        found = torch.autograd.grad((out, lse) if grouped else out, leaves, (grad, grad_lse) if grouped else grad)
    assert ran == kernels_of(size)

    exact = [x.double().requires_grad_() for x in (query, *history.unbind(2))]
    loss = (twins.cross_attention(*exact, index.to_user, lengths) * grad.double()).sum()
    if grouped:
        _, exact_lse = kernels.cross_attention(*exact, index, kv_lengths=lengths, return_lse=True)
        loss = loss + (exact_lse * grad_lse).masked_fill(grad_lse == 0, 0.0).sum()
    expected = list(torch.autograd.grad(loss, exact))
    if layout == "jagged":
        expected[1:] = [x[valid] for x in expected[1:]]
    for name, ours, true in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert relative_error(ours, true) < torch.finfo(dtype).eps, name


@interpreted
@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("starved", [0, 1, 2])
@pytest.mark.parametrize("size", [40, 128])
def test_whoever_is_slow(size: int, starved: int) -> None:
    """Many blocks of keys in a thread block that stays, with and without keys and rows, of which one partition is
    always behind the others as far as can be."""
    from tests.emulator import emulated

    index = CandidateIndex.from_user_ids(torch.tensor([0, 0, 2, 3, 3, 3, 5]), 6, grouped=True)
    lengths = torch.tensor([300, 130, 260, 0, 5, 129])
    shapes = ((7, 33, 2, size), (6, 300, 1, size), (6, 300, 1, size))
    leaves = [torch.randn(shape).half().requires_grad_() for shape in shapes]
    grad = torch.randn(7, 33, 2, size).half()
    with emulated(starved, EAGER[starved], 1, starved=starved) as ran, kernels.use_backend("gluon"):
        out = kernels.cross_attention(*leaves, index, kv_lengths=lengths)
        found = torch.autograd.grad(out, leaves, grad)
    assert ran == kernels_of(size)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.autograd.grad(twins.cross_attention(*exact, index.to_user, lengths), exact, grad.double())
    for ours, true in zip(found, expected, strict=True):
        assert relative_error(ours, true) < torch.finfo(torch.float16).eps


@interpreted
@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("eager", EAGER)
@pytest.mark.parametrize("size", [64, 128])
def test_nan_of_one_user_is_its_own(size: int, eager: float) -> None:
    """Rows of two users share a box of 64, and keys of two users a block."""
    from tests.emulator import emulated

    index = CandidateIndex.from_user_ids(torch.tensor([0, 0, 0, 1, 1]), 3, grouped=True)
    offsets = torch.tensor([0, 70, 170, 180])
    leaves = [torch.randn(shape).half() for shape in ((5, 24, 2, size), (180, 1, size), (180, 1, size))]
    grad = torch.randn(5, 24, 2, size).half()
    found = []
    for poison in (False, True):
        if poison:
            for x in leaves[1:]:
                x[:70] = float("nan")
        inputs = [x.clone().requires_grad_() for x in leaves]
        with emulated(size, eager, 3) as ran, kernels.use_backend("gluon"):
            out = kernels.cross_attention(*inputs, index, kv_offsets=offsets)
            found.append(torch.autograd.grad(out, inputs, grad))
        assert ran == kernels_of(size)
    (dq, dk, dv), (dq_beside, dk_beside, dv_beside) = found
    assert torch.equal(dq[3:], dq_beside[3:])
    assert dq_beside[:3].isnan().all()
    for ours, beside in ((dk, dk_beside), (dv, dv_beside)):
        assert torch.equal(ours[70:], beside[70:])


@interpreted
@pytest.mark.usefixtures("once")
def test_only_where_it_may() -> None:
    """Not where sums in any order are not allowed, not where a gradient is not needed; as is asked each time."""
    from tests.emulator import emulated

    index, grad = make_index(2, 3, True), torch.randn(3, 64, 1, 64).half()
    leaves = [torch.randn(shape).half().requires_grad_() for shape in ((3, 64, 1, 64), (2, 70, 1, 64), (2, 70, 1, 64))]
    others = ["attention_backward_query", "attention_backward_key_value"]
    before = torch.are_deterministic_algorithms_enabled()
    try:
        with emulated() as ran, kernels.use_backend("gluon"):
            for deterministic, needed in ((False, 3), (True, 3), (False, 3), (False, 2)):
                torch.use_deterministic_algorithms(deterministic)
                inputs = [*leaves[:needed], *(x.detach() for x in leaves[needed:])]
                torch.autograd.grad(kernels.cross_attention(*inputs, index), leaves[:needed], grad)
                expected = kernels_of(64) if needed == 3 and not deterministic else ["attention_forward", *others]
                assert ran == expected
                ran.clear()
    finally:
        torch.use_deterministic_algorithms(before)
