"""Target attention on a GPU: which path, autograd, and the operators that traced graphs contain.

An eager call goes from here straight to the launches. A traced one goes through
`torch.ops.ikbo.cross_attention_portable` (a `triton_op`, whose kernels Inductor sees and AOTInductor packages) or
`cross_attention_hopper` (opaque: Inductor cannot re-emit Gluon). Both have the same backward operator.

Shape letters as in `_attention_launch.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.kernels import _attention_hopper as hopper
from ikbo_recsys.kernels import _attention_launch as portable
from ikbo_recsys.kernels import _backend, _checks
from ikbo_recsys.kernels._attention_launch import (
    FULL,
    JAGGED,
    LENGTHS,
    MAX_HEAD_SIZE,
    Problem,
    index_cache,
)
from ikbo_recsys.kernels._plan import is_traced, traceable

_FEWEST_USER_ROWS = 512
"""Query rows per user below which 128-row tiles are too few, and the portable kernel with its smaller ones wins."""


def choose(
    query: Tensor, key: Tensor, value: Tensor, kv_offsets: Tensor | None, num_users: int, scale: float
) -> _backend.Choice:
    """The path of a call whose tensors are checked and of one dtype."""
    portable_why = _portable_refusal(query.device, query.dtype, query.shape[3]) or _count_refusal(query, num_users)
    gluon_why = portable_why or _backend.hopper_refusal(query.device)
    gluon_why = gluon_why or hopper.refusal(query, key, value, kv_offsets is not None, scale)
    order = [("triton", "portable kernels"), ("torch", "plain torch")]
    if query.shape[0] * query.shape[1] >= _FEWEST_USER_ROWS * num_users:
        order.insert(0, ("gluon", f"Hopper kernels measure faster from {_FEWEST_USER_ROWS} query rows per user on"))
    return _backend.choose({"torch": None, "triton": portable_why, "gluon": gluon_why}, order)


@torch.compiler.assume_constant_result
def traced_path(device: int | None, dtype: torch.dtype, head_size: int) -> str:
    """The path of a traced call, by what is fixed while tracing: no sizes, which must not become guards, no addresses.

    The Hopper operator looks at the rest when it runs. Exported programs have the portable kernels, which travel in
    them.
    """
    where = torch.device("cpu") if device is None else torch.device("cuda", device)
    portable_why = _portable_refusal(where, dtype, head_size)
    gluon_why = portable_why or _backend.hopper_refusal(where) or hopper.type_refusal(dtype, head_size)
    order = [("triton", "portable kernels, visible to the compiler"), ("torch", "plain torch")]
    # Asked here and not by the caller: inside torch.compile, PyTorch 2.11 answers yes.
    if not torch.compiler.is_exporting():
        order.insert(0, ("gluon", "Hopper kernels, opaque to the compiler"))
    return _backend.choose({"torch": None, "triton": portable_why, "gluon": gluon_why}, order).path


def _portable_refusal(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    if head_size > MAX_HEAD_SIZE:
        return f"the kernels take head sizes up to {MAX_HEAD_SIZE}, not {head_size}"
    return _backend.portable_refusal(device, dtype)


def _count_refusal(query: Tensor, num_users: int) -> str | None:
    if query.numel() == 0 or num_users == 0:
        return "there is nothing to compute"
    if query.shape[0] * query.shape[1] >= 2**31:
        return f"the kernels number query rows in 32 bits, there are {query.shape[0] * query.shape[1]}"
    return None


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

    def __init__(self, path: str, num_users: int, layout: int, scale: float) -> None:
        self.path, self.layout, self.scale, self._num_users = path, layout, scale, num_users
        self._forwards: dict[bool, Any] = {}
        self._backwards: dict[Hashable, Backward] = {}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, to_user: Tensor, offsets: Tensor | None, kv: Tensor | None
    ) -> Tensor:
        permutation = None
        if offsets is None:
            offsets, permutation = _grouped(to_user, self._num_users)
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return _Attention.apply(query, key, value, offsets, permutation, kv, self)
        return self.forward(Problem(query, key, value, offsets, permutation, kv, self.layout, self.scale), False)[0]

    def forward(self, problem: Problem, store_lse: bool) -> tuple[Tensor, Tensor]:
        run = self._forwards.get(store_lse)
        if run is None:
            module = hopper if self.path == "gluon" else portable
            run = self._forwards[store_lse] = module.Forward(problem, store_lse)
        return run(problem)

    def backward(
        self, problem: Problem, out: Tensor, lse: Tensor, grad: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        facts = (grad.dtype, grad.stride(), grad.data_ptr() & 15, needs)
        run = self._backwards.get(facts)
        if run is None:
            run = self._backwards[facts] = Backward(problem, grad, needs, self.path)
        return run(problem, out, lse, grad)


_MOST_PLANS = 1024
_plans: dict[Hashable, Plan] = {}


def _facts(x: Tensor | None) -> Hashable:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15)


def signature(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Any,
    kv_lengths: Tensor | None,
    kv_offsets: Tensor | None,
    scale: float | None,
) -> Hashable | None:
    """Everything that the checks and the choice of a path look at, or None when they have to look each time."""
    if is_traced() or _checks.check_mode():
        return None
    if not isinstance(index, (Tensor, CandidateIndex)):
        return None
    users = (None, _facts(index)) if isinstance(index, Tensor) else (index.num_users, _facts(index.to_user))
    offsets = None if isinstance(index, Tensor) else _facts(index.offsets)
    tensors = (_facts(query), _facts(key), _facts(value), _facts(kv_lengths), _facts(kv_offsets))
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return (tensors, users, offsets, scale, autocast, _backend.requested_backend())


def repeat(known: Hashable, query: Tensor, key: Tensor, value: Tensor, index: Any, kv: Tensor | None) -> Tensor | None:
    """The result of a call like one before, without its checks; None when there was none."""
    plan = _plans.get(known)
    if plan is None:
        return None
    if isinstance(index, Tensor):
        return plan(query, key, value, index, None, kv)
    return plan(query, key, value, index.to_user, index.offsets, kv)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    to_user: Tensor,
    offsets: Tensor | None,
    kv_lengths: Tensor | None,
    kv_offsets: Tensor | None,
    scale: float,
    path: str,
    known: Hashable | None = None,
) -> Tensor:
    """`cross_attention` by the "triton" or the "gluon" path. Tensors arrive checked, in one dtype.

    Args:
        known: the call's `signature`, when nothing of the call was converted since: the next one like it is then
        `repeat`ed.
    """
    num_users = key.shape[0] if kv_offsets is None else kv_offsets.shape[0] - 1
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        known = None
    layout, kv = FULL, None
    if kv_lengths is not None:
        layout, kv = LENGTHS, kv_lengths
    elif kv_offsets is not None:
        layout, kv = JAGGED, kv_offsets
    if is_traced():
        permutation = None
        if offsets is None:
            offsets, permutation = group(to_user, num_users)
        operator = torch.ops.ikbo.cross_attention_hopper if path == "gluon" else torch.ops.ikbo.cross_attention_portable
        return operator(query, key, value, offsets, permutation, kv, layout, scale)[0]
    plan = Plan(path, num_users, layout, scale)
    if known is not None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[known] = plan
    return plan(query, key, value, to_user, offsets, kv)


class Backward:
    """The backward launches, for problems and gradients that differ from these in nothing but their addresses."""

    def __init__(self, problem: Problem, grad: Tensor, needs: tuple[bool, bool, bool], path: str) -> None:
        need_dq, need_dk, need_dv = needs
        fits = path == "gluon" and hopper.backward_refusal(problem, grad) is None
        by_hopper = hopper.Backward(problem, grad) if fits else None
        self._query = by_hopper.query if by_hopper is not None and need_dq else None
        # The portable kernel for dq computes delta in passing, or delta alone.
        self._delta = portable.BackwardQuery(problem, grad, need_dq and self._query is None)
        self._key_value: Any = None
        if by_hopper is not None and (need_dk or need_dv) and hopper.fills_the_gpu(problem):
            self._key_value = by_hopper.key_value
        elif need_dk or need_dv:
            self._key_value = portable.BackwardKeyValue(problem, grad, need_dk, need_dv)

    def __call__(
        self, problem: Problem, out: Tensor, lse: Tensor, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dq, delta = self._delta(problem, out, lse, grad)
        if self._query is not None:
            dq = self._query(problem, lse, delta, grad)
        dk, dv = (None, None) if self._key_value is None else self._key_value(problem, lse, delta, grad)
        return dq, dk, dv


def backward(
    problem: Problem, out: Tensor, lse: Tensor, grad: Tensor, needs: tuple[bool, bool, bool], path: str
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk and dv, contiguous, None where not needed."""
    grad = _readable(grad)
    return Backward(problem, grad, needs, path)(problem, out, lse, grad)


