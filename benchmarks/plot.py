"""`python -m benchmarks.plot FILE.json [FILE.json ...] --out FOLDER`: latency over the swept size, one plot a sweep
and dtype.

Give the files of one run together, the newest last (ours and the rivals' may come from different processes): rows are
merged by provider.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.table import read

SWEEPS = {"batch": "B", "ratio": "ratio"}


def sweep_of(rows: list[dict[str, Any]], group: str, dtype: str) -> dict[str, list[tuple[int, float]]]:
    """Points (size, ms) of each provider; the default case belongs to every sweep."""
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if row["dtype"] == dtype and not row["training"] and (row["group"] == group or row["case"] == "default"):
            lines[row["provider"]].append((row[SWEEPS[group]], row["ms"]))
    return {provider: sorted(points) for provider, points in lines.items() if len(points) > 1}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read(options.files)
    for group, size in SWEEPS.items():
        for dtype in sorted({row["dtype"] for row in rows}):
            lines = sweep_of(rows, group, dtype)
            if not lines:
                continue
            figure, axes = pyplot.subplots(figsize=(8, 5))
            for provider, points in lines.items():
                style = "-o" if provider.startswith("ikbo_recsys") else "--x"
                axes.plot(*zip(*points, strict=True), style, label=provider)
            axes.set(xlabel=size, ylabel="ms", xscale="log", yscale="log", title=f"{group} sweep, {dtype}")
            axes.legend(fontsize=7)
            figure.savefig(options.out / f"{options.files[0].stem}_{group}_{dtype}.png", dpi=120, bbox_inches="tight")
            pyplot.close(figure)


if __name__ == "__main__":
    main()
