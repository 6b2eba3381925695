"""Benchmarks: `python -m benchmarks.run OPERATOR`, every rival in the same run."""
