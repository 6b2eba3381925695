"""`analyze` and its command: the numbers by hand, the table, the JSON."""

from __future__ import annotations

import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ikbo_recsys.transforms import analyze

ROOT = Path(__file__).parents[2]


class Ranker(nn.Module):
    """By hand: user tower 6x8, attention-free; over-arch (8 + 4) x 16; 16 x 1."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(6, 8)
        self.over = nn.Linear(12, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, user: Tensor, item: Tensor, index: Tensor) -> Tensor:
        hidden = torch.relu(self.tower(user.index_select(0, index)))
        return self.out(torch.relu(self.over(torch.cat([hidden, item], 1))))


def example() -> tuple[Tensor, ...]:
    return torch.randn(3, 6), torch.randn(24, 4), torch.arange(24) // 8


class Blocked(Ranker):
    """An operator without a rule stands before the tower."""

    def forward(self, user: Tensor, item: Tensor, index: Tensor) -> Tensor:
        wide = torch.special.logit(torch.sigmoid(user.index_select(0, index)))
        odd = torch.cdist(wide.unsqueeze(1), wide.unsqueeze(1)).squeeze(1) + wide
        return self.out(torch.relu(self.over(torch.cat([torch.relu(self.tower(odd)), item], 1))))


@pytest.mark.parametrize(("users", "ratio"), [(1, 64), (5, 8), (3, 1)])
def test_numbers_by_hand(users: int, ratio: int) -> None:
    found = analyze(Ranker(), example(), ratio=ratio, users=users).at
    candidates = users * ratio
    shared, own = 2 * (6 * 8 + 8 * 16), 2 * (4 * 16 + 16)
    assert (found.users, found.candidates) == (users, candidates)
    assert found.flops_before == candidates * (shared + own)
    assert found.flops_after == users * shared + candidates * own
    assert found.repeated == (candidates - users) * shared


def test_rates_and_places() -> None:
    found = analyze(Ranker(), example())
    assert found.inputs == {"user": "user", "item": "candidate", "index": "candidate"}
    (broadcast,) = found.report.broadcasts
    assert (broadcast.operator, broadcast.source_rows, broadcast.rows) == ("index_select", 3, 24)
    assert broadcast.bytes == 24 * 6 * 4
    assert Path(broadcast.where.rsplit(":", 1)[0]).name == "test_analyze.py"


def test_what_blocks_is_counted_and_named() -> None:
    """`cdist` has no rule: what could be saved behind it is reported as repeated, and not as saved."""
    found = analyze(Blocked(), example(), ratio=64)
    reasons = {entry.operator: entry.reason for entry in found.report.entries if entry.outcome == "left"}
    assert any("cdist" in name for name in reasons)
    assert found.at.repeated > found.at.flops_before - found.at.flops_after
    assert found.at.repeated >= 63 * 2 * (6 * 8)


def test_nothing_to_save() -> None:
    found = analyze(nn.Linear(4, 2), (torch.randn(24, 4),))
    assert not found.report.changed
    assert found.at.repeated == 0
    assert "NOTHING WAS DONE" in str(found)


@pytest.mark.parametrize("name", ["analyze", "optimize"])
def test_docstring_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"ikbo_recsys.transforms.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_example_script_runs() -> None:
    pytest.importorskip("torchrec")
    script = ROOT / "examples" / "05_optimize_existing_model.py"
    command = [sys.executable, str(script), "--candidates", "64", "--repeats", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "ikbo.dot_interaction" in done.stdout
    difference = float(done.stdout.split("largest difference of the scores: ")[1].split()[0])
    assert difference < 1e-5


def test_errors() -> None:
    with pytest.raises(ValueError, match="gpu must be one of"):
        analyze(Ranker(), example(), gpu="abacus")
    with pytest.raises(ValueError, match="at least 1, got 0 and 1"):
        analyze(Ranker(), example(), ratio=0)


FACTORY = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 4)

    def forward(self, x, item):
        return self.linear(torch.cat([x["age"], item], 1))


def build():
    return Model(), ({"age": torch.randn(24, 6)}, torch.randn(24, 4)), {"user_inputs": ["x.age"]}
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ikbo_recsys.transforms", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(FACTORY)
    table = run(tmp_path, "my_model:build", "--ratio", "100")
    assert table.returncode == 0, table.stderr
    assert "my_model.py:" in table.stdout
    assert "at U=1, B=100" in table.stdout
    as_json = run(tmp_path, "my_model:build", "--json", "--users", "2", "--gpu", "a100")
    found = json.loads(as_json.stdout)
    assert found["at"]["candidates"] == 128
    assert found["at"]["repeated"] == 126 * 2 * 6 * 4
    assert found["mode"] == "caller"
    assert found["gpu"] == "a100"


def test_the_command_explains_a_wrong_call(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("def build():\n    return 3\n")
    wrong = {"my_model": "module:function", "my_model:nothing": "no function", "my_model:build": "must return"}
    for factory, message in wrong.items():
        done = run(tmp_path, factory)
        assert done.returncode == 2
        assert message in done.stderr
