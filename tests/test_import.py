"""`import ikbo_recsys` is light: no triton, no torchrec, no CUDA, little time. Every docstring example runs."""

from __future__ import annotations

import doctest
import importlib
import os
import subprocess
import sys

import pytest
import torch

import ikbo_recsys


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_works_without_triton_and_torchrec() -> None:
    code = """
import sys
sys.modules["triton"] = sys.modules["torchrec"] = sys.modules["fbgemm_gpu"] = None  # importing them raises
import torch, ikbo_recsys as ik
index = ik.CandidateIndex.from_counts(torch.tensor([2, 1]))
layer = ik.IKBOLinear(3, 2, 4, activation="relu")
print(tuple(layer(torch.randn(2, 3), torch.randn(3, 2), index).shape), torch.cuda.is_initialized())
"""
    assert run(code) == "(3, 4) False"


def test_it_imports_neither_triton_nor_torchrec() -> None:
    code = "import sys, ikbo_recsys; print([m for m in ('triton', 'torchrec', 'fbgemm_gpu') if m in sys.modules])"
    assert run(code) == "[]"


def test_it_takes_little_time_beyond_torch() -> None:
    code = "import time, torch; start = time.perf_counter(); import ikbo_recsys; print(time.perf_counter() - start)"
    assert min(float(run(code)) for _ in range(3)) < 0.3


DOCUMENTED = [
    "ikbo_recsys.candidate_index",
    "ikbo_recsys.modules.compression_linear",
    "ikbo_recsys.modules.cross_attention",
    "ikbo_recsys.modules.interaction",
    "ikbo_recsys.modules.linear",
]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch, "CandidateIndex": ikbo_recsys.CandidateIndex})
    assert result.attempted > 0
    assert result.failed == 0
