"""`CandidateIndex`: constructors, composition, validation, pytree, moves."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.utils import _pytree as pytree

from ikbo_recsys import CandidateIndex
from tests.cases import BATCHES

DTYPES = [torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0], [], [5], [1, 1, 1]])
def test_counts_offsets_and_ids_agree(counts: list[int], dtype: torch.dtype) -> None:
    counts_U = torch.tensor(counts, dtype=dtype)
    expected = [user for user, count in enumerate(counts) for _ in range(count)]
    offsets = torch.tensor([0, *counts_U.cumsum(0).tolist()], dtype=dtype)
    for index in (
        CandidateIndex.from_counts(counts_U),
        CandidateIndex.from_counts(counts_U, num_candidates=sum(counts)),
        CandidateIndex.from_offsets(offsets),
        CandidateIndex.from_user_ids(torch.tensor(expected, dtype=dtype), len(counts), grouped=True),
    ):
        assert index.to_user.tolist() == expected
        assert index.offsets is not None
        assert index.offsets.tolist() == offsets.tolist()
        assert (index.num_users, index.num_candidates, index.is_grouped) == (len(counts), len(expected), True)
        assert index.dtype is dtype is index.offsets.dtype
        assert index.counts().tolist() == counts
        assert index.validate() is index


@pytest.mark.parametrize(("users", "candidates"), BATCHES)
def test_ungrouped_counts(users: int, candidates: int) -> None:
    ids = torch.randint(0, max(users, 1), (candidates,))
    index = CandidateIndex.from_user_ids(ids, users)
    assert not index.is_grouped
    assert index.counts().tolist() == torch.bincount(ids, minlength=users).tolist()


@pytest.mark.parametrize("grouped", [True, False])
def test_three_levels_compose(grouped: bool) -> None:
    vendors = CandidateIndex.from_user_ids(torch.tensor([0, 0, 2, 2, 2]), 3, grouped=grouped)
    items = CandidateIndex.from_user_ids(torch.tensor([0, 1, 1, 3, 4, 4, 4]), 5, grouped=grouped)
    composed = vendors.then(items)
    assert composed.to_user.tolist() == [0, 0, 0, 2, 2, 2, 2]
    assert (composed.num_users, composed.is_grouped) == (3, grouped)
    composed.validate()
    x = torch.randn(3, 2)
    assert torch.equal(x[composed.to_user], x[vendors.to_user][items.to_user])


def test_compose_refuses_levels_that_do_not_meet() -> None:
    parent = CandidateIndex.from_counts(torch.tensor([2, 1]))
    with pytest.raises(ValueError, match=r"child.num_users is 4 but the parent level has 3 candidates"):
        parent.then(CandidateIndex.from_counts(torch.tensor([1, 1, 1, 1])))
    with pytest.raises(TypeError, match=r"child is torch.int32 but the parent level is torch.int64"):
        parent.then(CandidateIndex.from_counts(torch.tensor([1, 1, 1], dtype=torch.int32)))


@pytest.mark.parametrize("entry", [-1, 3, 4, 2**31])
def test_an_index_out_of_range_is_named(entry: int) -> None:
    with pytest.raises(ValueError, match=rf"to_user\[1\] is {entry} but num_users is 3"):
        CandidateIndex.from_user_ids(torch.tensor([0, entry, 2]), 3)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2, 3], r"offsets\[0\] is 1 but must be 0"),
        ([0, 2, 1, 3], r"offsets\[2\] is 1, less than offsets\[1\] which is 2"),
    ],
)
def test_malformed_offsets(offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CandidateIndex.from_offsets(torch.tensor(offsets))


def test_counts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="counts sum to 5 but num_candidates is 6"):
        CandidateIndex.from_counts(torch.tensor([2, 3]), num_candidates=6)
    with pytest.raises(ValueError, match=r"counts\[1\] is -3"):
        CandidateIndex.from_counts(torch.tensor([2, -3]))
    with pytest.raises(ValueError, match=r"offsets\[-1\] is 3 but num_candidates is 2"):
        CandidateIndex(torch.tensor([0, 1]), 2, torch.tensor([0, 1, 3])).validate()
    with pytest.raises(ValueError, match=r"to_user\[0\] is 1 but offsets put that candidate under user 0"):
        CandidateIndex(torch.tensor([1, 1]), 2, torch.tensor([0, 1, 2])).validate()


def test_more_malformed_values() -> None:
    with pytest.raises(ValueError, match=r"offsets\[-1\] is 3 but num_candidates is 5"):
        CandidateIndex.from_offsets(torch.tensor([0, 3]), num_candidates=5)
    with pytest.raises(ValueError, match=r"offsets\[1\] is -3, less than offsets\[0\] which is 0"):
        CandidateIndex.from_offsets(torch.tensor([0, -3]))
    with pytest.raises(ValueError, match=r"ids\[1\] is 1, less than ids\[0\] which is 2"):
        CandidateIndex.from_user_ids(torch.tensor([2, 1, 0, 0]), 3, grouped=True)
    with pytest.raises(ValueError, match="int32 cannot hold"):
        CandidateIndex.from_counts(torch.tensor([2**31 - 1, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="num_users must not be negative, got -5"):
        CandidateIndex.from_user_ids(torch.tensor([], dtype=torch.int64), -5, grouped=True)
    for wrong in (2.5, torch.tensor(2), True, None):
        with pytest.raises(TypeError, match="num_users must be an integer, got"):
            CandidateIndex(torch.tensor([0]), wrong)  # type: ignore[arg-type]


def test_wrong_kinds_are_refused() -> None:
    with pytest.raises(TypeError, match="to_user must be int32 or int64, got torch.float32"):
        CandidateIndex(torch.zeros(3), 2)
    with pytest.raises(TypeError, match="to_user must be a tensor, got list"):
        CandidateIndex([0, 1], 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="to_user must have 1 dimension, got 2"):
        CandidateIndex(torch.zeros(3, 1, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match=r"offsets has 2 entries but num_users \+ 1 is 3"):
        CandidateIndex(torch.tensor([0]), 2, torch.tensor([0, 1]))
    with pytest.raises(TypeError, match="offsets is torch.int32 but to_user is torch.int64"):
        CandidateIndex(torch.tensor([0]), 1, torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match="num_users must not be negative, got -1"):
        CandidateIndex(torch.tensor([0]), -1)
    with pytest.raises(ValueError, match="offsets is on meta but to_user is on cpu"):
        CandidateIndex(torch.tensor([0]), 1, torch.tensor([0, 1], device="meta"))
    with pytest.raises(ValueError, match="offsets has 0 entries"):
        CandidateIndex.from_offsets(torch.tensor([], dtype=torch.int64))


def test_it_is_immutable_and_copies() -> None:
    index = CandidateIndex.from_counts(torch.tensor([2, 1]))
    with pytest.raises(AttributeError):
        index.num_users = 3  # type: ignore[misc]
    file = io.BytesIO()
    torch.save(index, file)
    file.seek(0)
    for other in (copy.deepcopy(index), torch.load(file), index.to("cpu")):
        assert torch.equal(other.to_user, index.to_user)
        assert other.num_users == 2
    assert index.to(torch.int32).dtype is torch.int32
    assert index.to("meta").device.type == "meta"


def test_it_is_a_pytree() -> None:
    index = CandidateIndex.from_counts(torch.tensor([2, 1]))
    doubled = pytree.tree_map_only(torch.Tensor, lambda t: t * 2, {"index": index})["index"]
    assert isinstance(doubled, CandidateIndex)
    assert doubled.to_user.tolist() == [0, 0, 2]
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(index)[0]]
    assert paths == [".to_user", ".num_users", ".offsets"]


def test_constructors_compile_without_a_break() -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def rank(user: torch.Tensor, counts: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        index = CandidateIndex.from_counts(counts, num_candidates=candidates.shape[0])
        return user[index.to_user] * candidates + index.num_users

    for counts in ([2, 0, 3], [4, 1, 1, 1, 9]):
        counts_U = torch.tensor(counts)
        user, candidates = torch.randn(len(counts), 2), torch.randn(sum(counts), 2)
        expected = user.repeat_interleave(counts_U, 0) * candidates + len(counts)
        assert torch.equal(rank(user, counts_U, candidates), expected)


def test_from_inverse_indices_of_a_variable_batch() -> None:
    torchrec = pytest.importorskip("torchrec")
    features = torchrec.KeyedJaggedTensor(
        keys=["country", "item"],
        values=torch.arange(6),
        lengths=torch.ones(6, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [4]],
        inverse_indices=(["item", "country"], torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0]])),
    )
    index = CandidateIndex.from_inverse_indices(features, "country")
    assert index.to_user.tolist() == [0, 0, 0, 0]
    assert (index.num_users, index.num_candidates) == (2, 4)
    with pytest.raises(ValueError, match="'city' is not among the keys"):
        CandidateIndex.from_inverse_indices(features, "city")
    plain = torchrec.KeyedJaggedTensor.from_lengths_sync(["item"], torch.arange(2), torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="no inverse_indices"):
        CandidateIndex.from_inverse_indices(plain, "item")
