"""Rings: what is written is read, while it is written, after it was overwritten, and when it is damaged."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.evidence.guard_flags import findings, merged
from distsim.debug.evidence.processes import Numbering, number_processes
from distsim.debug.evidence.rank_state import Knowledge, build_evidence
from distsim.debug.monitor.host import Host
from distsim.debug.postmortem import examine, load_rings
from distsim.debug.records import Caught, Group, MainPosition, Phase, RankState, RankThread, Site, State
from distsim.debug.records.kinds import Kind
from distsim.debug.records.signature import Signature
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import RecordedWorld, WorldKind, ring_path
from distsim.debug.rings.reader import RingReader, origin_of
from distsim.debug.rings.writer import RingWriter, stays
from distsim.errors import UsageError

NUMBERING = Numbering(2, 2)


def writer(folder: Path, rank: int = 0, world: int = 2, job: str = "job") -> RingWriter:
    """A ring as a rank makes it."""
    return RingWriter(ring_path(folder, rank, 0, job), rank=rank, world_size=world, local_rank=rank, job=job, attempt=0)


def said(op: str = "all_reduce", **more: Any) -> Any:
    return lambda _key: (Signature(op, ((4, 8),), dtypes=("float32",), nbytes=128, **more), False)


def issue(ring: RingWriter, seq: int, flags: int = rings.ISSUED, key: Any = "k", **more: Any) -> int:
    """One call on the world's group."""
    group = ring.group("0", "default_pg", [0, 1])
    thread = ring.entry(rings.TABLE_THREAD, 1, [1, "MainThread"])
    site = ring.entry(rings.TABLE_SITE, "s", [["train.py", 7, "step"]])
    signature, print_ = ring.signature(key, said(**more))
    return ring.issue(flags, group, thread, seq, signature, site, print_, 9, -1, 0)


def test_a_record_comes_back_whole(tmp_path: Path) -> None:
    """Every field that was written is in the decoded call, before and after it ended."""
    ring = writer(tmp_path)
    index = issue(ring, 1, rings.ISSUED | rings.WAITING, reduce_op="SUM")
    reader = RingReader(ring.path)
    call = reader.decode(reader.since(0)[0][0], 0)
    assert (call.op, call.seq, call.input_shapes, call.dtypes) == ("all_reduce", 1, ((4, 8),), ("float32",))
    assert (call.group, call.site) == (Group("0", "default_pg", (0, 1)), Site("train.py", 7, "step"))
    assert (call.state, call.reduce_op, call.nbytes) == (State.ISSUED, "SUM", 128)
    assert len(reader.unfinished()) == 1
    ring.finish(index, rings.COMPLETED)
    call = reader.decode(reader.since(0)[0][0], 0)
    assert call.state is State.COMPLETED
    assert call.completed_s is not None
    assert len(reader.unfinished()) == 0


def test_an_exception_that_ended_a_thread_comes_back_with_its_thread(tmp_path: Path) -> None:
    """One that was handled has none."""
    ring = writer(tmp_path)
    ended = Caught("OSError: 7", Site("train.py", 3, "produce"), 1, 4, "loader")
    handled = Caught("KeyError: 'x'", Site("train.py", 9, "step"), 2, 5)
    for slot, one in enumerate((ended, handled)):
        ring.caught(slot, one)
    assert RingReader(ring.path).caught() == (ended, handled)


def test_a_call_made_again_differs_in_time_and_numbers_only(tmp_path: Path) -> None:
    """Its record is made of the one before, and says all else that the first says."""
    ring = writer(tmp_path)
    first = issue(ring, 1, rings.ISSUED | rings.WAITING, reduce_op="SUM")
    same = stays(ring.template(first))
    ring.finish(first, rings.COMPLETED)
    ring.replay(same, 7, 3)
    reader = RingReader(ring.path)
    one, other = reader.since(0)[0]
    assert (int(other["seq"]), int(other["ordinal"]), int(other["completed"])) == (7, 3, 0)
    assert int(other["issued"]) > int(one["issued"])
    again = reader.decode(other, 0)
    assert (again.state, again.index) == (State.ISSUED, 1)
    numbers = {"seq": 1, "index": 0, "issued_s": 0.0, "completed_s": None, "state": State.ISSUED}
    assert replace(again, **numbers) == replace(reader.decode(one, 0), **numbers)


