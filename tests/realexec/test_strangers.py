"""A folder somebody else has made: what it names is not read, what it says is not obeyed, what it asks is bounded."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_bad_input import hang
from test_flight_recorder import dump, entry
from test_rings import issue, writer

from distsim.cli import diagnose, watch
from distsim.cli.dispatch import main
from distsim.debug.evidence import from_dumps
from distsim.debug.monitor.loop import Monitor
from distsim.debug.postmortem import examine, load_rings
from distsim.debug.records.signature import Signature
from distsim.debug.report.live import live_table
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import RingReader
from distsim.debug.settings import Settings
from distsim.errors import UsageError
from distsim.text.untrusted_input import load_json, load_toml, printable, read_bytes

OWNED = "\x1b]0;owned\x07\x1b[31m\u202e[bold red]\u2066x\x9b2J"


def _dumps(folder: Path, file: str, line: int = 1, name: str = "step") -> None:
    """Rank 1 skipped the call that rank 0 is in, at *line* of *file*."""
    frames = [{"name": name, "filename": file, "line": line}]
    for rank in (0, 1):
        calls = [entry(1, frames=frames), *([entry(2, state="scheduled", frames=frames)] if rank == 0 else [])]
        (folder / f"dump_{rank}").write_bytes(pickle.dumps(dump(calls, "[0, 1]")))


def _diagnose(folder: Path, *roots: Path) -> int:
    return diagnose.run(argparse.Namespace(directory=folder, report=None, sources=list(roots) or None, html=None))


def test_a_file_elsewhere_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dump that names /etc/shadow, or a link to it, shows no line of it; one below a named folder is shown."""
    secret = tmp_path / "secret"
    secret.write_text("root:$6$very-secret\n")
    records, work = tmp_path / "records", tmp_path / "work"
    records.mkdir()
    work.mkdir()
    (work / "link.py").symlink_to(secret)
    monkeypatch.chdir(work)
    for file in (str(secret), "../secret", str(work / "link.py"), "link.py", "/etc/passwd"):
        _dumps(records, file)
        assert _diagnose(records) == 3
        assert "very-secret" not in (out := capsys.readouterr().out)
        assert "root:" not in out
    _dumps(records, str(secret))
    assert _diagnose(records, tmp_path) == 3
    assert "very-secret" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["pipe", "zero", "huge", "folder"])
def test_a_source_that_is_no_file_of_text_is_passed_over(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe waits for ever, /dev/zero fills the memory."""
    path = tmp_path / "train.py"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "zero":
            path = Path("/dev/zero")
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        case _:
            path.mkdir()
    records = tmp_path / "records"
    records.mkdir()
    _dumps(records, str(path))
    monkeypatch.chdir(tmp_path)
    found = examine(records, [tmp_path, Path("/dev")])
    assert found.evidence.sources == {}


@pytest.mark.parametrize("name", ["rank0.ring", "dump_0", "verdict.json", "exit.00000.a0.json"])
def test_a_pipe_among_the_records_does_not_stop_the_reader(name: str, tmp_path: Path) -> None:
    """Nobody writes into it, so whoever opens it to read would wait."""
    hang(tmp_path) if name != "dump_0" else _dumps(tmp_path, "train.py")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    signal.alarm(60)
    try:
        examine(tmp_path)
    finally:
        signal.alarm(0)


BOMBS: dict[str, bytes] = {
    "a tuple nested deep as a key": b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s.",
    "a tuple doubled sixty times as a key": b"\x80\x02})q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"K\x01s.",
    "a string of an exabyte": b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b".",
    "bytes of an exabyte": b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b".",
    "a bytearray of a terabyte": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "a number of gigabytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a function": pickle.dumps(os.system),
    "an object from outside": b"\x80\x02X\x01\x00\x00\x00xQ.",
    "nothing on the stack": b"\x80\x02\x87.",
    "no end": b"\x80\x02}",
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_pickle_that_asks_for_too_much_is_refused(what: str) -> None:
    """At once, before anything is made that large."""
    began = time.process_time()
    with pytest.raises(pickle.UnpicklingError):
        from_dumps.loads(BOMBS[what])
    assert time.process_time() - began < 5


def test_a_memo_of_32_gib_is_a_dictionary_of_one() -> None:
    """The ten bytes that asked Python's own unpickler for it mean nothing bad here."""
    assert from_dumps.loads(b"\x80\x02}r\xff\xff\xff\xff.") == {}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_is_read_as_pickle_reads_it(protocol: int) -> None:
    """Of every protocol."""
    shared = [1, -2, 1 << 80, None, True, False, 2.5, "é\n", "", "x" * 300]
    said: Any = {"a": shared, "b": shared, "c": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)), "d": {}, "e": [], 5: {}}
    if protocol > 2:
        said["f"] = b"x" * 300
    assert from_dumps.loads(pickle.dumps(said, protocol=protocol)) == said


