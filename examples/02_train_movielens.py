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

REQUESTS_PER_BATCH = 128


def add_optimizers(model):
    """Tables are updated during the backward pass (row-wise Adagrad); the dense part by AdamW."""
    apply_optimizer_in_backward(RowWiseAdagrad, model.sparse.parameters(), {"lr": 0.02})
    return torch.optim.AdamW(model.dense.parameters(), lr=2e-3, weight_decay=0.01)


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


def train(data, requests):
    """Once through the requests: a second time makes the loss on the last tenth of the training period worse."""
    torch.manual_seed(0)
    model = movielens.make_model(len(data.titles))
    optimizer, losses = add_optimizers(model), []
    batches = movielens.shuffled(requests, REQUESTS_PER_BATCH, seed=0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(batches))
    progress = tqdm(batches, desc="training")
    for rows in progress:
        losses.append(train_step(model, optimizer, data.batch(rows)))
        decay.step()
        progress.set_postfix(loss=f"{np.mean(losses[-50:]):.4f}")
    return model, losses


@torch.no_grad()
def score(model, data, requests):
    model.eval()
    batches = [requests[start : start + 1024] for start in range(0, len(requests), 1024)]
    scores = [model(*data.batch(rows)[:4]).squeeze(1) for rows in batches]
    return torch.cat(scores)


def compare_aucs(data, requests, scores):
    """AUC of the model, and of the positive rate of each item before the request, over all candidates and in groups.

    Within a request the user is the same for all candidates, so only their order counts. Within a user it also counts
    how requests of different times compare: knowing more of the user by then changes that, and popularity does not.
    """
    rows, request = data.candidates(requests), np.repeat(requests, np.diff(data.offsets)[requests])
    labels, both = data.label[rows], {"popularity": data.rate[rows], "IKBOSequenceRanker": scores.numpy()}
    return {
        name: {
            "all": float(roc_auc_score(labels, values)),
            "within requests": mean_auc(request, labels, values),
            "within users": mean_auc(data.user[request], labels, values),
        }
        for name, values in both.items()
    }


def mean_auc(groups, labels, scores):
    """The mean over the groups that have both kinds of label."""
    order = np.argsort(groups, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    return float(np.mean([roc_auc_score(labels[r], scores[r]) for r in members if 0 < labels[r].mean() < 1]))


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
        places = np.arange(len(aucs[name])) + 0.4 * offset
        axes[2].bar_label(axes[2].bar(places, aucs[name].values(), 0.38, color=color, label=name), fmt="%.3f")
    axes[2].set_xticks(np.arange(len(aucs[name])) + 0.2, aucs[name])
    axes[2].set(title="AUC on later requests (last 20% of ratings)", ylim=(0.5, 0.85))
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
    model, losses = train(data, train_requests)

    aucs = compare_aucs(data, test_requests, score(model, data, test_requests))
    ours, baseline = aucs["IKBOSequenceRanker"], aucs["popularity"]
    movielens.save_report(
        auc=ours["all"],
        baseline_auc=baseline["all"],
        request_auc=ours["within requests"],
        baseline_request_auc=baseline["within requests"],
        user_auc=ours["within users"],
        baseline_user_auc=baseline["within users"],
        loss_difference=loss_difference,
    )
    torch.save(model.state_dict(), movielens.OUT / "model.pt")
    plot(losses, both, aucs)
    for kind in ours:
        print(f"AUC, {kind:15} {ours[kind]:.4f}, of popularity {baseline[kind]:.4f}")
    print(f"largest difference of loss to the broadcast twin in 50 steps: {loss_difference:.1e}")


if __name__ == "__main__":
    main()
