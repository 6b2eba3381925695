"""`python -m tests.gpu.small_calls`: each kernel once or twice, forward and backward, on small awkward sizes.

For `tools/measure FOLDER sanitize`, under which a memory access takes a hundred times longer. Results are the
other tests' business. Without PyTorch's own pool every tensor is an allocation, and an access behind its end shows.
"""

from __future__ import annotations

import functools
import sys
from unittest import mock

import torch

from ikbo_recsys import CandidateIndex
from ikbo_recsys.kernels import _attention_backward_hopper as backward_hopper
from ikbo_recsys.kernels import _attention_backward_launch as few
from ikbo_recsys.kernels import _attention_shares, _plan, compression_linear, linear, segment_sum
from ikbo_recsys.kernels._attention_launch import Problem
from ikbo_recsys.kernels._backend import hopper_refusal, use_backend
from tests.gpu import test_compression_linear, test_linear
from tests.gpu.test_cross_attention import Call
from tests.gpu.test_cross_attention_users import BothCall


def main() -> None:
    for path in ("triton", "gluon"):
        if path == "gluon" and hopper_refusal(torch.device("cuda", 0)):
            continue
        with use_backend(path):
            for dtype in (torch.bfloat16, torch.float32) if path == "triton" else (torch.bfloat16,):
                call_compression_linear(dtype)
            if path == "gluon":
                call_more_users()
                call_attention_by_hopper()
            else:
                call_cross_attention()
                with mock.patch.object(few, "_FEWEST_PROGRAMS", 1), mock.patch.object(few, "MOST_FEW_ROWS", 1024):
                    _plan.forget()
                    call_cross_attention()
    call_linear()
    torch.cuda.synchronize()


def say(line: str) -> None:
    torch.cuda.synchronize()
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def call_compression_linear(dtype: torch.dtype) -> None:
    for sizes, grouped in (((3, 67, 433, 256, 100, 190), True), ((5, 9, 65, 72, 9, 51), False)):
        tensors = test_compression_linear.make(*sizes, dtype)
        bias = torch.randn(sizes[2], device="cuda", dtype=dtype)
        leaves = [tensor.requires_grad_() for tensor in (*tensors, bias)]
        out = compression_linear(*leaves[:3], test_compression_linear.make_index(*sizes[:2], grouped), leaves[3])
        torch.autograd.grad(out, leaves, torch.randn_like(out))
        say(f"compression_linear {sizes} {dtype}")


def call_more_users() -> None:
    """Wider tiles of the user's part than few users have: half and whole ones on 132 multiprocessors."""
    for sizes in ((8, 9, 433, 256, 100, 51), (15, 9, 433, 256, 100, 51)):
        tensors = test_compression_linear.make(*sizes, torch.bfloat16)
        compression_linear(*tensors, test_compression_linear.make_index(*sizes[:2]))
        say(f"compression_linear {sizes}")


def call_attention_by_hopper() -> None:
    """In all forms, whatever the rules say of so small ones."""
    for is_wide, is_once in ((True, False), (True, True), (False, False)):
        say(f"tiles of {128 if is_wide else 64} rows, gradients in {'one pass' if is_once else 'two'}")
        asked = functools.partial(wants_one_pass, is_once)
        with (
            mock.patch.object(_attention_shares, "has_wide_tiles", return_value=is_wide),
            mock.patch.object(backward_hopper, "fills_the_gpu", return_value=True),
            mock.patch.object(backward_hopper, "one_pass", asked),
        ):
            _plan.forget()
            call_cross_attention()


def wants_one_pass(is_once: bool, problem: Problem, needs: tuple[bool, bool, bool]) -> bool:
    return is_once and problem.user_query is None and all(needs)


def call_cross_attention() -> None:
    for layout, grouped, seeds, size in (
        ("lengths", True, 64, 128),
        ("jagged", True, 17, 128),
        ("jagged", False, 64, 64),
        ("full", False, 3, 40),
    ):
        sizes = (5, 19, seeds, 131, (4, 2), size)
        Call(*sizes, dtype=torch.bfloat16, layout=layout, grouped=grouped).ours()
        BothCall(37, *sizes, dtype=torch.bfloat16, layout=layout, grouped=grouped).results()
        say(f"cross_attention {layout}, {'' if grouped else 'un'}grouped, {seeds} seeds, head size {size}")


def call_linear() -> None:
    tensors = test_linear.make(3, 131, 65, 9, 33, torch.bfloat16)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out = linear(*leaves[:3], test_compression_linear.make_index(3, 131), leaves[3], "gelu")
    torch.autograd.grad(out, leaves, torch.randn_like(out))
    rows = torch.randn(1000, 33, device="cuda")
    index = CandidateIndex.from_user_ids(torch.randint(0, 7, (1000,), device="cuda"), 7, grouped=False)
    segment_sum(rows, index)
    say("linear, segment_sum")


if __name__ == "__main__":
    main()
