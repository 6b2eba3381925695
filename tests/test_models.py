"""The ranking models: equal to their broadcast forms, trainable at every batch size, quantisable, exportable."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchrec.inference.modules import quantize_embeddings
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ikbo_recsys import CandidateIndex
from ikbo_recsys.export import check_program, export
from ikbo_recsys.models import IKBODLRM, IKBOSequenceRanker
from tests.ranking import (
    CANDIDATE_KEYS,
    DENSE_IN,
    DIM,
    MAX_HISTORY,
    ROWS,
    USER_KEYS,
    bags,
    item_table,
    make_dlrm,
    make_inputs,
    make_ranker,
    random_kjt,
    rows_of,
)
from tests.twins import AttentionTwin, CompressionTwin, LinearTwin

SIZES = [(1, 1), (1, 50), (3, 7), (7, 7), (9, 2), (4, 0), (0, 0)]
MAKE = {"dlrm": (make_dlrm, False), "ranker": (make_ranker, True)}


def merged(user: KeyedJaggedTensor, candidate: KeyedJaggedTensor, order: list[str]) -> KeyedJaggedTensor:
    """Features of both, in the order that one collection of all tables has."""
    both = KeyedJaggedTensor.concat([user, candidate])
    return both.permute([list(both.keys()).index(key) for key in order])


@pytest.mark.parametrize("order", [[*USER_KEYS, *CANDIDATE_KEYS], ["c2", "u2", "c1", "u1", "c3"]])
@pytest.mark.parametrize("top", [[24, 8, 1], [7, 2]])
def test_dlrm_takes_over_torchrec_weights(order: list[str], top: list[int]) -> None:
    dlrm = DLRM(bags(order), DENSE_IN, [20, DIM], top)
    model = IKBODLRM.from_dlrm(dlrm, ["t_u1", "t_u2"])
    assert model.sparse.user_tables.embedding_bags["t_u1"].weight is (
        dlrm.sparse_arch.embedding_bag_collection.embedding_bags["t_u1"].weight
    )
    for users, candidates in [(1, 1), (1, 50), (3, 7), (9, 2)]:
        dense, user, candidate, index = make_inputs(users, candidates, history=False)
        rows = index.to_user.tolist()
        expected = dlrm(dense[index.to_user], merged(rows_of(user, rows), candidate, order))
        assert expected.shape == (candidates, top[-1])
        torch.testing.assert_close(model(dense, user, candidate, index), expected, rtol=1e-5, atol=1e-6)


def test_dlrm_gradients_are_those_of_torchrec() -> None:
    order = ["c2", "u2", "c1", "u1", "c3"]
    dlrm = DLRM(bags(order), DENSE_IN, [20, DIM], [24, 1])
    model = IKBODLRM.from_dlrm(copy.deepcopy(dlrm), ["t_u1", "t_u2"])
    dense, user, candidate, index = make_inputs(3, 20, history=False)
    model(dense, user, candidate, index).square().sum().backward()
    dlrm(
        dense[index.to_user], merged(rows_of(user, index.to_user.tolist()), candidate, order)
    ).square().sum().backward()
    theirs = dlrm.sparse_arch.embedding_bag_collection.embedding_bags
    ours = {**model.sparse.user_tables.embedding_bags, **model.sparse.candidate_tables.embedding_bags}
    for name in ours:
        torch.testing.assert_close(ours[name].weight.grad, theirs[name].weight.grad, rtol=1e-4, atol=1e-6)
    bottom = dlrm.dense_arch.model._mlp[0]._linear.weight.grad
    torch.testing.assert_close(model.dense.dense_arch[0].weight.grad, bottom, rtol=1e-4, atol=1e-6)


def test_dlrm_refuses_wrong_tables() -> None:
    dlrm = DLRM(bags(["u1", "c1"]), DENSE_IN, [20, DIM], [24, 1])
    with pytest.raises(ValueError, match="names 't_x' but the tables are"):
        IKBODLRM.from_dlrm(dlrm, ["t_x"])
    with pytest.raises(ValueError, match="tables on both sides, got 2 of 2"):
        IKBODLRM.from_dlrm(dlrm, ["t_u1", "t_c1"])
    with pytest.raises(ValueError, match="ends in 20 but the embedding size is 16"):
        IKBODLRM(bags(["u1"]), bags(["c1"]), DENSE_IN, [20], [24, 1])
    with pytest.raises(ValueError, match="at least 2 sizes"):
        IKBODLRM(bags(["u1"]), bags(["c1"]), DENSE_IN, [DIM], [1])
    only_items = item_table()
    only_items.embedding_configs()[0].feature_names = ["item"]
    with pytest.raises(ValueError, match="features of history and item, in that order"):
        IKBOSequenceRanker(bags(["u1"]), bags(["c1"]), only_items, DENSE_IN, 5)


def test_dlrm_with_a_feature_of_two_tables_is_refused() -> None:
    tables = bags(["u1", "c1"]).embedding_bag_configs()
    tables[1].feature_names = ["c1", "u1"]
    dlrm = DLRM(EmbeddingBagCollection(tables=tables), DENSE_IN, [20, DIM], [24, 1])
    with pytest.raises(ValueError, match="the feature 'u1' has several tables"):
        IKBODLRM.from_dlrm(dlrm, ["t_u1"])


def test_dlrm_takes_several_names_and_no_string() -> None:
    dlrm = DLRM(bags(["u", "c"]), DENSE_IN, [20, DIM], [24, 1])
    with pytest.raises(TypeError, match="several names of tables, got the string 't_u'"):
        IKBODLRM.from_dlrm(dlrm, "t_u")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dlrm_keeps_dtype_and_what_is_frozen(dtype: torch.dtype) -> None:
    order = ["c2", "u2", "c1", "u1", "c3"]
    dlrm = DLRM(bags(order), DENSE_IN, [20, DIM], [24, 8, 1]).to(dtype)
    dlrm.dense_arch.requires_grad_(False)
    dlrm.over_arch.model[0]._mlp[0]._linear.weight.requires_grad_(False)
    dlrm.sparse_arch.embedding_bag_collection.embedding_bags["t_c1"].weight.requires_grad_(False)
    model = IKBODLRM.from_dlrm(dlrm, ["t_u1", "t_u2"])
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    bottom = {f"dense.dense_arch.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}
    table = "sparse.candidate_tables.embedding_bags.t_c1.weight"
    assert frozen == {*bottom, "dense.over_first.weight", table}
    # The weights are compared by the scores, in fp64: torchrec's tables give fp32, with which a bf16 DLRM does not run.
    model.double(), dlrm.double()
    dense, user, candidate, index = make_inputs(3, 7, history=False)
    expected = dlrm(dense.double()[index.to_user], merged(rows_of(user, index.to_user.tolist()), candidate, order))
    torch.testing.assert_close(model(dense.double(), user, candidate, index), expected, rtol=1e-12, atol=1e-12)


class BroadcastRanker(nn.Module):
    """The dense part of `IKBOSequenceRanker` with torch's own layers and the user copied."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        features = model.compression.in_features
        self.dense_arch, self.over_rest = copy.deepcopy(model.dense_arch), copy.deepcopy(model.over_rest)
        self.compression = CompressionTwin(features, model.compression.out_features, bias=False)
        self.attention = AttentionTwin(DIM, model.attention.num_heads, batch_first=True)
        self.over_first = LinearTwin(model.over_first.in_features, model.over_first.out_features)
        self.load_state_dict(model.state_dict())

    def forward(
        self, dense: Tensor, user: Tensor, history: Tensor, lengths: Tensor, cand: Tensor, index: Tensor
    ) -> Tensor:
        user = torch.cat((self.dense_arch(dense)[:, None], user), 1)
        taste = self.attention(history, cand[:, :1], index, lengths)
        mixed = torch.cat((self.compression(user, cand, index), taste), 1)
        first, second = torch.triu_indices(mixed.shape[1], mixed.shape[1], 1)
        pairs = (mixed[:, first] * mixed[:, second]).sum(-1)
        hidden = self.over_first(user.flatten(1), torch.cat((mixed.flatten(1), pairs), 1), index)
        return self.over_rest(F.relu(hidden))


