"""The portable attention kernels and the tile schedule on the CPU, in Triton's interpreter, against fp64.

The interpreter replaces the kernels when they are defined, so these tests need a process of their own, with
TRITON_INTERPRET=1; `test_in_a_process_of_its_own` starts it. fp32 and fp16 only: the interpreter's bf16 `tl.dot` is
wrong.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests import twins
from tests.cases import gradients, relative_error
from tests.processes import INTERPRETED, interpreted, run_interpreted

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
FULL, LENGTHS, JAGGED = 0, 1, 2


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


def make_problem(
    users: int, cands: int, seeds: int, rows: int, heads: tuple[int, int], size: int, **how: object
) -> tuple:
    """A `Problem`, and the fp64 operands, index, lengths and valid rows of its twin. User 1 of several has no history.

    Users have as many candidates as `counts` says, where it is given.
    """
    from ikbo_recsys.kernels._attention_launch import Problem
    from ikbo_recsys.kernels._attention_plans import group

    dtype, layout, index_dtype = how["dtype"], how["layout"], how.get("index_dtype", torch.int64)
    to_user = torch.randint(0, users, (cands,), dtype=index_dtype)
    if "counts" in how:
        to_user = torch.arange(users, dtype=index_dtype).repeat_interleave(torch.tensor(how["counts"]))
        to_user = to_user[torch.randperm(cands)]
    if not how["shuffled"]:
        to_user = to_user.sort()[0]
    offsets, permutation = group(to_user, users)
    lengths = torch.full((users,), rows) if layout == FULL else torch.randint(0, rows + 1, (users,))
    if layout != FULL and users > 1:
        lengths[1] = 0
    query = torch.randn(cands, seeds, heads[0], 2 * size).to(dtype)[..., size:]
    buffer = torch.randn(users, rows, 2, heads[1], size).to(dtype)
    wide = [x.double() for x in (query, *buffer.unbind(2))]
    valid = torch.arange(rows) < lengths[:, None]
    buffer[~valid] = float("nan")  # padding may hold anything
    kv = None
    if layout == LENGTHS:
        kv = lengths.to(index_dtype)
    elif layout == JAGGED:
        buffer = buffer[valid]
        kv = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(index_dtype)
    key, value = buffer.unbind(-3)
    scale = how.get("scale", size**-0.5)
    problem = Problem(query, key, value, offsets, permutation if how["shuffled"] else None, kv, layout, scale)
    return problem, wide, to_user.long(), lengths, valid


CASES = [
    ((1, 1, 1, 1, (1, 1), 8), {"layout": FULL, "shuffled": False}),
    ((3, 7, 2, 19, (2, 1), 8), {"layout": FULL, "shuffled": False}),
    ((3, 7, 2, 19, (2, 1), 24), {"layout": LENGTHS, "shuffled": True, "index_dtype": torch.int32}),
    ((5, 40, 3, 70, (2, 2), 48), {"layout": JAGGED, "shuffled": False}),
    ((4, 9, 5, 67, (3, 1), 16), {"layout": JAGGED, "shuffled": True, "scale": -0.2}),
    ((2, 60, 17, 33, (4, 2), 32), {"layout": LENGTHS, "shuffled": True}),
    ((1, 400, 1, 40, (1, 1), 16), {"layout": LENGTHS, "shuffled": True}),
    ((9, 2, 1, 5, (1, 1), 16), {"layout": JAGGED, "shuffled": False}),
]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("sizes", "how"), CASES)
def test_forward_and_backward(sizes: tuple, how: dict, dtype: torch.dtype) -> None:
    from ikbo_recsys.kernels import _attention_launch as launch
    from ikbo_recsys.kernels._attention_plans import backward

    problem, wide, to_user, lengths, valid = make_problem(*sizes, **how, dtype=dtype)
    expected = gradients(lambda q, k, v: twins.cross_attention(q, k, v, to_user, lengths, problem.scale), *wide)
    out, lse = launch.Forward(problem, True)(problem)
    grad = torch.ones(()).expand_as(out).to(dtype) if sizes[1] == 7 else torch.randn_like(out)
    inputs = [x.detach().requires_grad_() for x in wide]
    twin = twins.cross_attention(*inputs, to_user, lengths, problem.scale)
    expected = torch.autograd.grad(twin, inputs, grad.double())
    dq, dk, dv = backward(problem, out, lse, grad, (True, True, True), "triton")
    if problem.layout == JAGGED:
        expected = (expected[0], expected[1][valid], expected[2][valid])
    tolerance = TOLERANCE[dtype]
    assert relative_error(out, twin.detach()) < tolerance
    for got, want in zip((dq, dk, dv), expected, strict=True):
        # One key has weight 1 whatever its score: dq and dk are exactly 0, and what remains is the rounding of dv's
        # size.
        assert float((got.double() - want).norm()) < tolerance * float(want.norm().clamp_min(expected[2].norm()))
    _check_lse(problem, lse, wide, to_user, lengths)


def _check_lse(problem: object, lse: Tensor, wide: list[Tensor], to_user: Tensor, lengths: Tensor) -> None:
    heads = wide[0].shape[2] // wide[1].shape[2]
    key = wide[1].repeat_interleave(heads, 2)[to_user]
    scores = torch.einsum("bshd,bthd->bsht", wide[0], key) * problem.scale  # type: ignore[attr-defined]
    valid = torch.arange(key.shape[1]) < lengths[to_user][:, None]
    expected = scores.masked_fill(~valid[:, None, None, :], float("-inf")).logsumexp(-1)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_only_the_gradients_asked_for(needs: tuple[bool, bool, bool]) -> None:
    from ikbo_recsys.kernels import _attention_launch as launch
    from ikbo_recsys.kernels._attention_plans import backward

    problem, *_ = make_problem(3, 7, 2, 19, (2, 1), 16, layout=LENGTHS, shuffled=False, dtype=torch.float32)
    out, lse = launch.Forward(problem, True)(problem)
    grad = torch.randn_like(out)
    everything = backward(problem, out, lse, grad, (True, True, True), "triton")
    some = backward(problem, out, lse, grad, needs, "triton")
    for need, got, expected in zip(needs, some, everything, strict=True):
        assert (got is not None) == need
        if need:
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


@interpreted
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """The candidates of a user in another order give bitwise the same rows in that order."""
    from dataclasses import replace

    from ikbo_recsys.kernels import _attention_launch as launch

    problem, *_ = make_problem(2, 23, 3, 40, (2, 2), 16, layout=LENGTHS, shuffled=False, dtype=torch.float32)
    start, end = (int(x) for x in problem.offsets[:2])
    order = torch.cat((torch.arange(start, end).flip(0), torch.arange(end, 23)))
    out, _ = launch.Forward(problem, False)(problem)
    moved_problem = replace(problem, query=problem.query[order].contiguous())
    moved, _ = launch.Forward(moved_problem, False)(moved_problem)
    assert torch.equal(moved, out[order])


@interpreted
@pytest.mark.parametrize("users", [1, 3, 70, 200])
@pytest.mark.parametrize("layout", [FULL, LENGTHS, JAGGED])
def test_tile_table(users: int, layout: int) -> None:
    """Every row in one tile of its user, no tile of two users, longest histories first, the count right."""
    from ikbo_recsys.kernels._attention_hopper import tile_table

    problem, _, _, lengths, _ = make_problem(
        users, 3 * users, 5, 9, (1, 1), 8, layout=layout, shuffled=False, dtype=torch.float32
    )
    table = tile_table(problem, rows=4)
    count = int(table[0, 0])
    starts = (problem.offsets * 5).tolist()
    expected = []
    for user in sorted(range(users), key=lambda u: (-int(lengths[u]), u)):
        where = int(problem.kv[user]) if layout == JAGGED else user
        for row in range(starts[user], starts[user + 1], 4):
            expected.append([row, starts[user + 1], where, int(lengths[user])])
    assert table[1 : 1 + count].tolist() == expected
    assert count <= table.shape[0] - 1


@interpreted
@pytest.mark.parametrize("bad", [-3, 2**31 - 1])
def test_wrong_offsets_stay_inside(bad: int) -> None:
    """Offsets that lead outside are clamped: nothing hangs, nothing outside is read or written."""
    from dataclasses import replace

    from ikbo_recsys.kernels import _attention_both_launch as both_launch
    from ikbo_recsys.kernels import _attention_launch as launch

    problem, *_ = make_problem(3, 7, 2, 19, (1, 1), 16, layout=JAGGED, shuffled=False, dtype=torch.float32)
    offsets, kv = problem.offsets.clone(), problem.kv.clone()
    offsets[1], kv[2] = bad, bad
    wrong = replace(problem, offsets=offsets, kv=kv)
    launch.Forward(wrong, True)(wrong)
    offsets[0] = 5
    wrong = replace(wrong, user_query=torch.randn(3, 20, 1, 16))
    both_launch.Forward(wrong, True)(wrong)


@interpreted
def test_falling_offsets_stay_inside_the_table() -> None:
    """Every other user claims all the candidates: far more tiles than the table has room for."""
    from dataclasses import replace

    from ikbo_recsys.kernels._attention_hopper import tile_table

    problem, *_ = make_problem(8, 40, 5, 9, (1, 1), 8, layout=LENGTHS, shuffled=False, dtype=torch.float32)
    table = tile_table(replace(problem, offsets=torch.tensor([0, 40] * 4 + [0])), rows=4)
    assert int(table[0, 0]) == table.shape[0] - 1
    rows, ends = table[1:, 0], table[1:, 1]
    assert bool(((rows >= 0) & (rows < ends) & (ends <= 200)).all())


@interpreted
def test_more_tiles_than_32_bits_hold() -> None:
    """Offsets that go to and fro between 0 and 2^28 candidates: 2^23 tiles for every other user, room for ten."""
    from ikbo_recsys.kernels._triton.schedule import fill_tile_table

    users, limit = 601, 10
    table = torch.full((1 + limit, 4), -7, dtype=torch.int32)
    offsets = torch.tensor([0, 2**28] * 301)
    fill_tile_table[(10,)](
        *(table, offsets, offsets, users, 2**28, 4, 100, limit), ROWS=128, KV_LAYOUT=0, BLOCK=64, STEP=16, CHAINED=False
    )
    assert int(table[0, 0]) == limit
    assert table[1:].tolist() == [[128 * tile, 2**30, 0, 100] for tile in range(limit)]


@interpreted
def test_strided_index_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths and offsets that are columns of a matrix."""
    from ikbo_recsys import CandidateIndex, kernels
    from ikbo_recsys.kernels import _backend

    monkeypatch.setattr(_backend, "portable_refusal", lambda *_: None)
    ids = torch.randint(0, 3, (9,)).sort()[0]
    grouped = CandidateIndex.from_user_ids(ids, 3, grouped=True)
    column = torch.stack((grouped.offsets, grouped.offsets + 1), 1)[:, 0]
    index = CandidateIndex(ids, 3, column)
    query, history = torch.randn(9, 2, 2, 16), torch.randn(3, 11, 2, 2, 16)
    lengths = torch.tensor([[5, 11], [0, 11], [11, 1]])[:, 0]
    valid = torch.arange(11) < lengths[:, None]
    offsets = torch.stack((torch.tensor([0, 5, 5, 16]), torch.zeros(4).long()), 1)[:, 0]
    assert not any(x.is_contiguous() for x in (column, lengths, offsets))
    exact = twins.cross_attention(query.double(), *history.double().unbind(2), ids, lengths)
    with _backend.use_backend("triton"):
        padded = kernels.cross_attention(query, *history.unbind(2), index, kv_lengths=lengths)
        jagged = kernels.cross_attention(query, *history[valid].unbind(1), index, kv_offsets=offsets)
    assert relative_error(padded, exact) < 2e-6
    assert relative_error(jagged, exact) < 2e-6


