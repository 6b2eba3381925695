"""What the models share: the sizes of TorchRec tables, their embeddings as `[rows, features, D]`, and a plain MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def feature_names(configs: Sequence[Any]) -> list[str]:
    """The features of tables in the order in which their embeddings come out."""
    return [feature for config in configs for feature in config.feature_names]


def common_embedding_size(configs: Sequence[Any]) -> int:
    """D of the tables.

    Raises:
        ValueError: there are no tables, or they differ.
    """
    sizes = {config.name: config.embedding_dim for config in configs}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"all tables must have one embedding size, got {sizes}")
    return next(iter(sizes.values()))


def with_a_row(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The features, or one row without ids where there is no row at all: torchrec's collections cannot look up none.

    What comes of it is cut off again, so an empty batch takes part in collectives and has gradients, of zero.
    """
    rows = features.stride()
    if not isinstance(rows, int) or rows > 0:
        return features
    lengths = features.lengths().new_zeros(len(features.keys()))
    return KeyedJaggedTensor(features.keys(), features.values(), features.weights_or_none(), lengths=lengths)


def pooled(tables: nn.Module, features: KeyedJaggedTensor, num_features: int, embedding_dim: int) -> Tensor:
    """The embeddings `[rows, F, D]` of an EmbeddingBagCollection, without a copy."""
    padded = with_a_row(features)
    embeddings = tables(padded).values().unflatten(1, (num_features, embedding_dim))
    return embeddings if padded is features else embeddings[:0]


def mlp(in_features: int, layer_sizes: Sequence[int], *, last_activation: bool, device: Any = None) -> nn.Sequential:
    """Linear layers with ReLU between them, and after the last one if wanted."""
    layers: list[nn.Module] = []
    for size in layer_sizes:
        layers += [nn.Linear(in_features, size, device=device), nn.ReLU()]
        in_features = size
    return nn.Sequential(*layers if last_activation else layers[:-1])
