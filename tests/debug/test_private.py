"""What another user of the machine has put where a job's files go: refused, never followed, never emptied."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from distsim.debug.monitor.start import start_monitor
from distsim.debug.rings.files import append_private, create_private, private_folder, write_private
from distsim.debug.rings.writer import RingWriter

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
STRANGER = 12345


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_new_folder_is_ours_alone(tmp_path: Path, mask: int) -> None:
    """Whatever the umask says, with the folders above it."""
    before = os.umask(mask)
    try:
        private_folder(tmp_path / "jobs" / "one")
    finally:
        os.umask(before)
    assert _mode(tmp_path / "jobs" / "one") == 0o700


def test_ranks_that_make_a_new_folder_at_the_same_moment_all_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank makes it between our look at the folder above it and our own attempt."""
    wanted, real = tmp_path / "jobs" / "one", Path.mkdir

    def mkdir(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        real(path, mode, parents, exist_ok)
        if path == wanted.parent:
            real(wanted, 0o700)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    private_folder(wanted)
    assert _mode(wanted) == 0o700


@as_root
@pytest.mark.parametrize("chosen", [False, True])
def test_the_folder_of_another_user_is_refused(tmp_path: Path, chosen: bool) -> None:
    """Whoever owns it can put links into it, however tight its mode."""
    folder = tmp_path / "job"
    folder.mkdir(mode=0o700)
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match="it belongs to user 12345, and you are 0"):
        private_folder(folder, chosen=chosen)


@as_root
def test_another_user_who_came_first_is_refused_and_nothing_is_emptied(tmp_path: Path) -> None:
    """The attack itself: a folder made by another user, open to all, with a link to a file of ours where the rank
    writes its stacks."""
    tmp_path.chmod(0o777)
    precious = tmp_path / "precious"
    precious.write_text("years of work")

    def plant() -> None:
        folder = tmp_path / "job"
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "rank00000.job.stacks").symlink_to(precious)

    _as_user(STRANGER, plant, tmp_path)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        private_folder(tmp_path / "job")
    assert precious.read_text() == "years of work"


def _as_user(user: int, act: Callable[[], None], folder: Path) -> None:
    here = os.getcwd()
    above = [folder, *folder.parents]
    modes = {path: _mode(path) for path in above}
    for path in above:  # pytest's own folders are closed to others
        path.chmod(modes[path] | 0o011)
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(user, user, user)
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    for path in above:
        path.chmod(modes[path])
    assert os.waitstatus_to_exitcode(status) == 0, here


@pytest.mark.parametrize("chosen", [False, True])
def test_a_folder_where_others_may_have_written_is_refused(tmp_path: Path, chosen: bool) -> None:
    """Its content may be anybody's."""
    folder = tmp_path / "job"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "rank00000.job.stacks").symlink_to(tmp_path / "precious")
    with pytest.raises(PermissionError, match=r"other users can write there \(mode 0777\)"):
        private_folder(folder, chosen=chosen)


def test_a_folder_that_is_swapped_while_it_is_judged_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may rename in the folder above puts a link in its place after our look: what the link leads to keeps
    its mode, and nothing is written there."""
    folder, precious, real = tmp_path / "job", tmp_path / "precious", os.listdir
    for made in (folder, precious):
        made.mkdir()
        made.chmod(0o777)

    def swap(path: int) -> list[str]:
        if not folder.is_symlink():
            folder.rename(tmp_path / "away")
            folder.symlink_to(precious)
        return real(path)

    monkeypatch.setattr(os, "listdir", swap)
    with pytest.raises(PermissionError, match="another file has just replaced it"):
        private_folder(folder)
    assert _mode(precious) == 0o777


def test_a_folder_that_is_swapped_just_before_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link that is there by then is not followed."""
    folder, real = tmp_path / "job", os.open
    folder.mkdir()

    def swap(path: Path, flags: int, *mode: int) -> int:
        if path == folder and not folder.is_symlink():
            folder.rename(tmp_path / "away")
            folder.symlink_to(tmp_path / "away")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(PermissionError, match="expected a folder of your own, got a link"):
        private_folder(folder)


def test_an_empty_folder_of_ours_is_closed(tmp_path: Path) -> None:
    """`mkdir rings` under a loose umask."""
    folder = tmp_path / "rings"
    folder.mkdir()
    folder.chmod(0o777)
    private_folder(folder, chosen=True)
    assert _mode(folder) == 0o700


def test_a_chosen_folder_with_files_keeps_its_mode(tmp_path: Path) -> None:
    """It may be somebody's project that others read."""
    folder = tmp_path / "project"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "train.py").write_text("")
    private_folder(folder, chosen=True)
    assert _mode(folder) == 0o755


@pytest.mark.parametrize("chosen", [False, True])
def test_a_link_in_place_of_the_folder(tmp_path: Path, chosen: bool) -> None:
    """Refused where nobody asked for it; a user's own, that he names, is his to make."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "job").symlink_to(tmp_path / "elsewhere")
    if chosen:
        private_folder(tmp_path / "job", chosen=True)
    else:
        with pytest.raises(PermissionError, match="expected a folder of your own, got a link"):
            private_folder(tmp_path / "job")


@as_root
def test_another_users_link_is_refused_even_where_the_folder_was_chosen(tmp_path: Path) -> None:
    """He could let it point elsewhere a moment later."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    link = tmp_path / "job"
    link.symlink_to(tmp_path / "elsewhere")
    os.lchown(link, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        private_folder(link, chosen=True)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """In one line that says so."""
    (tmp_path / "job").write_text("")
    with pytest.raises(PermissionError, match="expected a folder of your own, got no folder"):
        private_folder(tmp_path / "job")


def _create(path: Path) -> None:
    os.close(create_private(path))


def _ring(path: Path) -> None:
    scratch = path.with_suffix(f".{os.getpid()}.new")
    path.rename(scratch)  # where the writer begins
    RingWriter(path, rank=0, world_size=1, local_rank=0, job="job", attempt=0).close()


@pytest.mark.parametrize(
    "write", [_create, lambda path: write_private(path, "new"), _ring], ids=["create", "write", "ring"]
)
def test_a_planted_link_is_replaced_not_followed(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """What it points to keeps its content; the file in its place is nobody else's to read."""
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    path = tmp_path / "rank00000.a0.job.ring"
    path.symlink_to(precious)
    write(path)
    assert precious.read_text() == "years of work"
    assert not path.is_symlink()
    assert _mode(path) == 0o600


def test_nothing_is_appended_through_a_link(tmp_path: Path) -> None:
    """The monitor's own log."""
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    (tmp_path / "monitor.err").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        append_private(tmp_path / "monitor.err", "more")
    assert precious.read_text() == "years of work"


def test_the_monitors_lock_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to a file that names no living process was emptied once."""
    precious = tmp_path / "precious"
    precious.write_text("99999999")
    (tmp_path / "monitor.job.lock").symlink_to(precious)
    started: list[object] = []

    class Process:
        pid = 1

        def __init__(self, *words: object, **_: object) -> None:
            started.append(words)

    monkeypatch.setattr("subprocess.Popen", Process)
    from distsim.debug.settings import Settings

    start_monitor(tmp_path, Settings(), "job")
    assert started
    assert precious.read_text() == "99999999"
