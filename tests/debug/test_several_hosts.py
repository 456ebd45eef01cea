"""What monitors of several hosts find together is told, however late they meet and however soon one leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.debug.matching.comparer import Suspicion
from distsim.debug.monitor import peers, protocol
from distsim.debug.monitor.loop import Monitor
from distsim.debug.records.kinds import Kind
from distsim.debug.records.signature import Signature
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import ring_path
from distsim.debug.rings.writer import RingWriter
from distsim.debug.settings import Settings

WORLD = 4
SECRET = "a secret of this job"


class Host:
    """One rank's ring, and the monitor of its host."""

    def __init__(self, folder: Path, rank: int, level: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.rank = rank
        path = ring_path(folder, rank, 0, "job")
        self.ring = RingWriter(path, rank=rank, world_size=WORLD, local_rank=0, job="job", attempt=0)
        self.ring.header(rings.W_LOCAL_WORLD, 1)
        self.ring.header(rings.W_JOINED, 1)
        self.group = self.ring.group("0", "default_pg", range(WORLD))
        self.monitor = Monitor(folder, Settings.read({"level": level, "on_hang": "report"}, {}), None)
        self.numbers: dict[str, int] = {}

    def call(self, op: str, peer: int = -1, size: int = 4, line: int = 1) -> None:
        """A call that has ended; *peer* where it is a message of so many floats."""
        number = self.numbers[op] = self.numbers.get(op, 0) + 1
        said = Signature(op, ((size,),), dtypes=("float32",), nbytes=4 * size)
        signature, print_ = self.ring.signature((op, size), lambda key: (said, False))
        flags = rings.COMPLETED | (rings.P2P_CALL if peer >= 0 else 0)
        site = self.ring.entry(rings.TABLE_SITE, line, [["train.py", line, "main"]])
        index = self.ring.issue(flags, self.group, 0, number, signature, site, print_, line, peer, 0, number)
        self.ring.finish(index, rings.COMPLETED)

    def leads(self) -> None:
        """What rank 0 leaves for its monitor."""
        said = {"addresses": ["127.0.0.1"], "secret": SECRET, "salt": "salt"}
        (self.folder / "lead.json").write_text(json.dumps(said))

    def follows(self, leader: Host) -> None:
        """What the first rank of another host leaves, once the leader listens."""
        said = json.loads((leader.folder / "monitor.json").read_text())
        said = {"address": said["address"], "port": said["port"], "secret": SECRET}
        (self.folder / "follow.json").write_text(json.dumps(said))


class Job:
    """The hosts of a job of a rank each."""

    def __init__(self, folder: Path, level: str = "check") -> None:
        self.hosts = [Host(folder / f"host{rank}", rank, level) for rank in range(WORLD)]
        self.leader = self.hosts[0].monitor
        self.in_time = True
        """The other hosts answer while the leader waits for it."""

    def turns(self, *hosts: int) -> None:
        """One turn of each monitor, of all unless said."""
        for rank in hosts or range(WORLD):
            self.hosts[rank].monitor._turn()

    def until(self, condition: Callable[[], Any], *hosts: int) -> bool:
        """Turn until something is so; bounded, so that a fault fails the test."""
        deadline = time.monotonic() + 10
        while not condition() and time.monotonic() < deadline:
            self.turns(*hosts)
        return bool(condition())

    def meet(self, *followers: int) -> None:
        """These hosts' monitors know the leader, and it knows them."""
        for rank in followers:
            self.hosts[rank].follows(self.hosts[0])
        there = lambda: {rank for link in self.links for rank in (p.rank for p in link.processes)} >= set(followers)  # noqa: E731
        assert self.until(there, 0, *followers)

    @property
    def links(self) -> list[Any]:
        assert self.leader.together.leader is not None
        return self.leader.together.leader.links

    def answer(self, _: float) -> None:
        """The other hosts do their part while the leader waits for their answers."""
        for host in self.hosts[1:] if self.in_time else ():
            host.monitor.together.step(host.monitor)

    @property
    def found(self) -> list[Any]:
        """What the leader says that is wrong with the calls."""
        return [diagnosis for diagnosis in self.leader.report.diagnoses if diagnosis.exit_code == 4]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Job]:
    """Whose naps are short."""
    for name in ("BUSY_POLL_S", "QUIET_POLL_S"):
        monkeypatch.setattr(f"distsim.debug.monitor.loop.{name}", 0.001)
    monkeypatch.setattr(protocol, "SPEAK_S", 0.0)
    made = Job(tmp_path, getattr(request, "param", "check"))
    clocks = {"monotonic": time.monotonic, "monotonic_ns": time.monotonic_ns}
    monkeypatch.setattr(protocol, "time", SimpleNamespace(sleep=made.answer, **clocks))
    made.hosts[0].leads()
    made.turns(0)
    yield made
    for host in made.hosts:
        for end in (host.monitor.together.leader, host.monitor.together.follower):
            if end is not None:
                end.close()
        host.ring.close()


