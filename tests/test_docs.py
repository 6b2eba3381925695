"""Every Python snippet of the README and the docs runs, in order, each document in a namespace of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(path: Path) -> list[tuple[int, str]]:
    """(line, code) of every Python block."""
    text = path.read_text()
    return [
        (text[: match.start()].count("\n") + 2, match[1])
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_snippets_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "snippet"}
    for line, code in snippets(path):
        exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)


def test_the_readme_has_snippets() -> None:
    assert len(snippets(ROOT / "README.md")) >= 5


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
