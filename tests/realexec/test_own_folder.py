"""A rank whose folder another user made first runs unguarded, says so in one line, and writes nothing there."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from distsim.debug.rings import files
from distsim.debug.rings.files import RecordedWorld, WorldKind
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
    monkeypatch.setattr(session, "default_directory", lambda job, ranks: folder)
    monkeypatch.setattr("os.environ", {})
    assert session.Session.open(Settings(), RecordedWorld("", 0, 2, WorldKind.DEFAULT, ""), "here:1") is None
    assert precious.read_text() == "years of work"
    assert [path.suffix for path in folder.iterdir()] == [".stacks"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "rank 0 runs unguarded" in said[0]
    assert "other users can write there (mode 0777)" in said[0]
    assert "DISTSIM_DIR" in said[0]


def test_the_launcher_refuses_such_a_folder_as_a_usage_error(tmp_path: Path) -> None:
    """In one line, with the remedy, before any rank starts."""
    folder = tmp_path / "rings"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "something").write_text("")
    args = launch.argparse.Namespace(rings=str(folder), level=None, hang_after=None, report=None)
    with pytest.raises(
        launch.UsageError, match=r"rings: other users can write there .*; choose another folder with --rings DIR"
    ) as told:
        launch._settings(args)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("free_rings", "living", "ranks", "in_memory"),
    [(8, 0, 8, True), (7, 0, 8, False), (3, 5, 8, True), (0, 8, 8, True), (3, 4, 8, False)],
)
def test_ranks_agree_on_a_place_with_room(
    free_rings: int, living: int, ranks: int, in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is too small for all is left to others; what ranks have taken by now counts as theirs."""
    monkeypatch.setattr(files, "SHARED", tmp_path)
    free = SimpleNamespace(f_bavail=free_rings * files.file_bytes(), f_frsize=1)
    monkeypatch.setattr("os.statvfs", lambda path: free)
    shared, disk = files.default_bases()
    (shared / "job").mkdir(parents=True)
    for rank in range(living):
        (shared / "job" / f"rank{rank:05d}.{os.getpid()}.a0.job.ring").touch()
    (shared / "job" / "rank00009.999999999.a0.job.ring").touch()  # of a process that is gone
    directory = files.default_directory("job", ranks)
    assert directory == (shared if in_memory else disk) / "job"
    note = files.room_note(directory, ranks)
    assert (not note) == in_memory
    if note:
        assert f"flight records (15 MiB, 2 a rank) are in {directory}" in note
        assert note.startswith(f"{tmp_path} has ")


@pytest.mark.parametrize("kind", ["a stranger's folder", "a file", "a link"])
def test_a_name_that_is_taken_has_a_second(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone may write to the folder in memory, and so could switch off the guard of another."""
    monkeypatch.setattr(files, "SHARED", tmp_path)
    free = SimpleNamespace(f_bavail=100 * files.file_bytes(), f_frsize=1)
    monkeypatch.setattr("os.statvfs", lambda path: free)
    if kind == "a stranger's folder":
        stranger = os.geteuid() + 1
        monkeypatch.setattr("os.geteuid", lambda: stranger)
    name = f"distsim-{os.geteuid()}"
    assert files.default_directory("job") == tmp_path / name / "job"
    make = {"a stranger's folder": Path.mkdir, "a file": Path.touch, "a link": lambda path: path.symlink_to(tmp_path)}
    make[kind](tmp_path / name)
    directory = files.default_directory("job")
    assert directory == tmp_path / f"{name}-2" / "job"
    assert files.room_note(directory, 1) == ""
    make[kind](tmp_path / f"{name}-2")
    on_disk = files.default_directory("job")
    assert on_disk.parent == files.default_bases()[1]
    assert files.room_note(on_disk, 1).startswith(
        f"{tmp_path / name}-2 is not a folder of yours, so the flight records"
    )
