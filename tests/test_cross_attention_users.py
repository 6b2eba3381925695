"""`cross_attention` with query rows of the users' own, and its log-sum-exp, against their broadcast twins.

The twin of a user's own rows is the twin of candidates that are one to a user.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ikbo_recsys import CandidateIndex, IKBOCrossAttention, kernels
from tests import twins
from tests.cases import BATCHES, INDEX_KINDS, make_index, relative_error, strided, to_user
from tests.test_cross_attention import jagged

OPS = torch.ops.ikbo.cross_attention


def with_gradients(function: Any, *inputs: Tensor) -> list[Tensor]:
    """The results of `function`, and the gradient of a fixed random projection of all of them for each input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    results = function(*leaves)
    torch.manual_seed(5)
    loss = sum((finite(x) * torch.randn(x.shape, dtype=torch.float64)).sum() for x in results)
    return [*(x.detach() for x in results), *torch.autograd.grad(loss, leaves)]


def finite(x: Tensor) -> Tensor:
    """Without the -inf of rows that have no key."""
    return x.masked_fill(x.isinf(), 0)


def twin(q: Tensor, own: Tensor, k: Tensor, v: Tensor, index: Any, lengths: Tensor | None, **more: Any) -> list[Tensor]:
    """out, user_out, lse, user_lse."""
    sides = (q, to_user(index)), (own, torch.arange(own.shape[0]))
    outs = [twins.cross_attention(x, k, v, ids, lengths, **more) for x, ids in sides]
    return outs + [twins.log_sum_exp(x, k, ids, lengths, **more) for x, ids in sides]


def compare(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize(("users", "candidates"), BATCHES)
def test_equals_the_twin_forward_and_backward(users: int, candidates: int, kind: str) -> None:
    """Padded with garbage behind the lengths, jagged; grouped query heads, strided operands, users without either."""
    index, lengths = make_index(users, candidates, kind), torch.randint(0, 12, (users,))
    inputs = (
        *(strided(candidates, 3, 6, 5), strided(users, 4, 6, 5)),
        *(torch.randn(users, 11, 2, 5).double() for _ in range(2)),
    )
    expected = with_gradients(lambda *x: twin(*x, index, lengths), *inputs)
    padding = (torch.arange(11) >= lengths[:, None])[:, :, None, None]

    def padded(q: Tensor, own: Tensor, k: Tensor, v: Tensor) -> Any:
        k, v = (x.masked_fill(padding, float("nan")) for x in (k, v))
        return kernels.cross_attention(q, k, v, index, user_query=own, kv_lengths=lengths, return_lse=True)

    def of_jagged(q: Tensor, own: Tensor, k: Tensor, v: Tensor) -> Any:
        rows, offsets = jagged(k, lengths)
        rest = {"kv_offsets": offsets, "user_query": own, "return_lse": True}
        return kernels.cross_attention(q, rows, jagged(v, lengths)[0], index, **rest)

    for ours in (padded, of_jagged):
        compare(with_gradients(ours, *inputs), expected)


def test_each_result_is_the_same_whatever_else_is_asked_for() -> None:
    index, lengths = make_index(3, 7, "shuffled"), torch.tensor([5, 0, 9])
    q, own, k, v = (torch.randn(n, m, h, 8) for n, m, h in ((7, 2, 4), (3, 6, 4), (3, 9, 2), (3, 9, 2)))
    options = {"kv_lengths": lengths, "scale": 0.3}
    out, user_out, lse, user_lse = kernels.cross_attention(q, k, v, index, user_query=own, return_lse=True, **options)
    compare(list(kernels.cross_attention(q, k, v, index, user_query=own, **options)), [out, user_out])
    compare(list(kernels.cross_attention(q, k, v, index, return_lse=True, **options)), [out, lse])
    torch.testing.assert_close(kernels.cross_attention(q, k, v, index, **options), out)
    compare([out, user_out, lse, user_lse], twin(q, own, k, v, index, lengths, scale=0.3))
    assert bool((lse[to_user(index) == 1] == float("-inf")).all())
    assert bool((user_lse[1] == float("-inf")).all())
    assert not user_out[1].any()


def test_two_histories_are_merged_by_their_log_sum_exps() -> None:
    """What the log-sum-exp is for: attention over two sets of keys is the mean of both, weighted by exp(lse)."""
    index = make_index(3, 7, "grouped")
    q, k, v = (torch.randn(n, m, 2, 8).double().requires_grad_() for n, m in ((7, 2), (3, 9), (3, 9)))

    def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [kernels.cross_attention(q, k[:, s], v[:, s], index, return_lse=True) for s in (slice(4), slice(4, 9))]
        weights = torch.stack([lse for _, lse in parts]).softmax(0)
        return (weights[..., None] * torch.stack([out for out, _ in parts])).sum(0)

    whole = kernels.cross_attention(q, k, v, index)
    ours = merged(q, k, v)
    torch.testing.assert_close(ours, whole)
    grad = torch.randn_like(whole)
    compare(
        list(torch.autograd.grad(ours, (q, k, v), grad, retain_graph=True)),
        list(torch.autograd.grad(whole, (q, k, v), grad)),
    )


@pytest.mark.parametrize("layout", ["full", "lengths", "jagged"])
def test_gradcheck(layout: str) -> None:
    index, lengths = make_index(3, 5, "shuffled"), torch.tensor([4, 1, 2])
    shapes = ((5, 2, 4, 3), (3, 2, 4, 3), (3, 4, 2, 3), (3, 4, 2, 3))
    q, own, k, v = (torch.randn(s, dtype=torch.float64) for s in shapes)
    options: dict[str, Any] = {"kv_lengths": lengths} if layout == "lengths" else {}
    if layout == "jagged":
        (k, offsets), v = jagged(k, lengths), jagged(v, lengths)[0]
        options = {"kv_offsets": offsets}

    def call(q: Tensor, own: Tensor, k: Tensor, v: Tensor) -> Any:
        return kernels.cross_attention(q, k, v, index, user_query=own, return_lse=True, **options)

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in (q, own, k, v)])


