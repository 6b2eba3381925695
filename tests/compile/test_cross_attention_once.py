"""The kernels for all gradients of target attention in one pass, compiled ahead of any launch."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from tests.compile.helper import (
    Compiled,
    assert_fits,
    assert_no_spills,
    assert_wgmma_pipelined,
    compile_kernel,
    descriptor,
)
from tests.compile.test_cross_attention import HEAD_SIZES, _backward, _descriptors, _runs, _signature

INDICES = ("permutation_ptr", "offsets_ptr", "kv_ptr")


def _compiled(kernel: Any, constexprs: dict[str, Any], descriptors: dict[str, str], dtype: str) -> Compiled:
    signature = _signature(kernel, dtype, constexprs) | descriptors
    aligned = [name for name in signature if name.endswith("_ptr") and name not in INDICES]
    return compile_kernel(kernel, signature, constexprs, aligned=aligned, num_warps=4)


@cache
def _once(head_size: int, dtype: str = "bf16", **how: Any) -> Compiled:
    from ikbo_recsys.kernels._attention_backward_hopper import ONE_PASS_TILES
    from ikbo_recsys.kernels._gluon.cross_attention_backward_once import attention_backward_once
    from ikbo_recsys.kernels._gluon.cross_attention_backward_staying import attention_backward_staying

    kernel = attention_backward_staying if head_size == 64 else attention_backward_once
    tile = ONE_PASS_TILES[head_size]
    constexprs = {
        **{"D": head_size, "HEAD_SIZE": head_size, "STAGES": tile.stages, "KV_LAYOUT": 2, "PERMUTED": False},
        **tile.registers(),
        **how,
    }
    rows, keys = descriptor(dtype, [64, 1, head_size]), descriptor(dtype, [1, 64, 1, head_size])
    halves = {"kh_desc": descriptor(dtype, [1, 64, 1, head_size // 2])} if head_size == 64 else {}
    return _compiled(kernel, constexprs, _descriptors(kernel, rows, keys) | halves, dtype)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("how", [{}, {"PERMUTED": True, "KV_LAYOUT": 1}, {"dtype": "fp16", "KV_LAYOUT": 0}])
def test_hopper_backward_once(head_size: int, how: dict[str, Any]) -> None:
    compiled = _once(head_size, **how)
    assert_fits(compiled)
    assert_wgmma_pipelined(compiled)
    assert compiled.resources["STACK"] <= 64, compiled.resources


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_hopper_backward_once_works_beside_its_products(head_size: int) -> None:
    """Order of the main loop: the exponentials beside g v^T; then dk, dq and the next scores before dk is waited for;
    and dq is added beside the next scores, 16 bytes a thread."""
    runs = _runs(_once(head_size), "HGMMA", "WARPGROUP.DEPBAR", "MUFU.EX2", "REDG")
    order = "".join({"HGMMA": "P", "MUFU": "E", "REDG": "A"}.get(name, "W") * count for name, count in runs)
    # Of each consumer, between waits: g v^T, exponentials and dv; dk; dq and the next scores; what is added.
    eighths = head_size // 16
    steps = re.findall(f"W([PE]+)WPPPPWP{{{8 + eighths}}}WWA{{{eighths}}}W", order)
    assert [(step.count("P"), step.count("E")) for step in steps] == [(eighths + 4, 32)] * 2, runs


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_hopper_backward_once_adds_as_its_workspace_lies(head_size: int) -> None:
    """16 bytes a thread, those of eight columns 2 KB from those of the next eight, from the registers that the tensor
    cores gave for them."""
    sass = _once(head_size).sass
    products = re.findall(rf"HGMMA\.64x{head_size // 2}x16\S+ R(\d+), gdesc\[UR\d+\]\.tnspA", sass)
    adds = re.findall(r"REDG\.E\.ADD\.F32x4\S* desc\[UR\d+\]\[R\d+\.64(?:\+0x([0-9a-f]+))?\], R(\d+)", sass)
    eighths = head_size // 16
    # In the loops of both consumers, and behind that of the first.
    assert len(adds) == sass.count("REDG") == 3 * eighths
    assert len(products) == 3 * 8
    for i in range(3):
        registers = {int(register) for register in products[8 * i : 8 * (i + 1)]}
        assert len(registers) == 1
        first = registers.pop()
        found = {(int(offset or "0", 16), int(register)) for offset, register in adds[eighths * i : eighths * (i + 1)]}
        assert found == {(2048 * j, first + 4 * j) for j in range(eighths)}


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_hopper_backward_once_keeps_its_loop_in_registers(head_size: int) -> None:
    """Nothing comes from local memory between the exponentials and the additions of a step."""
    positions = _once(head_size).sass_positions(r"MUFU\.EX2|REDG|LDL|STL")
    names = [name.split(".")[0] for name, _ in positions]
    first = [i for i, name in enumerate(names) if name == "MUFU" and names[i - 1] != "MUFU"]
    assert len(first) == 2, names
    for at in first:
        step = names[at : names.index("REDG", at)]
        assert step == ["MUFU"] * 32, names


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_hopper_backward_stores_whole_rows(head_size: int) -> None:
    """dk and dv leave by 16 bytes a thread, of each of the two consumers."""
    in_two = [_backward("key_value", head_size, both=both) for both in (False, True)]
    for compiled in (_once(head_size), *in_two):
        assert [name for name, _ in compiled.sass_positions("STG")] == ["STG.E.128"] * (2 * 2 * head_size // 16)


@pytest.mark.parametrize("d", [64, 128])
def test_prepare_and_finish(d: int) -> None:
    from ikbo_recsys.kernels._triton.cross_attention_backward_once import finish_once, prepare_once

    for kernel, more in ((prepare_once, {"GRAD_LSE": True}), (finish_once, {"PERMUTED": True})):
        constexprs = {"HEAD_SIZE": d - 8, "D": d, **more}
        assert_no_spills(_compiled(kernel, constexprs, {}, "bf16"))
