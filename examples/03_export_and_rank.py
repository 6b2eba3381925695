"""Export the trained ranker with both batch sizes dynamic, package it, and rank the catalogue in another process."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import movielens
import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ikbo_recsys.export import export, package

USER_KEYS = [*movielens.USER_TABLES, "history"]
CANDIDATE_KEYS = [*movielens.CANDIDATE_TABLES, "item"]
DYNAMIC = {
    "dense": "U",
    "user_lengths": "U",
    "user_ids": {0: "user_id_count"},
    "candidate_lengths": "B",
    "candidate_ids": {0: "candidate_id_count"},
    "index": "B",
}


class Ranker(nn.Module):
    """The whole model on plain tensors: ids and how many of them each row and feature has."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, dense, user_lengths, user_ids, candidate_lengths, candidate_ids, index):
        user = KeyedJaggedTensor(USER_KEYS, user_ids, lengths=user_lengths.t().flatten())
        candidate = KeyedJaggedTensor(CANDIDATE_KEYS, candidate_ids, lengths=candidate_lengths.t().flatten())
        return self.model(dense, user, candidate, index).squeeze(1)


def make_inputs(data, requests, items):
    """The users of some requests, each with the same items as candidates."""
    dense, user = data.user_batch(requests)
    tiled = np.tile(items, len(requests))
    candidate = data.candidate_batch(tiled, data.rate_at_end[tiled], data.ratings_at_end[tiled])
    return (
        dense,
        user.lengths().view(len(USER_KEYS), -1).t().contiguous(),
        user.values(),
        candidate.lengths().view(len(CANDIDATE_KEYS), -1).t().contiguous(),
        candidate.values(),
        torch.arange(len(requests)).repeat_interleave(len(items)),
    )


@torch.no_grad()
def largest_difference(model, served, requests):
    """Of the served scores to eager ones, and to those of the model that copies users."""
    ours, twin = Ranker(model), Ranker(model)
    eager = [ours(*inputs) for inputs in requests]
    dense, model.dense = model.dense, movielens.make_twin(model)
    copied = [twin(*inputs) for inputs in requests]
    model.dense = dense
    to_eager = max(float((a - b).abs().max()) for a, b in zip(served, eager, strict=True))
    to_twin = max(float((a - b).abs().max()) for a, b in zip(served, copied, strict=True))
    return to_eager, to_twin


def print_ranking(data, request, scores):
    user = data.user[request]
    liked = data.positives[user][: data.positives_before[request]][::-1]
    print(f"\nUser {user + 1} last liked: {', '.join(data.titles[i] for i in liked[:5])}")
    print("Top ten of the movies not liked yet:")
    scores = scores.clone()
    scores[torch.from_numpy(liked.copy())] = -torch.inf
    for place, item in enumerate(scores.topk(10).indices.tolist(), 1):
        print(f"  {place:2}  {torch.sigmoid(scores[item]):.2f}  {data.titles[item]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the catalogue")
    quick = parser.parse_args().quick

    data = movielens.load()
    weights = movielens.OUT / "model.pt"
    if not weights.exists():
        sys.exit(f"{weights} is missing: run 02_train_movielens.py first")
    model = movielens.make_model(len(data.titles)).eval()
    model.load_state_dict(torch.load(weights))

    catalogue = np.arange(len(data.titles) // (10 if quick else 1))
    last_requests = np.unique(data.user[::-1], return_index=True)[1]
    users = len(data.user) - 1 - last_requests[[0, 41, 270, 404]]
    start = time.perf_counter()
    program = export(Ranker(model), make_inputs(data, users[:2], catalogue[:20]), dynamic=DYNAMIC)
    path = package(program, movielens.OUT / "ranker.pt2")
    seconds, megabytes = time.perf_counter() - start, Path(path).stat().st_size / 1e6
    print(f"exported and packaged in {seconds:.0f} s: {path}, {megabytes:.1f} MB")

    requests = [
        make_inputs(data, users[:1], catalogue),
        make_inputs(data, users, catalogue),
        make_inputs(data, users[1:2], catalogue[:1]),
    ]
    request_file, score_file = movielens.OUT / "request.pt", movielens.OUT / "scores.pt"
    torch.save(requests, request_file)
    serve = Path(__file__).with_name("serve.py")
    subprocess.run([sys.executable, str(serve), path, str(request_file), str(score_file)], check=True)
    served = torch.load(score_file)

    for inputs in requests:
        print(f"served {inputs[0].shape[0]} users with {inputs[-1].shape[0]:,} candidates")
    to_eager, to_twin = largest_difference(model, served, requests)
    print(f"largest difference of a score: {to_eager:.1e} to eager, {to_twin:.1e} to the broadcast twin")
    movielens.save_report(max_score_difference=max(to_eager, to_twin))
    if not quick:
        print_ranking(data, users[0], served[0])


if __name__ == "__main__":
    main()
