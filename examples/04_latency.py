"""Latency and peak memory of a ranking model's dense part against the same model that copies users.

Both are exported and packaged in the same way. The model is of a realistic size and has random weights: 32 user
features, a history of 200 items and 8 candidate features, all of size 64.
"""

import argparse
import ctypes
import statistics
import subprocess
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import movielens
import torch
from broadcast_twin import BroadcastTwin
from matplotlib import pyplot as plt
from tqdm import tqdm

from ikbo_recsys import CandidateIndex
from ikbo_recsys.export import export, package
from ikbo_recsys.models import IKBOSequenceRankerDense

DENSE_IN, USER_FEATURES, CANDIDATE_FEATURES, DIM, HISTORY = 13, 31, 8, 64, 200
SIZES = {
    "dense_in_features": DENSE_IN,
    "user_features": USER_FEATURES,
    "candidate_features": CANDIDATE_FEATURES,
    "embedding_dim": DIM,
    "over_arch_layer_sizes": (256, 128, 1),
}
NAMES = ("broadcast", "ikbo")
RATIOS = (1, 8, 64, 512, 1682)
USERS_AT_RATIO_1 = 256
THREADS = 2


def make_inputs(ratio):
    """One user with `ratio` candidates; many users with one candidate each for a ratio of 1."""
    torch.manual_seed(0)
    users = USERS_AT_RATIO_1 if ratio == 1 else 1
    return (
        torch.randn(users, DENSE_IN),
        torch.randn(users, USER_FEATURES, DIM),
        torch.randn(users, HISTORY, DIM),
        torch.randint(HISTORY // 2, HISTORY + 1, (users,)),
        torch.randn(users * ratio, CANDIDATE_FEATURES, DIM),
        torch.arange(users).repeat_interleave(ratio),
    )


def package_path(name):
    return str(movielens.OUT / f"latency_{name}.pt2")


def make_packages():
    torch.manual_seed(0)
    ours = IKBOSequenceRankerDense(**SIZES).eval()
    twin = BroadcastTwin(**SIZES).eval()
    twin.load_state_dict(ours.state_dict())
    movielens.OUT.mkdir(parents=True, exist_ok=True)
    *inputs, to_user = make_inputs(8)
    package(export(twin, (*inputs, to_user)), package_path("broadcast"))
    # The candidates of a request come one user after the other: `grouped` saves the program a sort.
    index = CandidateIndex.from_user_ids(to_user, num_users=1, grouped=True)
    package(export(ours, (*inputs, index), grouped=True), package_path("ikbo"))


def keep_freed_memory():
    """Let the C library keep what is freed, as the allocators of serving processes do.

    Otherwise large tensors are new memory in every call, and the kernel's time to clear it is measured too. It is the
    model that copies users that gains the most.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_max, trim_threshold = -4, -1
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**30)


def measure_latency(models, ratio, seconds):
    """Median milliseconds of each model, called in turn so that both meet the same state of the machine."""
    inputs = make_inputs(ratio)
    times = {name: [] for name in models}
    for model in models.values():
        model(*inputs)
    stop = time.perf_counter() + seconds
    while len(times["ikbo"]) < 9 or time.perf_counter() < stop:
        for name, model in models.items():
            start = time.perf_counter()
            model(*inputs)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(of_model) for name, of_model in times.items()}


def measure_peak(name, ratio):
    """MB that one request adds to a fresh process."""
    inputs = movielens.OUT / "inputs.pt"
    torch.save((make_inputs(2), make_inputs(ratio)), inputs)
    command = [sys.executable, str(Path(__file__).with_name("peak_memory.py")), package_path(name), str(inputs)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def plot(latency, peak):
    colors = {"broadcast": "tab:orange", "ikbo": "tab:blue"}
    labels = {"broadcast": "users copied per candidate", "ikbo": "ikbo_recsys"}
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.8))
    for axis, values, unit in zip(axes, (latency, peak), ("latency (ms)", "peak memory (MB)"), strict=True):
        places = range(len(values))
        for name in NAMES:
            line = [of_ratio[name] for of_ratio in values.values()]
            # The ratio of 1 is a batch of many users: another kind of request, so no line leads to it.
            first = 1 if "1" in values else 0
            axis.plot(places[first:], line[first:], marker="o", color=colors[name], label=labels[name], linewidth=2)
            axis.plot(places[:first], line[:first], marker="o", color=colors[name])
        for place, of_ratio in zip(places, values.values(), strict=True):
            gain = f"{of_ratio['broadcast'] / of_ratio['ikbo']:.1f}x"
            axis.annotate(gain, (place, max(of_ratio.values())), (0, 9), textcoords="offset points", ha="center")
        ticks = [f"1\n({USERS_AT_RATIO_1} users)" if ratio == "1" else ratio for ratio in values]
        axis.set_xticks(places, ticks)
        axis.set(yscale="log", xlabel="candidates per user", title=unit)
        axis.margins(y=0.15)
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False, loc="lower right")
    figure.suptitle(f"A ranking request on {THREADS} CPU threads: lower is better")
    figure.tight_layout()
    figure.savefig(movielens.OUT / "latency.png", dpi=120)


def main(quick):
    torch.set_num_threads(THREADS)
    ratios = (1, 64) if quick else RATIOS
    make_packages()
    keep_freed_memory()
    models = {name: torch._inductor.aoti_load_package(package_path(name)) for name in NAMES}
    # Largest first, so that the memory that later calls reuse is there.
    latency = {
        str(ratio): measure_latency(models, ratio, seconds=0.5 if quick else 6)
        for ratio in tqdm(sorted(ratios, reverse=True), desc="latency")
    }
    latency = dict(reversed(latency.items()))
    peak = {
        str(ratio): {name: measure_peak(name, ratio) for name in NAMES}
        for ratio in tqdm(ratios[-1:] if quick else ratios, desc="peak memory")
    }
    print(f"\n{'candidates':>10} {'broadcast':>12} {'ikbo':>10} {'faster':>8} {'broadcast':>14} {'ikbo':>10}")
    for ratio, ms in latency.items():
        mb = peak.get(ratio)
        memory = f"{mb['broadcast']:11.1f} MB {mb['ikbo']:7.1f} MB" if mb else ""
        gain = f"{ms['broadcast'] / ms['ikbo']:.2f}x"
        print(f"{ratio:>10} {ms['broadcast']:9.2f} ms {ms['ikbo']:7.2f} ms {gain:>8} {memory}")
    movielens.save_report(latency_ms=latency, peak_mb=peak)
    plot(latency, peak)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two ratios, half a second each")
    main(parser.parse_args().quick)
