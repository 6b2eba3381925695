"""Refuse what the package must not contain; each ban with its reason. Run by `make lint` and pre-commit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

BANS = {
    r"\bmake_block_ptr\b": "block pointers are deprecated in Triton: use raw pointers or descriptors",
    r"\bpre_hook\s*=": "a pre_hook does not survive triton_op: torch.compile and export drop it",
    r"^\s*print\(": "the package does not print: raise, warn or log",
}


def main() -> int:
    package = Path(__file__).parent.parent / "ikbo_recsys"
    found = 0
    for path in sorted(package.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for pattern, reason in BANS.items():
                # A command's __main__ is there to print.
                if re.search(pattern, line) and not (path.name == "__main__.py" and "print" in pattern):
                    sys.stderr.write(f"{path.relative_to(package.parent)}:{number}: {reason}\n")
                    found += 1
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
