"""Taking over the parameters of a dense `nn.Linear`: shared by the modules that replace one."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

LinearT = TypeVar("LinearT", bound=nn.Linear)


def check_split(name: str, user_inputs: int, total: int) -> None:
    """Raise unless the user's share of a dense layer's inputs is a possible one."""
    if not 0 <= user_inputs <= total:
        raise ValueError(f"{name} is {user_inputs} but the dense layer has {total} inputs")


def adopt_linear(module: LinearT, dense: nn.Linear) -> LinearT:
    """Give `module` the parameters of `dense` (the same objects: nothing is copied) and its training flag."""
    module.weight = dense.weight
    module.bias = dense.bias
    return module.train(dense.training)
