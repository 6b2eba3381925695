"""`python -m ikbo_recsys.transforms module:factory`: what a model wastes, as a table.

The factory takes no arguments and returns `(model, args)` or `(model, args, options)`; `args` is the tuple of
example inputs and `options` are keyword arguments of `analyze` (`user_inputs`, `kwargs`, `dynamic`, ...).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from ikbo_recsys.transforms.analyze import analyze
from ikbo_recsys.transforms.report import GPUS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when something can be saved, 1 when nothing can, 2 for a wrong call."""
    parser = argparse.ArgumentParser(prog="python -m ikbo_recsys.transforms", description=__doc__)
    parser.add_argument("factory", help="module:function, which returns (model, args) or (model, args, options)")
    parser.add_argument(
        "--user-inputs", nargs="+", metavar="NAME", help="inputs that are the same for all candidates of a user"
    )
    parser.add_argument("--ratio", type=int, default=64, help="candidates per user (64)")
    parser.add_argument("--users", type=int, default=1, help="users per batch (1)")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h200", help="whose peak rates the roofline uses (h200)")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    arguments = parser.parse_args(argv)
    model, args, options = _built(parser, arguments.factory)
    if arguments.user_inputs:
        options["user_inputs"] = arguments.user_inputs
    options.update(ratio=arguments.ratio, users=arguments.users, gpu=arguments.gpu)
    found = analyze(model, args, **options)
    sys.stdout.write((found.to_json() if arguments.json else str(found)) + "\n")
    return 0 if found.report.changed else 1


def _built(parser: argparse.ArgumentParser, factory: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    module_name, separator, name = factory.partition(":")
    if not separator or not name:
        parser.error(f"factory must be module:function, got {factory!r}")
    sys.path.insert(0, os.getcwd())
    function = getattr(importlib.import_module(module_name), name, None)
    if not callable(function):
        parser.error(f"{module_name} has no function {name!r}")
    built = function()
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        parser.error(f"{factory} must return (model, args) or (model, args, options), got {type(built).__name__}")
    model, args, *rest = built
    return model, args, dict(rest[0]) if rest else {}


if __name__ == "__main__":
    raise SystemExit(main())
