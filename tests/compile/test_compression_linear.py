"""The compression and linear kernels compile for their targets; the Hopper ones without spills or serialised wgmma."""

from __future__ import annotations

import re

import pytest

from ikbo_recsys.kernels._tiles import GemmTile

from .helper import (
    HOPPER_SHARED_MEMORY,
    TARGETS,
    Compiled,
    assert_fits,
    assert_no_spills,
    assert_wgmma_pipelined,
    compile_kernel,
    descriptor,
)

SIZES = ["M", "K", "D", "num_users", "tiles_m", "tiles_d"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_mix(target: str, dtype: str) -> None:
    from ikbo_recsys.kernels._triton.compression_linear import mix_kernel

    strides = [f"weight_stride_{x}" for x in "mk"] + [f"x_stride_{x}" for x in "bkd"]
    pointers = dict.fromkeys(("weight_ptr", "x_ptr", "bias_ptr", "out_ptr"), f"*{dtype}")
    signature = pointers | {"user_ptr": f"*{dtype}", "index_ptr": "*i64"} | dict.fromkeys(SIZES + strides, "i32")
    step = 32 if dtype == "fp32" else 64
    constants = {"HAS_USER": True, "HAS_BIAS": True, "WEIGHT_PADDED": False, "CHAINED": False, "PRECISION": "ieee"}
    constants |= {"UNIT": 1, "ROWS": 64, "COLS": 64, "STEP": step}
    compile_kernel(mix_kernel, signature, constants, target=target, num_warps=4, num_stages=2)


def _tiled_mix(
    dtype: str, m: int, d: int, has_user: bool, target: str = "sm_90", index: str = "*i32"
) -> tuple[Compiled, GemmTile]:
    """As the portable launches have it where there is much shared memory, chained where kernels can wait."""
    from ikbo_recsys.kernels import _tiles
    from ikbo_recsys.kernels._triton.compression_linear import mix_kernel

    tile = _tiles.mix_tile(m, d, 866, 2, True, has_user)
    pointers = dict.fromkeys(("weight_ptr", "x_ptr", "bias_ptr", "user_ptr", "out_ptr"), f"*{dtype}")
    strides = ["weight_stride_m", "x_stride_b", "x_stride_k"]
    signature = pointers | {"index_ptr": index} | dict.fromkeys(SIZES + strides, "i32")
    constants = {
        **{"HAS_USER": has_user, "HAS_BIAS": False, "WEIGHT_PADDED": True, "CHAINED": target != "sm_80"},
        **{"PRECISION": "ieee", "UNIT": 8, "ROWS": tile.rows, "COLS": tile.cols, "STEP": tile.step},
        **{"weight_stride_k": 1, "x_stride_d": 1},
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    aligned = ["weight_stride_m", *pointers, *(["D", "x_stride_b", "x_stride_k"] if d % 128 == 0 else [])]
    return compile_kernel(mix_kernel, signature, constants, target=target, aligned=aligned, **options), tile


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_mix_with_the_most_shared_memory(target: str) -> None:
    """The largest tile fits into the 163 KiB that an A100's block can have."""
    compiled, _ = _tiled_mix("fp16", 433, 256, True, target, "*i64")
    assert_fits(compiled, 163 * 1024)
    assert_no_spills(compiled)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("has_user", [False, True])
@pytest.mark.parametrize(("m", "d"), [(433, 256), (262, 200), (40, 256), (433, 128), (433, 64)])
def test_mix_on_hopper(dtype: str, has_user: bool, m: int, d: int) -> None:
    """16-byte asynchronous copies only, pipelined wgmma, no spills, and as many blocks on a multiprocessor as the table
    says."""
    compiled, tile = _tiled_mix(dtype, m, d, has_user)
    assert {name for name, _ in compiled.sass_positions("LDGSTS")} == {"LDGSTS.E.BYPASS.128"}
    assert {name for name, _ in compiled.sass_positions("STG")} == {"STG.E.128"}
    # Each copies 16 bytes or none, by a condition of its own: rows past the end are not read.
    sizes = re.findall(r"cp\.async\.cg\S* \[ [^]]*\], \[ [^]]*\], 0x10, (%r\d+);", compiled.kernel.asm["ptx"])
    assert len(sizes) == len(set(sizes)) == len(compiled.sass_positions("LDGSTS"))
    check_portable_on_hopper(compiled, tile)
    check_chain(compiled, has_user)


def check_chain(compiled: Compiled, has_user: bool) -> None:
    """The users' part lets the next kernel start at once, which waits for its end behind its own products."""
    chain = [name.split(".")[0] for name, _ in compiled.sass_positions("HGMMA|PREEXIT|ACQBULK|LDG[.]")]
    if not has_user:
        assert chain[0] == "PREEXIT"
        assert "ACQBULK" not in chain
        return
    assert "PREEXIT" not in chain
    wait = chain.index("ACQBULK")
    assert "HGMMA" not in chain[wait:]
    # Loads of the index come before it, those of the users' part, at least as many, behind.
    assert "HGMMA" in chain[:wait]
    assert chain[wait:].count("LDG") >= max(1, chain[:wait].count("LDG")), chain


def check_portable_on_hopper(compiled: Compiled, tile: GemmTile) -> None:
    """Pipelined wgmma, no spills, and room for `tile.blocks` blocks: of the 228 KiB that a multiprocessor has, each
    takes one more than it asks for, and of its 65,536 registers eight at a time for every thread."""
    assert_no_spills(compiled)
    assert_wgmma_pipelined(compiled)
    assert tile.blocks * (compiled.shared_memory + 1024) <= 228 * 1024
    assert tile.blocks * tile.warps * 32 * (-(-compiled.resources["REG"] // 8) * 8) <= 65536


OUTER_STRIDES = [f"{tensor}_stride_{x}" for tensor, axes in (("grad", "bmd"), ("x", "bkd")) for x in axes]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_outer_sum(target: str, dtype: str) -> None:
    from ikbo_recsys.kernels import _tiles
    from ikbo_recsys.kernels._triton.compression_linear import outer_sum_kernel

    names = ["M", "K", "D", "steps", "per_split", "tiles_m", "tiles_k", *OUTER_STRIDES]
    signature = {"grad_ptr": f"*{dtype}", "x_ptr": f"*{dtype}", "out_ptr": "*fp32"} | dict.fromkeys(names, "i32")
    tile = _tiles.outer_tile(433, 866, 256, 4 if dtype == "fp32" else 2, False)
    constants = {"PRECISION": "ieee", "STEPS_PER_ROW": 4, "ROWS": tile.rows, "COLS": tile.cols, "STEP": tile.step}
    options = {"num_warps": tile.warps, "num_stages": 2}
    compile_kernel(outer_sum_kernel, signature, constants, target=target, **options)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("m", "k"), [(64, 64), (64, 500), (128, 128), (128, 500), (433, 866)])
def test_outer_sum_on_hopper(dtype: str, m: int, k: int) -> None:
    """16-byte asynchronous copies only, pipelined wgmma, no spills, and room for as many blocks as the table says."""
    from ikbo_recsys.kernels import _tiles
    from ikbo_recsys.kernels._triton.compression_linear import outer_sum_kernel

    tile = _tiles.outer_tile(m, k, 256, 2, True)
    even = ["D", "grad_stride_b", "grad_stride_m", "x_stride_b", "x_stride_k"]
    names = ["M", "K", "steps", "per_split", "tiles_m", "tiles_k", *even]
    signature = {"grad_ptr": f"*{dtype}", "x_ptr": f"*{dtype}", "out_ptr": "*fp32"} | dict.fromkeys(names, "i32")
    constants = {"PRECISION": "ieee", "STEPS_PER_ROW": 4, "ROWS": tile.rows, "COLS": tile.cols, "STEP": tile.step}
    constants |= {"grad_stride_d": 1, "x_stride_d": 1}
    aligned = [*even, "grad_ptr", "x_ptr", "out_ptr"]
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = compile_kernel(outer_sum_kernel, signature, constants, aligned=aligned, **options)
    assert {name for name, _ in compiled.sass_positions("LDGSTS")} == {"LDGSTS.E.BYPASS.128"}
    assert_no_spills(compiled)
    assert_wgmma_pipelined(compiled)
    assert compiled.shared_memory * tile.blocks <= HOPPER_SHARED_MEMORY
    registers = -(-compiled.resources["REG"] // 8) * 8 * 32 * tile.warps
    assert registers * tile.blocks <= 65536


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("has_order", [False, True])
def test_segment_sum(target: str, has_order: bool) -> None:
    from ikbo_recsys.kernels._triton.segment import segment_sum_kernel

    signature = {"x_ptr": "*fp16", "order_ptr": "*i64", "offsets_ptr": "*i32", "out_ptr": "*fp32"}
    signature |= dict.fromkeys(("num_users", "batch", "width", "x_stride_b", "blocks", "splits"), "i32")
    constants = {"HAS_ORDER": has_order, "COLS": 1024, "UNROLL": 4}
    compile_kernel(segment_sum_kernel, signature, constants, target=target, num_warps=4)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", [0, 1, 2, 3])
def test_linear(target: str, activation: int) -> None:
    from ikbo_recsys.kernels._triton.linear import linear_kernel

    signature = {f"{name}_ptr": "*bf16" for name in ("x", "weight", "bias", "out")}
    signature |= {"user_ptr": "*bf16", "index_ptr": "*i32"}
    names = ["B", "M", "K", "num_users", "tiles_m", "x_stride_b", "x_stride_k", "weight_stride_m", "weight_stride_k"]
    signature |= dict.fromkeys(names, "i32")
    constants = {"HAS_USER": True, "HAS_BIAS": True, "WEIGHT_PADDED": True, "ACTIVATION": activation}
    constants |= {"CHAINED": False, "PRECISION": "ieee", "UNIT": 1, "ROWS": 64, "COLS": 64, "STEP": 64}
    compile_kernel(linear_kernel, signature, constants, target=target, num_warps=4, num_stages=2)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("has_user", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "unit", "copies"),
    [(512, 866, 2, ".E"), (512, 868, 4, ".E.64"), (433, 872, 8, ".E.BYPASS.128"), (64, 512, 8, ".E.BYPASS.128")],
)
def test_linear_on_hopper(dtype: str, has_user: bool, m: int, k: int, unit: int, copies: str) -> None:
    """Asynchronous copies only, as wide as the rows of x allow; no spills, pipelined wgmma."""
    from ikbo_recsys.kernels import _tiles
    from ikbo_recsys.kernels._triton.linear import linear_kernel

    tile = _tiles.linear_tile(m, k, 2)
    even = ["K", "x_stride_b"] if k // unit % 16 == 0 else []
    signature = {f"{name}_ptr": f"*{dtype}" for name in ("x", "weight", "bias", "user", "out")} | {"index_ptr": "*i32"}
    numbers = ["B", "M", "num_users", "tiles_m", "K", "x_stride_b", "weight_stride_m"]
    signature |= dict.fromkeys(numbers, "i32")
    constants = {"HAS_USER": has_user, "HAS_BIAS": True, "WEIGHT_PADDED": True, "ACTIVATION": 1, "PRECISION": "ieee"}
    constants |= {"CHAINED": True, "UNIT": unit, "ROWS": tile.rows, "COLS": tile.cols, "STEP": tile.step}
    constants |= {"x_stride_k": 1, "weight_stride_k": 1}
    aligned = ["x_ptr", "weight_ptr", "out_ptr", "user_ptr", "weight_stride_m", *even, *(["M"] if m % 16 == 0 else [])]
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = compile_kernel(linear_kernel, signature, constants, aligned=aligned, **options)
    assert {name for name, _ in compiled.sass_positions("LDGSTS")} == {"LDGSTS" + copies, "LDGSTS.E.BYPASS.128"}
    if m % 16 == 0:
        assert {name for name, _ in compiled.sass_positions("STG")} == {"STG.E.128"}
    check_portable_on_hopper(compiled, tile)
    check_chain(compiled, has_user)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("cols", "has_bias"), [(256, False), (256, True), (128, False), (64, False)])
def test_hopper_user_part(dtype: str, cols: int, has_bias: bool) -> None:
    from ikbo_recsys.kernels import _compression_hopper as hopper
    from ikbo_recsys.kernels._gluon.compression_user import user_part_kernel

    signature = {
        "weight_desc": descriptor(dtype, [hopper.ROWS, hopper.USER_STEP]),
        "user_desc": descriptor(dtype, [1, hopper.USER_STEP, hopper.USER_STRIP]),
        **{"bias_ptr": f"*{dtype}", "out_ptr": "*i32", "M": "i32", "tiles": "i32", "strips": "i32"},
    }
    constants = {"ROW_TILES": 7, "COLS": cols, "COL_TILES": 1, "STEPS": 19, "HAS_BIAS": has_bias}
    constants |= {"WEIGHT_BUFFERS": hopper.USER_WEIGHTS, "USER_BUFFERS": hopper.USER_STRIPS}
    compiled = compile_kernel(user_part_kernel, signature, constants, aligned=["out_ptr"], num_warps=4)
    assert_no_spills(compiled)
    assert_fits(compiled)
    assert_wgmma_pipelined(compiled)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("cols", "row_tiles", "col_tiles", "features", "index"),
    [
        (256, 7, 1, 866, "i32"),  # a third of the weight stays, a tail
        (256, 7, 1, 866, "i64"),
        (256, 14, 2, 433, None),  # no tail, all of the weight stays; without a user's part
        (256, 1, 1, 830, "i32"),  # tails only
        (256, 7, 1, 3000, "i32"),  # more weight than stays
        (128, 5, 1, 125, "i64"),
        (64, 2, 1, 9, "i32"),
        (64, 3, 1, 600, None),
        (256, 7, 1, 1178, "is user"),
        (64, 3, 2, 40, "is user"),
    ],
)
def test_hopper_candidates(
    dtype: str, cols: int, row_tiles: int, col_tiles: int, features: int, index: str | None
) -> None:
    from ikbo_recsys.kernels import _compression_hopper as hopper
    from ikbo_recsys.kernels._gluon.compression_linear import candidate_kernel

    has_user, is_user = index is not None, index == "is user"
    signature = {
        "weight_desc": descriptor(dtype, [hopper.ROWS, hopper.STEP]),
        "cand_desc": descriptor(dtype, [1, hopper.STEP, cols]),
        "out_desc": descriptor(dtype, [1, hopper.ROWS, min(64, cols // 2)]),
        **{"user_ptr": "*i32" if has_user else f"*{dtype}", "bias_ptr": f"*{dtype}"},
        "index_ptr": f"*{index}" if has_user and not is_user else f"*{dtype}",
        **dict.fromkeys(("M", "num_users", "batch", "tail_blocks"), "i32"),
    }
    sizes = hopper.candidate_sizes(features, row_tiles, cols)._asdict()
    constants = {"HAS_USER": has_user and not is_user, "IS_USER": is_user, "HAS_BIAS": is_user}
    constants |= {"ROW_TILES": row_tiles, "COL_TILES": col_tiles, "STAGES": hopper.STAGES[cols]}
    constants |= {name.upper(): number for name, number in sizes.items()}
    compiled = compile_kernel(candidate_kernel, signature, constants, aligned=["user_ptr"], num_warps=4)
    assert_no_spills(compiled)
    assert_fits(compiled)
    assert_wgmma_pipelined(compiled)


def test_hopper_sizes() -> None:
    """The ring holds the weight of every step that may be in flight, and all of K is covered."""
    from ikbo_recsys.kernels import _compression_hopper as hopper

    for features in (*range(1, 2000, 7), 866, 896, 897, 5000):
        for row_tiles in (1, 2, 3, 7):
            for cols, stages in hopper.STAGES.items():
                sizes = hopper.candidate_sizes(features, row_tiles, cols)
                steps, resident = sizes.steps, sizes.resident
                assert (steps - 1) * hopper.STEP < features <= steps * hopper.STEP
                assert min(resident, sizes.tail_resident) >= 0
                stays = [(k + 1) * resident // steps > k * resident // steps for k in range(steps)]
                assert [k for k in range(steps) if stays[k]] == [
                    ((i + 1) * steps - 1) // resident for i in range(resident)
                ]
                round_and_round = stays * (2 + stages // steps)
                windows = (round_and_round[i : i + stages] for i in range(steps))
                assert max(window.count(False) for window in windows) <= sizes.ring
                if row_tiles >= 2:
                    assert 2 * (resident + sizes.ring) <= sizes.weight_buffers
                if row_tiles % 2:
                    ring = 0 if sizes.tail_resident == steps else stages
                    assert sizes.tail_resident + ring <= sizes.weight_buffers


def test_hopper_user_tiles() -> None:
    """As narrow as they can be with at most one for each multiprocessor, and of all columns where that cannot be."""
    from ikbo_recsys.kernels import _compression_hopper as hopper

    assert hopper.tile_strips(15 * 7, 256, 132) == 4  # 15 users, 433 outputs
    assert hopper.tile_strips(15, 256, 132) == 1  # 40 outputs
    for cols in (64, 128, 256):
        for most in (1, 2, 7, 132):
            for tiles in range(1, 10 * most):
                strips = hopper.tile_strips(tiles, cols, most)
                narrower = [n for n in (1, 2, 4) if n * 64 < cols and tiles * cols // (n * 64) <= most]
                assert strips == min([*narrower, cols // 64]), (tiles, cols, most)


def test_hopper_grid() -> None:
    """Every block has a role, and every pair of row tiles a block."""
    from ikbo_recsys.kernels import _compression_hopper as hopper

    for batch in (1, 2, 3, 37, 131, 1024, 70000):
        for row_tiles in (1, 2, 3, 7, 14):
            for col_tiles in (1, 2):
                for (more_tails,) in hopper.choices(row_tiles):
                    blocks, tails = hopper.grid(batch, row_tiles, col_tiles, 132, more_tails)
                    assert 1 <= blocks <= 132
                    assert (tails > 0) == (row_tiles % 2 == 1)
                    assert blocks - tails >= row_tiles // 2
