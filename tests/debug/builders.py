"""Evidence for tests: little programs played out by hand, no simulator, no torch, no clock.

A program is a list of steps per rank. `play` runs every rank until it blocks or ends: a collective
completes when all members brought the same call to the same number, a send when its receive is
there. What is left is what a hang leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.debug.matching.agreement import check_meeting
from distsim.debug.records import (
    P2P,
    CallRecord,
    CallWait,
    Evidence,
    Finding,
    Group,
    HostWait,
    Phase,
    RankState,
    Site,
    State,
    StoreWait,
    Wait,
)

FILE = "train.py"


def group(*ranks: int, name: str = "1", desc: str = "") -> Group:
    return Group(name, desc, ranks)


def world(size: int) -> Group:
    return Group("0", "default_pg", tuple(range(size)))


@dataclass
class Step:
    """One call; `end` steps give the rank its last phase."""

    op: str
    line: int = 0
    group: Group | None = None
    is_async: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)
    function: str = "main"
    callers: tuple[Site, ...] = ()
    thread: str = "MainThread"
    inside: tuple[str, ...] = ()
    state: RankState | None = None


def coll(op: str, line: int, group: Group | None = None, *, shape: tuple[int, ...] = (4,), **kw: Any) -> Step:
    """A collective on float32[4], SUM where it reduces."""
    own = {k: kw.pop(k) for k in ("is_async", "function", "callers", "thread", "inside") if k in kw}
    if op not in ("barrier", "new_group"):
        kw.setdefault("input_shapes", (shape,))
        kw.setdefault("dtypes", ("float32",))
    if "reduce" in op:
        kw.setdefault("reduce_op", "SUM")
    return Step(op, line, group, kwargs=kw, **own)


def all_reduce(line: int, group: Group | None = None, **kw: Any) -> Step:
    return coll("all_reduce", line, group, **kw)


def barrier(line: int, group: Group | None = None, **kw: Any) -> Step:
    return coll("barrier", line, group, **kw)


def send(to: int, line: int, *, tag: int = 0, shape: tuple[int, ...] = (4,), is_async: bool = False, **kw: Any) -> Step:
    kw = {"peer": to, "tag": tag, "input_shapes": (shape,), "dtypes": ("float32",), **kw}
    return Step("send", line, kwargs=kw, is_async=is_async)


def recv(
    source: int | None,
    line: int,
    *,
    tag: int = 0,
    shape: tuple[int, ...] = (4,),
    is_async: bool = False,
    **kw: Any,
) -> Step:
    kw = {"peer": source, "tag": tag, "output_shapes": (shape,), "dtypes": ("float32",), **kw}
    return Step("recv", line, kwargs=kw, is_async=is_async)


def wait_all(line: int = 0) -> Step:
    """Wait for every asynchronous call so far."""
    return Step("wait", line)


def _end(phase: Phase, line: int = 0, waits: tuple[Wait, ...] = (), **kw: Any) -> Step:
    site = Site(FILE, line, "main") if line else None
    return Step("end", line, state=RankState(-1, phase, waits, site=site, **kw))


def finish() -> Step:
    return _end(Phase.FINISHED, exit_code=0)


def leave(code: int, line: int) -> Step:
    return _end(Phase.EXITED, line, exit_code=code)


def fail(exception: str, line: int) -> Step:
    return _end(Phase.RAISED, line, exception=exception)


def killed(signal: str = "SIGKILL") -> Step:
    return _end(Phase.KILLED, signal=signal)


def frozen(line: int = 0) -> Step:
    return _end(Phase.FROZEN, line)


def spin(line: int) -> Step:
    return _end(Phase.HOST_STUCK, line)


def run(line: int = 0) -> Step:
    return _end(Phase.RUNNING, line)


def absent() -> Step:
    return _end(Phase.ABSENT)


def host(what: str, line: int, on: tuple[int, ...] = ()) -> Step:
    return _end(Phase.BLOCKED, line, (HostWait(what, on),))


def store(key: str, line: int, purpose: str = "") -> Step:
    return _end(Phase.BLOCKED, line, (StoreWait((key,), purpose),))


Programs = Mapping[int, Sequence[Step]] | Callable[[int], Sequence[Step]]


class Play:
    """Plays programs out; see `play`."""

    def __init__(self, size: int, programs: Programs, silent: bool) -> None:
        self.size = size
        self.silent = silent
        self.everyone = world(size)
        self.steps = {r: list(programs(r) if callable(programs) else programs.get(r, ())) for r in range(size)}
        for steps in self.steps.values():
            if not steps or steps[-1].op != "end":
                steps.append(finish())
        self.at = dict.fromkeys(range(size), 0)
        self.records: dict[int, list[CallRecord]] = {r: [] for r in range(size)}
        self.states = {r: RankState(r) for r in range(size)}
        self.pending: dict[int, list[CallRecord]] = {r: [] for r in range(size)}
        self.issued: set[tuple[int, int]] = set()
        self.now = 0

    def issue(self, rank: int, step: Step) -> CallRecord:
        on = step.group or self.everyone
        p2p = step.op in P2P
        seq = 1 + sum(r.group == on and r.is_p2p == p2p for r in self.records[rank])
        site = Site(FILE, step.line, step.function, inside=step.inside)
        self.now += 1
        record = CallRecord(
            rank,
            on,
            seq,
            step.op,
            is_async=step.is_async,
            site=site,
            stack=(site, *step.callers),
            thread=step.thread,
            issued_s=self.now / 1000,
            index=len(self.records[rank]),
            **step.kwargs,
        )
        self.records[rank].append(record)
        return record

    def meet(self, record: CallRecord) -> bool:
        """Complete what can be; True when *record* is done."""
        if record.done:
            return True
        if record.is_p2p:
            return self.meet_pair(record)
        met = [
            r
            for rank in record.group.ranks
            for r in self.records[rank]
            if r.group == record.group and r.seq == record.seq and not r.is_p2p
        ]
        if len(met) < len(record.group.ranks) or len({r.op for r in met}) > 1:
            return False
        if not self.silent and check_meeting(met) is not None:
            return False
        earlier = [
            r for m in met for r in self.records[m.rank] if r.group == m.group and r.seq < m.seq and not r.is_p2p
        ]
        if not all(r.done or self.meet(r) for r in earlier):
            return False
        for r in met:
            r.state = State.COMPLETED
        return True

    def meet_pair(self, record: CallRecord) -> bool:
        wanted = "recv" if record.op == "send" else "send"
        sources = record.group.ranks if record.peer is None else (record.peer,)
        for rank in sources:
            for other in self.records[rank]:
                fits = other.op == wanted and other.peer in (record.rank, None) and other.tag == record.tag
                if fits and not other.done and other.group == record.group and other.rank != record.rank:
                    if other.input_shapes + other.output_shapes != record.input_shapes + record.output_shapes:
                        continue
                    other.state = record.state = State.COMPLETED
                    return True
        return False

    def advance(self, rank: int) -> bool:
        """One step of one rank; False when it can not move."""
        at = self.at[rank]
        if at >= len(self.steps[rank]):
            return False
        step = self.steps[rank][at]
        if step.state is not None:
            state = self.states[rank]
            end = step.state
            self.states[rank] = RankState(
                rank,
                end.phase,
                end.waits,
                end.site,
                since_s=self.now / 1000,
                exit_code=end.exit_code,
                signal=end.signal,
                exception=end.exception or state.exception,
            )
        elif step.op == "wait":
            for record in self.pending[rank]:
                record.waited = True
            left = [r for r in self.pending[rank] if not self.meet(r)]
            if left:
                self.states[rank] = RankState(rank, Phase.BLOCKED, tuple(CallWait(r) for r in left))
                return False
            self.pending[rank] = []
        else:
            fresh = (rank, at) not in self.issued
            record = self.issue(rank, step) if fresh else self.records[rank][-1]
            self.issued.add((rank, at))
            if step.is_async:
                self.pending[rank].append(record)
            elif not self.meet(record):
                self.states[rank] = RankState(rank, Phase.BLOCKED, (CallWait(record),), site=record.site)
                return fresh
        self.at[rank] += 1
        if step.state is None:
            self.states[rank] = RankState(rank)
        return True

    def evidence(self, **kw: Any) -> Evidence:
        while sum(self.advance(rank) for rank in range(self.size)):
            pass
        kw.setdefault("now_s", self.now / 1000 + 0.5)
        return Evidence(self.size, self.states, self.records, **kw)


def play(size: int, programs: Programs, *, silent: bool = False, **kw: Any) -> Evidence:
    """Run *programs* (rank -> steps) to where nothing moves any more. *silent*: calls that differ in
    more than their operation complete all the same, as real backends let many of them."""
    return Play(size, programs, silent).evidence(**kw)


def finding(kind: Any, *ranks: int, text: str = "something was seen", **kw: Any) -> Finding:
    return Finding(kind, ranks, text, **kw)
