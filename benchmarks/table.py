"""`python -m benchmarks.table FILE.json [FILE.json ...]`: markdown tables, a line a case and a column a provider.

Give the files of one GPU and one day together, the newest last: of rows of one case and provider the last one counts.
The best time of each line is bold, and the last column says how many times faster ours is than the best rival. A rival
that leaves part of the operator out is shown and does not count.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

OURS = "ikbo_recsys"
_WHICH = ("case", "dtype", "training", "provider")


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The timed rows of all files, the last one of each case and provider; a file holds one run, or several under
    "runs"."""
    contents = [json.loads(path.read_text()) for path in paths]
    rows = [row for file in contents for run in file.get("runs", [file]) for row in run["rows"] if "ms" in row]
    return list({tuple(row[fact] for fact in _WHICH): row for row in rows}.values())


def tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One table each for inference and for training, by dtype."""
    made = []
    for training in (False, True):
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            chosen = [row for row in rows if row["training"] is training and row["dtype"] == dtype]
            if chosen:
                made.append(table(chosen, f"{dtype}{', forward and backward' if training else ''}, ms"))
    return made


def table(rows: Sequence[dict[str, Any]], corner: str) -> str:
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    lines = [f"| {corner} | {' | '.join(providers)} | best rival / ours |", "|---" * (len(providers) + 2) + "|"]
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {row["provider"]: row for row in rows if row["case"] == case}
        whole = [row["ms"] for row in found.values() if row["whole"]]
        cells = [_cell(found.get(provider), min(whole, default=0.0)) for provider in providers]
        lines.append(f"| {case} | {' | '.join(cells)} | {_ratio(list(found.values()))} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None, best: float) -> str:
    if row is None:
        return ""
    text = f"{row['ms']:#.3g}"
    return f"**{text}**" if row["whole"] and row["ms"] == best else text


def _ratio(rows: Sequence[dict[str, Any]]) -> str:
    """Ours is the provider of that plain name: the path a user gets without asking for one."""
    ours = [row["ms"] for row in rows if row["ours"] and row["provider"].split(",")[0].split(" fwd")[0] == OURS]
    rivals = [row["ms"] for row in rows if row["rival"] and row["whole"]]
    return f"{min(rivals) / ours[0]:.2f}" if ours and rivals else ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    sys.stdout.write("\n\n".join(tables(read(parser.parse_args().files))) + "\n")


if __name__ == "__main__":
    main()
