"""Test files that need a process of their own, because an environment variable decides when a module is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


def run_interpreted(file: str, *arguments: str) -> None:
    """Run the tests of a file with Triton's kernels interpreted, and fail as they do."""
    run_alone(file, {"TRITON_INTERPRET": "1"}, *arguments)


def run_alone(file: str, environment: dict[str, str], *arguments: str) -> None:
    """Run the tests of a file in a process with more in its environment, and fail as they do."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments, file]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout, done.stdout[-2000:]
