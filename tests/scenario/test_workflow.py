"""The workflow to copy does its work in a repository that is not ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from distsim.scenario.file.new import new_scenario

FILE = Path(__file__).parents[2] / ".github" / "workflows" / "scenarios.yml"


def steps() -> dict[str, str]:
    """The scripts of its named steps."""
    found = re.findall(r"- name: (\w+)\n(?:.*\n)*?( +)run: \|\n((?:\2 .*\n)+)", FILE.read_text(encoding="utf-8"))
    return {name: textwrap.dedent(script) for name, _, script in found}


@pytest.mark.slow
def test_the_workflow_to_copy_runs_in_another_repository(tmp_path: Path) -> None:
    """It installs what its variable names and asks for no file of ours; the scenarios run, and JUnit is written.
    Nothing is loaded: pip only says what it was asked for."""
    new_scenario(tmp_path / "repository" / "scenarios" / "hang.toml")
    (tmp_path / "repository" / "pyproject.toml").write_text('[project]\nname = "theirs"\n')
    (tmp_path / "bin").mkdir()
    for name, body in (("pip", f'echo "$@" >> {tmp_path}/pip'), ("distsim", f'exec {sys.executable} -m distsim "$@"')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    set_there = dict(re.findall(r"^  ([A-Z]+): (.+)$", FILE.read_text(encoding="utf-8"), re.MULTILINE))
    environ = {**os.environ, **set_there, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    assert list(steps()) == ["Install", "Run"]
    for script in steps().values():
        words = ["bash", "-e", "-o", "pipefail", "-c", script]
        ran = subprocess.run(
            words, cwd=tmp_path / "repository", env=environ, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "pip").read_text() == "install ./distsim\n"
    assert "1 passed, 0 failed" in ran.stdout
    assert (tmp_path / "repository" / "scenarios.xml").is_file()
    assert "cache-dependency-path: " in FILE.read_text(), "cache: pip ends in an error where it finds no requirements"
