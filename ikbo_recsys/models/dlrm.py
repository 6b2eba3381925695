"""`IKBODLRM`: DLRM with the user's side at the user batch size.

Shape letters: U users, B candidates, Fu/Fc sparse features (of the user, of a candidate), D embedding size, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.models._blocks import common_embedding_size, feature_names, mlp, pooled
from ikbo_recsys.modules import IKBOInteraction, IKBOLinear


class IKBODLRMSparse(nn.Module):
    """Look-ups: `(user KJT, candidate KJT)` to `(user [U, Fu, D], candidate [B, Fc, D])`."""

    def __init__(self, user_tables: EmbeddingBagCollection, candidate_tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.user_tables = user_tables
        self.candidate_tables = candidate_tables
        self.user_features = len(feature_names(user_tables.embedding_bag_configs()))
        self.candidate_features = len(feature_names(candidate_tables.embedding_bag_configs()))
        self.embedding_dim = common_embedding_size(
            [*user_tables.embedding_bag_configs(), *candidate_tables.embedding_bag_configs()]
        )

    def forward(self, user: KeyedJaggedTensor, candidate: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        return (
            pooled(self.user_tables, user, self.user_features, self.embedding_dim),
            pooled(self.candidate_tables, candidate, self.candidate_features, self.embedding_dim),
        )


class IKBODLRMDense(nn.Module):
    r"""Embeddings to scores; what is exported, benchmarked and served alone.

    With :math:`x = MLP(dense)` of the user and :math:`p` the dot products of all pairs among x and all features:

    .. math:: score[b] = MLP(cat(x[u(b)], p[b]))
    """

    def __init__(
        self,
        dense_in_features: int,
        user_features: int,
        candidate_features: int,
        embedding_dim: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        device: Any = None,
    ) -> None:
        super().__init__()
        if dense_arch_layer_sizes[-1] != embedding_dim:
            raise ValueError(
                f"dense_arch_layer_sizes ends in {dense_arch_layer_sizes[-1]} but the embedding size is {embedding_dim}"
            )
        if len(over_arch_layer_sizes) < 2:
            raise ValueError(f"over_arch_layer_sizes needs at least 2 sizes, got {list(over_arch_layer_sizes)}")
        features = 1 + user_features + candidate_features
        first, *rest = over_arch_layer_sizes
        self.dense_arch = mlp(dense_in_features, dense_arch_layer_sizes, last_activation=True, device=device)
        self.interaction = IKBOInteraction()
        self.over_first = IKBOLinear(
            embedding_dim, features * (features - 1) // 2, first, activation="relu", device=device
        )
        self.over_rest = mlp(first, rest, last_activation=False, device=device)

    def forward(self, dense: Tensor, user: Tensor, candidate: Tensor, index: CandidateIndex | Tensor) -> Tensor:
        """`(dense [U, in], user [U, Fu, D], candidate [B, Fc, D], index)` to scores (logits) `[B, over_arch[-1]]`."""
        dense_UD = self.dense_arch(dense)
        user_UFD = torch.cat((dense_UD[:, None], user), dim=1)
        pairs_BP = self.interaction(user_UFD, candidate, index)
        return self.over_rest(self.over_first(dense_UD, pairs_BP, index))


class IKBODLRM(nn.Module):
    """DLRM on a user KeyedJaggedTensor of U rows and a candidate one of B rows; the dense features are the user's.

    Args:
        user_tables, candidate_tables: collections whose tables all have the embedding size D.
        dense_in_features: length of a user's dense features.
        dense_arch_layer_sizes: of the bottom MLP; the last one is D.
        over_arch_layer_sizes: of the top MLP, at least two.
        device: of the dense part.

    Raises:
        ValueError: tables of different sizes, or layer sizes that do not fit.
    """

    def __init__(
        self,
        user_tables: EmbeddingBagCollection,
        candidate_tables: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        device: Any = None,
    ) -> None:
        super().__init__()
        self.sparse = IKBODLRMSparse(user_tables, candidate_tables)
        self.dense = IKBODLRMDense(
            dense_in_features,
            self.sparse.user_features,
            self.sparse.candidate_features,
            self.sparse.embedding_dim,
            dense_arch_layer_sizes,
            over_arch_layer_sizes,
            device,
        )

    def forward(
        self, dense: Tensor, user: KeyedJaggedTensor, candidate: KeyedJaggedTensor, index: CandidateIndex | Tensor
    ) -> Tensor:
        """`(dense [U, in], user features of U rows, candidate features of B rows, index)` to scores `[B, over[-1]]`."""
        return self.dense(dense, *self.sparse(user, candidate), index)

    @classmethod
    def from_dlrm(cls, dlrm: DLRM, user_tables: Iterable[str]) -> IKBODLRM:
        """Take over the tables (the same objects) and the weights (copied) of a `torchrec.models.dlrm.DLRM`.

        It gives the scores of `dlrm` on the same features without the user's copied per candidate. The columns of the
        first top layer are reordered if the tables of users and candidates are not in that order in `dlrm`. Dtypes stay
        and frozen parameters stay frozen.

        Args:
            dlrm: not sharded. Its dense features must be the user's.
            user_tables: names of the tables whose features are the user's; the others are the candidates'.

        Raises:
            TypeError: `user_tables` is a string.
            ValueError: a name that is not a table of `dlrm`, no table left on one side, or a feature of two tables
                (for which `DLRM` itself has no place).
        """
        if isinstance(user_tables, str):
            raise TypeError(f"user_tables must be several names of tables, got the string {user_tables!r}")
        source = dlrm.sparse_arch.embedding_bag_collection
        configs, user_names = source.embedding_bag_configs(), set(user_tables)
        unknown = sorted(user_names - {config.name for config in configs})
        if unknown:
            raise ValueError(
                f"user_tables names {unknown[0]!r} but the tables are {[config.name for config in configs]}"
            )
        names = feature_names(configs)
        shared = sorted({name for name in names if names.count(name) > 1})
        if shared:
            raise ValueError(f"the feature {shared[0]!r} has several tables, and a DLRM's features have one each")
        sides = [[c for c in configs if (c.name in user_names) is is_user] for is_user in (True, False)]
        if not sides[0] or not sides[1]:
            raise ValueError(f"user_tables must leave tables on both sides, got {len(sides[0])} of {len(configs)}")

        bottom, top = _linear_layers(dlrm.dense_arch), _linear_layers(dlrm.over_arch)
        collections = [
            EmbeddingBagCollection(tables=side, is_weighted=source.is_weighted(), device="meta") for side in sides
        ]
        for collection in collections:
            for name in list(collection.embedding_bags):
                collection.embedding_bags[name] = source.embedding_bags[name]
        model = cls(
            collections[0],
            collections[1],
            bottom[0].in_features,
            [layer.out_features for layer in bottom],
            [layer.out_features for layer in top],
            device=bottom[0].weight.device,
        )
        with torch.no_grad():
            for ours, theirs in zip(_linear_layers(model.dense), [*bottom, *top], strict=True):
                ours.weight, ours.bias = _copied(theirs.weight), _copied(theirs.bias)
            columns = _columns(names, feature_names([*sides[0], *sides[1]]), bottom[-1].out_features)
            model.dense.over_first.weight.copy_(top[0].weight[:, columns])
        return model.train(dlrm.training)


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def _copied(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


def _columns(theirs: list[str], ours: list[str], embedding_dim: int) -> list[int]:
    """Which column of their first top layer is each of ours: the dense output, then the pairs of features."""
    place = [0] + [1 + theirs.index(name) for name in ours]
    features = len(place)
    column: dict[tuple[int, int], int] = {}
    for first in range(features):
        for second in range(first + 1, features):
            column[first, second] = column[second, first] = embedding_dim + len(column) // 2
    pairs = [column[place[i], place[j]] for i in range(features) for j in range(i + 1, features)]
    return list(range(embedding_dim)) + pairs
