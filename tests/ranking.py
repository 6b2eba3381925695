"""Small ranking models and their inputs, for the tests of models, export and distributed training."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ikbo_recsys import CandidateIndex
from ikbo_recsys.models import IKBODLRM, IKBOSequenceRanker

ROWS, DIM, DENSE_IN, MAX_HISTORY = 50, 16, 5, 6
USER_KEYS, CANDIDATE_KEYS = ["u1", "u2"], ["c1", "c2", "c3"]


def bags(names: list[str], device: str = "cpu") -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
        for name in names
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device(device))


def item_table(device: str = "cpu") -> EmbeddingCollection:
    config = EmbeddingConfig(name="t_item", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["history", "item"])
    return EmbeddingCollection(tables=[config], device=torch.device(device))


def make_dlrm(device: str = "cpu") -> IKBODLRM:
    return IKBODLRM(bags(USER_KEYS, device), bags(CANDIDATE_KEYS, device), DENSE_IN, [20, DIM], [24, 8, 1])


def make_ranker(device: str = "cpu") -> IKBOSequenceRanker:
    return IKBOSequenceRanker(
        bags(USER_KEYS, device),
        bags(CANDIDATE_KEYS, device),
        item_table(device),
        DENSE_IN,
        MAX_HISTORY,
        compressed_features=3,
        num_heads=2,
        over_arch_layer_sizes=(24, 8, 1),
    )


def random_kjt(keys: list[str], rows: int, low: int = 0, high: int = 3) -> KeyedJaggedTensor:
    """`low` to `high` random ids for each feature of each row."""
    lengths = torch.randint(low, high + 1, (len(keys) * rows,))
    return KeyedJaggedTensor(keys, torch.randint(0, ROWS, (int(lengths.sum()),)), lengths=lengths)


def make_inputs(
    users: int, candidates: int, history: bool, index_dtype: torch.dtype = torch.int64
) -> tuple[Tensor, KeyedJaggedTensor, KeyedJaggedTensor, CandidateIndex]:
    """`(dense, user, candidate, index)`. Some users have no candidates and the candidates come in no order."""
    to_user = torch.randint(0, max(users, 1), (candidates,), dtype=index_dtype)
    user = random_kjt([*USER_KEYS, *(["history"] if history else [])], users)
    candidate = random_kjt(CANDIDATE_KEYS, candidates)
    if history:
        items = KeyedJaggedTensor(
            ["item"], torch.randint(0, ROWS, (candidates,)), lengths=torch.ones(candidates).long()
        )
        candidate = KeyedJaggedTensor.concat([candidate, items])
    return torch.randn(users, DENSE_IN), user, candidate, CandidateIndex.from_user_ids(to_user, users)


def rows_of(features: KeyedJaggedTensor, rows: list[int]) -> KeyedJaggedTensor:
    """The given rows, in that order, repeated as often as they are named."""
    keys = list(features.keys())
    columns = [[features[key].to_dense()[row] for row in rows] for key in keys]
    flat = [ids for column in columns for ids in column]
    values = torch.cat(flat) if flat else torch.zeros(0, dtype=torch.int64)
    return KeyedJaggedTensor(keys, values, lengths=torch.tensor([len(ids) for ids in flat]).long())