def test_escape_codes_in_dumps_and_rings_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of group names, functions, files and exceptions; in report, table and complaints."""
    monkeypatch.chdir(tmp_path)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    _dumps(dumps, f"{OWNED}.py", name=OWNED)
    (dumps / f"junk{OWNED.replace('/', '')}_7").write_bytes(b"junk")
    assert _diagnose(dumps) == 3
    told = tmp_path / "rings"
    told.mkdir()
    for rank in range(2):
        ring = writer(told, rank)
        ring.header(rings.W_JOINED, 1)
        group = ring.group("0", OWNED, [0, 1])
        site = ring.entry(rings.TABLE_SITE, "s", [[f"{OWNED}.py", 3, OWNED]])
        what, print_ = ring.signature("k", lambda _: (Signature("all_reduce", ((4,),), dtypes=(OWNED,)), False))
        thread = ring.entry(rings.TABLE_THREAD, "t", [1, OWNED])
        for seq in range(1, 4 - rank):
            ring.issue(
                rings.COMPLETED if seq < 3 else rings.ISSUED | rings.WAITING,
                group,
                thread,
                seq,
                what,
                site,
                print_,
                1,
                -1,
                0,
            )
        if rank:
            error = {"error": f"ValueError: {OWNED}", "traceback": f"Traceback\n {OWNED}", "frames": []}
            ring.header(rings.W_EXCEPTION, ring.entry(rings.TABLE_TEXT, "e", error))
            ring.header(rings.W_LIFE, rings.LIFE_RAISED)
    assert _diagnose(told) != 0
    assert watch.run(argparse.Namespace(directory=told, interval=0.1, job="", html=None, metrics=None)) == 0
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert not {"\x1b", "\x07", "\x9b", "\u202e", "\u2066"} & set(text)
    assert "[bold red]" in said.out


def test_a_usage_error_shows_what_a_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys and values of a cluster file are in its complaint."""
    path = tmp_path / "c.toml"
    path.write_text('base = "dgx-h100"\n"\\u001b[2J" = 1\nname = "x"\n')
    assert main(["topo", "show", str(path)]) == 2
    assert "\\x1b[2J" in (said := capsys.readouterr().err)
    assert "\x1b" not in said


def test_complaints_are_folded_after_ten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand broken files are eleven lines."""
    _dumps(tmp_path, "train.py")
    for number in range(2, 1000):
        (tmp_path / f"dump_{number}").write_bytes(b"junk")
    _diagnose(tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 11
    assert said[-1].startswith("distsim: ... and ")


def _table(ring: Any, content: Any) -> int:
    return int(ring.entry(rings.TABLE_GROUP, str(content)[:40], content))


WRONG: dict[str, Callable[[Any], None]] = {
    "a group of a trillion ranks": lambda ring: issue_on(ring, _table(ring, ["0", "x", [[0, 10**12]], 0, ""])),
    "a group that is a number": lambda ring: issue_on(ring, _table(ring, 5)),
    "a group with a text for a rank": lambda ring: issue_on(ring, _table(ring, ["0", "x", [["a", 1]], 0, ""])),
    "a group with a rank twice": lambda ring: issue_on(ring, _table(ring, ["0", "x", [[0, 2], [1, 1]], 0, ""])),
    "calls beyond counting": lambda ring: ring.header(rings.W_COUNT, (1 << 64) - 1),
    "a heartbeat in a million years": lambda ring: ring.header(rings.W_BEAT, (1 << 64) - 1),
    "an exception that is a list": lambda ring: ring.header(rings.W_EXCEPTION, _table(ring, [[1], {}])),
    "a finding of another shape": lambda ring: ring.header(rings.W_FINDING, _table(ring, {"kind": 3})),
    "an exit code that is none": lambda ring: ring.header(rings.W_EXIT_CODE, (1 << 63) + 5),
}


def issue_on(ring: Any, group: int) -> None:
    """Calls on a made-up group."""
    for seq in (4, 5):
        ring.issue(rings.ISSUED | rings.WAITING, group, 0, seq, 0, 0, 0, 0, -1, 0)


@pytest.mark.parametrize("what", WRONG)
def test_one_corrupted_rank_leaves_watch_and_monitor_standing(what: str, tmp_path: Path) -> None:
    """The others are watched on; nothing is raised, nothing grows."""
    hang(tmp_path, world=3)
    bad = writer(tmp_path, 2, 3)
    bad.header(rings.W_JOINED, 1)
    for seq in range(1, 4):
        bad.finish(issue(bad, seq), rings.COMPLETED)
    WRONG[what](bad)
    readers, _ = load_rings(tmp_path)
    assert live_table(readers).row_count >= 1
    monitor = Monitor(tmp_path, Settings(), None)
    monitor.host.find()
    monitor.host.read()
    monitor.host.comparer.check()
    assert set(monitor.look().ranks) == {0, 1, 2}
    examine(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        ["0", "x", [[0, 10**12]], 0, ""],
        ["0", "x", [["a", 1]], 0, ""],
        ["0", "x", [[0, 2], [1, 1]], 0, ""],
        ["0", "x", [[2, 2]], 0, ""],
        ["0", "x", [[0, 2]], 0],
    ],
    ids=["a trillion", "a text", "twice", "no rank of the job", "no world"],
)
def test_a_group_that_no_rank_writes_has_no_members(content: list[Any], tmp_path: Path) -> None:
    """Nobody is a member of it, and the reader says that the ring is damaged."""
    ring = writer(tmp_path, 0, 3)
    offset = _table(ring, content)
    reader = RingReader(ring.path)
    assert reader.group(offset).group.ranks == ()
    assert "group" in reader.damage or "table" in reader.damage


@pytest.mark.parametrize("field", [(13, 0), (13, 1 << 40), (9, -1), (10, 1 << 30), (12, -5)])
def test_a_header_that_no_rank_writes_is_refused(field: tuple[int, int], tmp_path: Path) -> None:
    """A pid of 0 is the monitor's own process group: it would be sent signals."""
    (path, _) = hang(tmp_path)
    data = bytearray(path.read_bytes())
    values = list(rings.HEADER.unpack_from(data, 0))
    values[field[0]] = field[1]
    rings.HEADER.pack_into(data, 0, *values)
    path.write_bytes(data)
    _, complaints = load_rings(tmp_path)
    assert any("damaged" in line for line in complaints)


