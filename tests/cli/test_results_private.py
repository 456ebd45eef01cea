"""Files of results hold paths, source lines and messages of a program: a new one is readable by its user alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from distsim.cli import main
from distsim.planning.points import KeptPoints
from distsim.scenario.expect.result import Result
from distsim.scenario.file.load import load_scenario
from tests.fuzz.readers import json_dumps
from tests.fuzz.readers import scenario as scenario_files


@pytest.fixture(autouse=True)
def _no_mask() -> Iterator[None]:
    """The user's umask forbids nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


def _modes(folder: Path, *names: str) -> dict[str, str]:
    return {name: oct(stat.S_IMODE((folder / name).stat().st_mode)) for name in names}


def test_a_simulation_leaves_private_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report, page, events, trace and the ranks' output; and the page that is made of a report."""
    monkeypatch.chdir(tmp_path)
    Path("prog.py").write_text("print(1)\n")
    words = (
        "run --on ethernet-cpu:1 --nproc-per-node 1 --report r.json --html r.html --events e.jsonl --trace t.json.gz"
    )
    assert main([*words.split(), "--log-dir", "logs", "prog.py"]) == 0
    assert main(["html", "r.json", "-o", "again.html"]) == 0
    logs = [str(path) for path in Path("logs").rglob("*") if path.is_file()]
    names = ("r.json", "r.html", "e.jsonl", "t.json.gz", "again.html", *logs)
    assert logs
    assert set(_modes(tmp_path, *names).values()) == {"0o600"}


def test_a_diagnosis_leaves_private_files_and_an_old_one_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who made the file, chose who may read it."""
    monkeypatch.chdir(tmp_path)
    Path("dumps").mkdir()
    for name, content in json_dumps().items():
        (tmp_path / "dumps" / name).write_bytes(content)
    Path("old.html").write_text("")
    main(["diagnose", "dumps", "--report", "r.json", "--html", "old.html"])
    assert _modes(tmp_path, "r.json", "old.html") == {"r.json": "0o600", "old.html": "0o666"}


def test_kept_points_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is their folder; and a damaged one is computed again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, content in scenario_files().items():
        (tmp_path / name).write_bytes(content)
    scenario = load_scenario(tmp_path / "one.toml")
    kept = KeptPoints(scenario)
    kept.save(scenario, Result("one", "one.toml"))
    (point,) = kept.folder.iterdir()
    assert _modes(kept.folder, ".", point.name) == {".": "0o700", point.name: "0o600"}
    assert kept.load(scenario) is not None
    for damaged in (
        '{"name": "x", "path": "y", "culprits": 5}',
        '{"name": "x", "path": "y", "site": []}',
        "[1]",
        "1e999",
    ):
        point.write_text(damaged)
        assert kept.load(scenario) is None
    point.unlink()
    os.mkfifo(point)
    assert kept.load(scenario) is None
