"""The Hopper attention kernels over both kinds of query rows, in the emulator: see `test_hopper_emulated.py`."""

from __future__ import annotations

import pytest
import torch

from ikbo_recsys import kernels
from tests import twins
from tests.cases import relative_error
from tests.processes import INTERPRETED, interpreted, run_interpreted
from tests.test_hopper_emulated import EAGER, make_index

pytest.importorskip("triton.experimental.gluon")

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


# (U, B, seeds, own rows, T, (H, Hkv), D): as in `test_hopper_emulated.py`; own rows below a box, and above a tile
SIZES = [
    (3, 7, 64, 5, 301, (2, 1), 64),
    (2, 40, 5, 150, 150, (2, 2), 128),
    (9, 4, 64, 64, 70, (1, 1), 40),
    (3, 130, 1, 130, 200, (4, 2), 64),
]


@interpreted
@pytest.mark.parametrize("layout", ["full", "lengths", "jagged"])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_both_kinds_of_rows(sizes: tuple, grouped: bool, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ikbo_recsys.kernels import _attention_backward_hopper
    from tests.emulator import emulated

    monkeypatch.setattr(_attention_backward_hopper, "fills_the_gpu", lambda problem: True)
    users, cands, seeds, own_rows, rows, heads, size = sizes
    index = make_index(users, cands, grouped)
    lengths = torch.randint(1, rows + 1, (users,))
    lengths[users // 2] = rows if layout == "full" else 0
    if layout == "full":
        lengths.fill_(rows)
    valid = torch.arange(rows) < lengths[:, None]
    query, grad = (torch.randn(cands, seeds, heads[0], size).half() for _ in range(2))
    own, own_grad = (torch.randn(users, own_rows, heads[0], size).half() for _ in range(2))
    history = torch.randn(users, rows, 2, heads[1], size).half()
    buffer = history.masked_fill(~valid[:, :, None, None, None], float("nan"))
    options = {"lengths": {"kv_lengths": lengths}}.get(layout, {})
    if layout == "jagged":
        buffer = buffer[valid]
        options = {"kv_offsets": torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))}
    leaves = [x.clone().requires_grad_() for x in (query, *buffer.unbind(-3), own)]
    lse_grads = [torch.randn(x.shape[:3]) for x in (query, own)]
    with emulated(seeds, EAGER[users % 3], 3) as ran, kernels.use_backend("gluon"):
        results = kernels.cross_attention(*leaves[:3], index, user_query=leaves[3], return_lse=True, **options)
        kept = [*results[:2], *(x.masked_fill(x.isinf(), 0) for x in results[2:])]
        gradients = torch.autograd.grad(kept, leaves, [grad, own_grad, *lse_grads])
    adjacent = grouped or seeds % 64 == 0
    backward = ["attention_backward_key_value_both", "attention_backward_query_both"] if adjacent else []
    assert ran[0] == "attention_forward_both"
    assert sorted(ran[1:]) == backward

    q, k, v, u = exact = [x.double().requires_grad_() for x in (query, *history.unbind(2), own)]
    sides = (q, index.to_user), (u, torch.arange(users))
    twin = [twins.cross_attention(x, k, v, ids, lengths) for x, ids in sides]
    twin += [twins.log_sum_exp(x, k, ids, lengths) for x, ids in sides]
    for got, want in zip(results[2:], twin[2:], strict=True):
        torch.testing.assert_close(got.detach().double(), want.detach(), rtol=1e-3, atol=1e-3)
    kept = [x.masked_fill(x.isinf(), 0) for x in twin]
    expected = list(torch.autograd.grad(kept, exact, [x.double() for x in (grad, own_grad, *lse_grads)]))
    if layout == "jagged":
        expected[1:3] = [x[valid] for x in expected[1:3]]
    names = ("out", "user_out", "dq", "dk", "dv", "user dq")
    for name, ours, true in zip(names, (*results[:2], *gradients), (*twin[:2], *expected), strict=True):
        assert relative_error(ours.detach(), true.detach()) < 1e-3, name