def a_message_of_another_size(job: Job) -> None:
    """From rank 1 to rank 2, neither of them on the leader's host."""
    job.hosts[1].call("send", 2, 4, line=10)
    job.hosts[2].call("recv", 1, 8, line=11)


@pytest.mark.parametrize("job", ["check", "strict"], indirect=True)
def test_a_message_between_hosts_before_all_have_met_is_told(job: Job) -> None:
    """The leader judges when it hears all hosts; what its comparer found before that is not forgotten. At level strict
    the ranks compare what is on their host only: this is the monitors' to tell, too."""
    job.meet(1, 2)
    a_message_of_another_size(job)
    assert job.until(lambda: job.leader.host.comparer.messages.compared, 0, 1, 2)
    assert not job.found, "it hears three hosts of four"
    job.meet(3)
    assert job.until(lambda: job.found)
    assert [(d.kind, d.pair) for d in job.found] == [(Kind.P2P_SIZE_MISMATCH, (1, 2))]
    assert job.leader.report.exit_code == 4


def test_rows_that_come_in_while_the_leader_asks_twice_are_compared(job: Job) -> None:
    """It asks its hosts for evidence again before it compares what came in beside the first answers."""
    job.meet(1, 2, 3)
    a_message_of_another_size(job)
    job.turns(1, 2)
    job.leader.look()
    job.leader.look()
    assert job.until(lambda: job.found)


def test_what_other_hosts_suspect_while_the_leader_asks_is_looked_at(job: Job) -> None:
    """A follower's own comparer finds something, and says it beside its answer to a look."""
    job.meet(1, 2, 3)
    one = Suspicion(("0", (3,), 0), 7, False)
    job.hosts[3].monitor.together.suspect([one])
    job.leader.look()
    assert job.leader.together.suspected() == [one]


def test_a_host_that_answers_late_is_asked_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its ranks' records the two ends of a message cannot be held against each other yet."""
    job.meet(1, 2, 3)
    a_message_of_another_size(job)
    job.in_time = False
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "LOOK_S", 0.0)
        assert job.until(lambda: job.leader.host.comparer.messages.compared)
        job.turns()
        assert not job.found
    job.in_time = True
    assert job.until(lambda: job.found)
    assert [d.pair for d in job.found] == [(1, 2)]


def test_the_last_calls_of_a_host_go_out_before_its_word_that_it_is_over(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks make their last calls, and end, between its look at their rings and its look at their processes: the
    leader, which leaves when all are over, has them by then."""
    job.meet(1, 2, 3)
    monitor = job.hosts[2].monitor
    job.hosts[1].call("send", 2, 4)
    assert job.until(lambda: job.leader.host.comparer.messages._waiting)

    def ended() -> dict[int, bool]:
        if not job.hosts[2].numbers:
            job.hosts[2].call("recv", 1, 8)
        return {2: True}

    monkeypatch.setattr(monitor.host, "ended", ended)
    over = lambda: any(link.status.over for link in job.links)  # noqa: E731
    assert job.until(over, 0, 2)
    assert job.leader.host.comparer.messages.compared == 1


def test_a_follower_that_leaves_has_sent_its_last_rows(job: Job) -> None:
    """Its goodbye comes after what it has read in its last moment."""
    job.meet(1, 2, 3)
    a_message_of_another_size(job)
    for rank in (1, 2):
        job.hosts[rank].monitor._farewell()
    assert job.until(lambda: job.leader.host.comparer.messages.compared, 0)


def test_a_job_that_is_over_before_its_monitors_have_met_is_waited_for(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They meet within moments: until then neither the leader nor a host leaves, and not for longer than that."""
    for host in job.hosts:
        monkeypatch.setattr(host.monitor.host, "ended", lambda host=host: {host.rank: True})
        (host.folder / "done.json").write_text("{}")
    a_message_of_another_size(job)
    for rank in range(WORLD):
        assert not job.hosts[rank].monitor._turn()
    job.meet(1, 2, 3)
    job.until(lambda: job.leader._turn(), 1, 2, 3)
    job.leader._farewell()
    assert job.leader.report.exit_code == 4
    monkeypatch.setattr(peers, "LAST_WORD_S", 0.0)
    assert not job.hosts[1].monitor.together.waits_for_others(job.hosts[1].monitor.host)
