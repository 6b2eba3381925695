"""What the attention kernel for the query's gradient reads and writes by rows on Hopper. Device code only.

Of candidates' rows or, in a tile whose first row is `~row`, of users': see `_attention_parts.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ikbo_recsys.kernels._gluon._attention_parts import row_places, store_rows


@gluon.jit
def _row_lse(lse_ptr, permutation_ptr, row, end, head, heads, seeds, mma: gl.constexpr, PERMUTED: gl.constexpr):
    """Log-sum-exp (base 2) of 64 rows; weights 2^-inf = 0 for rows that do not exist."""
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    valid = rows < end
    at = row_places(permutation_ptr, rows, valid, seeds, PERMUTED).to(gl.int64) * heads + head
    return gl.load(lse_ptr + at, mask=valid, other=float("inf")) * 1.4426950408889634


@gluon.jit
def _row_delta(
    delta_ptr, permutation_ptr, out_buf, g_buf, row, end, head, heads, seeds, mma: gl.constexpr, D: gl.constexpr,
    PERMUTED: gl.constexpr, GRAD_LSE: gl.constexpr,
):  # fmt: skip
    """delta = sum(out * g) of 64 rows in shared memory, less the gradient of the log-sum-exp, where `delta_ptr` holds
    one. Kept there, for dk and dv."""
    # In each warp the 16 rows that are its own in a product.
    lanes: gl.constexpr = 256 // D
    layout: gl.constexpr = gl.BlockedLayout([16 // lanes, 8], [lanes, 32 // lanes], [4, 1], [1, 0])
    out = out_buf.reshape([64, D]).load(layout)
    grad = g_buf.reshape([64, D]).load(layout)
    delta = gl.convert_layout(gl.sum(out.to(gl.float32) * grad.to(gl.float32), 1), gl.SliceLayout(1, mma))
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    valid = rows < end
    at = row_places(permutation_ptr, rows, valid, seeds, PERMUTED).to(gl.int64) * heads + head
    if GRAD_LSE:
        delta -= gl.load(delta_ptr + at, mask=valid, other=0.0)
    gl.store(delta_ptr + at, delta, mask=valid)
    return delta


@gluon.jit
def lse_of_either(
    lse_ptr, ulse_ptr, permutation_ptr, row, skip, end, head, heads, seeds, mma: gl.constexpr, PERMUTED: gl.constexpr
):
    """`_row_lse` of a tile's rows from the `skip`-th on, candidates' or users'."""
    if ulse_ptr is None:
        lse2 = _row_lse(lse_ptr, permutation_ptr, row + skip, end, head, heads, seeds, mma, PERMUTED)
    else:
        if row < 0:
            lse2 = _row_lse(ulse_ptr, permutation_ptr, ~row + skip, end, head, heads, seeds, mma, False)
        else:
            lse2 = _row_lse(lse_ptr, permutation_ptr, row + skip, end, head, heads, seeds, mma, PERMUTED)
    return lse2


@gluon.jit
def delta_of_either(
    delta_ptr, udelta_ptr, permutation_ptr, out_buf, g_buf, row, skip, end, head, heads, seeds, mma: gl.constexpr,
    D: gl.constexpr, PERMUTED: gl.constexpr, GRAD_LSE: gl.constexpr,
):  # fmt: skip
    """`_row_delta` of a tile's rows from the `skip`-th on, candidates' or users'."""
    if udelta_ptr is None:
        delta = _row_delta(
            delta_ptr, permutation_ptr, out_buf, g_buf, row + skip, end, head, heads, seeds, mma, D, PERMUTED, GRAD_LSE
        )
    else:
        if row < 0:
            delta = _row_delta(
                udelta_ptr, permutation_ptr, out_buf, g_buf, ~row + skip, end, head, heads, seeds, mma, D, False,
                GRAD_LSE,
            )  # fmt: skip
        else:
            delta = _row_delta(
                delta_ptr, permutation_ptr, out_buf, g_buf, row + skip, end, head, heads, seeds, mma, D, PERMUTED,
                GRAD_LSE,
            )  # fmt: skip
    return delta


@gluon.jit
def store_either(
    dq_ptr, udq_ptr, permutation_ptr, dq, row, skip, end, head, heads, seeds, layout: gl.constexpr, D: gl.constexpr,
    HEAD_SIZE: gl.constexpr, PERMUTED: gl.constexpr,
):  # fmt: skip
    """Store dq of a tile's rows from the `skip`-th on, candidates' or users'."""
    if udq_ptr is None:
        store_rows(dq_ptr, permutation_ptr, dq, row + skip, end, head, heads, seeds, layout, D, HEAD_SIZE, PERMUTED)
    else:
        if row < 0:
            store_rows(udq_ptr, permutation_ptr, dq, ~row + skip, end, head, heads, seeds, layout, D, HEAD_SIZE, False)
        else:
            store_rows(dq_ptr, permutation_ptr, dq, row + skip, end, head, heads, seeds, layout, D, HEAD_SIZE, PERMUTED)
