"""torchrec's own DLRM, as it is: see what it computes once per candidate, remove that, and compare.

Nothing of the model is rewritten. Its caller looks the user's embeddings up per candidate, as callers do; `optimize`
finds the copy in the traced model, moves the layers behind it to one row per user, and puts this library's operators
where both sides meet.
"""

import argparse
import logging
import statistics
import time

import torch
from torch import nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from ikbo_recsys.transforms import analyze, optimize

DIM, ROWS = 64, 1000
USER_KEYS = [f"user_{i}" for i in range(20)]
ITEM_KEYS = [f"item_{i}" for i in range(6)]


def tables(keys):
    return [EmbeddingBagConfig(name=k, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[k]) for k in keys]


class Embeddings(nn.Module):
    """DLRM's embedding collection: user ids of U users, candidate ids of B candidates, and the index."""

    def __init__(self):
        super().__init__()
        self.user = EmbeddingBagCollection(tables=tables(USER_KEYS))
        self.item = EmbeddingBagCollection(tables=tables(ITEM_KEYS))

    def embedding_bag_configs(self):
        return tables(USER_KEYS + ITEM_KEYS)

    def forward(self, features):
        user, item, index = features
        copied = self.user(user).values()[index]  # each user's embeddings, once per candidate
        values = torch.cat([copied, self.item(item).values()], 1)
        keys = USER_KEYS + ITEM_KEYS
        return KeyedTensor(keys=keys, length_per_key=[DIM] * len(keys), values=values)


class Serving(nn.Module):
    """DLRM on plain tensors, one id per feature."""

    def __init__(self):
        super().__init__()
        self.dlrm = DLRM(
            Embeddings(), dense_in_features=13, dense_arch_layer_sizes=[128, DIM], over_arch_layer_sizes=[512, 256, 1]
        )

    def forward(self, dense, user_ids, item_ids, index):
        user = KeyedJaggedTensor(USER_KEYS, user_ids.t().flatten(), lengths=torch.ones_like(user_ids).t().flatten())
        item = KeyedJaggedTensor(ITEM_KEYS, item_ids.t().flatten(), lengths=torch.ones_like(item_ids).t().flatten())
        return self.dlrm(dense, (user, item, index)).squeeze(1)


def batch(users, candidates):
    index = torch.arange(candidates) * users // candidates
    user_ids, item_ids = (torch.randint(0, ROWS, s) for s in ((users, len(USER_KEYS)), (candidates, len(ITEM_KEYS))))
    return torch.randn(candidates, 13), user_ids, item_ids, index


def milliseconds(model, inputs, repeats):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        model(*inputs)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)  # torchrec warns of every key it splits while being traced
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as a server runs one request

    model = Serving().eval()
    dynamic = {"dense": "B", "user_ids": "U", "item_ids": "B", "index": "B"}

    print("--- what the model wastes")
    print(analyze(model, batch(3, 24), dynamic=dynamic, ratio=arguments.candidates))

    optimized = optimize(model, batch(3, 24), dynamic=dynamic).module()

    inputs = batch(1, arguments.candidates)
    with torch.no_grad():
        difference = (optimized(*inputs) - model(*inputs)).abs().max().item()
        before, after = (milliseconds(m, inputs, arguments.repeats) for m in (model, optimized))
    print(f"\n--- 1 user, {arguments.candidates} candidates, 1 thread")
    print(f"largest difference of the scores: {difference:.1e}")
    print(f"before: {before:.2f} ms   after: {after:.2f} ms   ({before / after:.2f}x)")


if __name__ == "__main__":
    main()
