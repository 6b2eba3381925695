"""`IKBOInteraction`: pairwise dot products of user and candidate features.

Shape letters: U users, B candidates, Fu/Fc features, D embedding size.
"""

from __future__ import annotations

from torch import Tensor, nn

from ikbo_recsys import kernels
from ikbo_recsys.candidate_index import CandidateIndex


class IKBOInteraction(nn.Module):
    r"""All pairwise dot products among a user's and a candidate's feature embeddings, user-user pairs once per user.

    .. math:: out[b] = \{ \langle e_i, e_j \rangle : i < j \}, \quad e = cat(user[u(b)], candidate[b])

    The pairs come in the order of `torchrec.models.dlrm.InteractionArch`, so what follows it keeps its weights. No
    parameters.

    Example::

        >>> index = CandidateIndex.from_counts(torch.tensor([2, 3]))
        >>> IKBOInteraction()(torch.randn(2, 4, 16), torch.randn(5, 3, 16), index).shape
        torch.Size([5, 21])
    """

    def forward(self, user: Tensor, candidate: Tensor, index: CandidateIndex | Tensor) -> Tensor:
        """`(user [U, Fu, D], candidate [B, Fc, D], index)` to `[B, F (F - 1) / 2]`, as `kernels.dot_interaction`."""
        return kernels.dot_interaction(user, candidate, index)