@pytest.mark.parametrize("text", ["[" * 200 + "]" * 200, "[" * 100_000, "NaN", "-Infinity", "9" * 5000])
def test_json_beyond_bounds_is_a_value_error(text: str) -> None:
    """Nesting, constants and digits; of one sort, so that nobody forgets one."""
    with pytest.raises(ValueError, match=r"."):
        load_json(text)


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "9" * 5000, "x = " + "[" * 150 + "]" * 150])
def test_toml_beyond_bounds_is_a_value_error(text: str) -> None:
    """As JSON."""
    with pytest.raises(ValueError, match=r"."):
        load_toml(text)


def test_what_is_read_has_a_bound(tmp_path: Path) -> None:
    """Also where the file says that it has no size."""
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes("/dev/zero", 10)
    (tmp_path / "x").write_bytes(b"12345")
    assert read_bytes(tmp_path / "x", 5) == b"12345"
    with pytest.raises(OSError, match="longer than"):
        read_bytes(tmp_path / "x", 4)


def test_every_control_is_shown() -> None:
    """And nothing else: letters of all languages stay."""
    assert printable("".join(map(chr, range(32)))).count("\\") == 30
    assert printable("naïve 日本語 😀\tx\ny") == "naïve 日本語 😀\tx\ny"
    assert printable("\ud800\u2028\U000e0041") == "\\ud800\\u2028\\U000e0041"


def test_a_report_of_json_is_whole(tmp_path: Path) -> None:
    """The report's file holds the same, as JSON writes it."""
    _dumps(tmp_path, "train.py", name=OWNED)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        args = argparse.Namespace(
            directory=tmp_path, report=str(tmp_path / "verdict.out.json"), sources=None, html=None
        )
        assert diagnose.run(args) == 3
    assert json.loads((tmp_path / "verdict.out.json").read_text())["exit_code"] == 3


def test_a_verdict_of_another_shape_is_passed_over(tmp_path: Path) -> None:
    """The rings are judged instead."""
    hang(tmp_path)
    for said in ([], 5, {"schema": "distsim.report/1", "diagnoses": [[]]}, {"schema": 3}, {"diagnoses": None}):
        (tmp_path / "verdict.json").write_text(json.dumps(said))
        assert examine(tmp_path).diagnoses[0].culprits == (1,)


def test_nothing_to_diagnose_is_a_usage_error(tmp_path: Path) -> None:
    """Also where all that is there is rubbish."""
    (tmp_path / "dump_0").write_bytes(BOMBS["a string of an exabyte"])
    with pytest.raises(UsageError, match="neither rings of distsim"):
        examine(tmp_path)
