"""What is kept of an attention call on a GPU for the calls like it, and the eager autograd functions.

A `Plan` is a path with its prepared launches, for problems that differ in nothing but contents and addresses. A
`BothPlan` is one for calls in which users have query rows of their own: whatever exists for each kind of rows (out,
log-sum-exp, gradients of queries) is then a pair, the candidates' and the users'.

Shape letters as in `_attention_launch.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.kernels import _attention_backward_hopper as hopper_backward
from ikbo_recsys.kernels import _attention_backward_launch as portable_backward
from ikbo_recsys.kernels import _attention_both_hopper as both_hopper
from ikbo_recsys.kernels import _attention_both_launch as both_portable
from ikbo_recsys.kernels import _attention_hopper as hopper
from ikbo_recsys.kernels import _attention_launch as portable
from ikbo_recsys.kernels._attention_launch import Problem, index_cache
from ikbo_recsys.kernels._launch import first_order
from ikbo_recsys.kernels._plan import compiled_together


def group(to_user: Tensor, num_users: int) -> tuple[Tensor, Tensor]:
    """`(offsets [U + 1], permutation [B])` of an index in any order: candidates sorted by user, in their own order.

    Entries outside `[0, U)` are taken for the nearest user.
    """
    ordered, permutation = torch.sort(to_user.clamp(0, num_users - 1), stable=True)
    bounds = torch.arange(num_users + 1, dtype=to_user.dtype, device=to_user.device)
    is_narrow = to_user.dtype is torch.int32
    return torch.searchsorted(ordered, bounds, out_int32=is_narrow), permutation


def _grouped(to_user: Tensor, num_users: int) -> tuple[Tensor, Tensor]:
    return index_cache(to_user, ("group", num_users), lambda: group(to_user, num_users))


class Plan:
    """A path, and what it prepared for calls that differ in nothing but contents and addresses."""

    def __init__(self, path: str, num_users: int, layout: int, scale: float, return_lse: bool = False) -> None:
        self.path, self.layout, self.scale, self._num_users = path, layout, scale, num_users
        self.return_lse = return_lse
        self._forwards: dict[bool, Any] = {}
        self._backwards: dict[Hashable, Backward] = {}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, to_user: Tensor, offsets: Tensor | None, kv: Tensor | None
    ) -> Any:
        """The results of `kernels.cross_attention` that the plan is for."""
        permutation = None
        if offsets is None:
            offsets, permutation = _grouped(to_user, self._num_users)
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return _Attention.apply(query, key, value, offsets, permutation, kv, self)
        problem = Problem(query, key, value, offsets, permutation, kv, self.layout, self.scale)
        out, lse = self.forward(problem, self.return_lse)
        return (out, lse) if self.return_lse else out

    def repeat(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: CandidateIndex | Tensor,
        kv: Tensor | None,
        user_query: Tensor | None,
    ) -> Any:
        """The results for a call like the one that the plan was made for."""
        own = () if user_query is None else (user_query,)
        if isinstance(index, CandidateIndex):
            return self(query, key, value, index.to_user, index.offsets, kv, *own)
        return self(query, key, value, index, None, kv, *own)

    def forward(self, problem: Problem, store_lse: bool) -> Any:
        """out and lse, the latter without elements unless asked for."""
        run = self._forwards.get(store_lse)
        if run is None:
            run = self._forwards[store_lse] = forward_launch(problem, store_lse, self.path)
            with compiled_together(problem.query):
                return run(problem)
        return run(problem)

    def backward(self, problem: Problem, out: Any, lse: Any, grad: Any, grad_lse: Any, needs: tuple[Any, ...]) -> Any:
        """dq, dk and dv, None where not needed; `needs` says for each, `grad_lse` is None where there is none."""
        facts = (*_facts(problem.query, problem.key, problem.value, out, grad), needs, grad_lse is None)
        return self._backward(facts, problem, out, lse, grad, grad_lse, needs)

    def _backward(
        self,
        facts: Hashable,
        problem: Problem,
        out: Any,
        lse: Any,
        grad: Any,
        grad_lse: Any,
        needs: tuple[Any, ...],
    ) -> Any:
        facts = (facts, torch.are_deterministic_algorithms_enabled())
        run = self._backwards.get(facts)
        if run is None:
            run = self._backwards[facts] = Backward(problem, out, grad, needs, self.path, grad_lse is not None)
        return run(problem, out, lse, grad, grad_lse)


class BothPlan(Plan):
    """A `Plan` for calls in which users have query rows of their own."""

    def __call__(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        to_user: Tensor,
        offsets: Tensor | None,
        kv: Tensor | None,
        user_query: Tensor,
    ) -> Any:
        permutation = None
        if offsets is None:
            offsets, permutation = _grouped(to_user, self._num_users)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, user_query, key, value)):
            return _BothAttention.apply(query, user_query, key, value, offsets, permutation, kv, self)
        problem = Problem(query, key, value, offsets, permutation, kv, self.layout, self.scale, user_query)
        outs, lses = self.forward(problem, self.return_lse)
        return (*outs, *lses) if self.return_lse else outs

    def backward(self, problem: Problem, out: Any, lse: Any, grad: Any, grad_lse: Any, needs: tuple[Any, ...]) -> Any:
        saved = (problem.query, problem.user_query, problem.key, problem.value)
        facts = (*_facts(*saved, *out, *grad), needs, grad_lse is None)
        return self._backward(facts, problem, out, lse, grad, grad_lse, needs)


def _facts(*tensors: Any) -> list[Hashable]:
    """What prepared launches depend on. Saved tensors are not always as they were: hooks may have moved them
    (`torch.autograd.graph.save_on_cpu`), and back they come contiguous, and not always aligned."""
    found: list[Hashable] = [tensors[-1].dtype]
    for tensor in tensors:
        found += (tensor.stride(), tensor.data_ptr() & 15)
    return found


def forward_launch(problem: Problem, store_lse: bool, path: str) -> Any:
    """The forward launch of a path, for problems like this one."""
    if problem.user_query is not None:
        return (both_hopper if path == "gluon" else both_portable).Forward(problem, store_lse)
    return (hopper if path == "gluon" else portable).Forward(problem, store_lse)


class Backward:
    """The backward launches, for problems and gradients that differ from these in nothing but their addresses.

    Args:
        problem: the call.
        out: the output; a pair where there are two.
        grad: of the output, as that is.
        needs: of dq (a pair where there are two), dk and dv.
        path: "triton" or "gluon".
        has_grad_lse: whether the log-sum-exp has a gradient.
    """

    def __init__(
        self, problem: Problem, out: Any, grad: Any, needs: tuple[Any, bool, bool], path: str, has_grad_lse: bool
    ) -> None:
        is_both = problem.user_query is not None
        on_hopper, anywhere = (both_hopper, both_portable) if is_both else (hopper_backward, portable_backward)
        need_dq, need_dk, need_dv = needs
        fits = path == "gluon" and on_hopper.backward_refusal(problem, out, grad) is None
        self._in_one_pass: Any = None
        if fits and hopper_backward.one_pass(problem, needs):
            self._in_one_pass = hopper_backward.OnePass(problem, grad, has_grad_lse)
            return
        if not fits and portable_backward.few_refusal(problem) is None:
            self._in_one_pass = portable_backward.BackwardFew(problem, grad, needs, has_grad_lse)
            return
        by_hopper = on_hopper.Backward(problem, grad, has_grad_lse) if fits else None
        # The Hopper kernel writes dq of both kinds of rows; the portable one as asked for, or delta alone.
        is_whole = all(need_dq) if is_both else need_dq
        self._query: Any = None
        if by_hopper is not None and is_whole:
            self._query = by_hopper.query
        else:
            self._query = anywhere.BackwardQuery(problem, grad, need_dq, has_grad_lse)
        self._key_value: Any = None
        if by_hopper is not None and (need_dk or need_dv) and hopper_backward.fills_the_gpu(problem):
            self._key_value = by_hopper.key_value
        elif need_dk or need_dv:
            self._key_value = anywhere.BackwardKeyValue(problem, grad, need_dk, need_dv)

    def __call__(self, problem: Problem, out: Any, lse: Any, grad: Any, grad_lse: Any) -> tuple[Any, Any, Any]:
        if self._in_one_pass is not None:
            return self._in_one_pass(problem, out, lse, grad, grad_lse)
        dq, delta = self._query(problem, out, lse, grad, grad_lse)
        dk, dv = (None, None) if self._key_value is None else self._key_value(problem, lse, delta, grad)
        return dq, dk, dv


def backward(
    problem: Problem, out: Any, lse: Any, grad: Any, needs: tuple[Any, bool, bool], path: str, grad_lse: Any = None
) -> tuple[Any, Any, Any]:
    """dq, dk and dv, contiguous, None where not needed."""
    grad = tuple(map(_readable, grad)) if isinstance(grad, tuple) else _readable(grad)
    return Backward(problem, out, grad, needs, path, grad_lse is not None)(problem, out, lse, grad, grad_lse)


def _readable(grad: Tensor) -> Tensor:
    """With an innermost stride of 1, which gradients of sums do not have."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    """Readable, and zeros for a result that the loss does not depend on."""
    return torch.zeros_like(like) if grad is None else _readable(grad)


class _Attention(torch.autograd.Function):
    """The eager path. The log-sum-exp is kept for the backward pass, the weights are computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: Tensor,
        permutation: Tensor | None,
        kv: Tensor | None,
        plan: Plan,
    ) -> Any:
        problem = Problem(query, key, value, offsets, permutation, kv, plan.layout, plan.scale)
        out, lse = plan.forward(problem, True)
        ctx.save_for_backward(query, key, value, offsets, permutation, kv, out, lse)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return (out, lse) if plan.return_lse else out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if grad is None and grad_lse is None:
            return (None,) * 7
        query, key, value, offsets, permutation, kv, out, lse = ctx.saved_tensors
        plan = ctx.plan
        problem = Problem(query, key, value, offsets, permutation, kv, plan.layout, plan.scale)
        needs = tuple(ctx.needs_input_grad[:3])
        return *plan.backward(problem, out, lse, _or_zeros(grad, out), grad_lse, needs), *[None] * 4


