"""Environment variables: all of them are in one table, and a name that is not is a warning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distsim.debug.settings import (
    LAUNCHED,
    LOCAL_RANKS,
    PREFIX,
    VARIABLES,
    Settings,
    unknown_variables,
    warn_of_unknown_variables,
)
from distsim.errors import UsageError
from tests.house.tree import ROOT

KNOWN = {*Settings.variables().values(), *VARIABLES}


def test_every_variable_of_the_code_is_in_the_table() -> None:
    """Whatever the tree reads or sets by a name of ours is one that the documentation lists."""
    folders = [ROOT / name for name in ("debug", "realexec", "distsim", "tests", ".ci", ".github")]
    files = [f for folder in folders for f in folder.rglob("*") if f.suffix in (".py", ".yml", "") and f.is_file()]
    here = Path(__file__).resolve()
    names = {
        name
        for file in files
        if file.resolve() != here and "__pycache__" not in file.parts
        for name in re.findall(rf"{PREFIX}[A-Z_]*[A-Z]", file.read_text(encoding="utf-8", errors="ignore"))
    }
    assert names - KNOWN == set()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("DISTSIM_ONHANG", "did you mean DISTSIM_ON_HANG?"),
        ("DISTSIM_HANG_AFTER_S", "did you mean DISTSIM_HANG_AFTER?"),
        ("DISTSIM_LEVL", "did you mean DISTSIM_LEVEL?"),
        ("DISTSIM_ZEBRA", "it reads DISTSIM_LEVEL, DISTSIM_ON_HANG, "),
    ],
)
def test_an_unknown_variable_is_named_with_the_nearest(name: str, near: str) -> None:
    """One line for it, and none for the variables that are read or are another program's."""
    (line,) = unknown_variables({name: "1", "DISTSIM_LEVEL": "check", "DIST_SIM": "1"})
    assert line.startswith(f"distsim does not read {name}: {near}")


@pytest.mark.parametrize(
    ("environ", "lines"),
    [
        ({}, 1),
        ({"LOCAL_RANK": "0", "RANK": "8"}, 1),
        ({"LOCAL_RANK": "1", "RANK": "0"}, 0),
        ({"RANK": "3"}, 0),
        ({"LOCAL_RANK": "0", LAUNCHED: "/dev/shm/x"}, 0),
    ],
)
def test_the_warning_comes_once_a_job(
    environ: dict[str, str], lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher prints it, or the first rank of a host, and that rank once."""
    for name in (*LOCAL_RANKS, *KNOWN):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**environ, "DISTSIM_ONHANG": "abort"}.items():
        monkeypatch.setenv(name, value)
    warn_of_unknown_variables.cache_clear()
    warn_of_unknown_variables()
    warn_of_unknown_variables()
    warn_of_unknown_variables.cache_clear()
    assert capsys.readouterr().err.count("distsim: warning: distsim does not read DISTSIM_ONHANG") == lines


@pytest.mark.parametrize("name", ["DISTSIM_HANG_AFTER", "DISTSIM_STRAGGLER_AFTER"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e999", "x", "9" * 5000])
def test_a_time_that_is_none_is_refused(name: str, value: str) -> None:
    """Compared with it nothing is late, so no hang would ever be reported."""
    with pytest.raises(UsageError) as refused:
        Settings.read(environ={name: value})
    assert str(refused.value).startswith(f"{name}: expected seconds, from 0 to 1e+09, got ")
    assert len(str(refused.value)) < 200


def test_a_time_may_have_its_unit() -> None:
    """As the flags have it."""
    assert Settings.read(environ={"DISTSIM_HANG_AFTER": "90s"}).hang_after_s == 90.0
