"""Target attention in traced graphs: the operators that `torch.compile` and `torch.export` see on a GPU.

`cross_attention_portable` is a `triton_op`, whose kernels Inductor sees and AOTInductor packages;
`cross_attention_hopper` is opaque, since Inductor cannot re-emit Gluon, and looks at the call at hand when it runs.
Each has a form with query rows of the users' own, `_both`, and a backward operator of its own. Those are opaque on both
paths: into how many parts the sums for keys and values go follows from the batch sizes, which must not become guards.

What the eager path keeps with an index tensor is made anew here: compiled programs write into tensors that they use
again without raising their version counters.

Shape letters as in `_attention_launch.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels import _attention_hopper as hopper
from ikbo_recsys.kernels._attention_launch import JAGGED, Problem
from ikbo_recsys.kernels._attention_plans import backward, both_lse_grads, forward_launch
from ikbo_recsys.kernels._plan import traceable


def call(path: str, query: Tensor, user_query: Tensor | None, rest: tuple[Any, ...], return_lse: bool) -> Any:
    """The results of `kernels.cross_attention` by the operators of "gluon" or of "triton"."""
    if user_query is None:
        operator = torch.ops.ikbo.cross_attention_hopper if path == "gluon" else torch.ops.ikbo.cross_attention_portable
        out, lse = operator(query, *rest)
        return (out, lse) if return_lse else out
    both = torch.ops.ikbo
    operator = both.cross_attention_hopper_both if path == "gluon" else both.cross_attention_portable_both
    results = operator(query, user_query, *rest)
    return results if return_lse else results[:2]


def _problem(query: Tensor, key: Tensor, value: Tensor, *rest: Any, user_query: Tensor | None = None) -> Problem:
    offsets, permutation, kv, layout, scale = rest
    return Problem(query, key, value, offsets, permutation, kv, layout, scale, user_query, keeps_table=False)


def _path_at_hand(problem: Problem) -> str:
    query, user_query = problem.query, problem.user_query
    if query.numel() == 0 or problem.num_users == 0 or (user_query is not None and user_query.numel() == 0):
        return "triton"
    is_jagged = problem.layout == JAGGED
    if not hopper.is_faster(query, problem.key, problem.num_users, is_jagged, user_query):
        return "triton"
    why = hopper.refusal(query, problem.key, problem.value, is_jagged, problem.scale, user_query)
    return "gluon" if why is None else "triton"


def _forward(problem: Problem, path: str) -> tuple[Tensor, ...]:
    """out and lse, or both outs and both lses."""
    out, lse = forward_launch(problem, True, path)(problem)
    return (out, lse) if problem.user_query is None else (*out, *lse)


def _backward_both(problem: Problem, path: str, grads: Any, outs: Any, lses: Any, grad_lses: Any) -> tuple[Tensor, ...]:
    needs = ((True, True), True, True)
    grad_lse = both_lse_grads(grad_lses, lses)
    dq, dk, dv = backward(problem, outs, lses, grads, needs, path, grad_lse)
    return *dq, dk, dv


# ---- portable --------------------------------------------------------------------------------------------------------


@torch.library.triton_op("ikbo::cross_attention_portable", mutates_args={})
def cross_attention_portable(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    permutation: Tensor | None,
    kv: Tensor | None,
    layout: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out and lse by the portable kernels. Innermost strides are 1."""
    with traceable():
        problem = _problem(query, key, value, offsets, permutation, kv, layout, scale)
        return _forward(problem, "triton")  # type: ignore[return-value]


@torch.library.custom_op("ikbo::cross_attention_portable_backward", mutates_args=())
def cross_attention_portable_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    permutation: Tensor | None,
    kv: Tensor | None,
    layout: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv by the portable kernels."""
    problem = _problem(query, key, value, offsets, permutation, kv, layout, scale)
    return backward(problem, out, lse, grad, (True, True, True), "triton", grad_lse)


@torch.library.triton_op("ikbo::cross_attention_portable_both", mutates_args={})
def cross_attention_portable_both(
    query: Tensor,
    user_query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    permutation: Tensor | None,
    kv: Tensor | None,
    layout: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out of the candidates and of the users, lse of both, by the portable kernels. Innermost strides are 1."""
    with traceable():
        problem = _problem(query, key, value, offsets, permutation, kv, layout, scale, user_query=user_query)
        return _forward(problem, "triton")  # type: ignore[return-value]