class _BothAttention(torch.autograd.Function):
    """`_Attention` with query rows of the users' own: one pass for dk and dv over both kinds of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        user_query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: Tensor,
        permutation: Tensor | None,
        kv: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor, ...]:
        problem = Problem(query, key, value, offsets, permutation, kv, plan.layout, plan.scale, user_query)
        outs, lses = plan.forward(problem, True)
        ctx.save_for_backward(query, user_query, key, value, offsets, permutation, kv, *outs, *lses)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return (*outs, *lses) if plan.return_lse else outs

    @staticmethod
    @first_order
    def backward(
        ctx: Any, grad: Tensor | None, user_grad: Tensor | None, *grad_lses: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if all(x is None for x in (grad, user_grad, *grad_lses)):
            return (None,) * 8
        query, user_query, key, value, offsets, permutation, kv, *rest = ctx.saved_tensors
        plan, outs, lses = ctx.plan, tuple(rest[:2]), tuple(rest[2:])
        problem = Problem(query, key, value, offsets, permutation, kv, plan.layout, plan.scale, user_query)
        grads = (_or_zeros(grad, outs[0]), _or_zeros(user_grad, outs[1]))
        need_dq, need_user_dq, *need = ctx.needs_input_grad[:4]
        needs = ((need_dq, need_user_dq), *need)
        dq, dk, dv = plan.backward(problem, outs, lses, grads, both_lse_grads(grad_lses, lses), needs)
        return *dq, dk, dv, *[None] * 4


def both_lse_grads(grads: tuple[Tensor | None, ...], lses: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """The gradients of both log-sum-exps, zeros for a missing one; None when both are."""
    if all(grad is None for grad in grads):
        return None
    return tuple(torch.zeros_like(lse) if grad is None else grad for grad, lse in zip(grads, lses, strict=True))
