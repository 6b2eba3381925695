"""What the models share: the sizes of TorchRec tables, their embeddings as `[rows, features, D]`, and a plain MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor


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


def by_feature(embeddings: KeyedTensor, num_features: int) -> Tensor:
    """`[rows, F * D]` of an EmbeddingBagCollection as `[rows, F, D]`, without a copy."""
    values = embeddings.values()
    return values.unflatten(1, (num_features, values.shape[1] // num_features))


def mlp(in_features: int, layer_sizes: Sequence[int], *, last_activation: bool, device: Any = None) -> nn.Sequential:
    """Linear layers with ReLU between them, and after the last one if wanted."""
    layers: list[nn.Module] = []
    for size in layer_sizes:
        layers += [nn.Linear(in_features, size, device=device), nn.ReLU()]
        in_features = size
    return nn.Sequential(*layers if last_activation else layers[:-1])
