"""`IKBOSequenceRanker`: ranks candidates by a user's features and item history.

Shape letters: U users, B candidates, Fu/Fc features (of the user, of a candidate), T history rows, D embedding size, M
compressed features, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.models._blocks import common_embedding_size, feature_names, mlp, pooled, with_a_row
from ikbo_recsys.modules import IKBOCompressionLinear, IKBOCrossAttention, IKBOLinear


class IKBOSequenceRankerSparse(nn.Module):
    """Look-ups, `(user KJT, candidate KJT)` to `(user [U, Fu, D], history [U, T, D], lengths [U], cand [B, Fc, D])`.

    The candidate's item comes first among its features. One table serves the history and the candidates: the collection
    is called once for each, with no rows for the other's feature.
    """

    def __init__(
        self,
        user_tables: EmbeddingBagCollection,
        candidate_tables: EmbeddingBagCollection,
        item_table: EmbeddingCollection,
        max_history: int,
    ) -> None:
        super().__init__()
        items = feature_names(item_table.embedding_configs())
        if len(items) != 2:
            raise ValueError(f"item_table must have the features of history and item, in that order, got {items}")
        self.user_tables = user_tables
        self.candidate_tables = candidate_tables
        self.item_table = item_table
        self.history_name, self.item_name = items
        self.max_history = max_history
        self.user_features = len(feature_names(user_tables.embedding_bag_configs()))
        self.candidate_features = 1 + len(feature_names(candidate_tables.embedding_bag_configs()))
        bags = [*user_tables.embedding_bag_configs(), *candidate_tables.embedding_bag_configs()]
        self.embedding_dim = common_embedding_size([*bags, *item_table.embedding_configs()])

    def forward(self, user: KeyedJaggedTensor, candidate: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        user_UFD = pooled(self.user_tables, user, self.user_features, self.embedding_dim)
        cand_BFD = pooled(self.candidate_tables, candidate, self.candidate_features - 1, self.embedding_dim)
        history_UTD, lengths_U = self._items(user, self.history_name, self.max_history)
        item_B1D, _ = self._items(candidate, self.item_name, 1)
        return user_UFD, history_UTD, lengths_U, torch.cat((item_B1D, cand_BFD), dim=1)

    def _items(self, features: KeyedJaggedTensor, name: str, length: int) -> tuple[Tensor, Tensor]:
        """Embeddings of one of the two item features, padded to `length` rows, and how many of these are valid."""
        padded = with_a_row(features)
        given = padded[name]
        absent = torch.zeros_like(given.lengths())
        both = (given.lengths(), absent) if name == self.history_name else (absent, given.lengths())
        keys = [self.history_name, self.item_name]
        looked_up = self.item_table(KeyedJaggedTensor(keys, given.values(), lengths=torch.cat(both)))[name]
        rows, lengths = looked_up.to_padded_dense(length), given.lengths().clamp(max=length)
        return (rows, lengths) if padded is features else (rows[:0], lengths[:0])


class IKBOSequenceRankerDense(nn.Module):
    r"""Embeddings to scores; what is exported, benchmarked and served alone.

    With :math:`e` the user's features (dense ones through an MLP), :math:`c` the candidate's and :math:`c_0` its item:

    .. math:: m[b] = cat(compress(e[u(b)], c[b]), attend(c_0[b], history[u(b)]))

    .. math:: score[b] = MLP(e[u(b)], m[b], \{ \langle m_i, m_j \rangle : i < j \})
    """

    pairs: Tensor

    def __init__(
        self,
        dense_in_features: int,
        user_features: int,
        candidate_features: int,
        embedding_dim: int,
        compressed_features: int = 8,
        num_heads: int = 4,
        over_arch_layer_sizes: Sequence[int] = (128, 64, 1),
        device: Any = None,
    ) -> None:
        super().__init__()
        if len(over_arch_layer_sizes) < 2:
            raise ValueError(f"over_arch_layer_sizes needs at least 2 sizes, got {list(over_arch_layer_sizes)}")
        user_features, mixed_features = user_features + 1, compressed_features + 1
        pairs = mixed_features * (mixed_features - 1) // 2
        first, *rest = over_arch_layer_sizes
        self.dense_arch = mlp(dense_in_features, [embedding_dim], last_activation=True, device=device)
        self.compression = IKBOCompressionLinear(user_features, candidate_features, compressed_features, device=device)
        self.attention = IKBOCrossAttention(embedding_dim, num_heads, device=device)
        self.over_first = IKBOLinear(
            user_features * embedding_dim,
            mixed_features * embedding_dim + pairs,
            first,
            activation="relu",
            device=device,
        )
        self.over_rest = mlp(first, rest, last_activation=False, device=device)
        self.register_buffer(
            "pairs", torch.triu_indices(mixed_features, mixed_features, 1, device=device), persistent=False
        )

    def forward(
        self,
        dense: Tensor,
        user: Tensor,
        history: Tensor,
        history_lengths: Tensor,
        candidate: Tensor,
        index: CandidateIndex | Tensor,
    ) -> Tensor:
        """Score.

        Args:
            dense: `[U, in]`, the user's dense features.
            user: `[U, Fu, D]`, the user's feature embeddings.
            history: `[U, T, D]`, embeddings of the items of the user's history, padded.
            history_lengths: int32/int64 `[U]`, how many of the T rows are valid.
            candidate: `[B, Fc, D]`, the candidate's feature embeddings, its item first.
            index: a `CandidateIndex`, or `to_user` int32/int64 `[B]`.

        Returns:
            Scores (logits) `[B, over_arch[-1]]`.
        """
        user_UFD = torch.cat((self.dense_arch(dense)[:, None], user), dim=1)
        compressed_BMD = self.compression(user_UFD, candidate, index)
        taste_B1D = self.attention(history, candidate[:, :1], index, history_lengths)
        mixed_BMD = torch.cat((compressed_BMD, taste_B1D), dim=1)
        pairs_BP = torch.bmm(mixed_BMD, mixed_BMD.mT)[:, self.pairs[0], self.pairs[1]]
        mixed_BK = torch.cat((mixed_BMD.flatten(1), pairs_BP), dim=1)
        return self.over_rest(self.over_first(user_UFD.flatten(1), mixed_BK, index))


class IKBOSequenceRanker(nn.Module):
    """Target attention over the user's history, compression of features, and an over-arch, without a copy of the user.

    Args:
        user_tables, candidate_tables: feature tables; all tables have the embedding size D.
        item_table: one table with two features, the user's history and the candidate's item, in that order. The user
            KeyedJaggedTensor has the first beside the features of `user_tables`, the candidate one the second.
        dense_in_features: length of a user's dense features.
        max_history: T, the number of history items used: the *first* T of each user, so put recent ones first.
        compressed_features: M, the number of features that user and candidate features are compressed to.
        num_heads: of the attention; D is a multiple of it.
        over_arch_layer_sizes: of the top MLP, at least two.
        device: of the dense part.

    Raises:
        ValueError: tables of different sizes, an item table without exactly two features, or sizes that do not fit.
    """

    def __init__(
        self,
        user_tables: EmbeddingBagCollection,
        candidate_tables: EmbeddingBagCollection,
        item_table: EmbeddingCollection,
        dense_in_features: int,
        max_history: int,
        compressed_features: int = 8,
        num_heads: int = 4,
        over_arch_layer_sizes: Sequence[int] = (128, 64, 1),
        device: Any = None,
    ) -> None:
        super().__init__()
        self.sparse = IKBOSequenceRankerSparse(user_tables, candidate_tables, item_table, max_history)
        self.dense = IKBOSequenceRankerDense(
            dense_in_features,
            self.sparse.user_features,
            self.sparse.candidate_features,
            self.sparse.embedding_dim,
            compressed_features,
            num_heads,
            over_arch_layer_sizes,
            device,
        )

    def forward(
        self, dense: Tensor, user: KeyedJaggedTensor, candidate: KeyedJaggedTensor, index: CandidateIndex | Tensor
    ) -> Tensor:
        """`(dense [U, in], user features of U rows, candidate features of B rows, index)` to scores `[B, over[-1]]`."""
        return self.dense(dense, *self.sparse(user, candidate), index)
