"""The kernel for all gradients in one pass, compiled ahead of any launch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compile.helper import Compiled, assert_fits, assert_no_spills, compile_kernel
from tests.compile.test_cross_attention import CRAMPED, ROOMY, _signature


def _few(target: str, dtype: str, head_size: int, tile: Any, **how: Any) -> Compiled:
    from ikbo_recsys.kernels._triton.cross_attention_backward_few import attention_backward_few as kernel

    constexprs = {
        **{"QK_SCALE": 0.1, "SCALE": 0.1, "HEADS": 8, "GROUP": 1, "HEAD_SIZE": head_size},
        **{"BLOCK_D": 1 << (head_size - 1).bit_length(), "ROWS": tile.rows, "KEYS": tile.keys, "KV_LAYOUT": 2},
        **{"PERMUTED": False, "NEED_DQ": True, "NEED_DK": True, "NEED_DV": True, "GRAD_LSE": False},
        **{"PRECISION": "ieee", "PARTS": 4, **how},
    }
    signature = _signature(kernel, dtype, constexprs) | {"grad_lse_ptr": "*fp32"}
    indices = ("permutation_ptr", "offsets_ptr", "kv_ptr")
    aligned = [x for x in signature if x.startswith("stride") or (x.endswith("_ptr") and x not in indices)]
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return compile_kernel(kernel, signature, constexprs, target=target, aligned=aligned, **options)


def _tile(head_size: int, user_rows: int) -> Any:
    from ikbo_recsys.kernels._attention_launch import BACKWARD_FEW_16BIT
    from ikbo_recsys.kernels._tiles import pick

    return pick(BACKWARD_FEW_16BIT, head_size=head_size, user_rows=user_rows)


def _cases() -> list[Any]:
    """Target, limit, whether tiles are halved, dtype, head size; the first is quick."""
    targets = [(target, limit, False) for target, limit in ROOMY.items()]
    targets += [(target, limit, True) for target, limit in CRAMPED.items()]
    return [
        pytest.param(
            *how, dtype, size, marks=() if (how[0], how[2], size) == ("sm_90", False, 64) else pytest.mark.slow
        )
        for how in targets
        for dtype, size in (("bf16", 64), ("fp16", 96), ("bf16", 128))
    ]


@pytest.mark.parametrize(("target", "limit", "is_cramped", "dtype", "head_size"), _cases())
def test_fits(target: str, limit: int, is_cramped: bool, dtype: str, head_size: int) -> None:
    """With every tile, the gradient of the log-sum-exp, groups and a permutation where that takes most."""
    for rows in (8, 16, 64):
        tile = _tile(head_size, rows)
        tile = tile.halved() if is_cramped else tile
        assert_fits(_few(target, dtype, head_size, tile, GRAD_LSE=True, GROUP=2, PERMUTED=rows == 64), limit)


@pytest.mark.parametrize("needs", [(False, True, True), (True, False, False), (False, False, True)])
def test_some_of_the_gradients(needs: tuple[bool, bool, bool]) -> None:
    names = ("NEED_DQ", "NEED_DK", "NEED_DV")
    assert_fits(_few("sm_90", "bf16", 64, _tile(64, 64), **dict(zip(names, needs, strict=True))))


def test_on_hopper() -> None:
    """Two blocks share a multiprocessor, nothing spills, and rows are stored by 16 bytes."""
    compiled = _few("sm_90", "bf16", 64, _tile(64, 64))
    assert_no_spills(compiled)
    assert compiled.resources["REG"] * 128 <= 65536 // 2, compiled.resources
    assert compiled.shared_memory <= 232448 // 2 - 1024
    assert compiled.opcodes()["HGMMA"] > 0
    assert [name for name, _ in compiled.sass_positions("STG") if ".128" not in name] == []


def test_the_main_loop_does_not_spill_with_wide_heads() -> None:
    """The other way, for users with more rows than a tile, may."""
    compiled = _few("sm_90", "bf16", 128, _tile(128, 64))
    loop = _main_loop(compiled)
    assert sum(name.startswith("HGMMA") for name in loop) >= 20, loop
    assert sum(name.startswith(("STL", "LDL")) for name in loop) <= 4


def _main_loop(compiled: Compiled) -> list[str]:
    """From the first matrix instruction to the branch behind the asynchronous loads that follow it."""
    names = [name for name, _ in compiled.sass_positions("HGMMA|LDGSTS|STL|LDL|BRA")]
    first = next(i for i, name in enumerate(names) if name.startswith("HGMMA"))
    loads = next(i for i, name in enumerate(names) if i > first and name.startswith("LDGSTS"))
    return names[first : next(i for i, name in enumerate(names) if i > loads and name.startswith("BRA"))]
