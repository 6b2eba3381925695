"""Linear compression of user and candidate features: Type I, the user's part is computed once per user.

Shape letters: U users, B candidates, Ku/Kc features, D embedding size, M outputs.
"""

from __future__ import annotations

from torch import Tensor

from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.kernels import _backend, _checks, _plan, reference
from ikbo_recsys.kernels._library import register_operator


def compression_linear(
    user: Tensor, cand: Tensor, weight: Tensor, index: CandidateIndex | Tensor, bias: Tensor | None = None
) -> Tensor:
    r"""Mix the features of a user and of a candidate, embedding position by embedding position.

    .. math:: out[b] = W_{:, :K_u}\, user[u(b)] + W_{:, K_u:}\, cand[b] + bias[:, None]

    It equals `weight @ torch.cat((user[index], cand), 1)`; neither the copy of the user nor the concatenation exists,
    and the user's product is taken once per user. Products accumulate in fp32 (fp64 for fp64) and are added before
    the last rounding; the GPU kernels round the user's product to the working type first (docs/maths.md).

    Args:
        user: `[U, Ku, D]`, fp32, fp16, bf16 (fp64 on the CPU), any strides.
        cand: `[B, Kc, D]`.
        weight: `[M, Ku + Kc]`, the user's columns first.
        index: a `CandidateIndex`, or `to_user` int32/int64 `[B]`.
        bias: `[M]`.

    Returns:
        `[B, M, D]` in the promoted dtype of the inputs, or autocast's.

    Raises:
        ValueError: sizes that do not fit, tensors on different devices, an index outside `[0, U)` (on a GPU only under
            `IKBO_CHECK=1`).
        TypeError: an index that is not int32/int64, a dtype that is not supported.

    Source: "linear compression embedding" of In-Kernel Broadcast Optimization, Meta, 2025.
    """
    known = None
    if isinstance(cand, Tensor) and cand.is_cuda:
        known = _plan.signature("compression_linear", (cand, user, weight, bias), index)
        plan = _plan.recall(known)
        if plan is not None:
            return plan(user, cand, weight, index, bias)
    _checks.check_dims("user", user, "U, Ku, D")
    _checks.check_dims("cand", cand, "B, Kc, D")
    _checks.check_dims("weight", weight, "M, Ku + Kc")
    _checks.check_equal_sizes("embedding size", "user", user.shape[2], "cand", cand.shape[2])
    _checks.check_weight(weight, bias, user.shape[1], cand.shape[1])
    to_user, offsets = _checks.resolve_index(index, user=("user", user.shape[0]), candidate=("cand", cand.shape[0]))
    _checks.check_same_device(cand=cand, user=user, weight=weight, bias=bias, index=to_user)
    given = (user, cand, weight, bias)
    user, cand, weight, bias = _checks.promote(user=user, cand=cand, weight=weight, bias=bias)
    if cand.is_cuda or _backend.requested_backend() not in ("auto", "torch"):
        from ikbo_recsys.kernels import _compression_launch

        if cand.is_cuda and not _checks.is_same(given, (user, cand, weight, bias)):
            # Converted, as under autocast: a call like an earlier one from here on.
            known = _plan.signature("compression_linear", (cand, user, weight, bias), index)
            plan = _plan.recall(known)
            if plan is not None:
                return plan(user, cand, weight, index, bias)
        return _compression_launch.compression_linear(user, cand, weight, to_user, offsets, bias, known)
    with _checks.no_autocast(cand):
        return reference.compression_linear(user, cand, weight, to_user, bias)


def _explain(
    user: Tensor, cand: Tensor, weight: Tensor, index: CandidateIndex | Tensor, bias: Tensor | None = None
) -> _backend.Choice:
    from ikbo_recsys.kernels import _compression_launch

    return _compression_launch.choose(*_checks.promote(user=user, cand=cand, weight=weight))


_backend.register_chooser("compression_linear", _explain)
register_operator(
    "compression_linear(Tensor user, Tensor cand, Tensor weight, Tensor index, Tensor? bias=None) -> Tensor",
    compression_linear,
)
