"""The first layer of an over-arch, on user and candidate vectors: Type I, the user's part is computed once per user.

Shape letters: U users, B candidates, Ku/Kc inputs, M outputs.
"""

from __future__ import annotations

from torch import Tensor

from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.kernels import _backend, _checks, _plan, reference
from ikbo_recsys.kernels._library import register_operator


def linear(
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    index: CandidateIndex | Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    r"""A linear layer over the concatenation of a user's vector and a candidate's, without the concatenation.

    .. math:: out[b] = act(W_{:, :K_u}\, user[u(b)] + W_{:, K_u:}\, cand[b] + bias)

    It equals `act(F.linear(torch.cat((user[index], cand), 1), weight, bias))`. Products accumulate in fp32 (fp64 for
    fp64) and are added, and the activation is applied, before the last rounding; the
    GPU kernel rounds the user's product to the working type first (docs/maths.md).

    Args:
        user: `[U, Ku]`, fp32, fp16, bf16 (fp64 on the CPU), any strides.
        cand: `[B, Kc]`.
        weight: `[M, Ku + Kc]`, the user's columns first.
        index: a `CandidateIndex`, or `to_user` int32/int64 `[B]`.
        bias: `[M]`.
        activation: `None`, `"relu"`, `"gelu"` (exact) or `"silu"`.

    Returns:
        `[B, M]` in the promoted dtype of the inputs, or autocast's.

    Raises:
        ValueError: sizes that do not fit, tensors on different devices, an unknown activation, an index outside `[0,
            U)` (on a GPU only under `IKBO_CHECK=1`).
        TypeError: an index that is not int32/int64, a dtype that is not supported.
    """
    known = None
    if isinstance(cand, Tensor) and cand.is_cuda:
        known = _plan.signature("linear", (cand, user, weight, bias), index, activation)
        plan = _plan.recall(known)
        if plan is not None:
            return plan(user, cand, weight, index, bias)
    _checks.check_dims("user", user, "U, Ku")
    _checks.check_dims("cand", cand, "B, Kc")
    _checks.check_dims("weight", weight, "M, Ku + Kc")
    _checks.check_weight(weight, bias, user.shape[1], cand.shape[1])
    if not isinstance(activation, (str, type(None))) or activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation must be one of {list(reference.ACTIVATIONS)}, got {activation!r}")
    to_user, offsets = _checks.resolve_index(index, user=("user", user.shape[0]), candidate=("cand", cand.shape[0]))
    _checks.check_same_device(cand=cand, user=user, weight=weight, bias=bias, index=to_user)
    given = (user, cand, weight, bias)
    user, cand, weight, bias = _checks.promote(user=user, cand=cand, weight=weight, bias=bias)
    if cand.is_cuda or _backend.requested_backend() not in ("auto", "torch"):
        from ikbo_recsys.kernels import _linear_launch

        if cand.is_cuda and not _checks.is_same(given, (user, cand, weight, bias)):
            # Converted, as under autocast: a call like an earlier one from here on.
            known = _plan.signature("linear", (cand, user, weight, bias), index, activation)
            plan = _plan.recall(known)
            if plan is not None:
                return plan(user, cand, weight, index, bias)
        return _linear_launch.linear(user, cand, weight, to_user, offsets, bias, activation, known)
    with _checks.no_autocast(cand):
        return reference.linear(user, cand, weight, to_user, bias, activation)


def _explain(
    user: Tensor,
    cand: Tensor,
    weight: Tensor,
    index: CandidateIndex | Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> _backend.Choice:
    from ikbo_recsys.kernels import _linear_launch

    return _linear_launch.choose(*_checks.promote(user=user, cand=cand, weight=weight))


_backend.register_chooser("linear", _explain)
register_operator(
    "linear(Tensor user, Tensor cand, Tensor weight, Tensor index, Tensor? bias=None, str? activation=None) -> Tensor",
    linear,
)
