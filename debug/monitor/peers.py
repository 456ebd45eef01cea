"""A monitor's part in a job of several hosts: alone at first, then leading or following."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from msgspec import Meta, Struct

from distsim.debug.evidence.guard_flags import merged
from distsim.debug.matching.comparer import GroupKey, Suspicion
from distsim.debug.monitor.host import Host
from distsim.debug.monitor.protocol import Follower, Leader, Look, Message, Rows, Status
from distsim.debug.monitor.sent_calls import HostClock, SentCalls
from distsim.debug.monitor.sent_evidence import received, sent
from distsim.debug.monitor.straggler_watch import PaceWatch
from distsim.debug.records import Evidence, Finding
from distsim.debug.records.kinds import Kind
from distsim.debug.rings.files import Process
from distsim.text.codec import read
from distsim.text.ranks import format_ranks

T = TypeVar("T")
Word = Annotated[str, Meta(pattern=r"^[^\0]+\Z")]
MEETING_S = 8.0
"""Seconds that monitors have to find each other before one that is alone judges by itself."""
LAST_WORD_S = 3.0
MOST_ROWS = 4096
"""Largest number of row blocks that are kept for a leader that has not connected yet."""


class LeadingMonitor(Protocol):
    """Interface of the monitor to which this part belongs."""

    host: Host
    pace: PaceWatch

    def look_here(
        self, stacks: bool, focus: dict[GroupKey, int], origin: int, *, ours_only: bool = False
    ) -> Evidence: ...

    def accept(self, report: dict[str, Any]) -> None: ...


class Lead(Struct):
    """What a rank leaves for the monitor that leads."""

    addresses: Sequence[str]
    secret: Word
    salt: Word


class Follow(Struct):
    """What a rank leaves for a monitor that follows."""

    address: Word
    port: Annotated[int, Meta(ge=1, le=65535)]
    secret: Word


class PeerSession:
    """One monitor's part in the exchange. Does nothing where all ranks are on one host."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.leader: Leader | None = None
        self.follower: Follower | None = None
        self.outbox: list[tuple[int, GroupKey, Rows]] = []
        self._cannot_lead = False
        self._beat = 0.0
        self.abort_asked = False
        self._began = time.monotonic()
        self._met = False
        self._over_since: float | None = None

    # Every turn of the loop -----------------------------------------------------------------------

    def step(self, monitor: LeadingMonitor) -> None:
        """Find the part to play, then play it."""
        if not monitor.host.joined():
            self._began = time.monotonic()
        if self.leader is None and self.follower is None:
            self._choose(monitor)
        if self.leader is not None:
            self._lead(monitor, self.leader)
        elif self.follower is not None:
            self._follow(monitor, self.follower)
        elif len(self.outbox) > MOST_ROWS:
            del self.outbox[: len(self.outbox) - MOST_ROWS]

    def _choose(self, monitor: LeadingMonitor) -> None:
        lead, follow = self._left("lead.json", Lead), self._left("follow.json", Follow)
        if lead is not None and not self._cannot_lead:
            try:
                self.leader = Leader(
                    self._directory, lead.addresses, lead.secret, lead.salt, monitor.host.feed, monitor.host.notes
                )
            except OSError as error:
                self._cannot_lead = True
                monitor.host.notes.append(f"the monitors of this job's hosts cannot connect: {error}")
                return
            for row in self.outbox:
                monitor.host.feed(*row)
            self.outbox.clear()
        elif follow is not None:
            self.follower = Follower(
                follow.address, follow.port, follow.secret, socket.gethostname(), monitor.host.notes
            )

    def _left(self, name: str, kind: type[T]) -> T | None:
        """Return the note that a rank left for this monitor; None if there is none, or if it is incomplete."""
        try:
            return read(self._directory / name, kind)
        except (OSError, ValueError):
            return None

    def _lead(self, monitor: LeadingMonitor, leader: Leader) -> None:
        leader.step()
        if time.monotonic() - self._beat > 0.5:
            self._beat = time.monotonic()
            leader.tell(Message(beat=True))
            leader.compare_clocks()

    def _follow(self, monitor: LeadingMonitor, follower: Follower) -> None:
        def answer(request: Look) -> Message:
            monitor.host.use(request.numbering)
            if request.calls_since is not None:
                return Message(calls=monitor.pace.send([*monitor.host.readers.values()], request.calls_since))
            return Message(
                evidence=sent(monitor.look_here(request.stacks, request.focus, request.origin, ours_only=True))
            )

        status = self._status(monitor)
        if status.over:
            monitor.host.read(self.route)  # what ranks did just before they ended goes out before this is said
        for message in follower.step(status, self.outbox, answer):
            if message.verdict is not None:
                try:
                    monitor.accept(message.verdict)
                except ValueError as error:
                    monitor.host.notes.append(f"the verdict of the monitor on rank 0's host is invalid ({error!r})")
            self.abort_asked |= message.abort
            follower.left |= message.bye

    def _status(self, monitor: LeadingMonitor) -> Status:
        host = monitor.host
        ended = host.ended()
        return Status(
            host.processes(),
            host.counts(),
            host.oldest_wait_s(),
            host.quiet_s(),
            host.gone(),
            host.flagged(),
            bool(ended) and all(ended.values()),
        )

    # What the rest of the monitor asks -------------------------------------------------------------------

    def judges(self, host: Host) -> bool:
        """Return whether this monitor gives verdicts.

        The monitor of a job on one host does, a leader that hears all hosts, and one that has been alone for too
        long.
        """
        if host.local_world >= host.world_size:
            return True
        if self.leader is not None:
            return self._complete(host) or time.monotonic() - self._began > MEETING_S
        if self.follower is not None:
            if self.follower.connected:
                self._met = True
            return not (self.follower.connected or self.follower.left) and (self._met or self._alone())
        return self._alone() or not host.joined()

    def _alone(self) -> bool:
        return time.monotonic() - self._began > MEETING_S

    def _complete(self, host: Host) -> bool:
        assert self.leader is not None
        here = {process.key for process in host.processes()}
        there = {process.key for link in self.leader.links if link.known for process in link.processes}
        ranks = {number for key, number in host.numbering.numbers.items() if key in here or key in there}
        return ranks >= set(range(host.world_size))

    def processes(self) -> list[Process]:
        """Return processes of the other hosts."""
        if self.leader is None:
            return []
        return [p for link in self.leader.links if link.known for p in link.processes]

    def route(self, rank: int, key: GroupKey, rows: Rows, here: set[int]) -> bool:
        """Take rows of a group with members elsewhere; return False if they are to be compared here."""
        if self.leader is not None or all(member in here for member in key[1]):
            return False
        self.outbox.append((rank, key, rows))
        return True

    def suspected(self) -> list[Suspicion]:
        """Return new suspicions of the comparers of other hosts."""
        if self.leader is None:
            return []
        result, self.leader.suspected = self.leader.suspected, []
        return result

    def hears_suspicions(self) -> bool:
        """Return whether a leader is connected that receives this host's suspicions."""
        return self.follower is not None and self.follower.connected

    @property
    def has_leader(self) -> bool:
        """Return whether the monitor of another host gives the verdicts, or gave them until it ended."""
        return self.follower is not None and (self.follower.connected or self.follower.left)

    def suspect(self, suspicions: Sequence[Suspicion]) -> None:
        """Pass suspicions to the leader, if this monitor is a follower."""
        if self.follower is not None:
            for suspicion in suspicions:
                self.follower.suspect(suspicion)

    def remote(self) -> list[Status]:
        """Return the latest status of every other host."""
        return [] if self.leader is None else [link.status for link in self.leader.links if link.known]

    def calls(self, host: Host, since: Mapping[int, int]) -> list[tuple[SentCalls, HostClock | None]]:
        """Return the calls of the ranks of other hosts from numbers *since* on, and the clock of each host."""
        if self.leader is None:
            return []
        answers = self.leader.look(Look(host.numbering, False, 0, {}, calls_since=since))
        return [(message.calls, link.clock) for link, message in answers if message.calls is not None]

    def add(self, evidence: Evidence, host: Host, stacks: bool, focus: dict[GroupKey, int], origin: int) -> None:
        """Add the evidence of the other hosts to this one's."""
        if self.leader is None:
            self._without_leader(evidence)
            return
        sought = {**dict(host.comparer.progress()), **focus}
        request = Look(host.numbering, stacks, origin, sought)
        records = dict(evidence.records)
        states = dict(evidence.ranks)
        findings = list(evidence.findings)
        texts = dict(evidence.sources)
        for _, answer in self.leader.look(request):
            if answer.evidence is None:
                continue
            try:
                there = received(answer.evidence)
            except (ValueError, IndexError) as error:
                host.notes.append(f"a host sent an invalid state of its ranks, which is ignored ({error!r})")
                continue
            states.update({rank: state for rank, state in there.ranks.items() if rank not in host.readers})
            records.update(there.records)
            findings += there.findings
            texts = {**there.sources, **texts}
        evidence.ranks, evidence.records, evidence.sources = states, records, texts
        evidence.findings = [*self._cut_off(host), *merged(findings)]

    def _cut_off(self, host: Host) -> list[Finding]:
        assert self.leader is not None
        numbers = host.numbering.numbers
        lost = [
            (link, tuple(sorted(numbers[p.key] for p in link.processes if p.key in numbers)))
            for link in self.leader.lost
        ]
        return [
            Finding(
                Kind.NETWORK_FAULT,
                ranks,
                f"nothing was heard from host {link.host} (ranks {format_ranks(ranks)}) "
                f"for {link.silent_s:.1f} s: "
                "its network is cut, or it is down",
                suggestion=f"Look at host {link.host}: is it up, does it answer a ping, what does its NIC report?",
            )
            for link, ranks in lost
            if ranks
        ]

    def _without_leader(self, evidence: Evidence) -> None:
        follower = self.follower
        if follower is None or follower.connected or follower.left or not self._met:
            return
        here = {rank for rank, state in evidence.ranks.items() if state.host is not None}
        elsewhere = tuple(sorted(set(range(evidence.world_size)) - here))
        evidence.findings = [
            Finding(
                Kind.NETWORK_FAULT,
                elsewhere,
                f"the monitor beside rank 0 does not answer host {socket.gethostname()} "
                f"(ranks {format_ranks(here)}): the network between them is cut, or its host is down",
                suggestion=f"Look at the network of {socket.gethostname()} and of rank 0's host: "
                "a ping, the NIC, the switch.",
            ),
            *evidence.findings,
        ]

    def tell(self, report: dict[str, Any]) -> None:
        """Send a verdict to the launchers of the other hosts."""
        if self.leader is not None:
            self.leader.tell(Message(verdict=report))

    def abort(self) -> None:
        """End the ranks of the other hosts, too."""
        if self.leader is not None:
            self.leader.tell(Message(abort=True))

    def goodbye(self) -> None:
        """Leave, because the ranks of this monitor have ended."""
        if self.leader is not None:
            self.leader.tell(Message(bye=True))
            time.sleep(0.05)
        if self.follower is not None and self.follower.link is not None and self.follower.link.open:
            self.follower.send_rows(self.outbox)
            self.follower.link.send(Message(status=Status(self.follower.processes, over=True)))
            time.sleep(0.05)
        for end in (self.leader, self.follower):
            if end is not None:
                end.close()
        # After a restart other monitors are to meet in this folder, and not to look for these.
        used = ("lead.json", "monitor.json") if self.leader is not None else ("follow.json",)
        for name in used if self.leader is not None or self.follower is not None else ():
            with contextlib.suppress(OSError):
                (self._directory / name).unlink()

    def waits_for_others(self, host: Host) -> bool:
        """Return whether this monitor has to stay although its ranks have ended.

        A leader stays while other hosts' ranks run, because no other monitor sees all ranks. A follower stays for
        the leader's last message. If the job was over before they met, all stay until they have, for a limited time.
        """
        if host.local_world >= host.world_size or not host.joined():
            return False
        now = time.monotonic()
        self._over_since = self._over_since or now
        in_time = now - self._over_since < LAST_WORD_S
        if self.leader is not None:
            running = any(link.open and link.known and not link.status.over for link in self.leader.links)
            return running or (not self._complete(host) and not self._alone() and in_time)
        if self.follower is not None and (self.follower.connected or self._met):
            return self.follower.connected and not self.follower.left and in_time
        return not self._alone() and in_time
