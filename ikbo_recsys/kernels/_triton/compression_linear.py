"""Linear compression in portable Triton: one batched GEMM kernel, used for the user's part, the candidates' and the
gradients.

`mix_kernel` computes `out[b] = weight @ x[b] (+ user[index[b]]) (+ bias)`: without the looked-up user part it is that
part itself, with it the operator. `outer_sum_kernel` is the gradient of the weight.

Shape letters: U users, B batch rows, K contracted features, D embedding size, M outputs, S splits of the sum.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _tile_of_block(tiles_m, tiles_d):
    """(batch row, row tile, column tile): the row tiles of one batch row are neighbours, so that they share x[b] in
    L2."""
    block = tl.program_id(0)
    per_batch = tiles_m * tiles_d
    tile = block % per_batch
    return (block // per_batch).to(tl.int64), tile % tiles_m, tile // tiles_m


@triton.jit(do_not_specialize=["num_users"])
def mix_kernel(
    weight_ptr,
    x_ptr,
    user_ptr,
    index_ptr,
    bias_ptr,
    out_ptr,
    M,
    K,
    D,
    num_users,
    weight_stride_m,
    weight_stride_k,
    x_stride_b,
    x_stride_k,
    x_stride_d,
    tiles_m,
    tiles_d,
    HAS_USER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_PADDED: tl.constexpr,
    CHAINED: tl.constexpr,
    PRECISION: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One [ROWS, COLS] tile of out[b]; `user` is [U, M, D], contiguous as `out` is.

    Sixteen bits for `user` are half the bytes of it and, with tiles of 128 x 128, the registers between one and two
    blocks on a multiprocessor; its sum with the products is taken in fp32.

    With WEIGHT_PADDED the weight has columns of zeros up to a multiple of STEP, so that its loads need no mask along K:
    one that ends in the middle of 16 bytes makes them loads of single elements. Rows past M are masked. If they read
    row M - 1 instead, every tile at the end would ask for the same few lines once per such row, of the few slices of L2
    that have them: at M = 40 all tiles of the batch waited for those (docs/performance.md). D, x_stride_b and
    x_stride_k are counted in UNITs of elements (`_launch.row_unit`).

    CHAINED (programmatic dependent launch): the kernel behind a user's part, which is the one that looks it up, may
    start at once, and waits for the part's end when it has its products.
    """
    if CHAINED and not HAS_USER:
        gdc_launch_dependents()
    D *= UNIT
    b, tile_m, tile_d = _tile_of_block(tiles_m, tiles_d)
    rows = tile_m * ROWS + tl.arange(0, ROWS)
    cols = tile_d * COLS + tl.arange(0, COLS)
    steps = tl.arange(0, STEP)
    is_row = (rows < M)[:, None]
    weight_ptrs = weight_ptr + rows[:, None] * weight_stride_m + steps[None, :] * weight_stride_k
    # int64: in a transposed view the step from one feature or column to the next may be the size of the whole batch.
    wide_steps, wide_cols = steps.to(tl.int64), cols.to(tl.int64)
    x_row = x_ptr + b * x_stride_b * UNIT
    x_ptrs = x_row + wide_steps[:, None] * x_stride_k * UNIT + wide_cols[None, :] * x_stride_d
    x_step = tl.full((), STEP * UNIT, tl.int64) * x_stride_k
    if HAS_USER:
        # Before the products: behind them its latency would come on top of that of the user's tile.
        u = tl.load(index_ptr + b).to(tl.int64)
        u = tl.minimum(tl.maximum(u, 0), num_users - 1)
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for k in range(0, K, STEP):
        inside = steps < K - k
        weight = tl.load(weight_ptrs, mask=is_row if WEIGHT_PADDED else is_row & inside[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=inside[:, None] & (cols < D)[None, :], other=0.0)
        acc = tl.dot(weight, x, acc, input_precision=PRECISION)
        weight_ptrs += STEP * weight_stride_k
        x_ptrs += x_step
    # The offsets within one batch row of the output: 32 bits hold them, and take half the registers.
    place = rows[:, None] * D + cols[None, :]
    inside = is_row & (cols < D)[None, :]
    if HAS_USER:
        if CHAINED:
            gdc_wait()
        acc += tl.load(user_ptr + u * M * D + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    out_row = out_ptr + b * M * D
    tl.store(out_row + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["steps", "per_split"])
def outer_sum_kernel(
    grad_ptr,
    x_ptr,
    out_ptr,
    M,
    K,
    D,
    steps,
    per_split,
    grad_stride_b,
    grad_stride_m,
    grad_stride_d,
    x_stride_b,
    x_stride_k,
    x_stride_d,
    tiles_m,
    tiles_k,
    PRECISION: tl.constexpr,
    STEPS_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One [ROWS, COLS] tile of `sum_b grad[b] @ x[b].T` over the steps of one split; `out` is fp32 [S, M, K].

    The sum runs over all `B * STEPS_PER_ROW` blocks of STEP columns of all batch rows, one after the other.
    """
    block = tl.program_id(0)
    tile_m = block % tiles_m
    tile_k = block // tiles_m % tiles_k
    split = block // (tiles_m * tiles_k)
    rows = tile_m * ROWS + tl.arange(0, ROWS)
    cols = tile_k * COLS + tl.arange(0, COLS)
    inner = tl.arange(0, STEP)
    # int64: see above. Rows past the end read the first ones, not all of them the last one: see there, too. (With two
    # operands in shared memory masks cost a tenth.)
    grad_rows = grad_ptr + (rows % M).to(tl.int64)[:, None] * grad_stride_m
    x_cols = x_ptr + (cols % K).to(tl.int64)[None, :] * x_stride_k
    first = split * per_split
    last = tl.minimum(first + per_split, steps)
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for step in range(first, last):
        b = tl.cast(step // STEPS_PER_ROW, tl.int64)
        d = step % STEPS_PER_ROW * STEP + inner
        wide_d = d.to(tl.int64)
        grad_ptrs = grad_rows + (b * grad_stride_b + wide_d[None, :] * grad_stride_d)
        x_ptrs = x_cols + (b * x_stride_b + wide_d[:, None] * x_stride_d)
        grad = tl.load(grad_ptrs, mask=d[None, :] < D, other=0.0)
        x = tl.load(x_ptrs, mask=d[:, None] < D, other=0.0)
        acc = tl.dot(grad, x, acc, input_precision=PRECISION)
    # The offsets within one result are those of a weight: 32 bits hold them.
    out_tile = out_ptr + split.to(tl.int64) * M * K
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    tl.store(out_tile + (rows[:, None] * K + cols[None, :]), acc, mask=inside)
