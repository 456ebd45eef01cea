"""The README's promises that a machine can check."""

from __future__ import annotations

import os
import re

import pytest

from tests.house.readme_pictures import pictures, printed, without_wall_time
from tests.house.tree import ROOT

COMMANDS = [
    "pip install -c constraints.txt -e . && distsim run --on dgx-h100:2 scenarios/training/ddp.py --layers 4 --steps 3",
    'pip install -c constraints.txt -e ".[test]" && pytest',
]


def test_the_readme_opens_with_the_two_commands() -> None:
    """A newcomer sees the whole set-up before anything else."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^pip install.*$", text, re.MULTILINE)[:2] == COMMANDS
    assert text.index(COMMANDS[1]) < 600


@pytest.mark.slow
def test_the_first_command_shows_a_training_step() -> None:
    """On GPUs of two nodes: how long it is, its share of their rate, the memory."""
    lines = printed(COMMANDS[0].partition("&& ")[2])
    for line in (r"training on 16 GPUs \(h100\)", r"step +[\d.]+ ms ", r"MFU +[\d.]+%", r"memory +[\d.]+ GiB reserved"):
        assert any(re.match(line, one) for one in lines), "\n".join(lines)


def test_the_readme_is_short() -> None:
    """Somebody with a hung job reads it in two minutes."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_pictures_are_what_the_commands_print(number: int) -> None:
    """Every line shown in the README is printed by its command, figures included."""
    command, picture = pictures((ROOT / "README.md").read_text(encoding="utf-8"))[number]
    lines = printed(command)
    there = {without_wall_time(line) for line in lines}
    missing = [line for line in picture.splitlines() if without_wall_time(line) not in there]
    assert missing == [], "python -m tests.house.readme_pictures takes new ones; printed was:\n" + "\n".join(lines)


def test_every_file_the_readme_names_exists() -> None:
    """Links and paths in the README lead somewhere."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\(([^)#:]+)\)", text)) | set(re.findall(r"\bscenarios/\S+\.(?:py|toml)", text))
    assert named
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_ci_runs_the_readmes_own_test_command() -> None:
    """.ci/run takes the command out of the README, so the two cannot part."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "README.md" in script.read_text(encoding="utf-8")
