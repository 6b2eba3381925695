"""The attention kernels compiled ahead of any launch: they fit, nothing spills where it costs, wgmma stays
asynchronous."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.compile.helper import (
    TARGETS,
    Compiled,
    assert_fits,
    assert_no_spills,
    assert_wgmma_pipelined,
    compile_kernel,
    descriptor,
)

POINTERS = {
    **{"lse_ptr": "*fp32", "ulse_ptr": "*fp32", "delta_ptr": "*fp32", "udelta_ptr": "*fp32"},
    **{"table_ptr": "*i32", "offsets_ptr": "*i32", "kv_ptr": "*i32", "state_ptr": "*fp32", "flags_ptr": "*i32"},
    **{"work_ptr": "*fp32", "counter_ptr": "*i32"},
}


def _signature(kernel: Any, dtype: str, constexprs: dict[str, Any], index: str = "*i64") -> dict[str, str]:
    """Argument types by their names: descriptors are added by the caller."""
    types = {}
    for name in kernel.arg_names:
        if name in constexprs or name.endswith("_desc"):
            continue
        if name.endswith("_ptr"):
            types[name] = index if name == "permutation_ptr" else POINTERS.get(name, f"*{dtype}")
        else:
            types[name] = "fp32" if name in ("qk_scale", "scale") else "i32"
    return types


def _forward(head_size: int, dtype: str = "bf16", both: bool = False, **how: Any) -> Compiled:
    from ikbo_recsys.kernels._attention_hopper import FORWARD_TILES, NARROW_TILES, SHARED_REGISTERS
    from ikbo_recsys.kernels._gluon import cross_attention as module

    kernel = module.attention_forward_both if both else module.attention_forward
    if "SHARES" in how:
        kernel = module.attention_forward_shared
    tile = (NARROW_TILES if how.get("CONSUMERS") == 1 else FORWARD_TILES)[head_size]
    if kernel is module.attention_forward:
        how["CONSUMERS"] = tile.consumers
    constexprs = {
        **{"KEYS": tile.keys, "D": head_size, "HEAD_SIZE": head_size, "STAGES": tile.stages, "JAGGED": False},
        **{"GATHER": False, "PERMUTED": False, "STORE_LSE": False},
        **{"CONSUMER_REGISTERS": tile.consumer_registers, "PRODUCER_REGISTERS": tile.producer_registers},
        **how,
    }
    rows, keys = descriptor(dtype, [64, 1, head_size]), descriptor(dtype, [1, tile.keys, 1, head_size])
    signature = _signature(kernel, dtype, constexprs) | _descriptors(kernel, rows, keys)
    aligned = [name for name in signature if name.endswith("_ptr") and name != "permutation_ptr"]
    options = {} if tile.blocks == 1 else {"maxnreg": SHARED_REGISTERS}
    return compile_kernel(kernel, signature, constexprs, aligned=aligned, num_warps=4, **options)


def _descriptors(kernel: Any, rows: str, keys: str) -> dict[str, str]:
    names = [name for name in kernel.arg_names if name.endswith("_desc")]
    return {name: keys if name in ("k_desc", "v_desc") else rows for name in names}


def _backward(name: str, head_size: int, dtype: str = "bf16", both: bool = False, **how: Any) -> Compiled:
    """The kernel for "query" or for "key_value"."""
    from ikbo_recsys.kernels import _attention_backward_hopper as hopper
    from ikbo_recsys.kernels._gluon import cross_attention_backward, cross_attention_backward_query

    module = cross_attention_backward_query if name == "query" else cross_attention_backward
    kernel = getattr(module, f"attention_backward_{name}" + ("_both" if both else ""))
    tile = (hopper.BACKWARD_QUERY_TILES if name == "query" else hopper.BACKWARD_TILES)[head_size]
    layout = {"JAGGED": True, "GRAD_LSE": True} if name == "query" else {"KV_LAYOUT": 2}
    constexprs = {
        **{"D": head_size, "HEAD_SIZE": head_size, "STAGES": tile.stages, "PERMUTED": False},
        **layout,
        **tile.registers(),
        **how,
    }
    rows, keys = descriptor(dtype, [64, 1, head_size]), descriptor(dtype, [1, 64, 1, head_size])
    signature = _signature(kernel, dtype, constexprs) | _descriptors(kernel, rows, keys)
    indices = ("permutation_ptr", "offsets_ptr", "kv_ptr")
    aligned = [name for name in signature if name.endswith("_ptr") and name not in indices]
    return compile_kernel(kernel, signature, constexprs, aligned=aligned, num_warps=4)


def _runs(compiled: Compiled, *names: str) -> list[tuple[str, int]]:
    """The named opcodes in the order of the code, equal neighbours counted together."""
    runs: list[tuple[str, int]] = []
    for name, _ in compiled.sass_positions("|".join(names)):
        opcode = name.split(".")[0]
        if runs and runs[-1][0] == opcode:
            runs[-1] = (opcode, runs[-1][1] + 1)
        else:
            runs.append((opcode, 1))
    return runs


HEAD_SIZES = [pytest.param(64, marks=pytest.mark.slow), 128]


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("how", [{"JAGGED": True}, {"GATHER": True, "PERMUTED": True, "STORE_LSE": True}])
def test_hopper_forward(head_size: int, both: bool, how: dict[str, Any]) -> None:
    compiled = _forward(head_size, both=both, **how)
    assert_fits(compiled)
    assert_wgmma_pipelined(compiled)
    # The producer may keep a few words in local memory. A consumer that did would do so at every block of keys.
    assert compiled.resources["STACK"] <= 64, compiled.resources


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("how", [{"JAGGED": True}, {"GATHER": True, "PERMUTED": True, "STORE_LSE": True}])
def test_hopper_forward_of_few_rows(head_size: int, how: dict[str, Any]) -> None:
    """Two thread blocks share a multiprocessor: its registers, and its shared memory but for 1 KB of each."""
    compiled = _forward(head_size, CONSUMERS=1, **how)
    assert_wgmma_pipelined(compiled)
    assert compiled.resources["STACK"] == 0, compiled.resources
    assert 2 * 256 * compiled.resources["REG"] <= 65536, compiled.resources
    assert 2 * (compiled.kernel.metadata.shared + 1024) <= 228 << 10


@pytest.mark.parametrize("how", [{"JAGGED": True}, {"GATHER": True, "PERMUTED": True}, {"HEAD_SIZE": 104}])
def test_hopper_forward_stores_rows_by_16_bytes(how: dict[str, Any]) -> None:
    """Through shared memory, and no warp reads there before all have written."""
    compiled = _forward(128, **how)
    stores = [name for name, _ in compiled.sass_positions("STG")]
    assert stores
    assert all(".128" in name for name in stores), stores
    order = re.findall(r"stmatrix|bar\.sync|ld\.shared\.v4", compiled.kernel.asm["ptx"])
    steps = [step for step, before in zip(order[1:], order, strict=False) if step != before]
    assert "stmatrix bar.sync ld.shared.v4" in " ".join(steps)
    assert "stmatrix ld.shared.v4" not in " ".join(steps)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(
    "how", [{"SHARES": 1, "JAGGED": True, "STORE_LSE": True}, {"SHARES": 1, "GATHER": True}, {"SHARES": 8}]
)
def test_hopper_forward_with_shared_tiles(head_size: int, how: dict[str, Any]) -> None:
    compiled = _forward(head_size, **how)
    assert_fits(compiled)
    assert_wgmma_pipelined(compiled)
    assert compiled.resources["STACK"] <= 64, compiled.resources


@pytest.mark.parametrize("d", [64, 128])
def test_merge(d: int) -> None:
    from ikbo_recsys.kernels._attention_shares import MERGED_ROWS, MOST_PARTS
    from ikbo_recsys.kernels._triton.cross_attention_merge import merge_parts

    constexprs = {
        **{"D": d, "HEAD_SIZE": d - 8, "PARTS": MOST_PARTS, "ROWS": MERGED_ROWS},
        **{"PERMUTED": True, "STORE_LSE": True, "CHAINED": True},
    }
    signature = _signature(merge_parts, "bf16", constexprs)
    aligned = ["state_ptr", "out_ptr", "lse_ptr", "table_ptr"]
    assert_no_spills(compile_kernel(merge_parts, signature, constexprs, aligned=aligned, num_warps=4))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("name", ["query", "key_value"])
def test_hopper_backward(head_size: int, name: str, both: bool) -> None:
    compiled = _backward(name, head_size, both=both, PERMUTED=True)
    assert_fits(compiled)
    assert_wgmma_pipelined(compiled)
    assert compiled.resources["STACK"] <= 64, compiled.resources


@pytest.mark.parametrize("form", [{}, {"both": True}, {"SHARES": 1}, {"SHARES": 1, "JAGGED": True}, {"SHARES": 8}])
def test_hopper_forward_waits_for_values_after_the_softmax(form: dict[str, Any]) -> None:
    """Order of the main loop: Q.K and P.V are issued, Q.K is waited for, the exponentials, and only then P.V's wait.

    ptxas moves that last wait above the softmax unless something keeps it back, and the matmul then hides nothing.
    """
    runs = _runs(_forward(128, STORE_LSE=True, **form), "HGMMA", "WARPGROUP.DEPBAR", "MUFU.EX2")
    issues = [i for i, run in enumerate(runs) if run == ("HGMMA", 16)]
    # Two consumers, each with a main loop and the step between two items.
    assert len(issues) == 4, runs
    for at in issues:
        between = runs[at + 1 : at + 4]
        assert [name for name, _ in between] == ["WARPGROUP", "MUFU", "WARPGROUP"], runs
        assert between[1][1] >= 64, runs


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("form", [{}, {"both": True}, {"SHARES": 1}, {"SHARES": 8}, {"CONSUMERS": 1}])
def test_hopper_forward_rescales_beside_the_product_with_keys(head_size: int, form: dict[str, Any]) -> None:
    """The accumulator is multiplied by its factors between Q.K and P.V, not before both."""
    from ikbo_recsys.kernels._attention_hopper import FORWARD_TILES, NARROW_TILES

    tile = (NARROW_TILES if form == {"CONSUMERS": 1} else FORWARD_TILES)[head_size]
    runs = _runs(_forward(head_size, **form), "HGMMA", "FMUL")
    products = [("HGMMA", head_size // 16), ("FMUL", head_size // 2), ("HGMMA", tile.keys // 16)]
    # Each consumer has a main loop and the step between two items.
    assert sum(runs[at : at + 3] == products for at in range(len(runs))) == 2 * tile.consumers, runs


def test_hopper_forward_loads_keys_before_the_second_consumers_rows() -> None:
    """The first consumer begins with half of the rows and a block of keys."""
    ptx = _forward(128).kernel.asm["ptx"]
    # Each in two halves of 64 columns; rows have three coordinates, keys four.
    assert "".join(re.findall(r"tensor\.(\d)d\.shared::cta\.global", ptx)).startswith("334433")


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("both", [False, True])
def test_hopper_query_gradient_works_beside_its_products(head_size: int, both: bool) -> None:
    """Order of the main loop: three products are issued, the exponentials of the step begin beside them, and the last
    wait, for the next scores, stands at the loop's end, where the next step's products follow at once."""
    compiled = _backward("query", head_size, both=both, JAGGED=False, GRAD_LSE=False)
    runs = _runs(compiled, "HGMMA", "WARPGROUP.DEPBAR", "MUFU.EX2")
    order = "".join({"HGMMA": "P", "MUFU": "E"}.get(name, "W") * count for name, count in runs)
    # g v^T and ds k and q k^T before anything is waited for: in an item's first step and in the main loop, for each
    # consumer.
    products = 2 * (head_size // 16) + 4
    steps = [piece for piece in order.split("W") if piece.count("P") == products]
    assert len(steps) == 4, runs
    assert min(piece.count("E") for piece in steps[1::2]) >= 8, runs


ROOMY = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448}
CRAMPED = {"sm_80": 101376, "gfx942": 65536}
"""Bytes of shared memory per block; 99 KB is what consumer GPUs with the instructions of an sm_80 have."""


def _portable_kernels(narrow: bool, both: bool) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Forward, dq, and dk and dv: the kernel, its tile table, the constants of its own."""
    from ikbo_recsys.kernels import _attention_launch as launch
    from ikbo_recsys.kernels._triton import (
        cross_attention,
        cross_attention_backward,
        cross_attention_backward_query,
        cross_attention_both,
    )

    names = ("attention_forward", "attention_backward_query", "attention_backward_key_value")
    modules = (cross_attention, cross_attention_backward_query, cross_attention_backward)
    kernels = [getattr(module, name) for module, name in zip(modules, names, strict=True)]
    if both:
        kernels = [getattr(cross_attention_both, name + "_both") for name in names]
    backward = {"SCALE": 0.1, "NEED_DQ": True, "GRAD_LSE": True} | ({"NEED_USER_DQ": True} if both else {})
    return [
        (kernels[0], launch.FORWARD_16BIT if narrow else launch.FORWARD_32BIT, {"STORE_LSE": True}),
        (kernels[1], launch.BACKWARD_QUERY_16BIT if narrow else launch.BACKWARD_32BIT, backward),
        (
            kernels[2],
            launch.BACKWARD_KEY_VALUE_16BIT if narrow else launch.BACKWARD_32BIT,
            {"SCALE": 0.1, "SPLITS": 1, "NEED_DK": True, "NEED_DV": True},
        ),
    ]