@interpreted
def test_saved_tensors_that_come_back_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `torch.autograd.graph.save_on_cpu` gives them: not in the layout that the plan's launches are for."""
    from ikbo_recsys.kernels._attention_launch import LENGTHS
    from ikbo_recsys.kernels._attention_plans import Plan, group

    to_user = torch.randint(0, 3, (9,)).sort()[0]
    offsets, _ = group(to_user, 3)
    query, history, lengths = torch.randn(9, 2, 2, 32)[..., 16:], torch.randn(3, 11, 2, 2, 16), torch.tensor([5, 0, 11])
    plan = Plan("triton", 3, LENGTHS, 0.25)
    leaves = [x.detach().requires_grad_() for x in (query, *history.unbind(2))]

    def gradients_by_the_plan() -> tuple[Tensor, ...]:
        out = plan(*leaves, to_user, offsets, lengths)
        return torch.autograd.grad(out.square().sum(), leaves)

    expected = gradients_by_the_plan()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x
    ):
        found = gradients_by_the_plan()
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


def _call(seed: int, grouped: bool, first: bool) -> tuple:
    """One call through the public function, or the repetition of one, against its twin; operands and signature."""
    from ikbo_recsys import CandidateIndex, kernels
    from ikbo_recsys.kernels import _attention_paths as paths
    from ikbo_recsys.kernels import _plan

    torch.manual_seed(seed)
    ids = torch.randint(0, 3, (9,))
    ids = ids.sort()[0] if grouped else ids
    index = CandidateIndex.from_user_ids(ids, 3, grouped=grouped)
    inputs = [torch.randn(shape) for shape in ((9, 2, 2, 16), (3, 11, 1, 16), (3, 11, 1, 16))]
    lengths = torch.randint(0, 12, (3,))
    exact = [x.double() for x in inputs]
    expected = gradients(lambda q, k, v: twins.cross_attention(q, k, v, ids, lengths), *exact)
    known = _plan.signature("cross_attention", (*inputs, None, lengths, None), index, None, False)
    assert known is not None
    if first:
        ours = gradients(lambda q, k, v: kernels.cross_attention(q, k, v, index, kv_lengths=lengths), *inputs)
        operands = (*inputs, index.to_user, index.offsets, lengths, None)
        paths.attention(*operands, scale=16**-0.5, path="triton", known=known)
    else:
        ours = gradients(lambda q, k, v: _plan.recall(known).repeat(q, k, v, index, lengths, None), *inputs)
    for got, want in zip(ours, expected, strict=True):
        assert relative_error(got, want) < 2e-6
    return (*inputs, index, lengths), known


