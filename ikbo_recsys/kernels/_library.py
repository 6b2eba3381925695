"""Registration of the operators under `torch.ops.ikbo`.

Each is a CompositeImplicitAutograd operator over the public function's implementation: autograd, autocast, fake and
meta tensors, `FlopCounterMode` and every decomposition see the parts it is made of, so an exported CPU program needs
neither this library nor a registration. What the GPU paths add are operators of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("ikbo", "DEF")


def register_operator(schema: str, implementation: Callable[..., Any]) -> None:
    """Define `ikbo::<schema>` with `implementation`, which takes tensors and numbers as the schema says."""
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(schema.split("(", 1)[0], implementation, "CompositeImplicitAutograd")
