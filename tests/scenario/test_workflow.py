"""The action does its work in a repository that is not ours, and the workflow to copy uses it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from distsim.scenario.file.new import new_scenario

GITHUB = Path(__file__).parents[2] / ".github"
ACTION = (GITHUB / "actions" / "scenarios" / "action.yml").read_text(encoding="utf-8")


def steps() -> dict[str, str]:
    """The scripts of its named steps."""
    found = re.findall(r"- name: (\w+)\n(?:.*\n)*?( +)run: \|\n((?:\2 .*\n)+)", ACTION)
    return {name: textwrap.dedent(script) for name, _, script in found}


@pytest.mark.slow
def test_the_action_runs_in_another_repository(tmp_path: Path) -> None:
    """It installs its own clone and what the repository asks for; the scenarios run, and JUnit is written. Nothing is
    loaded: pip only says what it was asked for."""
    new_scenario(tmp_path / "repository" / "scenarios" / "hang.toml")
    (tmp_path / "repository" / "requirements.txt").write_text("einops\n")
    (tmp_path / "bin").mkdir()
    for name, body in (("pip", f'echo "$@" >> {tmp_path}/pip'), ("distsim", f'exec {sys.executable} -m distsim "$@"')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    inputs = dict(
        re.findall(r"^  ([a-z-]+):\n    description: .*\n    default: \"?([^\"\n]*)\"?$", ACTION, re.MULTILINE)
    )
    given = {
        name: inputs[value]
        for name, value in re.findall(r"^ +([A-Z]+): \$\{\{ inputs\.([a-z-]+) \}\}$", ACTION, re.MULTILINE)
    }
    environ = {**os.environ, **given, "CLONE": "clone", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    assert list(steps()) == ["Install", "Run"]
    for script in steps().values():
        words = ["bash", "-e", "-o", "pipefail", "-c", script]
        ran = subprocess.run(
            words, cwd=tmp_path / "repository", env=environ, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "pip").read_text() == "install -c clone/constraints.txt clone\ninstall -r requirements.txt\n"
    assert "1 passed, 0 failed" in ran.stdout
    assert (tmp_path / "repository" / "scenarios.xml").is_file()


def test_the_workflow_to_copy_uses_the_action() -> None:
    """By the path at which it lies, and with an input that it has."""
    workflow = (GITHUB / "workflows" / "scenarios.yml").read_text(encoding="utf-8")
    uses = re.search(r"uses: \./(.*)\n +with:\n +([a-z-]+): ", workflow)
    assert uses is not None
    assert (GITHUB.parent / uses[1] / "action.yml").is_file()
    assert f"\n  {uses[2]}:\n    description" in ACTION
