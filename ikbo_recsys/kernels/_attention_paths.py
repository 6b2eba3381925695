"""Target attention on a GPU: which path a call takes.

An eager call goes from here to a plan (`_attention_plans.py`) and its launches, a traced one through the operators of
`_attention_operators.py`.

Shape letters as in `_attention_launch.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ikbo_recsys.kernels import _attention_hopper as hopper
from ikbo_recsys.kernels import _backend, _plan
from ikbo_recsys.kernels._attention_launch import FULL, JAGGED, LENGTHS, MAX_HEAD_SIZE
from ikbo_recsys.kernels._attention_plans import BothPlan, Plan, group


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_offsets: Tensor | None,
    num_users: int,
    scale: float,
    user_query: Tensor | None = None,
) -> _backend.Choice:
    """The path of a call whose tensors are checked and of one dtype."""
    portable_why = _portable_refusal(query.device, query.dtype, query.shape[3])
    portable_why = portable_why or _count_refusal(query, user_query, num_users)
    gluon_why = portable_why or _backend.hopper_refusal(query.device)
    gluon_why = gluon_why or hopper.refusal(query, key, value, kv_offsets is not None, scale, user_query)
    order = [("triton", "portable kernels"), ("torch", "plain torch")]
    if hopper.is_faster(query, key, num_users, kv_offsets is not None, user_query):
        order.insert(0, ("gluon", "Hopper kernels measure faster"))
    return _backend.choose({"torch": None, "triton": portable_why, "gluon": gluon_why}, order)


@_backend.constant_while_tracing
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


def _count_refusal(query: Tensor, user_query: Tensor | None, num_users: int) -> str | None:
    if query.numel() == 0 or num_users == 0 or (user_query is not None and user_query.numel() == 0):
        return "there is nothing to compute"
    for each in (query, user_query):
        if each is not None and each.shape[0] * each.shape[1] >= 2**31:
            return f"the kernels number query rows in 32 bits, there are {each.shape[0] * each.shape[1]}"
    return None


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
    known: tuple[Hashable, ...] | None = None,
    user_query: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """`cross_attention` by the "triton" or the "gluon" path. Tensors arrive checked, in one dtype.

    Args:
        known: the call's signature, when nothing of the call was converted since: its plan is remembered.
    """
    num_users = key.shape[0] if kv_offsets is None else kv_offsets.shape[0] - 1
    given = (query, key, value) if user_query is None else (query, key, value, user_query)
    if any(x.stride(-1) != 1 for x in given):
        query, key, value, *own = (x if x.stride(-1) == 1 else x.contiguous() for x in given)
        user_query = own[0] if own else None
        known = None
    layout, kv = FULL, None
    if kv_lengths is not None:
        layout, kv = LENGTHS, kv_lengths
    elif kv_offsets is not None:
        layout, kv = JAGGED, kv_offsets
    if kv is not None:
        kv = kv.contiguous()
    if _plan.is_dispatched(query, key, value, user_query):
        # Imported by the first traced call: registering an operator of kernels imports TorchInductor.
        from ikbo_recsys.kernels import _attention_operators as operators

        permutation = None
        if offsets is None:
            offsets, permutation = group(to_user, num_users)
        rest = (key, value, offsets, permutation, kv, layout, scale)
        return operators.call(path, query, user_query, rest, return_lse)
    # Triton compiles whole numbers into a kernel, and launches are remembered for scales of any value.
    plan = (Plan if user_query is None else BothPlan)(path, num_users, layout, float(scale), return_lse)
    _plan.remember(known, plan)
    return plan(query, key, value, to_user, offsets, kv, *(() if user_query is None else (user_query,)))
