"""Taking over the parameters of a dense `nn.Linear`: shared by the modules that replace one."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

LinearT = TypeVar("LinearT", bound=nn.Linear)


def check_sizes(**sizes: int) -> None:
    """Raise if a size that a constructor was given is negative."""
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")


def check_width(name: str, tensor: Tensor, size_name: str, size: int) -> None:
    """Raise unless dimension 1 of an input is what the module was built for."""
    if tensor.dim() > 1 and tensor.shape[1] != size:
        raise ValueError(f"{name} has {tensor.shape[1]} features but {size_name} is {size}")


def check_dense(dense: nn.Linear, name: str, user_inputs: int) -> None:
    """Raise unless the parameters of `dense` can be taken over and the user's share of its inputs is possible."""
    if not isinstance(dense, nn.Linear):
        raise TypeError(f"dense must be an nn.Linear, got {type(dense).__name__}")
    if not isinstance(dense.weight, nn.Parameter):
        raise ValueError("dense.weight is computed (a parametrization): remove it first, there is no parameter to take")
    if not 0 <= user_inputs <= dense.in_features:
        raise ValueError(f"{name} is {user_inputs} but the dense layer has {dense.in_features} inputs")


def adopt_linear(module: LinearT, dense: nn.Linear) -> LinearT:
    """Give `module` the parameters of `dense` (the same objects: nothing is copied) and its training flag."""
    module.weight = dense.weight
    module.bias = dense.bias
    return module.train(dense.training)
