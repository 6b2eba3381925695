"""`IKBOCompressionLinear`: linear compression of user and candidate feature embeddings.

Shape letters: U users, B candidates, Ku/Kc features, D embedding size, M outputs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ikbo_recsys import kernels
from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.modules._dense import adopt_linear, check_dense, check_sizes, check_width


class IKBOCompressionLinear(nn.Linear):
    r"""Compress `Ku + Kc` feature embeddings to `M` without copying the user's features once per candidate.

    .. math:: out[b] = W_{:, :K_u}\, user[u(b)] + W_{:, K_u:}\, candidate[b] + bias[:, None]

    What `nn.Linear(Ku + Kc, M)` computes over the feature axis of `torch.cat((user[index], candidate), 1)`, with the
    same parameters and the same state_dict.

    Args:
        user_features: Ku.
        candidate_features: Kc.
        out_features: M.
        bias: one number per output feature.
        device, dtype: as in `torch.nn`.

    Example::

        >>> layer = IKBOCompressionLinear(user_features=6, candidate_features=4, out_features=3)
        >>> index = CandidateIndex.from_counts(torch.tensor([2, 3]))
        >>> layer(torch.randn(2, 6, 16), torch.randn(5, 4, 16), index).shape
        torch.Size([5, 3, 16])
    """

    def __init__(
        self,
        user_features: int,
        candidate_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check_sizes(user_features=user_features, candidate_features=candidate_features, out_features=out_features)
        super().__init__(user_features + candidate_features, out_features, bias=bias, device=device, dtype=dtype)
        self.user_features = user_features
        self.candidate_features = candidate_features

    @classmethod
    def from_dense(cls, dense: nn.Linear, user_features: int) -> IKBOCompressionLinear:
        """Take over the parameters of an `nn.Linear` whose first `user_features` inputs are the user's.

        Raises:
            ValueError: `user_features` is not between 0 and `dense.in_features`.
        """
        check_dense(dense, "user_features", user_features)
        module = cls(
            user_features,
            dense.in_features - user_features,
            dense.out_features,
            bias=dense.bias is not None,
            device="meta",
        )
        return adopt_linear(module, dense)

    def forward(self, user: Tensor, candidate: Tensor, index: CandidateIndex | Tensor) -> Tensor:  # type: ignore[override]
        """`(user [U, Ku, D], candidate [B, Kc, D], index)` to `[B, M, D]`; errors as `kernels.compression_linear`."""
        check_width("user", user, "user_features", self.user_features)
        check_width("candidate", candidate, "candidate_features", self.candidate_features)
        return kernels.compression_linear(user, candidate, self.weight, index, self.bias)

    def extra_repr(self) -> str:
        return (
            f"user_features={self.user_features}, candidate_features={self.candidate_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )
