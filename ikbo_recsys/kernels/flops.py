"""Import this module to have `torch.utils.flop_counter.FlopCounterMode` count attention.

Every other operator on the CPU is made of matmuls, which torch counts. Its attention kernel for the CPU has no
formula in torch, so that attention there, ours or anybody's, counts as nothing; nor does torch know our operators for a
GPU. Those are counted from shapes: every row of padding, and jagged histories as if all were of mean length. This is a
module of its own because torch's counter imports triton, which `import ikbo_recsys` must not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from ikbo_recsys.kernels import _attention_operators  # noqa: F401, defines the operators for a GPU
from ikbo_recsys.kernels._attention_launch import JAGGED

_OURS = torch.ops.ikbo
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _forward_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _backward_flops(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def _products(matmuls: int, key: Any, offsets: Any, layout: int, *queries: Any) -> int:
    """Of `matmuls` products between each query row and each key."""
    users, capacity = offsets[0] - 1, key[0] if layout == JAGGED else key[1]
    pairs = 0
    for rows, seeds, heads, _ in queries:
        pairs += rows * seeds * heads * capacity // (max(users, 1) if layout == JAGGED else 1)
    return 2 * matmuls * pairs * int(queries[0][3])


def _ours(query: Any, key: Any, value: Any, offsets: Any, permutation: Any, kv: Any, layout: int, *args: Any) -> int:
    return _products(2, key, offsets, layout, query)


def _ours_backward(
    grad: Any, query: Any, key: Any, value: Any, offsets: Any, permutation: Any, kv: Any, layout: int, *args: Any
) -> int:
    return _products(5, key, offsets, layout, query)


def _ours_both(
    query: Any, own: Any, key: Any, value: Any, offsets: Any, permutation: Any, kv: Any, layout: int, *args: Any
) -> int:
    return _products(2, key, offsets, layout, query, own)


def _ours_both_backward(grad: Any, own_grad: Any, *args: Any) -> int:
    query, own, key, _, offsets, _, _, layout, *_ = args
    return _products(5, key, offsets, layout, query, own)


def _register(operator: Any, formula: Any) -> None:
    if operator not in flop_registry:
        register_flop_formula(operator)(formula)


_register(_FORWARD, _forward_flops)
_register(_BACKWARD, _backward_flops)
for _path in ("portable", "hopper"):
    for _suffix, _formula in (
        *(("", _ours), ("_backward", _ours_backward)),
        *(("_both", _ours_both), ("_both_backward", _ours_both_backward)),
    ):

        def _counted(*args: Any, out_shape: Any = None, _formula: Any = _formula, **kwargs: Any) -> int:
            return _formula(*args)  # type: ignore[no-any-return]

        _register(getattr(_OURS, f"cross_attention_{_path}{_suffix}"), _counted)
