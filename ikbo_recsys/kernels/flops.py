"""Import this module to have `torch.utils.flop_counter.FlopCounterMode` count attention on the CPU.

Every other operator on the CPU is made of matmuls, which torch counts. Its attention kernel for the CPU has no
formula in torch, so that attention there, ours or anybody's, counts as nothing. This is a module of its own because
torch's counter imports triton, which `import ikbo_recsys` must not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _forward_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _backward_flops(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


for _operator, _formula in ((_FORWARD, _forward_flops), (_BACKWARD, _backward_flops)):
    if _operator not in flop_registry:
        register_flop_formula(_operator)(_formula)