HEADS_AND_TYPES = [("bf16", 64), ("bf16", 96), ("bf16", 128), ("fp16", 256), ("fp32", 64), ("fp32", 96), ("fp32", 256)]
QUICK = ("sm_90", False, "bf16", 128)


def _portable_cases() -> list[Any]:
    """Target, limit, whether tiles are halved, dtype, head size, and whether candidates are permuted."""
    cases = [(target, limit, False, False) for target, limit in ROOMY.items()]
    cases += [(target, limit, True, False) for target, limit in CRAMPED.items()]
    # A permutation takes less memory, where it makes a difference at all.
    cases += [("sm_90", ROOMY["sm_90"], False, True)]
    return [
        pytest.param(
            target,
            limit,
            is_cramped,
            dtype,
            head_size,
            permuted,
            marks=() if (target, permuted, dtype, head_size) == QUICK else pytest.mark.slow,
        )
        for target, limit, is_cramped, permuted in cases
        for dtype, head_size in HEADS_AND_TYPES
    ]


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("target", "limit", "is_cramped", "dtype", "head_size", "permuted"), _portable_cases())
def test_portable(
    target: str, limit: int, is_cramped: bool, dtype: str, head_size: int, permuted: bool, both: bool
) -> None:
    """Every kernel with every tile that a head size can have fits: most memory takes the one for many rows."""
    from ikbo_recsys.kernels._tiles import pick

    assert target in TARGETS
    common = {
        **{"QK_SCALE": 0.1, "HEADS": 4, "GROUP": 2, "HEAD_SIZE": head_size, "KV_LAYOUT": 2, "PERMUTED": permuted},
        **{"BLOCK_D": 1 << (head_size - 1).bit_length(), "PRECISION": "ieee"},
    }
    for kernel, table, more in _portable_kernels(dtype != "fp32", both):
        rows = (16, 32, 64, 4096) if target == "sm_90" and not permuted else (4096,)
        for tile in {pick(table, head_size=head_size, user_rows=each) for each in rows}:
            tile = tile.halved() if is_cramped else tile
            constexprs = {**common, **more, "ROWS": tile.rows, "KEYS": tile.keys}
            signature = _signature(kernel, dtype, constexprs)
            indices = ("permutation_ptr", "offsets_ptr", "kv_ptr")
            aligned = [x for x in signature if x.startswith("stride") or (x.endswith("_ptr") and x not in indices)]
            how = {"num_warps": tile.warps, "num_stages": tile.stages}
            assert_fits(compile_kernel(kernel, signature, constexprs, target=target, aligned=aligned, **how), limit)


def test_tile_table_compiles_with_and_without_a_dependent_launch() -> None:
    from ikbo_recsys.kernels._attention_hopper import TABLE_BLOCK
    from ikbo_recsys.kernels._triton.schedule import fill_tile_table, fill_tile_table_both

    for kernel in (fill_tile_table, fill_tile_table_both):
        for chained in (False, True):
            constexprs = {"ROWS": 128, "KV_LAYOUT": 2, "BLOCK": TABLE_BLOCK, "STEP": 16, "CHAINED": chained}
            signature = _signature(kernel, "fp16", constexprs)
            assert_no_spills(compile_kernel(kernel, signature, constexprs, num_warps=4))
