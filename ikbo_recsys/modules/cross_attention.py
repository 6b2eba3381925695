"""`IKBOCrossAttention`: target attention of candidates over their user's history, projections included.

Shape letters: U users, B candidates, S seeds (query rows per candidate), X query rows of a user's own, T history
rows, E/Eu embedding sizes, H heads, D head size.
"""

from __future__ import annotations

from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ikbo_recsys import kernels
from ikbo_recsys.candidate_index import CandidateIndex

_SEPARATE_WEIGHTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class IKBOCrossAttention(nn.Module):
    r"""Multi-head attention of candidate rows over their user's rows; keys and values are projected once per user.

    .. math:: out[b] = W_o\, softmax(q[b]\, k[u(b)]^T / \sqrt{D})\, v[u(b)] + b_o

    with :math:`q = W_q\, candidate`, :math:`k = W_k\, user`, :math:`v = W_v\, user`. What `nn.MultiheadAttention` with
    `batch_first=True` computes on `(candidate, user[index], user[index])`, with its parameter names and state_dict: one
    `in_proj_weight` where all three projections have the same shape, otherwise `q_proj_weight`, `k_proj_weight` and
    `v_proj_weight`; `in_proj_bias`; `out_proj`. A user without history contributes zeros, so its candidates get
    `out_proj.bias`.

    With `user_query` the user's own rows attend to the same keys and values with the same weights, and are returned as
    well: self-attention and target attention of one layer in one pass, with no parameter more.

    Args:
        embed_dim: E, of the candidates and of the result.
        num_heads: H.
        user_dim: Eu, `embed_dim` by default.
        num_kv_heads: key heads, a divisor of H; H by default.
        head_dim: D, `embed_dim // num_heads` by default.
        bias: on all projections.
        device, dtype: as in `torch.nn`.

    Raises:
        ValueError: `embed_dim` is not a multiple of `num_heads` (and no `head_dim` is given), or H not of
            `num_kv_heads`.

    Example::

        >>> layer = IKBOCrossAttention(embed_dim=32, num_heads=4, user_dim=24)
        >>> index = CandidateIndex.from_counts(torch.tensor([2, 3]))
        >>> layer(torch.randn(2, 50, 24), torch.randn(5, 1, 32), index, lengths=torch.tensor([50, 7])).shape
        torch.Size([5, 1, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        user_dim: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads)):
            if size < 1:
                raise ValueError(f"{name} must be positive, got {size}")
        if head_dim is not None and head_dim < 1:
            raise ValueError(f"head_dim must be positive, got {head_dim}")
        if head_dim is None and embed_dim % num_heads != 0:
            raise ValueError(
                f"embed_dim is {embed_dim}, not a multiple of num_heads which is {num_heads}: give head_dim"
            )
        self.embed_dim = embed_dim
        self.user_dim = embed_dim if user_dim is None else user_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads != 0:
            raise ValueError(f"num_heads is {num_heads}, not a multiple of num_kv_heads which is {self.num_kv_heads}")

        factory = {"device": device, "dtype": dtype}
        query_dim, key_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self._widths = (query_dim, key_dim)
        if self.user_dim == embed_dim and query_dim == key_dim:
            self.in_proj_weight = nn.Parameter(torch.empty((3 * query_dim, embed_dim), **factory))
        else:
            self.register_parameter("in_proj_weight", None)
            self.q_proj_weight = nn.Parameter(torch.empty((query_dim, embed_dim), **factory))
            self.k_proj_weight = nn.Parameter(torch.empty((key_dim, self.user_dim), **factory))
            self.v_proj_weight = nn.Parameter(torch.empty((key_dim, self.user_dim), **factory))
        self.in_proj_bias = nn.Parameter(torch.empty(query_dim + 2 * key_dim, **factory)) if bias else None
        self.out_proj = nn.Linear(query_dim, embed_dim, bias=bias, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as `nn.MultiheadAttention` does."""
        names = ("in_proj_weight",) if self.in_proj_weight is not None else _SEPARATE_WEIGHTS
        for name in names:
            nn.init.xavier_uniform_(getattr(self, name))
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    @classmethod
    def from_dense(cls, dense: nn.MultiheadAttention) -> IKBOCrossAttention:
        """Take over the parameters of an `nn.MultiheadAttention` (the same objects: nothing is copied).

        Raises:
            ValueError: it adds bias rows or a zero row to the keys, its key and value sizes differ, or it is in
                training mode with attention dropout, none of which this module does.
        """
        if not isinstance(dense, nn.MultiheadAttention):
            raise TypeError(f"dense must be an nn.MultiheadAttention, got {type(dense).__name__}")
        if dense.bias_k is not None or dense.add_zero_attn:
            raise ValueError("dense adds rows to the keys (add_bias_kv or add_zero_attn), which has no equivalent here")
        if dense.kdim != dense.vdim:
            raise ValueError(f"dense has kdim {dense.kdim} but vdim {dense.vdim}: both must be the user's size")
        if dense.training and dense.dropout > 0:
            raise ValueError(
                f"dense trains with attention dropout {dense.dropout}, which has no equivalent: set it to 0"
            )
        bias = dense.in_proj_bias is not None
        module = cls(dense.embed_dim, dense.num_heads, user_dim=dense.kdim, bias=bias, device="meta")
        for name in ("in_proj_weight", *_SEPARATE_WEIGHTS, "in_proj_bias"):
            if getattr(dense, name) is not None:
                setattr(module, name, getattr(dense, name))
        module.out_proj.weight, module.out_proj.bias = dense.out_proj.weight, dense.out_proj.bias
        return module.train(dense.training)

    @overload
    def forward(
        self,
        user: Tensor,
        candidate: Tensor,
        index: CandidateIndex | Tensor,
        lengths: Tensor | None = ...,
        *,
        user_query: None = ...,
        offsets: Tensor | None = ...,
        max_length: int | None = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        user: Tensor,
        candidate: Tensor,
        index: CandidateIndex | Tensor,
        lengths: Tensor | None = ...,
        *,
        user_query: Tensor,
        offsets: Tensor | None = ...,
        max_length: int | None = ...,
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        user: Tensor,
        candidate: Tensor,
        index: CandidateIndex | Tensor,
        lengths: Tensor | None = None,
        *,
        user_query: Tensor | None = None,
        offsets: Tensor | None = None,
        max_length: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend.

        Args:
            user: `[U, T, Eu]`, or jagged `[sum T, Eu]` with `offsets`.
            candidate: `[B, S, E]`.
            index: a `CandidateIndex`, or `to_user` int32/int64 `[B]`.
            lengths: `[U]` valid rows of each user in padded `user`; all by default.
            user_query: `[U, X, E]`, rows of the users' own that attend to their user's rows: `user` itself for
                self-attention, where Eu is E. All X are computed: padding among them must be finite.
            offsets: `[U + 1]` where each user's rows begin in jagged `user`.
            max_length: an upper bound of the jagged lengths, see `kernels.cross_attention`.

        Returns:
            `[B, S, E]`; with `user_query` the pair of it and `[U, X, E]`. Errors as `kernels.cross_attention`.
        """
        self._check_inputs(user, candidate, user_query, jagged=offsets is not None)
        options: dict[str, Any] = {"kv_lengths": lengths, "kv_offsets": offsets, "max_kv_length": max_length}
        query, key, value = self._project(user, candidate)
        if user_query is None:
            attended = kernels.cross_attention(query, key, value, index, **options)
            return self.out_proj(attended.flatten(-2))
        both = kernels.cross_attention(query, key, value, index, user_query=self._project_query(user_query), **options)
        candidates, users = (self.out_proj(x.flatten(-2)) for x in both)
        return candidates, users

    def _project_query(self, rows: Tensor) -> Tensor:
        """Queries by head, of candidates or of users."""
        query_dim = self._widths[0]
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight[:query_dim]
        bias = None if self.in_proj_bias is None else self.in_proj_bias[:query_dim]
        return F.linear(rows, weight, bias).unflatten(-1, (self.num_heads, self.head_dim))

    def _project(self, user: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the candidates, keys and values of the users, by head."""
        query_dim, key_dim = self._widths
        key_heads = (self.num_kv_heads, self.head_dim)
        bias_kv = bias_k = bias_v = None
        if self.in_proj_bias is not None:
            bias_kv = self.in_proj_bias[query_dim:]
        if self.in_proj_weight is not None:
            # One matmul for both: the operator reads keys and values where they lie.
            both = F.linear(user, self.in_proj_weight[query_dim:], bias_kv).unflatten(-1, (2, *key_heads))
            key, value = both.unbind(-3)
        else:
            if bias_kv is not None:
                bias_k, bias_v = bias_kv[:key_dim], bias_kv[key_dim:]
            key = F.linear(user, self.k_proj_weight, bias_k).unflatten(-1, key_heads)
            value = F.linear(user, self.v_proj_weight, bias_v).unflatten(-1, key_heads)
        return self._project_query(candidate), key, value

    def _check_inputs(self, user: Tensor, candidate: Tensor, user_query: Tensor | None, jagged: bool) -> None:
        if not isinstance(user, Tensor):
            raise TypeError(f"user must be a tensor, got {type(user).__name__}")
        layout = "[sum T, Eu]" if jagged else "[U, T, Eu]"
        if user.dim() != (2 if jagged else 3):
            raise ValueError(f"user must be {layout}, got shape {tuple(user.shape)}")
        if user.shape[-1] != self.user_dim:
            raise ValueError(f"user has embedding size {user.shape[-1]} but user_dim is {self.user_dim}")
        self._check_rows("candidate", candidate, "[B, S, E]")
        if user_query is not None:
            self._check_rows("user_query", user_query, "[U, X, E]")

    def _check_rows(self, name: str, rows: Tensor, layout: str) -> None:
        if not isinstance(rows, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(rows).__name__}")
        if rows.dim() != 3:
            raise ValueError(f"{name} must be {layout}, got shape {tuple(rows.shape)}")
        if rows.shape[-1] != self.embed_dim:
            raise ValueError(f"{name} has embedding size {rows.shape[-1]} but embed_dim is {self.embed_dim}")

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, user_dim={self.user_dim}, "
            f"num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, bias={self.in_proj_bias is not None}"
        )
