"""The functional operators: tensors in, tensors out, differentiable, without a copy of the user per candidate.

They are also registered as `torch.ops.ikbo.*`, with a bare `to_user` for the index.
"""

from ikbo_recsys.kernels._backend import BackendError, explain, use_backend
from ikbo_recsys.kernels.compression_linear import compression_linear
from ikbo_recsys.kernels.cross_attention import cross_attention
from ikbo_recsys.kernels.dot_interaction import dot_interaction
from ikbo_recsys.kernels.linear import linear
from ikbo_recsys.kernels.segment import broadcast, segment_sum

__all__ = [
    "BackendError",
    "broadcast",
    "compression_linear",
    "cross_attention",
    "dot_interaction",
    "explain",
    "linear",
    "segment_sum",
    "use_backend",
]
