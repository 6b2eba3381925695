"""Pairwise dot products of user and candidate features (DLRM): pairs of user features are computed once per user.

Shape letters: U users, B candidates, F features (Fu, Fc: of the user, of a candidate), D embedding size, P pairs.
"""

from __future__ import annotations

from torch import Tensor

from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.kernels import _checks, reference
from ikbo_recsys.kernels._library import register_operator


def dot_interaction(user: Tensor, cand: Tensor, index: CandidateIndex | Tensor) -> Tensor:
    r"""All pairwise dot products among a user's and a candidate's feature embeddings.

    With :math:`e = cat(user[u(b)], cand[b])` of :math:`F = F_u + F_c` features:

    .. math:: out[b] = \{ \langle e_i, e_j \rangle : 0 \le i < j < F \}

    in the order of `torch.triu_indices(F, F, 1)`, which is that of `torchrec.models.dlrm.InteractionArch`. User-user
    pairs are Type I (once per user); user-candidate pairs are arithmetic per candidate with the user's features read
    in place.

    Args:
        user: `[U, Fu, D]`, fp32, fp16, bf16 (fp64 on the CPU), any strides.
        cand: `[B, Fc, D]`.
        index: a `CandidateIndex`, or `to_user` int32/int64 `[B]`.

    Returns:
        `[B, F (F - 1) / 2]` in the promoted dtype of the inputs, or autocast's.

    Raises:
        ValueError: sizes that do not fit, tensors on different devices, an index outside `[0, U)` (on a GPU only under
            `IKBO_CHECK=1`).
        TypeError: an index that is not int32/int64, a dtype that is not supported.

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019.
    """
    _checks.check_dims("user", user, "U, Fu, D")
    _checks.check_dims("cand", cand, "B, Fc, D")
    _checks.check_equal_sizes("embedding size", "user", user.shape[2], "cand", cand.shape[2])
    to_user, offsets = _checks.resolve_index(index, user=("user", user.shape[0]), candidate=("cand", cand.shape[0]))
    _checks.check_same_device(cand=cand, user=user, index=to_user)
    user, cand = _checks.promote(user=user, cand=cand)
    with _checks.no_autocast(cand):
        return reference.dot_interaction(user, cand, to_user, offsets)


register_operator("dot_interaction(Tensor user, Tensor cand, Tensor index) -> Tensor", dot_interaction)
