"""Train `IKBOSequenceRanker` on MovieLens-100K; compare it with popularity, and its loss with the broadcast twin's."""

import argparse
import copy

import matplotlib

matplotlib.use("Agg")
import movielens
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from sklearn.metrics import roc_auc_score
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from tqdm import tqdm

REQUESTS_PER_BATCH, EPOCHS = 256, 3


def add_optimizers(model):
    """Tables are updated during the backward pass (row-wise Adagrad); the dense part by Adam."""
    apply_optimizer_in_backward(RowWiseAdagrad, model.sparse.parameters(), {"lr": 0.02})
    return torch.optim.Adam(model.dense.parameters(), lr=1e-3, weight_decay=1e-5)


def train_step(model, optimizer, batch):
    scores = model(batch.dense, batch.user, batch.candidate, batch.index).squeeze(1)
    loss = F.binary_cross_entropy_with_logits(scores, batch.label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class WithBroadcastTwin(torch.nn.Module):
    """The same tables and weights, with the dense part that copies users."""

    def __init__(self, model):
        super().__init__()
        self.sparse = copy.deepcopy(model.sparse)
        self.dense = movielens.make_twin(model)

    def forward(self, dense, user, candidate, index):
        return self.dense(dense, *self.sparse(user, candidate), index.to_user)


def compare_losses(data, requests, steps):
    """Train both from the same weights on the same batches; return both series of losses."""
    torch.manual_seed(0)
    ours = movielens.make_model(len(data.titles))
    twin = WithBroadcastTwin(ours)
    optimizers = add_optimizers(ours), add_optimizers(twin)
    losses = []
    batches = movielens.shuffled(requests, 32, seed=1)[:steps]
    for rows in tqdm(batches, desc="ours and the twin"):
        batch = data.batch(rows)
        losses.append([train_step(m, o, batch) for m, o in zip((ours, twin), optimizers, strict=True)])
    return np.array(losses)


def train(data, requests, epochs):
    torch.manual_seed(0)
    model = movielens.make_model(len(data.titles))
    optimizer = add_optimizers(model)
    losses = []
    for epoch in range(epochs):
        batches = movielens.shuffled(requests, REQUESTS_PER_BATCH, seed=epoch)
        progress = tqdm(batches, desc=f"epoch {epoch + 1}/{epochs}")
        for rows in progress:
            losses.append(train_step(model, optimizer, data.batch(rows)))
            progress.set_postfix(loss=f"{np.mean(losses[-50:]):.4f}")
    return model, losses


@torch.no_grad()
def score(model, data, requests):
    model.eval()
    batches = [requests[start : start + 1024] for start in range(0, len(requests), 1024)]
    scores = [model(*data.batch(rows)[:4]).squeeze(1) for rows in batches]
    return torch.cat(scores).numpy()


def popularity(data, train_requests, test_requests):
    """The positive rate of each item in training, drawn towards the mean where there are few ratings."""
    train, test = data.candidates(train_requests), data.candidates(test_requests)
    ratings = np.bincount(data.item[train], minlength=len(data.titles))
    positive = np.bincount(data.item[train], weights=data.label[train], minlength=len(data.titles))
    rate = (positive + 10 * data.label[train].mean()) / (ratings + 10)
    return rate[data.item[test]]


def user_auc(users, labels, scores):
    """The mean over the users who have both kinds of label."""
    of_user = [np.flatnonzero(users == user) for user in np.unique(users)]
    return float(np.mean([roc_auc_score(labels[r], scores[r]) for r in of_user if 0 < labels[r].mean() < 1]))


def plot(losses, both, aucs):
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2))
    axes[0].plot(losses, color="tab:blue", alpha=0.25)
    smooth = np.convolve(losses, np.ones(25) / 25, mode="valid") if len(losses) > 25 else losses
    axes[0].plot(np.arange(len(smooth)) + len(losses) - len(smooth), smooth, color="tab:blue")
    axes[0].set(title="Training loss", xlabel="step", ylabel="binary cross-entropy")
    axes[1].plot(both[:, 1], color="tab:orange", linewidth=5, alpha=0.5, label="broadcast twin")
    axes[1].plot(both[:, 0], color="tab:blue", linewidth=1.2, label="ikbo_recsys")
    axes[1].set(title="Same weights, same batches: same loss", xlabel="step")
    axes[1].legend(frameon=False)
    for offset, (name, color) in enumerate((("popularity", "tab:gray"), ("IKBOSequenceRanker", "tab:blue"))):
        heights = [aucs[name], aucs[f"{name}, per user"]]
        bars = axes[2].bar([0.4 * offset, 1 + 0.4 * offset], heights, 0.38, color=color, label=name)
        axes[2].bar_label(bars, fmt="%.3f")
    axes[2].set_xticks([0.2, 1.2], ["all requests", "mean over users"])
    axes[2].set(title="AUC on later requests (last 20% of ratings)", ylim=(0.5, max(aucs.values()) + 0.1))
    axes[2].legend(frameon=False, loc="upper right")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(movielens.OUT / "training.png", dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fraction of the data, to see that it runs")
    quick = parser.parse_args().quick

    data = movielens.load()
    train_requests, test_requests = data.split(0.8)
    if quick:
        train_requests, test_requests = train_requests[-2000:], test_requests[:500]
    print(f"{len(data.user):,} requests with {len(data.item):,} candidates; training on {len(train_requests):,}")

    both = compare_losses(data, train_requests, steps=50)
    loss_difference = float(np.abs(both[:, 0] - both[:, 1]).max())
    model, losses = train(data, train_requests, epochs=1 if quick else EPOCHS)

    rows = data.candidates(test_requests)
    labels, users = data.label[rows], np.repeat(data.user[test_requests], np.diff(data.offsets)[test_requests])
    scores, baseline = score(model, data, test_requests), popularity(data, train_requests, test_requests)
    aucs = {
        "popularity": float(roc_auc_score(labels, baseline)),
        "IKBOSequenceRanker": float(roc_auc_score(labels, scores)),
        "popularity, per user": user_auc(users, labels, baseline),
        "IKBOSequenceRanker, per user": user_auc(users, labels, scores),
    }
    movielens.save_report(
        auc=aucs["IKBOSequenceRanker"],
        baseline_auc=aucs["popularity"],
        user_auc=aucs["IKBOSequenceRanker, per user"],
        baseline_user_auc=aucs["popularity, per user"],
        loss_difference=loss_difference,
    )
    torch.save(model.state_dict(), movielens.OUT / "model.pt")
    plot(losses, both, aucs)
    for name, auc in aucs.items():
        print(f"AUC of {name:30} {auc:.4f}")
    print(f"largest difference of loss to the broadcast twin in 50 steps: {loss_difference:.1e}")


if __name__ == "__main__":
    main()
