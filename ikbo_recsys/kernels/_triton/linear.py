"""The linear layer over (user, candidate) in portable Triton: a GEMM whose epilogue looks the user's part up.

Shape letters: U users, B batch rows, K contracted features, M outputs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ACTIVATION_CODES = {None: 0, "relu": 1, "gelu": 2, "silu": 3}


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of fp32 values; codes as in `ACTIVATION_CODES`."""
    if ACTIVATION == 1:
        # Not tl.maximum, which would turn NaN into 0.
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == 2:
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:
        x = x / (1 + tl.exp(-x))
    return x


@triton.jit(do_not_specialize=["B", "num_users"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    user_ptr,
    index_ptr,
    bias_ptr,
    out_ptr,
    B,
    M,
    K,
    num_users,
    x_stride_b,
    x_stride_k,
    weight_stride_m,
    weight_stride_k,
    tiles_m,
    HAS_USER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_PADDED: tl.constexpr,
    CHAINED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One [ROWS, COLS] tile of `act(x @ weight.T (+ user[index]) (+ bias))`; `user` is [U, M], contiguous as `out`.

    K and x_stride_b are counted in UNITs of elements (`_launch.row_unit`): with 2 of them rows of 866 elements are
    known to begin and end at multiples of 4 bytes, the least that asynchronous copies take. CHAINED is that of
    `mix_kernel`.
    """
    if CHAINED and not HAS_USER:
        gdc_launch_dependents()
    block = tl.program_id(0)
    first = (block // tiles_m).to(tl.int64) * ROWS
    places = tl.arange(0, ROWS)
    rows = first + places
    cols = block % tiles_m * COLS + tl.arange(0, COLS)
    steps = tl.arange(0, STEP)
    K *= UNIT
    # int64: in a transposed view the step from one feature to the next is the size of the whole batch.
    x_ptrs = x_ptr + tl.minimum(rows, B - 1)[:, None] * x_stride_b * UNIT + steps.to(tl.int64)[None, :] * x_stride_k
    x_step = tl.full((), STEP, tl.int64) * x_stride_k
    # Outputs past M read the weights of the first ones: if all read the last one's, its few lines would be asked for by
    # every tile at the end, many times over. (A mask for them costs 3%; the batch's one tile at the end may do it.)
    weight_ptrs = weight_ptr + (cols % M)[None, :] * weight_stride_m + steps[:, None] * weight_stride_k
    is_row = places < B - first
    if HAS_USER:
        # Before the products: behind them its latency would come on top of that of the user's rows.
        u = tl.load(index_ptr + first + places, mask=is_row, other=0).to(tl.int64)
        u = tl.minimum(tl.maximum(u, 0), num_users - 1)
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for k in range(0, K, STEP):
        inside = steps < K - k
        x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs) if WEIGHT_PADDED else tl.load(weight_ptrs, mask=inside[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
        x_ptrs += x_step
        weight_ptrs += STEP * weight_stride_k
    inside = is_row[:, None] & (cols < M)[None, :]
    if HAS_USER:
        if CHAINED:
            gdc_wait()
        acc += tl.load(user_ptr + u[:, None] * M + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < M, other=0.0).to(tl.float32)[None, :]
    out = activate(acc, ACTIVATION)
    # The offsets within one tile's rows: 32 bits hold them, and take half the registers.
    place = places[:, None] * M + cols[None, :]
    tl.store(out_ptr + first * M + place, out.to(out_ptr.dtype.element_ty), mask=inside)
