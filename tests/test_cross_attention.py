"""`cross_attention` and `IKBOCrossAttention` against their broadcast twins."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ikbo_recsys import CandidateIndex, IKBOCrossAttention, kernels
from tests import twins
from tests.cases import BATCHES, INDEX_KINDS, gradients, make_index, relative_error, to_user


def jagged(x_UT: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    valid = torch.arange(x_UT.shape[1]) < lengths[:, None]
    return x_UT[valid], torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


@pytest.mark.parametrize("kind", INDEX_KINDS)
@pytest.mark.parametrize(("users", "candidates"), BATCHES)
def test_equals_the_twin_forward_and_backward(users: int, candidates: int, kind: str) -> None:
    index, lengths = make_index(users, candidates, kind), torch.randint(0, 12, (users,))
    buffer = torch.randn(users, 11, 2, 3 * 5).double()
    inputs = torch.randn(candidates, 3, 6, 5).double(), buffer[..., 1:6], buffer[..., 7:12]
    twin = gradients(lambda q, k, v: twins.cross_attention(q, k, v, to_user(index), lengths), *inputs)
    padded = gradients(lambda q, k, v: kernels.cross_attention(q, k, v, index, kv_lengths=lengths), *inputs)

    def on_jagged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, offsets = jagged(key, lengths)
        return kernels.cross_attention(query, rows, jagged(value, lengths)[0], index, kv_offsets=offsets)

    for ours in (padded, gradients(on_jagged, *inputs)):
        for got, expected in zip(ours, twin, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("head_size", [1, 8, 24, 48, 64, 96, 128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
def test_head_sizes_and_grouped_query_heads(head_size: int, heads: tuple[int, int]) -> None:
    index = make_index(2, 5, "shuffled")
    query = torch.randn(5, 2, heads[0], head_size).double()
    key, value = (torch.randn(2, 7, heads[1], head_size).double() for _ in range(2))
    for scale in (None, 0.3):
        out = kernels.cross_attention(query, key, value, index, scale=scale)
        torch.testing.assert_close(out, twins.cross_attention(query, key, value, to_user(index), scale=scale))


@pytest.mark.parametrize("seeds", [0, 1, 2, 17, 64, 200])
def test_seeds(seeds: int) -> None:
    index, lengths = make_index(3, 4, "grouped"), torch.tensor([5, 0, 2])
    query, key, value = torch.randn(4, seeds, 2, 8), torch.randn(3, 5, 2, 8), torch.randn(3, 5, 2, 8)
    out = kernels.cross_attention(query, key, value, index, kv_lengths=lengths)
    expected = twins.cross_attention(query, key, value, to_user(index), lengths)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_no_history_gives_zeros_and_zero_gradients() -> None:
    index = CandidateIndex.from_counts(torch.tensor([3, 2]))
    inputs = torch.randn(5, 1, 2, 4), torch.randn(2, 6, 2, 4), torch.randn(2, 6, 2, 4)
    lengths = torch.tensor([0, 6])
    out, *grads = gradients(lambda q, k, v: kernels.cross_attention(q, k, v, index, kv_lengths=lengths), *inputs)
    assert not out[:3].any()
    assert out[3:].any()
    for gradient, rows in zip(grads, (slice(0, 3), slice(0, 1), slice(0, 1)), strict=True):
        assert gradient.isfinite().all()
        assert not gradient[rows].any()


@pytest.mark.parametrize("shape", ["padded", "jagged"])
def test_no_rows_at_all(shape: str) -> None:
    index = make_index(2, 5, "grouped")
    query = torch.randn(5, 1, 2, 4)
    if shape == "padded":
        rows = torch.randn(2, 0, 2, 4)
        out, *grads = gradients(lambda q, k: kernels.cross_attention(q, k, k, index), query, rows)
    else:
        rows, offsets = torch.randn(0, 2, 4), torch.zeros(3, dtype=torch.int32)
        out, *grads = gradients(lambda q, k: kernels.cross_attention(q, k, k, index, kv_offsets=offsets), query, rows)
    assert out.shape == query.shape
    assert not out.any()
    assert not grads[0].any()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_padding_is_never_attended_to(garbage: float) -> None:
    index, lengths = make_index(3, 9, "shuffled"), torch.tensor([4, 0, 2])
    query, clean = torch.randn(9, 2, 2, 4), torch.randn(3, 5, 2, 4)
    dirty = clean.masked_fill((torch.arange(5) >= lengths[:, None])[:, :, None, None], garbage)
    expected = gradients(lambda q, k: kernels.cross_attention(q, k, k, index, kv_lengths=lengths), query, clean)
    got = gradients(lambda q, k: kernels.cross_attention(q, k, k, index, kv_lengths=lengths), query, dirty)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_large_logits_do_not_overflow() -> None:
    index = make_index(2, 6, "grouped")
    query, key, value = (200 * torch.randn(*s).half() for s in ((6, 1, 2, 16), (2, 9, 2, 16), (2, 9, 2, 16)))
    out = kernels.cross_attention(query, key, value, index, scale=1.0)
    exact = twins.cross_attention(query.double(), key.double(), value.double(), to_user(index), scale=1.0)
    assert relative_error(out, exact) < 1e-3


def test_a_permutation_of_candidates_permutes_the_result() -> None:
    ids = torch.randint(0, 3, (40,)).sort()[0]
    query, key, value = torch.randn(40, 2, 2, 8), torch.randn(3, 30, 2, 8), torch.randn(3, 30, 2, 8)
    out = kernels.cross_attention(query, key, value, CandidateIndex.from_user_ids(ids, 3, grouped=True))
    order = torch.randperm(40)
    shuffled = kernels.cross_attention(query[order], key, value, CandidateIndex.from_user_ids(ids[order], 3))
    torch.testing.assert_close(shuffled, out[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_accuracy_is_not_below_the_twins(dtype: torch.dtype) -> None:
    index, lengths = make_index(3, 20, "grouped"), torch.tensor([50, 17, 1])
    inputs = [torch.randn(*shape).to(dtype) for shape in ((20, 2, 4, 32), (3, 50, 2, 32), (3, 50, 2, 32))]
    exact = twins.cross_attention(*(x.double() for x in inputs), to_user(index), lengths)
    out = kernels.cross_attention(*inputs, index, kv_lengths=lengths)
    twin = twins.cross_attention(*inputs, to_user(index), lengths)
    assert out.dtype is dtype
    assert relative_error(out, exact) <= 1.1 * relative_error(twin, exact) + 1e-8


def test_errors_name_the_argument_and_both_sizes() -> None:
    query, key, index = torch.randn(4, 1, 2, 8), torch.randn(3, 5, 2, 8), torch.tensor([0, 1, 2, 2])

    def attend(
        message: str, q: Tensor = query, k: Tensor = key, v: Tensor = key, i: Tensor = index, **kwargs: object
    ) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            kernels.cross_attention(q, k, v, i, **kwargs)  # type: ignore[arg-type]

    attend(r"query must be \[B, S, H, D\], got 3 dimensions", q=query[0])
    attend(r"key must be \[U, T, Hkv, D\], got 3 dimensions", k=key[0])
    attend(r"key must be \[sum T, Hkv, D\], got 4 dimensions", kv_offsets=torch.tensor([0, 1, 2, 3]))
    attend("row count of key is 5 but row count of value is 4", v=key[:, :4])
    attend("max_kv_length is 4 but only jagged keys", max_kv_length=4)
    attend("head size of query is 7 but head size of key is 8", q=query[..., :7])
    attend("head count of query is 3, not a multiple of head count of key which is 2", q=torch.randn(4, 1, 3, 8))
    attend("index has 3 entries but the candidate batch size of query is 4", i=index[:3])
    attend(r"to_user\[3\] is 3 but num_users is 3", i=torch.tensor([0, 1, 2, 3]))
    attend("index must be int32 or int64, got torch.float32", i=index.float())
    attend("kv_lengths must be int32 or int64, got torch.float32", kv_lengths=torch.ones(3))
    attend("user batch size of kv_lengths is 2 but user batch size of key is 3", kv_lengths=torch.tensor([1, 2]))
    attend(r"kv_lengths\[1\] is -1, outside \[0, 5\]", kv_lengths=torch.tensor([1, -1, 2]))
    attend(r"kv_lengths\[2\] is 6, outside \[0, 5\]", kv_lengths=torch.tensor([1, 1, 6]))
    both = torch.tensor([1, 1, 1]), torch.tensor([0, 1, 2, 3])
    attend("give one of them", kv_lengths=both[0], kv_offsets=both[1])
    rows = torch.randn(7, 2, 8)
    attend("kv_offsets goes from 0 to 6, not from 0 to 7 rows", k=rows, v=rows, kv_offsets=torch.tensor([0, 1, 2, 6]))
    attend(
        r"kv_offsets\[2\] is 1, less than kv_offsets\[1\] which is 3",
        k=rows,
        v=rows,
        kv_offsets=torch.tensor([0, 3, 1, 7]),
    )
    attend(
        "a length of 5 but max_kv_length is 4", k=rows, v=rows, kv_offsets=torch.tensor([0, 1, 2, 7]), max_kv_length=4
    )
    attend(
        "max_kv_length must not be negative, got -1",
        k=rows,
        v=rows,
        kv_offsets=torch.tensor([0, 1, 2, 7]),
        max_kv_length=-1,
    )
    attend(
        "row count of key is 7 but row count of value is 6", k=rows, v=rows[:6], kv_offsets=torch.tensor([0, 1, 2, 7])
    )
    attend("query must be float32, float16, bfloat16 or float64, got torch.int64", q=query.long())


@pytest.mark.parametrize("user_dim", [None, 24])
def test_the_module_loads_a_multihead_attention_and_back(user_dim: int | None) -> None:
    dense = twins.AttentionTwin(32, 4, kdim=user_dim, vdim=user_dim, batch_first=True)
    nn.init.normal_(dense.in_proj_bias)
    module = IKBOCrossAttention(32, 4, user_dim=user_dim)
    module.load_state_dict(dense.state_dict())
    adopted = IKBOCrossAttention.from_dense(dense)
    assert adopted.out_proj.weight is dense.out_proj.weight
    assert not IKBOCrossAttention.from_dense(copy.deepcopy(dense).eval()).training
    index, lengths = CandidateIndex.from_counts(torch.tensor([2, 0, 4])), torch.tensor([7, 3, 1])
    user, cand = torch.randn(3, 7, user_dim or 32), torch.randn(6, 2, 32)
    expected = dense(user, cand, index.to_user, lengths)
    torch.testing.assert_close(module(user, cand, index, lengths), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(adopted(user, cand, index.to_user, lengths), expected, rtol=1e-5, atol=1e-5)
    rows, offsets = jagged(user, lengths)
    torch.testing.assert_close(module(rows, cand, index, offsets=offsets), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="a length of 7 but max_kv_length is 6"):
        module(rows, cand, index, offsets=offsets, max_length=6)
    back = nn.MultiheadAttention(32, 4, kdim=user_dim, vdim=user_dim)
    back.load_state_dict(module.state_dict())


def test_the_module_with_grouped_heads_and_other_sizes() -> None:
    module = IKBOCrossAttention(12, 4, user_dim=10, num_kv_heads=2, head_dim=6, bias=False)
    index = CandidateIndex.from_counts(torch.tensor([2, 3]))
    assert set(module.state_dict()) == {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"}
    out = module(torch.randn(2, 5, 10), torch.randn(5, 1, 12), index, torch.tensor([5, 0]))
    assert out.shape == (5, 1, 12)
    assert not out[2:].any()
    assert out[:2].any()


def test_the_module_refuses_what_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="embed_dim is 10, not a multiple of num_heads which is 4"):
        IKBOCrossAttention(10, 4)
    with pytest.raises(ValueError, match="num_heads must be positive, got 0"):
        IKBOCrossAttention(8, 0)
    with pytest.raises(ValueError, match="head_dim must be positive, got 0"):
        IKBOCrossAttention(8, 2, head_dim=0)
    with pytest.raises(ValueError, match="num_heads is 4, not a multiple of num_kv_heads which is 3"):
        IKBOCrossAttention(12, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match="add_bias_kv or add_zero_attn"):
        IKBOCrossAttention.from_dense(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    with pytest.raises(ValueError, match="kdim 6 but vdim 4"):
        IKBOCrossAttention.from_dense(nn.MultiheadAttention(8, 2, kdim=6, vdim=4))
    with pytest.raises(ValueError, match=r"attention dropout 0\.1"):
        IKBOCrossAttention.from_dense(nn.MultiheadAttention(8, 2, dropout=0.1))
    module, index = IKBOCrossAttention(8, 2, user_dim=6), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="user has embedding size 8 but user_dim is 6"):
        module(torch.randn(2, 3, 8), torch.randn(2, 1, 8), index)
    with pytest.raises(ValueError, match="candidate has embedding size 6 but embed_dim is 8"):
        module(torch.randn(2, 3, 6), torch.randn(2, 1, 6), index)
