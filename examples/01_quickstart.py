"""Two users, five candidates, and no copy of a user: the four modules in thirty lines."""

import torch

from ikbo_recsys import CandidateIndex, IKBOCompressionLinear, IKBOCrossAttention, IKBOInteraction, IKBOLinear

users, candidates, dim = 2, 5, 16
user_features = torch.randn(users, 6, dim)
user_history = torch.randn(users, 50, dim)
history_lengths = torch.tensor([50, 12])
candidate_features = torch.randn(candidates, 4, dim)
index = CandidateIndex.from_counts(torch.tensor([2, 3]))  # candidates 0-1 are user 0's, candidates 2-4 user 1's

compress = IKBOCompressionLinear(user_features=6, candidate_features=4, out_features=3)
attend = IKBOCrossAttention(embed_dim=dim, num_heads=2)
interact = IKBOInteraction()
over_arch = IKBOLinear(user_in=6 * dim, candidate_in=3 * dim + dim + 45, out=1)

compressed = compress(user_features, candidate_features, index)
taste = attend(user_history, candidate_features[:, :1], index, history_lengths)
pairs = interact(user_features, candidate_features, index)
mixed = torch.cat((compressed.flatten(1), taste.flatten(1), pairs), dim=1)
scores = over_arch(user_features.flatten(1), mixed, index)
scores.sum().backward()

print(f"candidate -> user  {index.to_user.tolist()}")
print(f"compressed         {tuple(compressed.shape)}")
print(f"attention          {tuple(taste.shape)}")
print(f"pairs              {tuple(pairs.shape)}")
print(f"scores             {[round(score, 3) for score in scores.flatten().tolist()]}")
