"""`nn.Module`s with the state_dict of what they replace; the call order is `forward(user, candidate, index)`."""

from ikbo_recsys.modules.compression_linear import IKBOCompressionLinear
from ikbo_recsys.modules.cross_attention import IKBOCrossAttention
from ikbo_recsys.modules.interaction import IKBOInteraction
from ikbo_recsys.modules.linear import IKBOLinear

__all__ = ["IKBOCompressionLinear", "IKBOCrossAttention", "IKBOInteraction", "IKBOLinear"]