@pytest.mark.parametrize(("overload", "grad"), [("lse", False), ("users", False), ("users_lse", True)])
def test_opcheck(overload: str, grad: bool) -> None:
    q, own, k = (torch.randn(s, requires_grad=grad) for s in ((7, 2, 4, 6), (3, 3, 4, 6), (3, 5, 2, 6)))
    index, lengths = torch.randint(0, 3, (7,)), torch.tensor([5, 0, 2])
    kwargs: dict[str, Any] = {"kv_lengths": lengths} | ({"user_query": own} if "users" in overload else {})
    op = getattr(OPS, overload)
    assert set(torch.library.opcheck(op, (q, k, k, index), kwargs).values()) == {"SUCCESS"}
    expected = kernels.cross_attention(q, k, k, index, **kwargs, return_lse="lse" in overload)
    compare(list(op(q, k, k, index, **kwargs)), list(expected))


@pytest.mark.slow
def test_compile_has_no_break_and_no_recompile() -> None:
    torch._dynamo.reset()

    def call(q: Tensor, own: Tensor, k: Tensor, v: Tensor, index: CandidateIndex, lengths: Tensor) -> Any:
        return kernels.cross_attention(q, k, v, index, user_query=own, kv_lengths=lengths, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for count, (users, candidates, rows) in enumerate([(17, 29, 5), (13, 37, 7), (2, 300, 4)]):
        index, lengths = make_index(users, candidates, "grouped"), torch.randint(0, 12, (users,))
        shapes = ((candidates, 2, 4, 6), (users, rows, 4, 6), (users, 11, 2, 6), (users, 11, 2, 6))
        inputs = [torch.randn(shape) for shape in shapes]
        with torch._dynamo.config.patch(error_on_recompile=count > 0):
            ours = with_gradients(lambda *x, i=index, n=lengths: compiled(*x, i, n), *inputs)
        expected = with_gradients(lambda *x, i=index, n=lengths: twin(*x, i, n), *inputs)
        for got, want in zip(ours, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_export_with_every_size_dynamic() -> None:
    class Call(nn.Module):
        def forward(self, q: Tensor, own: Tensor, k: Tensor, index: Tensor, lengths: Tensor) -> Any:
            return kernels.cross_attention(q, k, k, index, user_query=own, kv_lengths=lengths, return_lse=True)

    def inputs(users: int, candidates: int, rows: int, history: int) -> tuple[Tensor, ...]:
        tensors = [torch.randn(n, m, 2, 8) for n, m in ((candidates, 3), (users, rows), (users, history))]
        return (*tensors, torch.randint(0, users, (candidates,)), torch.randint(0, history + 1, (users,)))

    auto = torch.export.Dim.AUTO
    shapes = ({0: auto}, {0: auto, 1: auto}, {0: auto, 1: auto}, {0: auto}, {0: auto})
    with torch.no_grad():
        program = torch.export.export(Call(), inputs(5, 23, 4, 9), dynamic_shapes=shapes)
    for sizes in ((5, 23, 4, 9), (3, 7, 2, 6), (9, 4, 11, 3), (7, 301, 5, 20)):
        example = inputs(*sizes)
        compare(list(program.module()(*example)), list(Call()(*example)))


def test_meta_tensors_and_autocast() -> None:
    index = torch.randint(0, 3, (7,))
    q, own, k = torch.randn(7, 2, 4, 6), torch.randn(3, 5, 4, 6), torch.randn(3, 8, 2, 6)
    real = kernels.cross_attention(q, k, k, index, user_query=own, return_lse=True)
    on_meta = [x.to("meta") for x in (q, k, k, index)]
    for got, want in zip(
        kernels.cross_attention(*on_meta, user_query=own.to("meta"), return_lse=True), real, strict=True
    ):
        assert (got.device.type, got.shape, got.dtype, got.stride()) == ("meta", want.shape, want.dtype, want.stride())
    with torch.autocast("cpu", torch.bfloat16):
        half = kernels.cross_attention(q, k, k, index, user_query=own, return_lse=True)
    assert [x.dtype for x in half] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    mixed = kernels.cross_attention(q.half(), k.half(), k.half(), index, user_query=own, return_lse=True)
    assert [x.dtype for x in mixed] == [torch.float32] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_accuracy_is_not_below_the_twins(dtype: torch.dtype) -> None:
    index, lengths = make_index(3, 20, "grouped"), torch.tensor([50, 17, 1])
    shapes = ((20, 2, 4, 32), (3, 9, 4, 32), (3, 50, 2, 32), (3, 50, 2, 32))
    q, own, k, v = inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    exact = twin(*(x.double() for x in inputs), index, lengths)
    theirs = twin(*inputs, index, lengths)
    ours = kernels.cross_attention(q, k, v, index, user_query=own, kv_lengths=lengths, return_lse=True)
    for got, other, want in zip(ours, theirs, exact, strict=True):
        assert relative_error(got, want) <= 1.1 * relative_error(other, want) + 1e-7


def test_the_history_is_never_copied_and_its_flops_count() -> None:
    """Own rows read keys and values where they are; the counter sees both kinds of rows."""
    import ikbo_recsys.kernels.flops  # noqa: F401
    from tests.test_operators import LargestTensor

    users, candidates = 4, 2048
    index = make_index(users, candidates, "grouped")
    q, own, k = (torch.randn(n, m, 2, 8, requires_grad=True) for n, m in ((candidates, 1), (users, 3), (users, 300)))
    with LargestTensor() as largest, torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        outs = kernels.cross_attention(q, k, k, index, user_query=own)
    assert largest.bytes < candidates * k[0].numel() * 4 / 4
    with torch.utils.flop_counter.FlopCounterMode(display=False) as without:
        kernels.cross_attention(q, k, k, index)
    assert counter.get_total_flops() - without.get_total_flops() == 4 * users * 3 * 2 * 300 * 8
    sum(out.square().sum() for out in outs).backward()


def test_errors_name_the_argument_and_both_sizes() -> None:
    q, k, index = torch.randn(4, 1, 2, 8), torch.randn(3, 5, 2, 8), torch.tensor([0, 1, 2, 2])
    for own, message in (
        (torch.randn(3, 2, 8), r"user_query must be \[U, X, H, D\], got 3 dimensions"),
        (torch.randn(4, 1, 2, 8), "user batch size of user_query is 4 but user batch size of key is 3"),
        (torch.randn(3, 1, 4, 8), "head count of user_query is 4 but head count of query is 2"),
        (torch.randn(3, 1, 2, 6), "head size of user_query is 6 but head size of query is 8"),
        (torch.zeros(3, 1, 2, 8, dtype=torch.int64), "user_query must be float32.*got torch.int64"),
        (torch.zeros(3, 1, 2, 8, device="meta"), "user_query is on meta but query is on cpu"),
        ([1.0], r"user_query must be a tensor \[U, X, H, D\], got list"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            kernels.cross_attention(q, k, k, index, user_query=own)  # type: ignore[call-overload]


@pytest.mark.parametrize("user_dim", [None, 24])
def test_the_module_is_self_and_target_attention_with_the_same_weights(user_dim: int | None) -> None:
    dense = twins.AttentionTwin(32, 4, kdim=user_dim, vdim=user_dim, batch_first=True)
    nn.init.normal_(dense.in_proj_bias)
    module = IKBOCrossAttention.from_dense(dense)
    index, lengths = CandidateIndex.from_counts(torch.tensor([2, 0, 4])), torch.tensor([7, 3, 1])
    user, cand = torch.randn(3, 7, user_dim or 32), torch.randn(6, 2, 32)
    own = user if user_dim is None else torch.randn(3, 5, 32)
    expected = [dense(user, cand, index.to_user, lengths)]
    expected.append(dense(user, own, torch.arange(3), lengths))
    got = module(user, cand, index, lengths, user_query=own)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module(user, cand, index, lengths), got[0], rtol=1e-5, atol=1e-5)
    rows, offsets = jagged(user, lengths)
    for a, b in zip(module(rows, cand, index, user_query=own, offsets=offsets), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert set(module.state_dict()) == set(dense.state_dict())
    parameters = list(module.parameters())
    ours = torch.autograd.grad(sum(x.square().sum() for x in got), parameters)
    theirs = torch.autograd.grad(sum(x.square().sum() for x in expected), list(dense.parameters()))
    by_name = dict(zip((name for name, _ in dense.named_parameters()), theirs, strict=True))
    for name, gradient in zip((name for name, _ in module.named_parameters()), ours, strict=True):
        torch.testing.assert_close(gradient, by_name[name], rtol=1e-4, atol=1e-4)


def test_the_module_refuses_wrong_own_rows() -> None:
    module, index = IKBOCrossAttention(8, 2, user_dim=6), torch.tensor([0, 1])
    user, cand = torch.randn(2, 3, 6), torch.randn(2, 1, 8)
    with pytest.raises(ValueError, match="user_query has embedding size 6 but embed_dim is 8"):
        module(user, cand, index, user_query=user)
    with pytest.raises(ValueError, match=r"user_query must be \[U, X, E\], got shape \(2, 8\)"):
        module(user, cand, index, user_query=cand[:, 0])
    with pytest.raises(TypeError, match="user_query must be a tensor, got list"):
        module(user, cand, index, user_query=[1])
