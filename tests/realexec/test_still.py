"""Ranks that stand still, seen through their rings: who may go on by itself, who is on the way out, who took over."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from distsim.debug.evidence.guard_flags import findings
from distsim.debug.evidence.processes import Numbering
from distsim.debug.evidence.rank_state import HELD_S, Knowledge, build_evidence, settle_stuck
from distsim.debug.monitor.host import Host
from distsim.debug.records import Evidence, MainPosition, Phase, Site
from distsim.debug.records.kinds import Kind
from distsim.debug.records.signature import Signature
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import ring_path
from distsim.debug.rings.reader import RingReader, origin_of
from distsim.debug.rings.writer import RingWriter

S = 10**9

NUMBERING = Numbering(2, 2)


def writer(folder: Path, rank: int) -> RingWriter:
    ring = RingWriter(ring_path(folder, rank, 0, "job"), rank=rank, world_size=2, local_rank=rank, job="job", attempt=0)
    ring.header(rings.W_JOINED, time.monotonic_ns())
    ring.header(rings.W_LIFE, rings.LIFE_JOINED)
    return ring


def call(ring: RingWriter, seq: int, flags: int = 0, thread: str = "MainThread", line: int = 7) -> int:
    group = ring.group("0", "default_pg", [0, 1])
    who = ring.entry(rings.TABLE_THREAD, thread, [1, thread])
    site = ring.entry(rings.TABLE_SITE, line, [["train.py", line, "step"]])
    signature, print_ = ring.signature("k", lambda _: (Signature("all_reduce"), False))
    return ring.issue(rings.ISSUED | flags, group, who, seq, signature, site, print_, 9, -1, 0)


def seen(rings_: list[RingWriter], after_s: float, **known: Any) -> Evidence:
    """What a monitor sees so much later; rank 0 has beaten on if *beats* says so."""
    readers = [RingReader(ring.path) for ring in rings_]
    now_ns = time.monotonic_ns() + int(after_s * S)
    evidence = build_evidence(readers, Knowledge(now_ns=now_ns, hang_after_s=60.0, **known), NUMBERING)
    evidence.findings = findings(readers, evidence, origin_of(readers))
    settle_stuck(evidence)
    return evidence


@pytest.fixture
def pair(tmp_path: Path) -> list[RingWriter]:
    """Both have made a call; rank 1 waits in its second."""
    both = [writer(tmp_path, rank) for rank in (0, 1)]
    for ring in both:
        ring.finish(call(ring, 1, rings.WAITING), rings.COMPLETED)
    call(both[1], 2, rings.WAITING)
    return both


def beat(ring: RingWriter, after_s: float) -> None:
    ring.header(rings.W_BEAT, time.monotonic_ns() + int(after_s * S))


@pytest.mark.parametrize(("silent_s", "phase"), [(HELD_S + 0.5, Phase.HOST_STUCK), (HELD_S - 0.5, Phase.RUNNING)])
def test_who_holds_the_interpreter_is_told_soon(pair: list[RingWriter], silent_s: float, phase: Phase) -> None:
    """No heartbeat for two seconds while others wait, long before patience is over."""
    beat(pair[0], 5 - silent_s)
    beat(pair[1], 5)
    assert seen(pair, 5).ranks[0].phase is phase


def test_a_pause_of_all_is_nobodys_silence(pair: list[RingWriter]) -> None:
    """The monitor was stopped with them: the heartbeats that it missed are none that failed."""
    now_ns = time.monotonic_ns()
    state = seen(pair, 30, away_ns=((now_ns + S // 10, now_ns + 30 * S),)).ranks[0]
    assert (state.phase, state.silent_s) == (Phase.RUNNING, None)


def test_who_has_ended_its_script_is_not_stuck(pair: list[RingWriter]) -> None:
    """Its process is still there for longer than patience, while the other waits: it is on its way out."""
    pair[0].header(rings.W_LIFE, rings.LIFE_EXITING)
    beat(pair[0], 100)
    beat(pair[1], 100)
    state = seen(pair, 100).ranks[0]
    assert (state.phase, state.leaving) == (Phase.RUNNING, True)
    pair[0].header(rings.W_LIFE, rings.LIFE_JOINED)
    assert seen(pair, 100).ranks[0].phase is Phase.HOST_STUCK


@pytest.mark.parametrize(
    ("main_in", "thread", "threads", "at_large"),
    [
        ("/usr/lib/python3.11/threading.py", "io", 2, False),
        ("train.py", "io", 2, True),
        ("train.py", "MainThread", 1, False),
        ("train.py", "MainThread", 2, True),
    ],
)
def test_a_thread_that_does_not_wait_is_at_large(
    pair: list[RingWriter], main_in: str, thread: str, threads: int, at_large: bool
) -> None:
    """The main thread, unless it waits for a thread itself, and any other that has made calls and lives."""
    pair[0].header(rings.W_THREADS, threads)
    pair[0].position(MainPosition(Site(main_in, 3, "wait"), (Site("train.py", 9, "main"),)))
    call(pair[0], 2, rings.WAITING, thread)
    beat(pair[0], 1)
    state = seen(pair, 1).ranks[0]
    assert (state.phase, state.at_large) == (Phase.BLOCKED, at_large)


def test_a_guess_ends_with_the_next_call(pair: list[RingWriter]) -> None:
    """Gradients that were missing while a rank stood still: only as long as it stands there, and others reduce."""
    pair[1].finish(1, rings.COMPLETED)
    call(pair[1], 3, rings.ASYNC)
    text = pair[0].entry(rings.TABLE_TEXT, "t", {"kind": "ddp_unused_parameter?", "text": "DDP parameter b got none"})
    pair[0].header(rings.W_FINDING, text)
    pair[0].header(rings.W_GUESSED, 2)
    (found,) = seen(pair, 1).findings
    assert (found.kind, found.guess) == (Kind.DDP_UNUSED_PARAMETER, True)
    call(pair[0], 2, rings.WAITING)
    assert seen(pair, 1).findings == []


def test_every_flagged_call_counts(tmp_path: Path, pair: list[RingWriter]) -> None:
    """A second finding on a rank is news, and so is the first after a restart."""
    host = Host(tmp_path, None)
    host.find()
    counts = [host.flagged()]
    for line in (7, 8):
        pair[0].mark(call(pair[0], line, line=line), rings.MODIFIED)
        counts.append(host.flagged())
    again = RingWriter(ring_path(tmp_path, 0, 1, "job"), rank=0, world_size=2, local_rank=0, job="job", attempt=1)
    host.find()
    counts.append(host.flagged())
    again.mark(call(again, 1), rings.MODIFIED)
    counts.append(host.flagged())
    assert counts == [0, 1, 2, 2, 3]


def test_findings_of_several_lines_are_all_told(pair: list[RingWriter]) -> None:
    """One finding a line of a rank, and one race a group, whoever's thread it was."""
    for line in (7, 8, 8):
        pair[0].mark(call(pair[0], line, line=line), rings.MODIFIED)
    for ring in pair:
        ring.mark(call(ring, 20, line=20 + ring.rank), rings.RACE)
    found = seen(pair, 1).findings
    assert [(f.kind, f.ranks, f.site and f.site.line) for f in found] == [
        (Kind.BUFFER_MODIFIED_IN_FLIGHT, (0,), 7),
        (Kind.BUFFER_MODIFIED_IN_FLIGHT, (0,), 8),
        (Kind.THREAD_RACE, (0,), 20),
    ]


def test_a_ring_made_anew_is_read_anew(tmp_path: Path) -> None:
    """A process that replaces itself (os.execv) before it joins makes its ring again under the same name."""
    first = writer(tmp_path, 0)
    host = Host(tmp_path, None)
    host.find()
    call(first, 1)
    assert host.counts() == (1,)
    writer(tmp_path, 0)
    host.find()
    assert host.counts() == (0,)


def test_a_process_that_nobody_saw_end_was_not_killed(pair: list[RingWriter]) -> None:
    """Without an exit code or a signal none is named."""
    from distsim.debug.diagnosis.diagnose import diagnose
    from distsim.debug.report.render import render_diagnoses

    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    beat(pair[1], 1)
    readers = [RingReader(ring.path) for ring in pair]
    readers[0].header = readers[0].header._replace(pid=child)
    evidence = build_evidence(readers, Knowledge(now_ns=time.monotonic_ns() + S, hang_after_s=60.0), NUMBERING)
    (told,) = diagnose(evidence)
    assert (told.kind, told.culprits, told.victims) == (Kind.RANK_EXITED, (0,), (1,))
    assert "killed" not in render_diagnoses([told], evidence).plain(200)


@pytest.mark.parametrize(("waited_s", "phase"), [(1.0, Phase.RUNNING), (59.0, Phase.RUNNING), (61.0, Phase.ABSENT)])
@pytest.mark.parametrize("has_ring", [True, False])
def test_who_never_joins_is_missed_once_others_have_waited(
    tmp_path: Path, has_ring: bool, waited_s: float, phase: Phase
) -> None:
    """Patience with a rank that has not joined is counted from the others' call, however long ago it began itself."""
    made = [writer(tmp_path, rank) for rank in ((0, 1) if has_ring else (0,))]
    for ring in made:
        ring.header(rings.W_JOINED, 0)
        ring.header(rings.W_LIFE, rings.LIFE_STARTED)
        ring.header(rings.W_OPENED, time.monotonic_ns() - 100 * S)
    call(made[0], 0, rings.WAITING)
    host = Host(tmp_path, None)
    host.find()
    beat(made[0], int(waited_s))
    readers = [host.readers[rank] for rank in sorted(host.readers)]
    known = Knowledge(now_ns=time.monotonic_ns() + int(waited_s * S), hang_after_s=60.0)
    evidence = build_evidence(readers, known, NUMBERING, host.missing_states(host.readers))
    settle_stuck(evidence)
    assert evidence.ranks[0].phase is Phase.BLOCKED
    assert evidence.ranks[1].phase is phase
