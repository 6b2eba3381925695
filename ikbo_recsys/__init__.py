"""Ranking-model components for PyTorch and TorchRec that never copy the user once per candidate."""

from ikbo_recsys import kernels
from ikbo_recsys.candidate_index import CandidateIndex
from ikbo_recsys.modules import IKBOCompressionLinear, IKBOCrossAttention, IKBOInteraction, IKBOLinear

__all__ = [
    "CandidateIndex",
    "IKBOCompressionLinear",
    "IKBOCrossAttention",
    "IKBOInteraction",
    "IKBOLinear",
    "kernels",
]