def _readable(grad: Tensor) -> Tensor:
    """With an innermost stride of 1, which gradients of sums do not have."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


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
    ) -> Tensor:
        problem = Problem(query, key, value, offsets, permutation, kv, plan.layout, plan.scale)
        out, lse = plan.forward(problem, True)
        ctx.save_for_backward(query, key, value, offsets, permutation, kv, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, offsets, permutation, kv, out, lse = ctx.saved_tensors
        plan = ctx.plan
        problem = Problem(query, key, value, offsets, permutation, kv, plan.layout, plan.scale)
        return *plan.backward(problem, out, lse, _readable(grad), tuple(ctx.needs_input_grad[:3])), *[None] * 4


# ---- operators for traced graphs -------------------------------------------------------------------------------------


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
        return portable.forward(Problem(query, key, value, offsets, permutation, kv, layout, scale), True)


@torch.library.triton_op("ikbo::cross_attention_portable_backward", mutates_args={})
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
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv by the portable kernels."""
    problem = Problem(query, key, value, offsets, permutation, kv, layout, scale)
    with traceable():
        return backward(problem, out, lse, grad, (True, True, True), "triton")  # type: ignore[return-value]


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
    problem = Problem(query, key, value, offsets, permutation, kv, layout, scale)
    module = hopper if _path_at_hand(problem) == "gluon" else portable
    return module.forward(problem, True)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, by the Hopper kernels where the call at hand fits them."""
    problem = Problem(query, key, value, offsets, permutation, kv, layout, scale)
    grads = backward(problem, out, lse, grad, (True, True, True), _path_at_hand(problem))
    return grads  # type: ignore[return-value]


def _path_at_hand(problem: Problem) -> str:
    query = problem.query
    if query.shape[0] * query.shape[1] < _FEWEST_USER_ROWS * problem.num_users:
        return "triton"
    why = hopper.refusal(query, problem.key, problem.value, problem.layout == JAGGED, problem.scale)
    return "gluon" if why is None else "triton"


@cross_attention_hopper.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


@cross_attention_hopper_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.layout, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _register_autograd(forward: Any, backward: Any) -> None:
    def differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        return *backward(grad.contiguous(), *tensors, ctx.layout, ctx.scale, out, lse), *[None] * 5

    forward.register_autograd(differentiate, setup_context=_setup_context)


_register_autograd(cross_attention_portable, cross_attention_portable_backward)
_register_autograd(cross_attention_hopper, cross_attention_hopper_backward)
