"""Programs that are functions: one that is not there is said before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.cli import main
from distsim.scenario.file.load import lacks, module_source
from tests.scenario.made import made

PROGRAM = """\
raise SystemExit("this module was run")
def main():
    def inner(): pass
class Trainer: pass
if True:
    async def later(): pass
from os.path import join as joined
import os.path
step = lambda: None
"""


def test_a_function_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and the program is not run."""
    made(tmp_path, 'program = "made.py:main"\n[expect]', PROGRAM)
    file = tmp_path / "made.toml"
    for program, told in (("made.py:mian", "mian in made.py"), ("made:mian", "mian in made")):
        file.write_text(file.read_text().replace("made.py:main", program).replace("made.py:mian", program))
        assert main(["scenario", "run", str(file)]) == 2
        captured = capsys.readouterr()
        assert captured.err.strip().endswith(f"{file}: program: no function {told}")
        assert len(captured.err.strip().splitlines()) == 1
        assert "this module was run" not in captured.out + captured.err


@pytest.mark.parametrize("name", ["main", "Trainer", "later", "joined", "os", "step"])
def test_what_a_module_binds_is_there(tmp_path: Path, name: str) -> None:
    """Functions, classes, imports and values, also under a condition."""
    (tmp_path / "made.py").write_text(PROGRAM)
    assert not lacks(tmp_path / "made.py", name)


@pytest.mark.parametrize("name", ["inner", "path", "nofn"])
def test_what_it_does_not_bind_is_not(tmp_path: Path, name: str) -> None:
    """Names inside of functions are not the module's."""
    (tmp_path / "made.py").write_text(PROGRAM)
    assert lacks(tmp_path / "made.py", name)


@pytest.mark.parametrize(
    "text",
    [
        "from os import *",
        "globals()['nofn'] = print",
        "def __getattr__(name): return print",
        "def make():\n    global nofn\n    nofn = 1",
        "def broken(:",
    ],
)
def test_what_cannot_be_told_is_left_to_the_run(tmp_path: Path, text: str) -> None:
    """A check that is wrong would be worse than none."""
    (tmp_path / "made.py").write_text(text)
    assert not lacks(tmp_path / "made.py", "nofn")


def test_a_module_is_found_without_importing_its_packages(tmp_path: Path) -> None:
    """Overlap the scenario as well as installed; built in or missing ones have no source."""
    package = tmp_path / "pack" / "age"
    package.mkdir(parents=True)
    for file in (tmp_path / "pack" / "__init__.py", package / "__init__.py", package / "mod.py"):
        file.write_text(PROGRAM)
    assert module_source("pack.age.mod", tmp_path) == package / "mod.py"
    assert module_source("pack.age", tmp_path) == package / "__init__.py"
    assert module_source("pack.nothing", tmp_path) is None
    assert module_source("sys", tmp_path) is None
    assert module_source("json", tmp_path) is not None
