"""Existing models: find the copies of user rows they make, and remove them without changing a result.

`analyze` says what a model wastes, `optimize` removes it, `torch.compile(model, backend="ikbo")` does so while
compiling. Importing this package registers the backend. The algorithm is described in `docs/transforms.md`.
"""

from ikbo_recsys.transforms.analyze import Analysis, analyze
from ikbo_recsys.transforms.backend import GraphPass, ikbo
from ikbo_recsys.transforms.optimize import NothingToOptimize, Optimized, optimize
from ikbo_recsys.transforms.report import Report

__all__ = ["Analysis", "GraphPass", "NothingToOptimize", "Optimized", "Report", "analyze", "ikbo", "optimize"]