@torch.library.custom_op("ikbo::cross_attention_portable_both_backward", mutates_args=())
def cross_attention_portable_both_backward(
    grad: Tensor,
    user_grad: Tensor,
    query: Tensor,
    user_query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    permutation: Tensor | None,
    kv: Tensor | None,
    layout: int,
    scale: float,
    out: Tensor,
    user_out: Tensor,
    lse: Tensor,
    user_lse: Tensor,
    grad_lse: Tensor | None,
    user_grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq of the candidates and of the users, dk and dv by the portable kernels."""
    problem = _problem(query, key, value, offsets, permutation, kv, layout, scale, user_query=user_query)
    pairs = (grad, user_grad), (out, user_out), (lse, user_lse), (grad_lse, user_grad_lse)
    return _backward_both(problem, "triton", *pairs)  # type: ignore[return-value]


# ---- Hopper ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("ikbo::cross_attention_hopper", mutates_args=())
def cross_attention_hopper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    permutation: Tensor | None,
    kv: Tensor | None,
    layout: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out and lse, by the Hopper kernels where the call at hand fits them."""
    problem = _problem(query, key, value, offsets, permutation, kv, layout, scale)
    return _forward(problem, _path_at_hand(problem))  # type: ignore[return-value]


@torch.library.custom_op("ikbo::cross_attention_hopper_backward", mutates_args=())
def cross_attention_hopper_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    permutation: Tensor | None,
    kv: Tensor | None,
    layout: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, by the Hopper kernels where the call at hand fits them."""
    problem = _problem(query, key, value, offsets, permutation, kv, layout, scale)
    return backward(problem, out, lse, grad, (True, True, True), _path_at_hand(problem), grad_lse)


@torch.library.custom_op("ikbo::cross_attention_hopper_both", mutates_args=())
def cross_attention_hopper_both(
    query: Tensor,
    user_query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    permutation: Tensor | None,
    kv: Tensor | None,
    layout: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out of the candidates and of the users, lse of both, by the Hopper kernels where the call at hand fits them."""
    problem = _problem(query, key, value, offsets, permutation, kv, layout, scale, user_query=user_query)
    return _forward(problem, _path_at_hand(problem))  # type: ignore[return-value]


@torch.library.custom_op("ikbo::cross_attention_hopper_both_backward", mutates_args=())
def cross_attention_hopper_both_backward(
    grad: Tensor,
    user_grad: Tensor,
    query: Tensor,
    user_query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    permutation: Tensor | None,
    kv: Tensor | None,
    layout: int,
    scale: float,
    out: Tensor,
    user_out: Tensor,
    lse: Tensor,
    user_lse: Tensor,
    grad_lse: Tensor | None,
    user_grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq of both, dk and dv, by the Hopper kernels where the call at hand fits them."""
    problem = _problem(query, key, value, offsets, permutation, kv, layout, scale, user_query=user_query)
    pairs = (grad, user_grad), (out, user_out), (lse, user_lse), (grad_lse, user_grad_lse)
    return _backward_both(problem, _path_at_hand(problem), *pairs)  # type: ignore[return-value]


@cross_attention_hopper.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


@cross_attention_portable_backward.register_fake
@cross_attention_hopper_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


@cross_attention_hopper_both.register_fake
def _(query: Tensor, user_query: Tensor, *_: Any) -> tuple[Tensor, ...]:
    both = (query, user_query)
    return *(x.new_empty(x.shape) for x in both), *(x.new_empty(x.shape[:3], dtype=torch.float32) for x in both)


@cross_attention_portable_both_backward.register_fake
@cross_attention_hopper_both_backward.register_fake
def _(
    grad: Tensor, user_grad: Tensor, query: Tensor, user_query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, user_query, key, value))


# ---- autograd --------------------------------------------------------------------------------------------------------


def _register_autograd(forward: Any, backward: Any, sides: int) -> None:
    """`sides` outputs, then their log-sum-exps; the first `sides` inputs are queries."""

    def set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.layout, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)
        # The log-sum-exp mostly has no gradient: it is then absent, not zeros.
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, results = ctx.saved_tensors[: -2 * sides], ctx.saved_tensors[-2 * sides :]
        of_outs = (
            torch.zeros_like(out) if grad is None else grad.contiguous()
            for out, grad in zip(results[:sides], grads[:sides], strict=True)
        )
        return *backward(*of_outs, *tensors, ctx.layout, ctx.scale, *results, *grads[sides:]), *[None] * 5

    forward.register_autograd(differentiate, setup_context=set_up)


_register_autograd(cross_attention_portable, cross_attention_portable_backward, 1)
_register_autograd(cross_attention_hopper, cross_attention_hopper_backward, 1)
_register_autograd(cross_attention_portable_both, cross_attention_portable_both_backward, 2)
_register_autograd(cross_attention_hopper_both, cross_attention_hopper_both_backward, 2)
