"""One name for each Gluon feature: Triton 3.6 and 3.7 have the long TMA names, 3.8 and 3.9 the short ones."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""`tma_load(descriptor, coordinates, barrier, shared)`: global to shared, arrives on `barrier` with its bytes."""

tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""`tma_store(descriptor, coordinates, shared)`: shared to global, waited for with `tma.store_wait`."""

reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
"""`reinterpret(shared, dtype, shape, layout)`: the same shared memory under another type, shape and layout."""


@gluon.jit
def eights(block, ROWS: gl.constexpr, D: gl.constexpr):
    """A block `[ROWS, D]` of 16-bit values that TMA swizzles by 128 bytes, as it lies in shared memory: int32 views
    `[8, 32]`, of 8 rows and 64 columns each, `.index(column // 64 * (ROWS // 8) + row // 8)`.

    Unlike a slice a view may be one of a loop. What is a row of the block is one of the view, but its columns are
    swizzled.
    """
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    return reinterpret(block, gl.int32, [D // 64 * (ROWS // 8), 8, 32], layout)


@gluon.jit
def wait_for_primary_grid():
    """Programmatic dependent launch: wait until the grid before this one is complete and its writes are visible.

    Does nothing when the kernel was launched without `launch_pdl=True`.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def launch_dependent_grid():
    """Programmatic dependent launch: let the next grid in the stream start as soon as blocks of this one leave room."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )
