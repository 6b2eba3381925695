"""Test files that need a process of their own: an environment variable decides when a module is imported, or what they
try may end the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


def run_interpreted(file: str, *arguments: str) -> None:
    """Run the tests of a file with Triton's kernels interpreted, and fail as they do."""
    run_alone(file, {"TRITON_INTERPRET": "1"}, *arguments)


def run_alone(tests: str, environment: Mapping[str, str], *arguments: str, timeout: float = 900) -> None:
    """Run tests (a file, or one of its tests) in a process with more in its environment, and fail as they do."""
    failure, output = outcome_alone(tests, environment, *arguments, timeout=timeout)
    assert failure is None, f"{failure}\n{output[-6000:]}"


def outcome_alone(
    tests: str, environment: Mapping[str, str], *arguments: str, timeout: float = 900
) -> tuple[str | None, str]:
    """`(how they failed, output)` of tests that run as `run_alone` says; None where they passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments, tests]
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException as error:
        # With whatever it started: compilers hold the pipe open.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"not done after {timeout:g} seconds", output
    if process.returncode < 0:
        return f"ended by {signal.Signals(-process.returncode).name}", output
    if process.returncode > 0:
        return f"failed with exit code {process.returncode}", output
    return (None if "passed" in output else "nothing ran"), output