def test_a_record_under_way_is_not_read(tmp_path: Path) -> None:
    """A record without its commit word is left out, and read on the next look."""
    ring = writer(tmp_path)
    issue(ring, 1)
    index = issue(ring, 2)
    word = rings.RECORDS_AT // 8 + index * rings.RECORD_WORDS
    ring.words[word] = 0
    reader = RingReader(ring.path)
    records, next_index = reader.since(0)
    assert [int(seq) for seq in records["seq"]] == [1]
    ring.words[word] = index + 1
    records, next_index = reader.since(next_index)
    assert [int(seq) for seq in records["seq"]] == [2]
    assert next_index == 2


def test_the_ring_of_another_user_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied, not mapped, and every poll sees what its rank has done since."""
    ring = writer(tmp_path)
    index = issue(ring, 1, rings.ISSUED | rings.WAITING)
    monkeypatch.setattr(os, "geteuid", lambda: ring.path.stat().st_uid + 1)
    host = Host(tmp_path, None)
    host.find()
    assert (host.read(), host.counts(), host.oldest_wait_s() > 0) == (1, (1,), True)
    ring.finish(index, rings.COMPLETED)
    issue(ring, 2, rings.COMPLETED, key="new")
    assert (host.read(), host.counts()) == (1, (2,))
    assert len(host.readers[0].unfinished()) == 0
    records, _ = host.readers[0].since(0)
    assert [host.readers[0].decode(record, 0).op for record in records] == ["all_reduce"] * 2
    os.truncate(ring.path, 100)
    assert (host.read(), host.counts()) == (0, (2,))


def test_old_records_and_signatures_are_overwritten(tmp_path: Path) -> None:
    """A ring that went round holds its last calls; a signature that is lost reads as unknown, never as another."""
    ring = writer(tmp_path)
    for seq in range(1, rings.RECORDS + 100):
        issue(ring, seq, key=seq, root=seq)
    reader = RingReader(ring.path)
    records, _ = reader.since(0)
    assert len(records) == rings.RECORDS - 1
    calls = [reader.decode(record, 0) for record in records]
    assert all(call.root == call.seq or (call.root is None and call.op == "?") for call in calls)
    assert calls[-1].root == rings.RECORDS + 99


def test_a_full_table_costs_names_not_calls(tmp_path: Path) -> None:
    """When the table of sites is full, calls are still recorded."""
    ring = writer(tmp_path)
    issue(ring, 1)
    for number in range(2000):
        ring.text(f"{number}" * 200)
    assert ring.text("one more" * 100) == 0
    issue(ring, 2)
    assert RingReader(ring.path).count == 2


def test_damaged_rings_are_one_line_each(tmp_path: Path) -> None:
    """Another version, a truncated file, no ring at all, another job: one line each, the rest is read."""
    writer(tmp_path, rank=0, job="new")
    writer(tmp_path, rank=1, job="new")
    old = writer(tmp_path, rank=0, world=4, job="old")
    old.header(rings.W_OPENED, 1)
    (tmp_path / "rank00007.a0.x.ring").write_bytes(b"no ring")
    data = bytearray(old.path.read_bytes())
    (tmp_path / "rank00008.a0.x.ring").write_bytes(data[:100_000])
    data[8] = 99
    (tmp_path / "rank00009.a0.x.ring").write_bytes(data)
    readers, complaints = load_rings(tmp_path)
    assert [reader.header.job for reader in readers] == ["new", "new"]
    assert len(complaints) == 4
    for word in ("not a ring", "truncated", "version 99", "two jobs"):
        assert any(word in complaint for complaint in complaints), complaints
    assert all("\n" not in complaint for complaint in complaints)


def test_a_full_disk_is_refused_before_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file cannot be reserved, making the ring fails and leaves nothing behind."""

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", no_space)
    with pytest.raises(OSError, match="No space"):
        writer(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_session_without_room_runs_unguarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk costs the guard, not the job: one line that says so."""
    from distsim.debug.settings import Settings
    from distsim.realexec.process.session import Session

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", no_space)
    assert Session.open(Settings(directory=str(tmp_path / "x")), RecordedWorld("", 0, 2, WorldKind.DEFAULT, "")) is None
    said = capsys.readouterr().err
    assert said.startswith("distsim: rank 0 runs unguarded")
    assert len(said.splitlines()) == 1


def test_settings_are_checked() -> None:
    """A level that does not exist is a one-line mistake that names the choices."""
    from distsim.debug.settings import Settings

    with pytest.raises(UsageError, match="level: expected one of off, record, check, strict, got 'chek'"):
        Settings.read({"level": "chek"}, {})
    with pytest.raises(UsageError, match="DISTSIM_HANG_AFTER: expected seconds"):
        Settings.read({}, {"DISTSIM_HANG_AFTER": "soon"})
    settings = Settings.read({"level": "strict", "nan": True}, {})
    assert Settings.read({}, settings.environment()) == settings


def test_the_first_nan_is_the_first_though_read_last(tmp_path: Path) -> None:
    """A call made after the evidence was gathered is dated like the others: the first rank with NaN is named."""
    rings_of = [writer(tmp_path, rank) for rank in range(2)]
    readers = [RingReader(ring.path) for ring in rings_of]
    issue(rings_of[1], 1, rings.ISSUED | rings.NAN_INPUT)
    issue(rings_of[0], 2, rings.ISSUED | rings.NAN_INPUT)
    origin = origin_of(readers)
    evidence = build_evidence(readers[:1], Knowledge(directory=tmp_path), NUMBERING, origin_wall=origin)
    assert 1 not in evidence.records
    assert [finding.ranks for finding in findings(readers, evidence, origin)] == [(1,)]


def test_numbers_order_nan_where_clocks_do_not(tmp_path: Path) -> None:
    """Of two hosts whose clocks disagree, the one with the smaller number in the group had NaN first."""
    rings_of = [writer(tmp_path, rank) for rank in range(2)]
    issue(rings_of[0], 2, rings.ISSUED | rings.NAN_INPUT)
    issue(rings_of[1], 1, rings.ISSUED | rings.NAN_INPUT)
    readers = [RingReader(ring.path) for ring in rings_of]
    origin = origin_of(readers)
    evidence = build_evidence(readers, Knowledge(directory=tmp_path), NUMBERING, origin_wall=origin)
    late, early = (findings([reader], evidence, origin)[0] for reader in readers)
    assert [finding.ranks for finding in merged([replace(late, at_s=0.0), replace(early, at_s=1.0)])] == [(1,)]


@pytest.fixture
def nobody_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rings' processes are this one, which is alive."""
    monkeypatch.setattr("distsim.debug.postmortem.has_ended", lambda *_: True)


def ended_badly(folder: Path, last: int) -> None:
    """Two ranks that made one call; rank 1 was ended by SIGABRT on its way out."""
    for rank in range(2):
        ring = writer(folder, rank)
        index = issue(ring, 1)
        ring.finish(index, rings.COMPLETED)
        ring.header(rings.W_LIFE, rings.LIFE_EXITING if rank == 0 else last)
        ring.header(rings.W_JOINED, 1)
        said = {"rank": rank, "attempt": 0, "code": -6 if rank else 0}
        (folder / f"exit.{rank:05d}.a0.json").write_text(json.dumps(said))


@pytest.mark.usefixtures("nobody_lives")
def test_an_abort_at_the_interpreters_end(tmp_path: Path) -> None:
    """SIGABRT after all calls and the program's end is a line, and no fault."""
    ended_badly(tmp_path, rings.LIFE_ENDED)
    examined = examine(tmp_path)
    assert examined.diagnoses == []
    assert examined.complaints == [
        "rank 1 was killed by SIGABRT, after its program and all its calls had ended: only the exit code is lost"
    ]


@pytest.mark.usefixtures("nobody_lives")
@pytest.mark.parametrize("life", [rings.LIFE_JOINED, rings.LIFE_EXITING])
def test_an_abort_before_the_end(life: int, tmp_path: Path) -> None:
    """The same signal while the program still ran is not excused, nor where only its guard has ended: it was taken
    off, or another program took its place (os.execv)."""
    ended_badly(tmp_path, life)
    (found,) = examine(tmp_path).diagnoses
    assert found.kind is Kind.RANK_KILLED
    assert "had ended" not in found.explanation


def test_the_newest_of_heartbeat_and_record_says_where_a_killed_rank_was(tmp_path: Path) -> None:
    """A call made after the last heartbeat that saw the rank stand still is where it was; before it, that heartbeat."""
    ring = writer(tmp_path)
    first = issue(ring, 1)
    ring.finish(first, rings.COMPLETED)
    ring.position(MainPosition(Site("load.py", 3, "load"), (Site("load.py", 3, "load"),)))
    known = Knowledge(exits={(0, 0): -9}, post_mortem=True)
    assert build_evidence([RingReader(ring.path)], known, NUMBERING).ranks[0].site == Site("load.py", 3, "load")
    second = issue(ring, 2)
    ring.finish(second, rings.COMPLETED)
    state = build_evidence([RingReader(ring.path)], known, NUMBERING).ranks[0]
    assert (state.phase, state.site) == (Phase.KILLED, Site("train.py", 7, "step"))


@pytest.mark.parametrize(("code", "killed", "is_oom"), [(-9, 1, True), (-9, 0, False), (-15, 1, False)])
def test_a_rank_that_the_kernel_killed_for_want_of_memory(tmp_path: Path, code: int, killed: int, is_oom: bool) -> None:
    """SIGKILL, and the kernel has counted a kill meanwhile: the advice is about memory."""
    ring = writer(tmp_path)
    known = Knowledge(exits={(0, 0): code}, post_mortem=True, oom_kills=killed)
    evidence = build_evidence([RingReader(ring.path)], known, NUMBERING)
    evidence.world_size, evidence.ranks = 2, {**evidence.ranks, 1: RankState(1, Phase.RUNNING)}
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits) == (Kind.RANK_KILLED, (0,))
    assert ("killed a process for want of memory" in d.explanation) == is_oom
    assert d.suggestion.startswith("Let rank 0 need less memory of the host") == is_oom


