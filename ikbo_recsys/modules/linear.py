"""`IKBOLinear`: the first layer of an over-arch, on a user's and a candidate's vectors.

Shape letters: U users, B candidates, Ku/Kc inputs, M outputs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ikbo_recsys import kernels
from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.kernels.reference import ACTIVATIONS
from ikbo_recsys.modules._dense import adopt_linear, check_dense, check_sizes, check_width


class IKBOLinear(nn.Linear):
    r"""A linear layer over a user's vector and a candidate's, the user's product taken once per user.

    .. math:: out[b] = act(W_{:, :K_u}\, user[u(b)] + W_{:, K_u:}\, candidate[b] + bias)

    What `nn.Linear(Ku + Kc, M)` computes on `torch.cat((user[index], candidate), 1)`, with the same parameters and
    the same state_dict.

    Args:
        user_in: Ku.
        candidate_in: Kc.
        out: M.
        bias: as in `nn.Linear`.
        activation: `None`, `"relu"`, `"gelu"` (exact) or `"silu"`, applied in the same kernel.
        device, dtype: as in `torch.nn`.

    Raises:
        ValueError: an activation that is not one of these.

    Example::

        >>> layer = IKBOLinear(user_in=6, candidate_in=4, out=3, activation="relu")
        >>> index = CandidateIndex.from_counts(torch.tensor([2, 3]))
        >>> layer(torch.randn(2, 6), torch.randn(5, 4), index).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        user_in: int,
        candidate_in: int,
        out: int,
        bias: bool = True,
        activation: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {list(ACTIVATIONS)}, got {activation!r}")
        check_sizes(user_in=user_in, candidate_in=candidate_in, out=out)
        super().__init__(user_in + candidate_in, out, bias=bias, device=device, dtype=dtype)
        self.user_in = user_in
        self.candidate_in = candidate_in
        self.activation = activation

    @classmethod
    def from_dense(cls, dense: nn.Linear, user_in: int, activation: str | None = None) -> IKBOLinear:
        """Take over the parameters of an `nn.Linear` whose first `user_in` inputs are the user's.

        Raises:
            ValueError: `user_in` is not between 0 and `dense.in_features`.
        """
        check_dense(dense, "user_in", user_in)
        module = cls(
            user_in,
            dense.in_features - user_in,
            dense.out_features,
            bias=dense.bias is not None,
            activation=activation,
            device="meta",
        )
        return adopt_linear(module, dense)

    def forward(self, user: Tensor, candidate: Tensor, index: CandidateIndex | Tensor) -> Tensor:  # type: ignore[override]
        """`(user [U, Ku], candidate [B, Kc], index)` to `[B, M]`; errors as `kernels.linear`."""
        check_width("user", user, "user_in", self.user_in)
        check_width("candidate", candidate, "candidate_in", self.candidate_in)
        return kernels.linear(user, candidate, self.weight, index, self.bias, self.activation)

    def extra_repr(self) -> str:
        return (
            f"user_in={self.user_in}, candidate_in={self.candidate_in}, out={self.out_features}, "
            f"bias={self.bias is not None}, activation={self.activation!r}"
        )
