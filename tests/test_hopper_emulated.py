"""The Hopper kernels without a GPU: their device code in the emulator, launched as it is on a GPU, against fp64."""

from __future__ import annotations

import pytest
import torch

from ikbo_recsys import CandidateIndex, kernels
from tests import twins
from tests.cases import relative_error
from tests.processes import INTERPRETED, interpreted, run_interpreted

pytest.importorskip("triton.experimental.gluon")

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FP16, BF16 = torch.float16, torch.bfloat16
# How often work under way is done at once: as late as possible, in between, as early as possible.
EAGER = [0.0, 0.3, 0.9]


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.parametrize("operator", ["compression_linear", "cross_attention"])
def test_in_a_process_of_its_own(operator: str) -> None:
    run_interpreted(__file__, "-k", operator)


def make_index(users: int, cands: int, grouped: bool, dtype: torch.dtype = torch.int64) -> CandidateIndex:
    to_user = torch.randint(0, users, (cands,), dtype=dtype)
    return CandidateIndex.from_user_ids(to_user.sort()[0] if grouped else to_user, users, grouped=grouped)


# ---- compression_linear ----------------------------------------------------------------------------------------------

# (multiprocessors, U, B, M, D, Ku, Kc): only a tail, pairs without one, both, more blocks than work, several column
# tiles, a weight that stays in shared memory as a whole and one that does not, halves and quarters of the user's tiles,
# the most users that are not many, many users (the last two)
COMPRESSION = [
    (2, 2, 3, 40, 64, 20, 33),
    (3, 3, 4, 128, 72, 8, 64),
    (5, 3, 9, 193, 256, 70, 200),
    (9, 2, 4, 449, 256, 40, 866),
    (50, 2, 2, 65, 512, 64, 1000),
    (4, 2, 5, 130, 64, 8, 600),
    (13, 3, 4, 128, 256, 200, 40),
    (40, 2, 3, 40, 264, 1126, 33),
    (5, 2, 3, 1, 72, 65, 16),
    (2, 16, 5, 40, 256, 33, 20),
    (2, 20, 23, 65, 64, 40, 33),
    (3, 9, 11, 193, 256, 70, 17),
]


@interpreted
@pytest.mark.parametrize("sizes", COMPRESSION)
@pytest.mark.parametrize(("dtype", "eager"), list(zip([FP16, BF16, FP16], EAGER, strict=True)))
def test_compression_linear(sizes: tuple[int, ...], dtype: torch.dtype, eager: float) -> None:
    from tests.emulator import emulated

    multiprocessors, users, batch, m, d, user_k, cand_k = sizes
    user, cand = torch.randn(users, user_k, d).to(dtype), torch.randn(batch, cand_k, d).to(dtype)
    weight, bias = torch.randn(m, user_k + cand_k).to(dtype), torch.randn(m).to(dtype)
    index = make_index(users, batch, eager < 0.5, torch.int32 if eager else torch.int64)
    with emulated(batch, eager, multiprocessors) as ran, kernels.use_backend("gluon"):
        out = kernels.compression_linear(user, cand, weight, index, bias if eager else None)
    has_many_users = sizes in COMPRESSION[-2:]
    assert ran == ["candidate_kernel" if has_many_users else "user_part_kernel", "candidate_kernel"]
    expected = twins.compression_linear(user.double(), cand.double(), weight.double(), index.to_user)
    expected = expected + bias.double()[:, None] if eager else expected
    # One rounding of the user's part, and one of the result.
    assert relative_error(out, expected) < torch.finfo(dtype).eps / 2


@interpreted
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(("m", "d"), [(433, 72), (40, 128), (1, 256), (40, 264)])
def test_compression_linear_of_tiles_of_any_width(m: int, d: int, dtype: torch.dtype) -> None:
    """The user's part has the same bits, whatever the number of columns that a tile of it has."""
    from ikbo_recsys.kernels import _compression_hopper as hopper
    from tests.emulator import emulated

    user, weight, bias = torch.randn(3, 200, d).to(dtype), torch.randn(m, 200).to(dtype), torch.randn(m).to(dtype)
    tiles, most = hopper.part_shape(weight, user)[0], hopper.columns(d) // 64
    parts = {}
    for multiprocessors in (tiles, 2 * tiles, 4 * tiles):
        with emulated(m, multiprocessors=multiprocessors) as ran:
            launch = hopper.UserPart(weight, user, bias)
            parts[hopper.tile_strips(tiles, hopper.columns(d), multiprocessors)] = launch(weight, user, bias)
        assert ran == ["user_part_kernel"]
    assert sorted(parts) == [strips for strips in (1, 2, 4) if strips <= most]
    assert all(torch.equal(part, parts[most]) for part in parts.values())


@interpreted
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("sizes", "eager"), list(zip(COMPRESSION[:3], EAGER, strict=True)))
def test_compression_linear_gradients(sizes: tuple[int, ...], eager: float, grouped: bool) -> None:
    from tests.emulator import emulated

    multiprocessors, users, batch, m, d, user_k, cand_k = sizes
    shapes = ((users, user_k, d), (batch, cand_k, d), (m, user_k + cand_k), (m,))
    leaves = [torch.randn(shape).half().requires_grad_() for shape in shapes]
    index, grad = make_index(users, batch, grouped), torch.randn(batch, m, d).half()
    with emulated(m, eager, multiprocessors) as ran, kernels.use_backend("gluon"):
        out = kernels.compression_linear(*leaves[:3], index, leaves[3])
        found = torch.autograd.grad(out, leaves, grad)
    # After the forward pass: the gradients of user and cand, then the users' columns of the weight's, the candidates'.
    assert ran == ["user_part_kernel", *["candidate_kernel"] * 3, *["outer_sum_kernel"] * 2]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    twin = twins.compression_linear(*exact[:3], index.to_user) + exact[3][:, None]
    for name, ours, true in zip(
        ("user", "cand", "weight", "bias"), found, torch.autograd.grad(twin, exact, grad.double()), strict=True
    ):
        assert relative_error(ours, true) < 1e-3, name


@interpreted
@pytest.mark.parametrize("path", ["gluon", "triton"])
def test_compression_linear_saved_tensors_come_back_contiguous(path: str) -> None:
    from ikbo_recsys.kernels._compression_launch import Plan
    from tests.emulator import emulated

    plan, index = Plan(path), make_index(3, 5, True)
    shapes = ((3, 24, 64), (5, 40, 64), (70, 32))
    user, cand, weight = (torch.randn(shape).half().requires_grad_() for shape in shapes)
    grad = torch.randn(5, 70, 64).half()
    found = []
    with emulated():
        for pack in (lambda x: x, torch.Tensor.contiguous, lambda x: x):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                out = plan(user[:, 4:16], cand[:, 9:29], weight, index, None)
            found.append(torch.autograd.grad(out, (user, cand, weight), grad))
    exact = [x.detach().double().requires_grad_() for x in (user, cand, weight)]
    twin = twins.compression_linear(exact[0][:, 4:16], exact[1][:, 9:29], exact[2], index.to_user)
    expected = torch.autograd.grad(twin, exact, grad.double())
    for ours in found:
        assert max(relative_error(x, true) for x, true in zip(ours, expected, strict=True)) < 1e-3


@interpreted
def test_compression_linear_with_rows_that_tma_cannot_store() -> None:
    from tests.emulator import emulated

    user, cand = torch.randn(2, 3, 72).half()[..., :68], torch.randn(4, 5, 72).half()[..., :68]
    with emulated(multiprocessors=9):
        choice = kernels.explain(
            kernels.compression_linear, user, cand, torch.randn(9, 8).half(), make_index(2, 4, True)
        )
    assert "rows of 68 elements" in choice.refused["gluon"]


@interpreted
def test_compression_linear_with_more_outputs_than_multiprocessors() -> None:
    from tests.emulator import emulated

    user, cand, weight = torch.randn(3, 9, 64).half(), torch.randn(5, 40, 64).half(), torch.randn(300, 49).half()
    index = make_index(3, 5, True)
    with emulated(multiprocessors=3) as ran:
        choice = kernels.explain(kernels.compression_linear, user, cand, weight, index)
        assert "300 are more than 256" in choice.refused["gluon"]
        assert "gluon" not in kernels.explain(kernels.compression_linear, user, cand, weight[:256], index).refused
    assert not ran