@pytest.mark.parametrize(("frames", "threads", "cut"), [(1, 2, False), (4, 12, True), (1, 40, True)])
def test_threads_that_have_no_room_are_known_to_be_missing(
    tmp_path: Path, frames: int, threads: int, cut: bool
) -> None:
    """Outer frames go first, so that more threads stay; whatever is left out, the rank's state says so."""
    ring = writer(tmp_path)
    stack = tuple(
        Site(f"/home/someone/projects/training/package/module_{i}.py", i, "Trainer.fit") for i in range(frames)
    )
    others = tuple(RankThread(f"worker-{i}", True, stack) for i in range(threads))
    ring.position(MainPosition(stack[0], stack, (), others))
    state = build_evidence([RingReader(ring.path)], Knowledge(), NUMBERING).ranks[0]
    assert state.threads_cut == cut
    assert len(state.threads) == 1 + threads or threads == 40
    assert all(thread.stack[:1] == stack[:1] for thread in state.threads)


def test_a_position_with_a_path_that_is_longer_than_its_room_says_that_something_is_missing(tmp_path: Path) -> None:
    """Nothing of it can be read."""
    ring = writer(tmp_path)
    ring.position(MainPosition(Site("d/" * 2000 + "m.py", 1, "f")))
    assert build_evidence([RingReader(ring.path)], Knowledge(), NUMBERING).ranks[0].threads_cut


