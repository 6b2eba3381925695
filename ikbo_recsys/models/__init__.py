"""Complete ranking models on TorchRec: each has a sparse part (look-ups) and a dense part (embeddings to scores)."""

from ikbo_recsys.models.dlrm import IKBODLRM, IKBODLRMDense, IKBODLRMSparse
from ikbo_recsys.models.sequence_ranker import (
    IKBOSequenceRanker,
    IKBOSequenceRankerDense,
    IKBOSequenceRankerSparse,
)

__all__ = [
    "IKBODLRM",
    "IKBODLRMDense",
    "IKBODLRMSparse",
    "IKBOSequenceRanker",
    "IKBOSequenceRankerDense",
    "IKBOSequenceRankerSparse",
]
