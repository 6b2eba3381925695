"""Target attention: candidate queries over their own user's history. Type II, keys and values are read in place.

Shape letters: U users, B candidates, S seeds (query rows per candidate), T history rows, H query heads, Hkv key
heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ikbo_recsys.candidate_index import CandidateIndex, check_count, check_index_tensor
from ikbo_recsys.kernels import _backend, _checks, _plan, reference
from ikbo_recsys.kernels._library import register_operator


@overload
def cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: CandidateIndex | Tensor,
    *,
    user_query: None = ...,
    kv_lengths: Tensor | None = ...,
    kv_offsets: Tensor | None = ...,
    max_kv_length: int | None = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: CandidateIndex | Tensor,
    *,
    user_query: Tensor | None = ...,
    kv_lengths: Tensor | None = ...,
    kv_offsets: Tensor | None = ...,
    max_kv_length: int | None = ...,
    scale: float | None = ...,
    return_lse: bool = ...,
) -> Any: ...


def cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: CandidateIndex | Tensor,
    *,
    user_query: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    max_kv_length: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    r"""Attention of each candidate's query rows over the rows of its own user.

    .. math:: out[b, s, h] = \sum_t softmax_t(scale \cdot \langle q[b, s, h], k[u(b), t, h'] \rangle)\, v[u(b), t, h']

    with :math:`h' = h / (H / H_{kv})` and t over the user's own rows only. Keys and values are never copied per
    candidate. A user without history gives zeros and zero gradients; whatever lies in the padding is never attended to.

    With `user_query` the user's own rows attend to the same keys and values in the same pass, self-attention beside
    target attention: :math:`user\_out[u, x, h] = \sum_t softmax_t(scale \cdot \langle user\_query[u, x, h],
    k[u, t, h'] \rangle)\, v[u, t, h']`. On a GPU both are one launch, forward, and their gradients of keys and values
    one sum.

    On Hopper the gradient of `query` may be added up in another order in every run, unless
    `torch.use_deterministic_algorithms(True)` is set; everything else has a fixed one.

    Args:
        query: `[B, S, H, D]`, fp32, fp16, bf16 (fp64 on the CPU), any strides.
        key, value: padded `[U, T, Hkv, D]`, or jagged `[sum T, Hkv, D]` with `kv_offsets`. Hkv divides H (grouped
        query heads).
        index: a `CandidateIndex`, or `to_user` int32/int64 `[B]`.
        kv_lengths: int32/int64 `[U]`, the number of valid rows of each user in padded `key` and `value`; all of them
            by default.
        kv_offsets: int32/int64 `[U + 1]` where each user's rows begin in jagged `key` and `value`.
        max_kv_length: an upper bound of the jagged lengths. Without it the CPU path reads it from `kv_offsets`, which
            `torch.compile(fullgraph=True)` refuses.
        user_query: `[U, X, H, D]`, the same number of query rows for each user, candidates or not, any strides. All
            are computed: rows that stand for nothing must at least be finite.
        scale: of the dot products; `1 / sqrt(D)` by default.
        return_lse: also return :math:`log \sum_t exp(scale \cdot \langle q, k_t \rangle)` of every row, with which
            attentions over two sets of keys are merged. Differentiable, as `flex_attention`'s is.

    Returns:
        out `[B, S, H, D]` in the promoted dtype of the inputs, or autocast's. With `user_query` the pair of it and
        user_out `[U, X, H, D]`. With `return_lse` a tuple of these followed by lse `[B, S, H]`, and user_lse
        `[U, X, H]` if there is a user_out: fp32 (fp64 for fp64 inputs), -inf for rows without a single key.

    Raises:
        ValueError: sizes that do not fit, lengths and offsets together, lengths outside `[0, T]`, offsets that do not
            go from 0 to the number of rows, different devices, an index outside `[0, U)` (values are checked on the
            CPU; on a GPU only under `IKBO_CHECK=1`).
        TypeError: index, lengths or offsets that are not int32/int64, a dtype that is not supported.

    Source: target attention of Zhou et al., "Deep Interest Network", 2018, in its softmax form.
    """
    known = None
    if isinstance(query, Tensor) and query.is_cuda:
        tensors = (query, key, value, user_query, kv_lengths, kv_offsets)
        known = _plan.signature("cross_attention", tensors, index, scale, return_lse)
        plan = _plan.recall(known)
        if plan is not None:
            return plan.repeat(query, key, value, index, kv_lengths if kv_offsets is None else kv_offsets, user_query)  # type: ignore[no-any-return]
    _checks.check_dims("query", query, "B, S, H, D")
    num_users = _check_key_value(query, key, value, kv_lengths, kv_offsets, max_kv_length)
    if user_query is not None:
        _check_user_query(user_query, query, num_users)
    to_user, offsets = _checks.resolve_index(index, user=("key", num_users), candidate=("query", query.shape[0]))
    _checks.check_same_device(
        **{"query": query, "key": key, "value": value, "user_query": user_query, "index": to_user},
        **{"kv_lengths": kv_lengths, "kv_offsets": kv_offsets},
    )
    given = (query, key, value, user_query)
    query, key, value, user_query = _checks.promote(query=query, key=key, value=value, user_query=user_query)
    known = known if _checks.is_same(given, (query, key, value, user_query)) else None
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[3]) if query.shape[3] else 1.0
    path = _path(query, key, value, kv_offsets, num_users, scale, user_query)
    if path != "torch":
        from ikbo_recsys.kernels import _attention_paths

        rest = (to_user, offsets, kv_lengths, kv_offsets, scale, path, known, user_query, return_lse)
        return _attention_paths.attention(query, key, value, *rest)  # type: ignore[no-any-return]
    with _checks.no_autocast(query):
        if kv_offsets is not None:
            length = _max_length(kv_offsets, key.shape[0]) if max_kv_length is None else max_kv_length
            key, value = reference.pad_jagged(key, value, kv_offsets, length)
            kv_lengths = kv_offsets.diff()
        results = reference.cross_attention(
            query, key, value, to_user, offsets, kv_lengths, scale, user_query, return_lse
        )
    return results[0] if len(results) == 1 else tuple(results)


def _path(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_offsets: Tensor | None,
    num_users: int,
    scale: float,
    user_query: Tensor | None,
) -> str:
    """The path of a call. The GPU paths are imported for a GPU alone, or for whoever asks for them by name."""
    if query.device.type != "cuda" and _backend.requested_backend() in ("auto", "torch"):
        return "torch"
    from ikbo_recsys.kernels import _attention_paths

    if _plan.is_transformed():
        return "torch"
    if _plan.is_dispatched(query, key, value, user_query):
        # The size itself may be a symbol, of which only the outcome of comparisons is a constant.
        size = query.shape[3]
        representative = 64 if size <= 128 and size % 8 == 0 else 256 if size <= 256 else 512
        return _attention_paths.traced_path(query.device.index, query.dtype, representative)
    return _attention_paths.choose(query, key, value, kv_offsets, num_users, scale, user_query).path


def _explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: CandidateIndex | Tensor,
    *,
    user_query: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    max_kv_length: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> _backend.Choice:
    from ikbo_recsys.kernels import _attention_paths

    num_users = key.shape[0] if kv_offsets is None else kv_offsets.shape[0] - 1
    query, key, value, user_query = _checks.promote(query=query, key=key, value=value, user_query=user_query)
    scale = 1.0 if scale is None else scale
    return _attention_paths.choose(query, key, value, kv_offsets, num_users, scale, user_query)


_backend.register_chooser("cross_attention", _explain)


def _check_key_value(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_lengths: Tensor | None,
    kv_offsets: Tensor | None,
    max_kv_length: int | None,
) -> int:
    """Check shapes, lengths and offsets; return U."""
    if kv_lengths is not None and kv_offsets is not None:
        raise ValueError("kv_lengths is for padded keys and kv_offsets for jagged ones: give one of them")
    if max_kv_length is not None:
        check_count("max_kv_length", max_kv_length)
        if kv_offsets is None:
            raise ValueError(f"max_kv_length is {max_kv_length} but only jagged keys, with kv_offsets, have one")
    layout = "U, T, Hkv, D" if kv_offsets is None else "sum T, Hkv, D"
    _checks.check_dims("key", key, layout)
    _checks.check_dims("value", value, layout)
    rows = ("user batch size", "row count") if kv_offsets is None else ("row count",)
    for axis, what in enumerate((*rows, "head count", "head size")):
        _checks.check_equal_sizes(what, "key", key.shape[axis], "value", value.shape[axis])
    _checks.check_equal_sizes("head size", "query", query.shape[3], "key", key.shape[-1])
    heads, key_heads = query.shape[2], key.shape[-2]
    if key_heads == 0 or heads % key_heads != 0:
        raise ValueError(f"head count of query is {heads}, not a multiple of head count of key which is {key_heads}")
    if kv_offsets is not None:
        check_index_tensor("kv_offsets", kv_offsets)
        if kv_offsets.shape[0] == 0:
            raise ValueError("kv_offsets has 0 entries but needs num_users + 1 of them, at least 1")
        _checks.check_offsets("kv_offsets", kv_offsets, key.shape[0], max_kv_length)
        return kv_offsets.shape[0] - 1
    if kv_lengths is not None:
        check_index_tensor("kv_lengths", kv_lengths)
        _checks.check_equal_sizes("user batch size", "kv_lengths", kv_lengths.shape[0], "key", key.shape[0])
        _checks.check_lengths("kv_lengths", kv_lengths, key.shape[1])
    return key.shape[0]


def _check_user_query(user_query: Tensor, query: Tensor, num_users: int) -> None:
    _checks.check_dims("user_query", user_query, "U, X, H, D")
    _checks.check_equal_sizes("user batch size", "user_query", user_query.shape[0], "key", num_users)
    for axis, what in ((2, "head count"), (3, "head size")):
        _checks.check_equal_sizes(what, "user_query", user_query.shape[axis], "query", query.shape[axis])


def _max_length(offsets: Tensor, total: int) -> int:
    if offsets.shape[0] == 1:
        return 0
    longest = offsets.diff().max().item()
    torch._check(longest >= 0)
    torch._check(longest <= total)
    return int(longest)


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor index, *, %sTensor? kv_lengths=None, Tensor? kv_offsets=None, "
    "SymInt? max_kv_length=None, float? scale=None"
)


def _register(overload_name: str, has_users: bool, has_lse: bool) -> None:
    """An operator has a fixed number of results: one overload for each number."""

    def implementation(*args: Any, **kwargs: Any) -> Any:
        return cross_attention(*args, **kwargs, return_lse=has_lse)

    arguments = _ARGUMENTS % ("Tensor user_query, " if has_users else "")
    results = ["Tensor"] * ((1 + has_users) * (1 + has_lse))
    register_operator(
        f"cross_attention{overload_name}({arguments}) -> "
        + (results[0] if len(results) == 1 else f"({', '.join(results)})"),
        implementation,
    )


_register("", has_users=False, has_lse=False)
_register(".lse", has_users=False, has_lse=True)
_register(".users", has_users=True, has_lse=False)
_register(".users_lse", has_users=True, has_lse=True)