def test_keys_of_a_store_that_a_rank_waited_for_once_are_no_wait(tmp_path: Path) -> None:
    """A rank that has made calls since it was seen waiting for a store waits for it no longer."""
    ring = writer(tmp_path)
    ring.position(MainPosition(Site("store.py", 3, "wait"), (Site("store.py", 3, "wait"),), ("key",)))
    later_ns = ring.words[rings.WORDS_AT // 8 + rings.W_POSITION_SINCE] + 10**10
    later = Knowledge(now_ns=later_ns)
    assert build_evidence([RingReader(ring.path)], later, NUMBERING).ranks[0].phase is Phase.BLOCKED
    assert RingReader(ring.path).key_wait_ns(later_ns) == 10**10
    ring.finish(issue(ring, 1), rings.COMPLETED)
    assert RingReader(ring.path).key_wait_ns(later_ns) == 0
    assert build_evidence([RingReader(ring.path)], later, NUMBERING).ranks[0].phase is Phase.RUNNING


def test_the_members_of_a_world_joined_since_are_not_guessed(tmp_path: Path) -> None:
    """A process joins a further world after the monitor has numbered the job: its 0 and 1 are not the job's."""
    ring = writer(tmp_path)
    reader = RingReader(ring.path)
    reader.called(0, {}, number_processes([reader.process]).known)
    ring.join_world(RecordedWorld("w4", 0, 2, WorldKind.FURTHER, "host:1"))
    offset = ring.group("w4", "undefined", [0, 1], world="w4")
    assert (reader.job_group(offset).ranks, reader.in_job(reader.group(offset))) == ((), ())
    reader.called(0, {"w4": (0, 2)}, number_processes([reader.process]).known)
    assert reader.job_group(offset).ranks == (0, 2)
