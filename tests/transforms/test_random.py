"""Random models: the optimized graph gives what the model gives, forward and gradient."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from ikbo_recsys.transforms import optimize
from tests.transforms.generator import Case, Sizes, generate, replay
from tests.transforms.helper import gradients, must_rewrite, trace

SIZES = (Sizes(3, 7, 2, 5), Sizes(1, 1, 1, 1), Sizes(1, 50, 1, 3), Sizes(9, 2, 4, 3), Sizes(2, 6, 2, 3))
CHUNK, CHUNKS, ROTATING = 125, 16, 100


def check(case: Case) -> bool:
    """Compare a model with its optimized graph; whether the pass changed anything."""
    model, count = case.model, len(list(case.model.params))
    tensors = [p.detach().clone().requires_grad_() for p in model.params]
    tensors += [t.clone().requires_grad_() if t.dtype.is_floating_point else t.clone() for t in case.inputs]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        return replay(model.steps, model.outputs, list(given[count:]), list(given[:count]))

    module = trace(run, tensors)
    report = must_rewrite(module, skip=count)
    wanted = [t for t in tensors if t.requires_grad]
    expected, found = run(*tensors), module(*tensors)
    compare(expected, found)
    compare(gradients(expected, wanted), gradients(found, wanted))
    return report.changed


def compare(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    # float64, save for one step that rounds to float32 on purpose.
    for e, f in zip(expected, found, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-6)


def check_seeds(first: int, count: int) -> None:
    changed = 0
    for seed in range(first, first + count):
        try:
            changed += check(generate(seed, SIZES[seed % len(SIZES)]))
        except Exception as error:
            raise AssertionError(f"random model with seed {seed}: {type(error).__name__}: {error}") from error
    assert changed > count // 2, f"the pass changed only {changed} of {count} models from seed {first}"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_two_thousand_models(chunk: int) -> None:
    check_seeds(chunk * CHUNK, CHUNK)


def test_models_of_a_seed_that_changes() -> None:
    """The seed of a failure is in its message: `check(generate(seed, SIZES[seed % len(SIZES)]))` repeats it."""
    check_seeds(1_000_000 + int(time.time()) % 100_000_000, ROTATING)


@pytest.mark.parametrize("seed", range(24))
def test_exported_models_at_other_sizes(seed: int) -> None:
    """Through torch.export with all batch sizes dynamic: one program for all of them."""
    case = generate(seed, Sizes(3, 11, 5, 7))
    names = [f"inputs_{i}" for i in range(len(case.inputs))]
    program = torch.export.export(
        case.model,
        tuple(case.inputs),
        dynamic_shapes=(tuple({0: Dim.AUTO} for _ in names),),
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    optimized = optimize(program)
    module = optimized.module()
    # Sizes that no feature axis has: PyTorch asserts that a batch size is not one that it would broadcast with.
    for users, candidates, queries, vendors in ((3, 11, 5, 7), (5, 40, 8, 9), (13, 6, 9, 5)):
        inputs = generate(seed, Sizes(users, candidates, queries, vendors)).inputs
        compare(case.model(*inputs), module(*inputs))
