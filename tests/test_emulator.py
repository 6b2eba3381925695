"""The emulator of Gluon kernels finds what it is there to find: one small pipeline, right, and with one fault at a
time."""

from __future__ import annotations

import pytest
import torch

from tests.emulator.scheduler import NamedBarrier, Task
from tests.processes import INTERPRETED, interpreted, run_interpreted

pytest.importorskip("triton.experimental.gluon")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ikbo_recsys.kernels._gluon._compat import launch_dependent_grid, tma_load, tma_store, wait_for_primary_grid

TILES, STEPS, STAGES = 5, 4, 2


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


@gluon.jit
def consumer(a_bufs, b_bufs, out_buf, full, empty, out_desc, scale_ptr, TILES, STEPS, STAGES, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    stage = 0
    phase = 0
    for tile in range(0, TILES):
        acc = gl.zeros((64, 64), gl.float32, layout=layout)
        for k in range(0, STEPS):
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(a_bufs.index(stage), b_bufs.index(stage), acc, use_acc=k > 0, is_async=True)
            if FAULT == "released early":
                mbarrier.arrive(empty.index(stage), count=1)
            if FAULT != "not waited for":
                acc = warpgroup_mma_wait(0, deps=(acc,))
            if FAULT != "released early":
                mbarrier.arrive(empty.index(stage), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if FAULT == "behind the end":
            acc *= gl.load(scale_ptr + tile)
        else:
            acc *= gl.load(scale_ptr + tile, mask=tile < TILES - 1, other=1.0)
        if FAULT != "buffer reused":
            tma.store_wait(0)
        out_buf.store(acc.to(gl.float16))
        if FAULT != "no fence":
            fence_async_shared()
        tma_store(out_desc, [tile * 64, 0], out_buf)
    tma.store_wait(0)


@gluon.jit
def producer(a_desc, b_desc, a_bufs, b_bufs, full, empty, TILES, STEPS, STAGES, FAULT: gl.constexpr):
    stage = 0
    phase = 0
    for tile in range(0, TILES):
        for k in range(0, STEPS):
            mbarrier.wait(empty.index(stage), phase if FAULT == "wrong phase" else phase ^ 1)
            mbarrier.expect(full.index(stage), (2 if FAULT != "half the bytes" else 1) * 64 * 64 * 2)
            tma_load(a_desc, [tile * 64, k * 64], full.index(stage), a_bufs.index(stage))
            tma_load(b_desc, [k * 64, 0], full.index(stage), b_bufs.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def pipeline(a_desc, b_desc, out_desc, scale_ptr, TILES, STEPS, STAGES, FAULT: gl.constexpr):
    a_bufs = gl.allocate_shared_memory(gl.float16, [STAGES, 64, 64], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.float16, [STAGES, 64, 64], b_desc.layout)
    out_buf = gl.allocate_shared_memory(gl.float16, [64, 64], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2 if FAULT == "wrong count" else 1)
    gl.warp_specialize(
        [
            (consumer, (a_bufs, b_bufs, out_buf, full, empty, out_desc, scale_ptr, TILES, STEPS, STAGES, FAULT)),
            (producer, (a_desc, b_desc, a_bufs, b_bufs, full, empty, TILES, STEPS, STAGES, FAULT)),
        ],
        [1],
        [24],
    )


def run(fault: str, seed: int, eager: float) -> float:
    """The largest difference to the right result; infinite where there is a NaN."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from tests.emulator import emulated

    # The last tile is cut off, and its scale is 1.
    a, b = torch.randn(64 * TILES - 9, 64 * STEPS).half(), torch.randn(64 * STEPS, 64).half()
    out, scale = torch.full((a.shape[0], 64), float("nan")).half(), torch.randn(TILES - 1)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    descriptors = (TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 64], layout) for x in (a, b, out))
    with emulated(seed, eager) as ran:
        pipeline[(1,)](*descriptors, scale, TILES=TILES, STEPS=STEPS, STAGES=STAGES, FAULT=fault)
    assert ran == ["pipeline"]
    rows = torch.cat((scale, torch.ones(1))).repeat_interleave(64)[: a.shape[0], None]
    difference = ((a.float() @ b.float() * rows) - out.float()).abs().max()
    return float(difference.nan_to_num(float("inf")))


@interpreted
@pytest.mark.parametrize("eager", [0.0, 0.3, 0.9])
def test_a_right_pipeline(eager: float) -> None:
    for seed in range(5):
        assert run("", seed, eager) < 0.1


@interpreted
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no fence", "without a fence"),
        ("not waited for", "not waited for"),
        ("wrong count", "waits for phase"),
        ("half the bytes", "bytes"),
        ("behind the end", "elements 4 to 4 of 4"),
    ],
)
def test_faults_that_are_seen_as_they_happen(fault: str, message: str) -> None:
    for seed in range(3):
        with pytest.raises((AssertionError, IndexError), match=message):
            run(fault, seed, 0.3)


@interpreted
@pytest.mark.parametrize("fault", ["released early", "buffer reused", "wrong phase"])
def test_faults_that_depend_on_the_order_of_things(fault: str) -> None:
    """Seen in some order of events; on a GPU most of them go well most of the time."""
    found = 0
    for seed in range(8):
        try:
            found += run(fault, seed, 0.1) > 0.1
        except AssertionError:
            found += 1
    assert found


def test_a_partition_arrives_once_at_a_named_barrier() -> None:
    """Twice, it would let itself go on, and the other one wait for ever."""
    barrier, tasks = NamedBarrier(), [Task(name, print, ()) for name in ("a", "b")]
    assert [barrier.arrive(task) for task in (*tasks, *reversed(tasks))] == [0, 0, 1, 1]
    barrier.arrive(tasks[0])
    with pytest.raises(AssertionError, match="arrives for both"):
        barrier.arrive(tasks[0])


@gluon.jit
def primary(x_ptr):
    launch_dependent_grid()
    gl.store(x_ptr, 2.0)


@gluon.jit
def secondary(x_ptr, other_ptr, out_ptr, FAULT: gl.constexpr):
    other = gl.load(other_ptr)
    if FAULT == "written early":
        gl.store(out_ptr, 0.0)
    if FAULT != "read early":
        wait_for_primary_grid()
    gl.store(out_ptr, gl.load(x_ptr) + other)


@interpreted
@pytest.mark.parametrize("fault", ["", "read early", "written early"])
@pytest.mark.parametrize("is_dependent", [True, False])
def test_a_kernel_that_overlaps_with_the_one_before(fault: str, is_dependent: bool) -> None:
    from tests.emulator import emulated

    x, other, out = torch.zeros(1), torch.ones(1), torch.zeros(1)
    with emulated():
        primary[(1,)](x)
        if fault and is_dependent:
            with pytest.raises(AssertionError, match=f"{fault.split()[0]} without waiting"):
                secondary[(2,)](x, other, out, FAULT=fault, launch_pdl=True)
        else:
            secondary[(2,)](x, other, out, FAULT=fault, launch_pdl=is_dependent)
            assert out.item() == 3
