"""The broadcast twin of each operator and module: the same result with the user copied once per candidate.

Shape letters: U users, B candidates, K features, D embedding size, M outputs, S seeds, T history rows, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compression_linear(
    user: Tensor, cand: Tensor, weight: Tensor, to_user: Tensor, bias: Tensor | None = None
) -> Tensor:
    out = weight @ torch.cat((user[to_user], cand), 1)
    return out if bias is None else out + bias[:, None]


def linear(
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    to_user: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    out = F.linear(torch.cat((user[to_user], cand), 1), weight, bias)
    return out if activation is None else getattr(F, activation)(out)


def dot_interaction(user: Tensor, cand: Tensor, to_user: Tensor) -> Tensor:
    both = torch.cat((user[to_user], cand), 1)
    first, second = torch.triu_indices(both.shape[1], both.shape[1], 1)
    return (both @ both.mT)[:, first, second]


def cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    to_user: Tensor,
    lengths: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    scores = _scores(query, key, to_user, scale)
    value = value[to_user].repeat_interleave(query.shape[2] // key.shape[2], 2)
    if lengths is None:
        weights = scores.softmax(-1)
    else:
        valid = _valid(key, to_user, lengths)
        weights = scores.masked_fill(~valid, torch.finfo(scores.dtype).min).softmax(-1) * valid
    return torch.einsum("bhst,bthd->bshd", weights, value)


def log_sum_exp(
    query: Tensor, key: Tensor, to_user: Tensor, lengths: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """`[B, S, H]`; -inf, without a gradient, for rows without a key."""
    scores = _scores(query, key, to_user, scale)
    if lengths is None:
        return scores.logsumexp(-1).transpose(1, 2)
    valid = _valid(key, to_user, lengths)
    lse = scores.masked_fill(~valid, torch.finfo(scores.dtype).min).logsumexp(-1)
    return lse.masked_fill(~valid.any(-1), float("-inf")).transpose(1, 2)


def _scores(query: Tensor, key: Tensor, to_user: Tensor, scale: float | None) -> Tensor:
    key = key[to_user].repeat_interleave(query.shape[2] // key.shape[2], 2)
    return torch.einsum("bshd,bthd->bhst", query, key) * (query.shape[3] ** -0.5 if scale is None else scale)


def _valid(key: Tensor, to_user: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(key.shape[1], device=lengths.device) < lengths[to_user][:, None])[:, None, None, :]


class CompressionTwin(nn.Linear):
    """`IKBOCompressionLinear` as an `nn.Linear` over the feature axis of the concatenation."""

    def forward(self, user: Tensor, candidate: Tensor, to_user: Tensor) -> Tensor:
        return super().forward(torch.cat((user[to_user], candidate), 1).mT).mT


class LinearTwin(nn.Linear):
    """`IKBOLinear` as an `nn.Linear` over the concatenation."""

    def forward(self, user: Tensor, candidate: Tensor, to_user: Tensor) -> Tensor:
        return super().forward(torch.cat((user[to_user], candidate), 1))


class AttentionTwin(nn.MultiheadAttention):
    """`IKBOCrossAttention` as an `nn.MultiheadAttention` over copies of the history."""

    def forward(self, user: Tensor, candidate: Tensor, to_user: Tensor, lengths: Tensor) -> Tensor:
        history = user[to_user]
        padding = torch.arange(user.shape[1]) >= lengths[to_user][:, None]
        return super().forward(candidate, history, history, key_padding_mask=padding, need_weights=False)[0]