@interpreted
def test_compression_linear_wrong_index() -> None:
    from tests.emulator import emulated

    user, cand, weight = torch.randn(3, 9, 64).half(), torch.randn(5, 40, 64).half(), torch.randn(70, 49).half()
    index = torch.tensor([-1, 3, 2**31 - 1, -(2**31), 1], dtype=torch.int32)
    with emulated(multiprocessors=2), kernels.use_backend("gluon"):
        out = kernels.compression_linear(user, cand, weight, index)
    expected = twins.compression_linear(user.double(), cand.double(), weight.double(), index.clamp(0, 2))
    assert relative_error(out, expected) < 1e-3


# ---- cross_attention -------------------------------------------------------------------------------------------------

# (U, B, seeds, T, (H, Hkv), D): 64 rows of a candidate, rows of several in a tile, one row each; head sizes that are
# padded; users without candidates
ATTENTION = [
    (3, 7, 64, 301, (2, 1), 64),
    (2, 40, 5, 150, (2, 2), 128),
    (9, 4, 64, 70, (1, 1), 40),
    (3, 130, 1, 200, (4, 2), 64),
    (2, 3, 128, 129, (1, 1), 104),
]


@interpreted
@pytest.mark.parametrize("layout", ["full", "lengths", "jagged"])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("sizes", ATTENTION)
def test_cross_attention(
    sizes: tuple, is_wide: bool, grouped: bool, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ikbo_recsys.kernels import _attention_backward_hopper, _attention_shares
    from tests.emulator import emulated

    # Tiles of 128 rows, and gradients by the Hopper kernels, for any number of rows and keys; or tiles of 64.
    monkeypatch.setattr(_attention_shares, "has_wide_tiles", lambda problem: is_wide)
    monkeypatch.setattr(_attention_backward_hopper, "fills_the_gpu", lambda problem: True)
    users, cands, seeds, rows, heads, size = sizes
    index = make_index(users, cands, grouped)
    lengths = torch.randint(1, rows + 1, (users,))
    lengths[users // 2] = rows if layout == "full" else 0
    if layout == "full":
        lengths.fill_(rows)
    valid = torch.arange(rows) < lengths[:, None]
    query, grad = (torch.randn(cands, seeds, heads[0], size).half() for _ in range(2))
    history = torch.randn(users, rows, 2, heads[1], size).half()
    buffer = history.masked_fill(~valid[:, :, None, None, None], float("nan"))
    options = {"lengths": {"kv_lengths": lengths}}.get(layout, {})
    if layout == "jagged":
        buffer = buffer[valid]
        options = {"kv_offsets": torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))}
    leaves = [x.clone().requires_grad_() for x in (query, *buffer.unbind(-3))]
    # The gradient of the log-sum-exp, of rows that have one.
    grad_lse = torch.randn(cands, seeds, heads[0]) * (lengths[index.to_user] > 0)[:, None, None]
    with emulated(seeds, EAGER[users % 3], 3) as ran, kernels.use_backend("gluon"):
        out, lse = kernels.cross_attention(*leaves[:3], index, return_lse=True, **options)
        grads = torch.autograd.grad((out, lse) if grouped else out, leaves, (grad, grad_lse) if grouped else grad)
        found = [out.detach(), *grads]
    # Without adjacent rows the gradients are the portable kernels', and with few.
    is_adjacent = grouped or seeds % 64 == 0
    on_hopper = ["attention_backward_key_value", "attention_backward_query"] if is_wide and is_adjacent else []
    assert ran[0] == "attention_forward"
    assert sorted(ran[1:]) == on_hopper

    exact = [x.double().requires_grad_() for x in (query, *history.unbind(2))]
    twin = twins.cross_attention(*exact, index.to_user, lengths)
    loss = (twin * grad.double()).sum()
    if grouped:
        _, exact_lse = kernels.cross_attention(*exact, index, kv_lengths=lengths, return_lse=True)
        loss = loss + (exact_lse * grad_lse).masked_fill(grad_lse == 0, 0.0).sum()
    expected = [twin.detach(), *torch.autograd.grad(loss, exact)]
    if layout == "jagged":
        expected[2:] = [x[valid] for x in expected[2:]]
    for name, ours, true in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert relative_error(ours, true) < 1e-3, name


