"""Every operator in plain torch: the specification, the CPU path and the fallback.

They are decomposed as the kernels are. The user's part of a Type I operator is computed at the user batch size and
only its result is looked up; autograd turns that look-up into a segment sum, so the backward pass has its matmuls at
the user batch size too. Where the arithmetic is per candidate (attention, dots), candidates of one user are packed
into tiles (`_packing.py`) so that user rows are read once per tile. Inputs arrive checked and in one dtype.

Shape letters: U users, B candidates, K features (Ku, Kc: of the user, of a candidate), D embedding size, M outputs, S
seeds (query rows per candidate), X query rows of a user's own, T history rows, H heads, G query heads per key head, N
tiles of R candidates, P pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ikbo_recsys.kernels._packing import Packing, pack_candidates

ACTIVATIONS = {None: lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}
"""The activations of `linear`; gelu is the exact one, as `torch.nn.GELU()`."""


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def compression_linear(
    user_UKD: Tensor, cand_BKD: Tensor, weight_MK: Tensor, to_user_B: Tensor, bias_M: Tensor | None
) -> Tensor:
    dtype, wide = cand_BKD.dtype, _accumulation(cand_BKD.dtype)
    weight_MK = weight_MK.to(wide)
    user_features = user_UKD.shape[1]
    user_UMD = torch.matmul(weight_MK[:, :user_features], user_UKD.to(wide))
    if bias_M is not None:
        user_UMD = user_UMD + bias_M.to(wide)[:, None]
    cand_BMD = torch.matmul(weight_MK[:, user_features:], cand_BKD.to(wide))
    # The sum takes the layout of its first operand, the looked-up one: contiguous, whatever matmul folded.
    return (user_UMD.index_select(0, to_user_B) + cand_BMD).to(dtype)


def linear(
    user_UK: Tensor,
    cand_BK: Tensor,
    weight_MK: Tensor,
    to_user_B: Tensor,
    bias_M: Tensor | None,
    activation: str | None,
) -> Tensor:
    dtype, wide = cand_BK.dtype, _accumulation(cand_BK.dtype)
    weight_MK = weight_MK.to(wide)
    user_features = user_UK.shape[1]
    user_UM = F.linear(user_UK.to(wide), weight_MK[:, :user_features], None if bias_M is None else bias_M.to(wide))
    cand_weight_KM = weight_MK[:, user_features:].t()
    out_BM = torch.addmm(user_UM.index_select(0, to_user_B), cand_BK.to(wide), cand_weight_KM)
    return ACTIVATIONS[activation](out_BM).to(dtype)


def broadcast(x_U: Tensor, to_user_B: Tensor) -> Tensor:
    if x_U.dtype in (torch.float16, torch.bfloat16) and x_U.requires_grad:
        # So that the gradient's sums over candidates are rounded once.
        return x_U.float().index_select(0, to_user_B).to(x_U.dtype)
    return x_U.index_select(0, to_user_B)


def segment_sum(x_B: Tensor, to_user_B: Tensor, num_users: int) -> Tensor:
    wide_U = torch.zeros((num_users, *x_B.shape[1:]), dtype=_accumulation(x_B.dtype), device=x_B.device)
    return wide_U.index_add(0, to_user_B, x_B.to(wide_U.dtype)).to(x_B.dtype)


def dot_interaction(user_UFD: Tensor, cand_BFD: Tensor, to_user_B: Tensor, offsets: Tensor | None) -> Tensor:
    dtype, wide = cand_BFD.dtype, _accumulation(cand_BFD.dtype)
    user_UFD, cand_BFD = user_UFD.to(wide), cand_BFD.to(wide)
    num_user, num_cand = user_UFD.shape[1], cand_BFD.shape[1]
    packing = pack_candidates(to_user_B, offsets, user_UFD.shape[0])

    user_pairs_UP = _upper_pairs(torch.bmm(user_UFD, user_UFD.mT))
    cand_pairs_BP = _upper_pairs(torch.bmm(cand_BFD, cand_BFD.mT))
    tiles_NRFD = packing.to_tiles(cand_BFD)
    mixed = torch.bmm(tiles_NRFD.flatten(1, 2), packing.per_tile(user_UFD).mT)
    mixed_BFF = packing.from_tiles(mixed.unflatten(1, (packing.rows, num_cand))).mT

    # triu_indices(F, F, 1) goes row by row: for each user feature its later user features, then every candidate
    # feature.
    rows, start = [], 0
    for feature in range(num_user):
        stop = start + num_user - 1 - feature
        rows += [user_pairs_UP[:, start:stop].index_select(0, to_user_B), mixed_BFF[:, feature]]
        start = stop
    return torch.cat((*rows, cand_pairs_BP), dim=1).to(dtype)


def _upper_pairs(gram_XFF: Tensor) -> Tensor:
    features = gram_XFF.shape[1]
    first, second = torch.triu_indices(features, features, 1, device=gram_XFF.device)
    return gram_XFF.flatten(1).index_select(1, first * features + second)


def cross_attention(
    query_BSHD: Tensor,
    key_UTHD: Tensor,
    value_UTHD: Tensor,
    to_user_B: Tensor,
    offsets: Tensor | None,
    kv_lengths_U: Tensor | None,
    scale: float,
    user_query_UXHD: Tensor | None = None,
    with_lse: bool = False,
) -> list[Tensor]:
    """The candidates' result and, where users have query rows of their own, theirs; then, if asked for, the log-sum-exp
    of each."""
    wide = _accumulation(query_BSHD.dtype)
    key_UTHD, value_UTHD = key_UTHD.to(wide), value_UTHD.to(wide)
    history = key_UTHD.shape[1]
    if not isinstance(history, int) or history == 0:
        # Torch's attention kernel for the CPU divides by the number of keys. A dynamic number may be 0.
        key_UTHD, value_UTHD = _one_padding_row(key_UTHD), _one_padding_row(value_UTHD)
        if kv_lengths_U is None:
            kv_lengths_U = to_user_B.new_full((key_UTHD.shape[0],), history)
    packing = pack_candidates(to_user_B, offsets, key_UTHD.shape[0])
    attend_UT = padding_UT = empty_U = None
    if kv_lengths_U is not None:
        valid_UT = torch.arange(key_UTHD.shape[1], device=key_UTHD.device) < kv_lengths_U[:, None]
        padding_UT, empty_U = ~valid_UT, kv_lengths_U == 0
        # Without a history there is nothing to normalise by: attend to the zeros, whose result and gradients are zero.
        attend_UT = valid_UT | empty_U[:, None]
    of_users = None
    if user_query_UXHD is not None:
        if padding_UT is not None:
            key_UTHD, value_UTHD = (x.masked_fill(padding_UT[:, :, None, None], 0) for x in (key_UTHD, value_UTHD))
            padding_UT = None
        query_U1XHD = user_query_UXHD.to(wide)[:, None]
        of_users = _attend(query_U1XHD, key_UTHD, value_UTHD, attend_UT, empty_U, scale, with_lse)
    key_NTHD, value_NTHD = (_clean_per_tile(packing, x, padding_UT) for x in (key_UTHD, value_UTHD))
    attend_NT = None if attend_UT is None else packing.per_tile(attend_UT)
    empty_N = None if empty_U is None or not with_lse else packing.per_tile(empty_U)
    query_NRSHD = packing.to_tiles(query_BSHD.to(wide))
    of_cands = _attend(query_NRSHD, key_NTHD, value_NTHD, attend_NT, empty_N, scale, with_lse)
    results = [[packing.from_tiles(x) for x in of_cands]]
    if of_users is not None:
        results.append([x[:, 0] for x in of_users])
    outs = [out.to(query_BSHD.dtype) for out, *_ in results]
    return outs + [lse for _, *lses in results for lse in lses]


def _attend(
    query_NRSHD: Tensor,
    key_NTHD: Tensor,
    value_NTHD: Tensor,
    attend_NT: Tensor | None,
    empty_N: Tensor | None,
    scale: float,
    with_lse: bool,
) -> list[Tensor]:
    """Each tile's rows over its own keys: `[N, R, S, H, D]`, then the log-sum-exp `[N, R, S, H]` if asked for.

    Keys and values that are not there are zeros. Tiles without any attend to one of those, and get -inf.
    """
    rows_NHRD = _fold_query_heads(query_NRSHD, key_NTHD.shape[2])
    key_NHTD = key_NTHD.transpose(1, 2)
    attend_N11T = None if attend_NT is None else attend_NT[:, None, None, :]
    out_NHRD = F.scaled_dot_product_attention(
        rows_NHRD, key_NHTD, value_NTHD.transpose(1, 2), attn_mask=attend_N11T, scale=scale
    )
    results = [_unfold_query_heads(out_NHRD, query_NRSHD.shape)]
    if with_lse:
        scores_NHRT = torch.matmul(rows_NHRD * scale, key_NHTD.mT)
        if attend_N11T is not None:
            scores_NHRT = scores_NHRT.masked_fill(~attend_N11T, float("-inf"))
        lse_NHR = scores_NHRT.logsumexp(-1)
        if empty_N is not None:
            lse_NHR = lse_NHR.masked_fill(empty_N[:, None, None], float("-inf"))
        results.append(_unfold_query_heads(lse_NHR[..., None], query_NRSHD.shape)[..., 0])
    return results


def _clean_per_tile(packing: Packing, x_UTHD: Tensor, padding_UT: Tensor | None) -> Tensor:
    """Each tile's user's rows, with zeros in the padding.

    Padding may hold anything, NaN included, and 0 * NaN is NaN: it has to be gone before the matmuls. Where there are
    no more tiles than users it goes after the look-up, in place: a copy less.
    """
    if padding_UT is None:
        return packing.per_tile(x_UTHD)
    tiles, users = packing.user_N.shape[0], x_UTHD.shape[0]
    if not torch.compiler.is_compiling() and isinstance(tiles, int) and tiles <= users:
        return packing.per_tile(x_UTHD).masked_fill_(packing.per_tile(padding_UT)[:, :, None, None], 0)
    return packing.per_tile(x_UTHD.masked_fill(padding_UT[:, :, None, None], 0))


def _one_padding_row(x_UTHD: Tensor) -> Tensor:
    """Another row of padding, so that there is one."""
    return F.pad(x_UTHD, (0, 0, 0, 0, 0, 1))


def _fold_query_heads(query_NRSHD: Tensor, key_heads: int) -> Tensor:
    """`[N, R, S, Hkv * G, D]` to `[N, Hkv, R * S * G, D]`: the query heads of one key head are rows like any other."""
    grouped = query_NRSHD.unflatten(3, (key_heads, query_NRSHD.shape[3] // key_heads))
    return grouped.permute(0, 3, 1, 2, 4, 5).flatten(2, 4)


def _unfold_query_heads(out_NHRD: Tensor, query_shape: torch.Size) -> Tensor:
    """Back to `[N, R, S, H, D]`, the shape of the queries (D may differ)."""
    key_heads = out_NHRD.shape[1]
    split = out_NHRD.unflatten(2, (*query_shape[1:3], query_shape[3] // key_heads))
    return split.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)


def pad_jagged(key_LHD: Tensor, value_LHD: Tensor, offsets_U: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """`[sum T, ...]` with offsets `[U + 1]` to `[U, max_length, ...]`, zeros behind each user's rows."""
    num_users, row_L = offsets_U.shape[0] - 1, torch.arange(key_LHD.shape[0], device=key_LHD.device)
    offsets_U = offsets_U.long()
    user_L = torch.searchsorted(offsets_U[1:], row_L, right=True)
    slot_L = user_L * max_length + row_L - offsets_U.index_select(0, user_L)

    def padded(x_LHD: Tensor) -> Tensor:
        zeros = x_LHD.new_zeros((num_users * max_length, *x_LHD.shape[1:]))
        return zeros.index_copy(0, slot_L, x_LHD).unflatten(0, (num_users, max_length))

    return padded(key_LHD), padded(value_LHD)
