"""Launch of the Hopper attention kernel: tile table, TMA descriptors, and the reasons why a call cannot take it.

Shape letters as in `_attention_launch.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels._attention_launch import JAGGED, Problem, row_slots
from ikbo_recsys.kernels._backend import multiprocessors
from ikbo_recsys.kernels._launch import TMA_ALIGNMENT, cdiv, device_guard

_LOG2_E = 1.4426950408889634
_TILE_ROWS = 128
_TABLE_BLOCK, _TABLE_STEP = 64, 16


@dataclass(frozen=True)
class HopperTile:
    """Keys of a block, stages of each ring, registers of a consumer's and of the producer's threads."""

    keys: int
    stages: int
    consumer_registers: int
    producer_registers: int


_TILES = {64: HopperTile(128, 4, 232, 40), 128: HopperTile(128, 2, 232, 40)}


def refusal(problem: Problem) -> str | None:
    """Why the kernel cannot take the call, or None. The device is checked elsewhere."""
    if problem.query.dtype not in (torch.float16, torch.bfloat16):
        return f"the kernel takes float16 and bfloat16, not {problem.query.dtype}"
    head_size = problem.query.shape[3]
    if head_size > 128 or head_size % 8:
        return f"the kernel takes head sizes that are multiples of 8 up to 128, not {head_size}"
    if problem.scale <= 0:
        return f"the kernel takes positive scales, not {problem.scale}"
    if problem.capacity == 0:
        return "there is no history at all"
    for name, tensor in (("key", problem.key), ("value", problem.value)):
        if not _is_tma_ready(tensor):
            return f"{name} is not aligned to {TMA_ALIGNMENT} bytes in its base and strides {tensor.stride()}"
    return None


def _is_tma_ready(tensor: Tensor) -> bool:
    if tensor.stride(-1) != 1 or tensor.data_ptr() % TMA_ALIGNMENT:
        return False
    step = TMA_ALIGNMENT // tensor.element_size()
    sizes, strides = tensor.shape, tensor.stride()
    return all(size == 1 or (stride > 0 and stride % step == 0) for size, stride in zip(sizes[:-1], strides[:-1], strict=True))


def _flat_query_strides(query: Tensor) -> tuple[int, int] | None:
    """(row, head) strides of the query as `[B * S, H, D]`, or None when it is not one, or not aligned for TMA."""
    cands, seeds = query.shape[:2]
    stride_b, stride_s, stride_h, _ = query.stride()
    if seeds > 1 and cands > 1 and stride_b != seeds * stride_s:
        return None
    if not _is_tma_ready(query):
        return None
    return (stride_s if seeds > 1 else stride_b), stride_h


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for(list(block), gl.float16 if dtype is torch.float16 else gl.bfloat16)


def _descriptor(base: Tensor, shape: list[int], strides: list[int], block: tuple[int, ...]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # The stride of a dimension of size 1 is never used, but the descriptor wants it aligned.
    strides = [TMA_ALIGNMENT if size == 1 else stride for size, stride in zip(shape[:-1], strides[:-1], strict=True)] + [1]
    return TensorDescriptor(base, shape, strides, list(block), _layout(block, base.dtype))


def _history_descriptor(tensor: Tensor, layout: int, block: tuple[int, ...]) -> Any:
    shape, strides = list(tensor.shape), list(tensor.stride())
    if layout == JAGGED:
        shape, strides = [1, *shape], [TMA_ALIGNMENT, *strides]
    return _descriptor(tensor, shape, strides, block)


def tile_table(problem: Problem, rows: int = _TILE_ROWS) -> tuple[Tensor, Tensor]:
    """The table of `_triton/schedule.py` and the number of its entries, both on the device."""
    from ikbo_recsys.kernels._triton.schedule import TILE_FIELDS, fill_tile_table

    device = problem.query.device
    table = torch.empty((row_slots(problem, rows), TILE_FIELDS), dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    fill_tile_table[(cdiv(problem.num_users, _TABLE_BLOCK),)](
        table,
        count,
        problem.offsets,
        problem.offsets if problem.kv is None else problem.kv,
        *problem.sizes(),
        ROWS=rows,
        KV_LAYOUT=problem.layout,
        BLOCK=_TABLE_BLOCK,
        STEP=_TABLE_STEP,
        num_warps=4,
    )
    return table, count


def forward(problem: Problem, store_lse: bool, **override: Any) -> tuple[Tensor, Tensor]:
    """`out [B, S, H, D]`, and `lse [B, S, H]` fp32 (without elements unless asked for)."""
    from ikbo_recsys.kernels._gluon.cross_attention import CONSUMER_ROWS, attention_forward

    query, key = problem.query, problem.key
    cands, seeds, heads, head_size = query.shape
    padded = 64 if head_size <= 64 else 128
    tile = _TILES[padded]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3] if store_lse else (0,), dtype=torch.float32, device=query.device)
    row_block, key_block = (CONSUMER_ROWS, 1, padded), (1, tile.keys, 1, padded)
    flat = None if problem.permutation is not None else _flat_query_strides(query)
    shape = [cands * seeds, heads, head_size]
    o_desc = _descriptor(out, shape, [heads * head_size, head_size, 1], row_block)
    q_desc = o_desc if flat is None else _descriptor(query, shape, [*flat, 1], row_block)
    with device_guard(query):
        table, count = tile_table(problem)
        blocks = min(multiprocessors(query.device), table.shape[0] * heads)
        attention_forward[(blocks,)](
            q_desc,
            _history_descriptor(key, problem.layout, key_block),
            _history_descriptor(problem.value, problem.layout, key_block),
            o_desc,
            query,
            out,
            lse,
            table,
            count,
            problem.offsets if problem.permutation is None else problem.permutation,
            problem.scale * _LOG2_E,
            heads,
            problem.group,
            seeds,
            *problem.query_strides(),
            KEYS=tile.keys,
            D=padded,
            HEAD_SIZE=head_size,
            STAGES=tile.stages,
            JAGGED=problem.layout == JAGGED,
            GATHER=flat is None,
            PERMUTED=problem.permutation is not None,
            STORE_LSE=store_lse,
            **{
                **dict(LAZY=True, PARTIAL=False, QREG=False, CONSUMER_REGISTERS=tile.consumer_registers,
                       PRODUCER_REGISTERS=tile.producer_registers),
                **override,
            },
            num_warps=4,
        )
    return out, lse