@interpreted
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("is_wide", [True, False])
def test_cross_attention_of_negative_scores(head_size: int, is_wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all keys in one head, of all but those that come last in the other; every third row has them the other way
    round."""
    from ikbo_recsys.kernels import _attention_shares
    from tests.emulator import emulated

    monkeypatch.setattr(_attention_shares, "has_wide_tiles", lambda problem: is_wide)
    query = torch.rand(2, 96, 2, head_size) + 0.5
    query[:, ::3] *= -1
    key, value = -torch.rand(1, 300, 2, head_size), torch.randn(1, 300, 2, head_size)
    key[:, :128, 1] *= -1  # the last keys come first
    query, key, value = (x.half() for x in (query, key, value))
    index = make_index(1, 2, True)
    with emulated() as ran, kernels.use_backend("gluon"), torch.no_grad():
        out = kernels.cross_attention(query, key, value, index, scale=0.4)
    assert ran == ["attention_forward"]
    exact = twins.cross_attention(*(x.double() for x in (query, key, value)), index.to_user, None, 0.4)
    assert relative_error(out, exact) < 1e-3


@interpreted
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("is_wide", [True, False])
def test_cross_attention_largest_weights_are_not_rounded(
    head_size: int, is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are 1, wherever in the history they are: a result that is one of them has but its own rounding."""
    from ikbo_recsys.kernels import _attention_shares
    from tests.emulator import emulated

    monkeypatch.setattr(_attention_shares, "has_wide_tiles", lambda problem: is_wide)
    query = torch.zeros(2, 64, 1, head_size, dtype=FP16)
    key, value = (torch.zeros(1, 256, 1, head_size, dtype=FP16) for _ in range(2))
    query[..., 0] = 1 + torch.rand(2, 64, 1)
    key[0, 200, 0, 0], key[0, 10, 0, 0], value[0, 10] = 1, 1.5, 1  # the last keys come first
    with emulated() as ran, kernels.use_backend("gluon"), torch.no_grad():
        out = kernels.cross_attention(query, key, value, make_index(1, 2, True), scale=1.0)
    assert ran.count("attention_forward") == 1
    scores = query[..., 0].double()
    exact = (1.5 * scores).exp() / ((1.5 * scores).exp() + scores.exp() + 254)
    # But for the few that fp32 puts on the other side of a middle.
    assert (out == exact.to(FP16)[..., None]).double().mean() > 0.98


@interpreted
def test_cross_attention_saved_tensors_come_back_unaligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a buffer of many, for example: the gradients are the portable kernels', which read any address."""
    from ikbo_recsys.kernels import _attention_backward_hopper, _attention_shares
    from tests.emulator import emulated

    monkeypatch.setattr(_attention_shares, "has_wide_tiles", lambda problem: True)
    monkeypatch.setattr(_attention_backward_hopper, "fills_the_gpu", lambda problem: True)

    def unaligned(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x) if x.is_floating_point() else x

    index, grad = make_index(2, 3, True), torch.randn(3, 64, 1, 64).half()
    leaves = [torch.randn(shape).half().requires_grad_() for shape in ((3, 64, 1, 64), (2, 70, 1, 64), (2, 70, 1, 64))]
    found = []
    with emulated() as ran, kernels.use_backend("gluon"):
        for unpack in (lambda x: x, unaligned):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
                out = kernels.cross_attention(*leaves, index)
            found.append(torch.autograd.grad(out, leaves, grad))
    assert ran.count("attention_backward_query") == 1
    for usual, ours in zip(*found, strict=True):
        assert relative_error(ours, usual.double()) < 1e-3
