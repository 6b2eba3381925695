"""The two parts of a weight `[M, Ku + Kc]`, the user's and the candidates', as kernels want them: aligned.

Shape letters: Ku/Kc features of a user and of a candidate, M outputs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ikbo_recsys.kernels import _launch

WEIGHT_STEP = 64
"""The portable kernels' longest step along K: with weights padded to it their loads need no masks."""


def weight_parts(weight: Tensor, user_features: int, step: int, is_traced: bool = False) -> tuple[Tensor, Tensor]:
    """`(weight[:, :Ku], weight[:, Ku:])`, each with columns of zeros up to a multiple of `step`: rows begin at
    multiples of it.

    Where that is not so in `weight` itself, they are padded copies, which are made once and again after the weight
    changes (in a traced program each time). The padding belongs to the tensors returned: a compiler is free to move
    what lies beyond a view.
    """
    if is_traced:
        return _parts(weight, user_features, step, True)
    parts: tuple[Tensor, Tensor] = _CACHE.get(weight, user_features, step)
    return parts


def aligned_parts(weight: Tensor, user_features: int) -> tuple[Tensor, Tensor]:
    """`weight_parts` whose rows begin at multiples of 16 bytes: for TMA, and for cuBLAS's faster kernels."""
    return weight_parts(weight, user_features, _launch.TMA_ALIGNMENT // weight.element_size())


def transposed(weight_MK: Tensor, step: int) -> Tensor:
    """`weight.T`, contiguous, with columns of zeros up to a multiple of `step`."""
    turned_KM, missing = weight_MK.t(), -weight_MK.shape[0] % step
    # Padding by nothing is a copy, too, of the same strides.
    return (F.pad(turned_KM, (0, missing)) if missing else turned_KM).contiguous()


def _parts(weight: Tensor, user_features: int, step: int, is_traced: bool = False) -> tuple[Tensor, Tensor]:
    user_part, cand_part = weight[:, :user_features], weight[:, user_features:]
    fits = weight.stride(1) == 1 and not (weight.stride(0) % step or user_features % step or weight.shape[1] % step)
    # While tracing there is no address. The compiler allocates with more alignment than this.
    if fits and (is_traced or weight.data_ptr() % _launch.TMA_ALIGNMENT == 0):
        return user_part, cand_part
    return (
        F.pad(user_part, (0, -user_part.shape[1] % step)).contiguous(),
        F.pad(cand_part, (0, -cand_part.shape[1] % step)).contiguous(),
    )


_CACHE = _launch.WeightCache(_parts)
