"""The ranking model that most teams run today: the same layers, with the user copied once per candidate.

It has the parameters and the state_dict of `IKBOSequenceRankerDense`, so it loads the same weights and must give the
same scores. The copies are what `ikbo_recsys` removes; everything else is as fast as plain PyTorch makes it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CrossAttention(nn.Module):
    """`nn.MultiheadAttention(batch_first=True)` with its parameters, through the fused attention of PyTorch."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query: Tensor, history: Tensor, lengths: Tensor) -> Tensor:
        query_weight, key_value_weight = self.in_proj_weight.split((query.shape[2], 2 * query.shape[2]))
        query_bias, key_value_bias = self.in_proj_bias.split((query.shape[2], 2 * query.shape[2]))
        query = F.linear(query, query_weight, query_bias)
        key, value = F.linear(history, key_value_weight, key_value_bias).chunk(2, dim=-1)
        valid = torch.arange(history.shape[1], device=history.device) < lengths[:, None]
        # A user without a history attends to nothing: its row is replaced by zeros below.
        mask = (valid | (lengths == 0)[:, None])[:, None, None, :]
        query, key, value = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        attended = attended.transpose(1, 2).flatten(2) * (lengths > 0)[:, None, None]
        return self.out_proj(attended)


class BroadcastTwin(nn.Module):
    """`IKBOSequenceRankerDense` without `ikbo_recsys`."""

    def __init__(
        self,
        dense_in_features: int,
        user_features: int,
        candidate_features: int,
        embedding_dim: int,
        compressed_features: int = 8,
        num_heads: int = 4,
        over_arch_layer_sizes: tuple[int, ...] = (128, 64, 1),
    ) -> None:
        super().__init__()
        user_features, mixed_features = user_features + 1, compressed_features + 1
        pairs = mixed_features * (mixed_features - 1) // 2
        first, second, out = over_arch_layer_sizes
        self.dense_arch = nn.Sequential(nn.Linear(dense_in_features, embedding_dim), nn.ReLU())
        self.compression = nn.Linear(user_features + candidate_features, compressed_features, bias=False)
        self.attention = CrossAttention(embedding_dim, num_heads)
        self.over_first = nn.Linear((user_features + mixed_features) * embedding_dim + pairs, first)
        self.over_rest = nn.Sequential(nn.Linear(first, second), nn.ReLU(), nn.Linear(second, out))
        self.register_buffer("pairs", torch.triu_indices(mixed_features, mixed_features, 1), persistent=False)

    def forward(
        self,
        dense: Tensor,
        user: Tensor,
        history: Tensor,
        history_lengths: Tensor,
        candidate: Tensor,
        index: Tensor,
    ) -> Tensor:
        # The copies: U rows become B rows.
        dense, user, history = dense[index], user[index], history[index]
        history_lengths = history_lengths[index]

        user = torch.cat((self.dense_arch(dense)[:, None], user), dim=1)
        compressed = self.compression.weight @ torch.cat((user, candidate), dim=1)
        taste = self.attention(candidate[:, :1], history, history_lengths)
        mixed = torch.cat((compressed, taste), dim=1)
        pairs = torch.bmm(mixed, mixed.mT)[:, self.pairs[0], self.pairs[1]]
        hidden = F.relu(self.over_first(torch.cat((user.flatten(1), mixed.flatten(1), pairs), dim=1)))
        return self.over_rest(hidden)
