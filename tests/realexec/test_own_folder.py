"""A rank whose folder another user made first runs unguarded, says so in one line, and writes nothing there."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.debug.rings.world import World, WorldKind
from distsim.debug.settings import Settings
from distsim.realexec import launch
from distsim.realexec.process import session


def test_a_rank_writes_nothing_into_a_folder_that_others_may_have_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No ring, no stacks; the program goes on."""
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    folder = tmp_path / "distsim-0" / "job"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    (folder / f"rank00000.{session.job_name({}, 'here:1')}.stacks").symlink_to(precious)
    monkeypatch.setattr(session, "default_directory", lambda job: folder)
    monkeypatch.setattr("os.environ", {})
    assert session.Session.open(Settings(), World("", 0, 2, WorldKind.DEFAULT, ""), "here:1") is None
    assert precious.read_text() == "years of work"
    assert [path.suffix for path in folder.iterdir()] == [".stacks"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "rank 0 runs unguarded" in said[0]
    assert "others may write there (mode 0777)" in said[0]
    assert "DISTSIM_DIR" in said[0]


def test_the_launcher_refuses_such_a_folder_as_a_usage_error(tmp_path: Path) -> None:
    """In one line, with the remedy, before any rank starts."""
    folder = tmp_path / "rings"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "something").write_text("")
    args = launch.argparse.Namespace(rings=str(folder), level=None, hang_after=None, report=None)
    with pytest.raises(
        launch.UsageError, match=r"rings: others may write there .*; choose one with --rings DIR"
    ) as told:
        launch._settings(args)
    assert "\n" not in str(told.value)