@interpreted
@pytest.mark.parametrize("grouped", [True, False])
def test_public_function_and_calls_like_one_before(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `kernels.cross_attention` and autograd; a repeated call skips the checks and gives the new result."""
    from ikbo_recsys.kernels import _backend, _plan

    monkeypatch.setattr(_backend, "portable_refusal", lambda *_: None)
    _plan.forget()
    with _backend.use_backend("triton"):
        _, known = _call(0, grouped, True)
        (query, key, value, index, lengths), again = _call(1, grouped, False)
        assert known == again
        # Another scale, shape, stride or dtype is another call.
        strided = torch.cat((query, query), -1)[..., :16]
        for other, scale in ((query, 0.5), (query[1:], None), (strided, None), (query.half(), None)):
            tensors = (other, key, value, None, lengths, None)
            assert _plan.signature("cross_attention", tensors, index, scale, False) != known


def _far(x: Tensor, dim: int, stride: int) -> Tensor:
    """`x` with another stride in memory of which no more is touched than it needs."""
    strides = [stride if i == dim else each for i, each in enumerate(x.stride())]
    elements = sum((size - 1) * each for size, each in zip(x.shape, strides, strict=True)) + 1
    storage = torch.UntypedStorage(elements * x.element_size())
    return torch.empty(0, dtype=x.dtype).set_(storage, 0, x.shape, strides).copy_(x)


@interpreted
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(("which", "dim", "stride"), [(0, 2, 2**31 + 16), (1, 2, 2**31 + 16), (1, 1, 2**25)])
def test_offsets_beyond_32_bits(which: int, dim: int, stride: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads, and blocks of a history's rows, that lie 2^31 elements apart; gradients by one kernel and by two."""
    from ikbo_recsys import CandidateIndex, kernels
    from ikbo_recsys.kernels import _attention_backward_launch, _backend

    monkeypatch.setattr(_backend, "portable_refusal", lambda *_: None)
    monkeypatch.setattr(_attention_backward_launch, "_FEWEST_PROGRAMS", 1 if few else 128)
    index = CandidateIndex.from_counts(torch.tensor([3, 2]))
    leaves = [torch.randn(5, 1, 2, 16).half(), *(torch.randn(2, 70, 2, 16).half() for _ in range(2))]
    if dim == 1:  # of one user, or there would be as much memory for each
        index, leaves[1:] = CandidateIndex.from_counts(torch.tensor([5])), [x[:1] for x in leaves[1:]]
    exact = [x.double().requires_grad_() for x in leaves]
    leaves[which] = _far(leaves[which], dim, stride)
    grad = torch.randn(5, 1, 2, 16).half()

    def results(tensors: list[Tensor]) -> list[Tensor]:
        tensors = [x.requires_grad_() for x in tensors]
        out = kernels.cross_attention(*tensors, index)
        return [out.detach(), *torch.autograd.grad(out, tensors, grad.to(out.dtype))]

    with _backend.use_backend("triton"):
        found = results(leaves)
    for ours, true in zip(found, results(exact), strict=True):
        assert relative_error(ours, true) < TOLERANCE[torch.float16]
