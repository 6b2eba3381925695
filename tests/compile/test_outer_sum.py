"""The Hopper kernel for the gradient of a weight compiles without spills or serialised wgmma, at each of its widths."""

from __future__ import annotations

import pytest

from .helper import assert_fits, assert_no_spills, assert_wgmma_pipelined, compile_kernel, descriptor


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_outer_sum(width: int, dtype: str) -> None:
    from ikbo_recsys.kernels._gluon.outer_sum import outer_sum_kernel
    from ikbo_recsys.kernels._outer_sum_hopper import STAGES, STEP

    signature = {"row_desc": descriptor(dtype, [1, 64, STEP]), "col_desc": descriptor(dtype, [1, width, STEP])}
    signature |= {"out_ptr": "*fp32"} | dict.fromkeys(["R", "C", "steps", "per_split", "row_tiles", "col_tiles"], "i32")
    constants = {"STEPS_PER_ROW": 4, "STAGES": STAGES[width]}
    compiled = compile_kernel(outer_sum_kernel, signature, constants, aligned=["out_ptr"], num_warps=4)
    assert_no_spills(compiled)
    assert_fits(compiled)
    assert_wgmma_pipelined(compiled)