@pytest.mark.parametrize(("users", "candidates"), [(1, 1), (1, 50), (3, 7), (7, 7), (9, 2)])
def test_ranker_is_its_broadcast_form(users: int, candidates: int) -> None:
    model = make_ranker()
    twin = BroadcastRanker(model.dense)
    dense, user, candidate, index = make_inputs(users, candidates, history=True)
    embeddings = list(model.sparse(user, candidate))
    # nn.MultiheadAttention gives NaN for a user without a history, who has a test of its own below.
    embeddings[2] = embeddings[2].clamp(min=1)
    embeddings = [x.detach().requires_grad_() if x.is_floating_point() else x for x in embeddings]
    ours, theirs = model.dense(dense, *embeddings, index), twin(dense, *embeddings, index.to_user)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    leaves = [x for x in embeddings if x.is_floating_point()]
    upstream, parameters = torch.randn_like(ours), dict(twin.named_parameters())
    for a, b in zip(
        torch.autograd.grad(ours, [*leaves, *model.dense.parameters()], upstream),
        torch.autograd.grad(theirs, [*leaves, *(parameters[k] for k, _ in model.dense.named_parameters())], upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_history_and_items_share_a_table() -> None:
    model = make_ranker()
    dense, user, candidate, index = make_inputs(3, 7, history=True)
    user_UFD, history_UTD, lengths_U, cand_BFD = model.sparse(user, candidate)
    weight = model.sparse.item_table.embeddings["t_item"].weight
    assert user_UFD.shape == (3, 2, DIM)
    assert cand_BFD.shape == (7, 4, DIM)
    torch.testing.assert_close(cand_BFD[:, 0], weight[candidate["item"].values()], rtol=0, atol=0)
    for row, ids in enumerate(user["history"].to_dense()):
        torch.testing.assert_close(history_UTD[row, : len(ids)], weight[ids], rtol=0, atol=0)
        assert int(lengths_U[row]) == len(ids)
    model(dense, user, candidate, index).sum().backward()
    owner = torch.repeat_interleave(user["history"].lengths())
    seen = user["history"].values()[index.counts()[owner] > 0]
    used = torch.cat((candidate["item"].values(), seen)).unique()
    touched = model.sparse.item_table.embeddings["t_item"].weight.grad.abs().sum(1).nonzero().flatten()
    assert touched.tolist() == used.tolist()


def test_long_history_is_cut_and_none_is_no_nan() -> None:
    model = make_ranker()
    lengths = torch.tensor([0, MAX_HISTORY + 4, 2])
    history = KeyedJaggedTensor(["history"], torch.randint(0, ROWS, (int(lengths.sum()),)), lengths=lengths)
    dense, _, candidate, _ = make_inputs(3, 6, history=True)
    user = KeyedJaggedTensor.concat([random_kjt(USER_KEYS, 3), history])
    index = CandidateIndex.from_counts(torch.tensor([2, 3, 1]))
    cut = KeyedJaggedTensor(
        ["history"],
        torch.cat((history["history"].values()[:MAX_HISTORY], history["history"].values()[-2:])),
        lengths=lengths.clamp(max=MAX_HISTORY),
    )
    scores = model(dense, user, candidate, index)
    scores.sum().backward()
    same = KeyedJaggedTensor.concat([user.split([2, 1])[0], cut])
    torch.testing.assert_close(model(dense, same, candidate, index), scores)
    assert bool(torch.isfinite(scores).all())
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(("users", "candidates"), SIZES)
def test_every_batch_trains(name: str, users: int, candidates: int) -> None:
    make, history = MAKE[name]
    model = make()
    scores = model(*make_inputs(users, candidates, history))
    assert scores.shape == (candidates, 1)
    scores.sum().backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    assert [key for key, gradient in gradients.items() if gradient is None] == []
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
    moved = any(bool(gradient.any()) for gradient in gradients.values())
    assert moved == (candidates > 0)


@pytest.mark.parametrize("name", MAKE)
def test_features_without_ids(name: str) -> None:
    make, history = MAKE[name]
    model = make()
    dense, _, candidate, index = make_inputs(3, 7, history)
    keys = [*USER_KEYS, *(["history"] if history else [])]
    user = KeyedJaggedTensor(
        keys, torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(3 * len(keys), dtype=torch.int64)
    )
    scores = model(dense, user, candidate, index)
    scores.sum().backward()
    assert bool(torch.isfinite(scores).all())
    assert not bool(model.sparse.user_tables.embedding_bags["t_u1"].weight.grad.any())


@pytest.mark.parametrize("name", MAKE)
def test_order_of_candidates_and_index_dtype(name: str) -> None:
    make, history = MAKE[name]
    model = make()
    dense, user, candidate, index = make_inputs(4, 30, history)
    scores = model(dense, user, candidate, index)
    order = torch.randperm(30)
    shuffled = CandidateIndex.from_user_ids(index.to_user[order], 4)
    torch.testing.assert_close(model(dense, user, rows_of(candidate, order.tolist()), shuffled), scores[order])
    sorting = index.to_user.argsort(stable=True)
    grouped = CandidateIndex.from_user_ids(index.to_user[sorting].int(), 4, grouped=True)
    torch.testing.assert_close(model(dense, user, rows_of(candidate, sorting.tolist()), grouped), scores[sorting])
    torch.testing.assert_close(model(dense, user, candidate, index.to_user), scores, rtol=0, atol=0)


@pytest.mark.parametrize("name", MAKE)
def test_state_dict_copy_and_pickle(name: str) -> None:
    make, history = MAKE[name]
    model, other = make(), make()
    inputs = make_inputs(3, 7, history)
    other.load_state_dict(model.state_dict())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (other, copy.deepcopy(model), torch.load(file, weights_only=False)):
        torch.testing.assert_close(twin(*inputs), model(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("name", MAKE)
def test_quantised_tables(name: str) -> None:
    make, history = MAKE[name]
    model = make().eval()
    quantised = quantize_embeddings(copy.deepcopy(model), dtype=torch.qint8, inplace=True)
    assert "quant" in type(quantised.sparse.user_tables).__module__
    for users, candidates in [(1, 50), (3, 7), (9, 2)]:
        inputs = make_inputs(users, candidates, history)
        with torch.no_grad():
            exact, scores = model(*inputs), quantised(*inputs)
            # The error in the embeddings is half a step of 255 in each row's range.
            for a, b in zip(model.sparse(*inputs[1:3]), quantised.sparse(*inputs[1:3]), strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=3 * 2 / (ROWS**0.5) / 255)
        assert float((scores - exact).abs().max()) < 0.05 * float(exact.abs().max())


@pytest.mark.parametrize("name", MAKE)
def test_dense_part_exports_alone(name: str) -> None:
    make, history = MAKE[name]
    model = make().eval().requires_grad_(False)
    dense, user, candidate, index = make_inputs(2, 5, history)
    program = export(model.dense, (dense, *model.sparse(user, candidate), index))
    check_program(program)
    for users, candidates in [(1, 1), (1, 50), (3, 7), (7, 7), (9, 2)]:
        dense, user, candidate, index = make_inputs(users, candidates, history)
        scores = program.module()(dense, *model.sparse(user, candidate), index.to_user)
        torch.testing.assert_close(scores, model(dense, user, candidate, index))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
def test_dense_part_compiles_once(name: str) -> None:
    make, history = MAKE[name]
    model = make()
    torch._dynamo.reset()
    # No two sizes of the first call are equal: the compiler takes equal ones for the same.
    compiles = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.dense, fullgraph=True, dynamic=True, backend=compiles)
    for users, candidates in [(11, 31), (13, 40), (19, 23), (2, 200)]:
        dense, user, candidate, index = make_inputs(users, candidates, history)
        embeddings = [x.detach() for x in model.sparse(user, candidate)]
        torch.testing.assert_close(
            compiled(dense, *embeddings, index.to_user), model(dense, user, candidate, index), rtol=1e-4, atol=1e-5
        )
    assert compiles.frame_count == 1
