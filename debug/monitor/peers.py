"""A monitor's part in a job of several hosts: alone at first, then leading or following.

Monitors exchange states, calls and findings as JSON.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Protocol

from distsim.debug.evidence.guard_flags import merged
from distsim.debug.evidence.processes import Numbering
from distsim.debug.matching.comparer import GroupKey, Suspicion
from distsim.debug.monitor.host import Host
from distsim.debug.monitor.protocol import Follower, Leader, Rows
from distsim.debug.records import (
    CallRecord,
    CallWait,
    Caught,
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
from distsim.debug.records.call import Remote
from distsim.debug.records.kinds import Kind
from distsim.debug.rings.files import Process
from distsim.text.ranks import format_ranks
from distsim.text.untrusted_input import load_json, read_bytes, whole

__all__ = ["PeerSession", "evidence_from_json", "evidence_to_json"]

MEETING_S = 8.0
"""Seconds that monitors have to find each other before one that is alone judges by itself."""
LAST_WORD_S = 3.0
MOST_ROWS = 4096
"""Largest number of row blocks that are kept for a leader that has not connected yet."""
_CALL = {f.name: f for f in fields(CallRecord) if f.name not in ("rank", "group", "site", "stack", "remote")}
"""Fields of a call that are sent unchanged; those with their default, which are most, are left out."""
_STATE = [f.name for f in fields(RankState) if f.name not in ("rank", "phase", "waits", "site", "stack", "caught")]
_FINDING = [f.name for f in fields(Finding) if f.name not in ("kind", "ranks", "group", "call", "site")]


class LeadingMonitor(Protocol):
    """Interface of the monitor to which this part belongs."""

    host: Host

    def look_here(
        self, stacks: bool, focus: dict[GroupKey, int], origin: int, *, ours_only: bool = False
    ) -> Evidence: ...

    def accept(self, report: dict[str, Any]) -> None: ...


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
        if (self._directory / "lead.json").exists():
            lead = self._said("lead.json")
            if lead is None or self._cannot_lead:
                return
            try:
                self.leader = Leader(self._directory, lead["addresses"], lead["secret"], lead["salt"])
            except OSError as error:
                self._cannot_lead = True
                monitor.host.notes.append(f"the monitors of this job's hosts cannot connect: {error}")
                return
            for rank, key, rows in self.outbox:
                monitor.host.comparer.feed_rows(rank, key, rows)
            self.outbox.clear()
        elif (self._directory / "follow.json").exists():
            lead = self._said("follow.json")
            if lead is not None:
                self.follower = Follower(lead["address"], int(lead["port"]), lead["secret"], socket.gethostname())

    def _said(self, name: str) -> dict[str, Any] | None:
        """Return the note that a rank left for this monitor; None if it is incomplete."""
        try:
            content = load_json(read_bytes(self._directory / name, 1 << 16))
            keys = ("addresses", "salt") if name == "lead.json" else ("address", "port")
            words = [content[key] for key in ("secret", "address", "salt") if key == "secret" or key in keys]
            words += content["addresses"] if name == "lead.json" else []
            if not all(isinstance(word, str) and word for word in words) or "\0" in "".join(words):
                return None
            if name == "follow.json":
                whole(content["port"], "port", 1, 65535)
            return dict(content)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _lead(self, monitor: LeadingMonitor, leader: Leader) -> None:
        leader.step(monitor.host.comparer.feed_rows)
        monitor.host.notes += leader.notes
        leader.notes.clear()
        if time.monotonic() - self._beat > 0.5:
            self._beat = time.monotonic()
            leader.tell({"beat": 1})

    def _follow(self, monitor: LeadingMonitor, follower: Follower) -> None:
        def answer(request: dict[str, Any]) -> Any:
            focus = {(n, tuple(r), int(g)): int(seq) for (n, r, g), seq in request["focus"]}
            monitor.host.use(Numbering.from_json(request["numbering"]))
            evidence = monitor.look_here(bool(request["stacks"]), focus, int(request["origin"]), ours_only=True)
            return evidence_to_json(evidence)

        status = self._status(monitor)
        if status["over"]:
            monitor.host.read(self.route)  # what ranks did just before they ended goes out before this is said
        for message in follower.step(status, self.outbox, answer):
            if "verdict" in message:
                try:
                    monitor.accept(message["verdict"])
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    follower.notes.append(f"the verdict of the monitor on rank 0's host is invalid ({error!r})")
            if "abort" in message:
                self.abort_asked = True
            if "bye" in message:
                follower.lost_since = None
                follower.left = True
        monitor.host.notes += follower.notes
        follower.notes.clear()

    def _status(self, monitor: LeadingMonitor) -> dict[str, Any]:
        host = monitor.host
        ended = host.ended()
        return {
            "processes": [process.to_json() for process in host.processes()],
            "counts": list(host.counts()),
            "oldest_wait_s": host.oldest_wait_s(),
            "quiet_s": host.quiet_s(),
            "ended": int(host.gone()),
            "flagged": host.flagged(),
            "over": bool(ended) and all(ended.values()),
        }

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

    def remote(self, name: str) -> list[Any]:
        """Return the latest status of every other host."""
        if self.leader is None:
            return []
        return [link.status[name] for link in self.leader.links if name in link.status]

    def add(self, evidence: Evidence, host: Host, stacks: bool, focus: dict[GroupKey, int], origin: int) -> None:
        """Add the evidence of the other hosts to this one's."""
        if self.leader is None:
            self._without_leader(evidence)
            return
        sought = {**dict(host.comparer.progress()), **focus}
        request = {
            "numbering": host.numbering.to_json(),
            "stacks": stacks,
            "origin": origin,
            "focus": [[list(key), seq] for key, seq in sought.items()],
        }
        records = dict(evidence.records)
        states = dict(evidence.ranks)
        findings = list(evidence.findings)
        texts = dict(evidence.sources)
        for answer in self.leader.look(request):
            try:
                more_states, more_records, more_found, sources = evidence_from_json(answer)
            except Exception as error:
                self.leader.notes.append(f"a host sent an invalid state of its ranks, which is ignored ({error!r})")
                continue
            states.update({rank: state for rank, state in more_states.items() if rank not in host.readers})
            records.update(more_records)
            findings += more_found
            texts = {**sources, **texts}
        evidence.ranks, evidence.records, evidence.sources = states, records, texts
        evidence.findings = [*self._cut_off(host), *merged(findings)]

    def held(self) -> list[tuple[int, GroupKey, Rows]]:
        """Return rows that came in while the leader waited for answers."""
        if self.leader is None:
            return []
        rows, self.leader.held = self.leader.held, []
        return rows

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
            self.leader.tell({"verdict": report})

    def abort(self) -> None:
        """End the ranks of the other hosts, too."""
        if self.leader is not None:
            self.leader.tell({"abort": 1})

    def goodbye(self) -> None:
        """Leave, because the ranks of this monitor have ended."""
        if self.leader is not None:
            self.leader.tell({"bye": 1})
            time.sleep(0.05)
        if self.follower is not None and self.follower.link is not None and self.follower.link.open:
            self.follower.send_rows(self.outbox)
            self.follower.link.send({"status": {"over": True, "ended": 0, "processes": self.follower.processes}})
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
            running = any(link.open and link.known and not link.status.get("over") for link in self.leader.links)
            return running or (not self._complete(host) and not self._alone() and in_time)
        if self.follower is not None and (self.follower.connected or self._met):
            return self.follower.connected and not self.follower.left and in_time
        return not self._alone() and in_time


def evidence_to_json(evidence: Evidence) -> dict[str, Any]:
    """Return one host's part of the evidence; groups, stacks and calls that repeat are written once."""
    writer = _Writer(evidence)
    result: dict[str, Any] = {
        "states": [writer.state(state) for state in evidence.ranks.values()],
        "records": {str(rank): [[writer.record(call)] for call in calls] for rank, calls in evidence.records.items()},
        "findings": [writer.finding(finding) for finding in evidence.findings],
        "sources": dict(evidence.sources),
    }
    result["groups"] = [[group.name, group.description, list(group.ranks)] for group in writer.groups]
    result["stacks"] = [[site.to_json() for site in stack] for stack in writer.stacks]
    return result


class _Writer:
    def __init__(self, evidence: Evidence) -> None:
        self.groups: dict[Group, int] = {}
        self.stacks: dict[tuple[Site, ...], int] = {}
        self._written = {(rank, call.index) for rank, calls in evidence.records.items() for call in calls}

    def state(self, state: RankState) -> dict[str, Any]:
        return {
            "rank": state.rank,
            "phase": state.phase.value,
            "waits": [self._wait(wait) for wait in state.waits],
            "site": _site(state.site),
            "stack": self._stack(state.stack),
            "caught": [[one.error, one.site.to_json(), one.times, one.calls, one.thread] for one in state.caught],
            **{name: getattr(state, name) for name in _STATE},
        }

    def record(self, call: CallRecord) -> dict[str, Any]:
        result: dict[str, Any] = {"group": self._group(call.group), "stack": self._stack(call.stack)}
        if call.site != next(iter(call.stack), None):
            result["site"] = _site(call.site)
        for name, field in _CALL.items():
            value = getattr(call, name)
            if field.default is MISSING or value != field.default:
                result[name] = value
        if call.remote is not None:
            result["remote"] = call.remote.to_json()
        return result

    def finding(self, finding: Finding) -> dict[str, Any]:
        return {
            "kind": finding.kind.value,
            "ranks": list(finding.ranks),
            "group": None if finding.group is None else self._group(finding.group),
            "call": None if finding.call is None else self._call(finding.call),
            "site": _site(finding.site),
            **{name: getattr(finding, name) for name in _FINDING},
        }

    def _wait(self, wait: Wait) -> dict[str, Any]:
        if isinstance(wait, CallWait):
            return {"call": self._call(wait.record)}
        if isinstance(wait, StoreWait):
            return {"keys": list(wait.keys), "purpose": wait.purpose}
        return {"what": wait.what, "on_ranks": list(wait.on_ranks)}

    def _call(self, call: CallRecord) -> list[Any]:
        """Return a call that is among the records by its number, another one whole."""
        where = [call.rank, call.index]
        return where if tuple(where) in self._written else [*where, self.record(call)]

    def _group(self, group: Group) -> int:
        return self.groups.setdefault(group, len(self.groups))

    def _stack(self, stack: Sequence[Site]) -> int:
        return self.stacks.setdefault(tuple(stack), len(self.stacks))


def _site(site: Site | None) -> list[Any] | None:
    return None if site is None else site.to_json()


def evidence_from_json(
    content: dict[str, Any],
) -> tuple[dict[int, RankState], dict[int, Sequence[CallRecord]], list[Finding], dict[str, str]]:
    """Return states, calls, findings and sources of another host."""
    groups = [Group(name, description, tuple(ranks)) for name, description, ranks in content["groups"]]
    stacks = [tuple(Site.from_json(frame) for frame in stack) for stack in content["stacks"]]
    records: dict[int, Sequence[CallRecord]] = {
        int(rank): [_read_record(int(rank), call[0], groups, stacks) for call in calls]
        for rank, calls in content["records"].items()
    }
    by_number = {(rank, call.index): call for rank, calls in records.items() for call in calls}

    def read_call(where: Sequence[Any]) -> CallRecord:
        rank, index, *whole = where
        return _read_record(rank, whole[0], groups, stacks) if whole else by_number[rank, index]

    states = {}
    for entry in content["states"]:
        rank = int(entry["rank"])
        states[rank] = RankState(
            rank=rank,
            phase=Phase(entry["phase"]),
            waits=tuple(_read_wait(wait, read_call) for wait in entry["waits"]),
            site=_read_site(entry["site"]),
            stack=stacks[entry["stack"]],
            caught=tuple(Caught(error, Site.from_json(site), *counts) for error, site, *counts in entry["caught"]),
            **{name: entry[name] for name in _STATE},
        )
    findings = [
        Finding(
            kind=Kind(entry["kind"]),
            ranks=tuple(entry["ranks"]),
            group=None if entry["group"] is None else groups[entry["group"]],
            call=None if entry["call"] is None else read_call(entry["call"]),
            site=_read_site(entry["site"]),
            **{name: entry[name] for name in _FINDING},
        )
        for entry in content["findings"]
    ]
    return states, records, findings, dict(content["sources"])


def _read_wait(content: dict[str, Any], read_call: Callable[[Sequence[Any]], CallRecord]) -> Wait:
    if "call" in content:
        return CallWait(read_call(content["call"]))
    if "keys" in content:
        return StoreWait(tuple(content["keys"]), content["purpose"])
    return HostWait(content["what"], tuple(content["on_ranks"]))


def _read_site(content: list[Any] | None) -> Site | None:
    return None if content is None else Site.from_json(content)


def _read_record(
    rank: int, content: dict[str, Any], groups: Sequence[Group], stacks: Sequence[tuple[Site, ...]]
) -> CallRecord:
    stack = stacks[content["stack"]]
    given = {name: _tuples(content[name]) for name in _CALL if name in content}
    return CallRecord(
        **{**given, "state": State(content["state"]) if "state" in content else State.ISSUED},
        rank=rank,
        group=groups[content["group"]],
        site=_read_site(content["site"]) if "site" in content else next(iter(stack), None),
        stack=stack,
        remote=Remote.from_json(content["remote"]) if "remote" in content else None,
    )


def _tuples(value: Any) -> Any:
    """Convert lists to tuples, which calls have and JSON does not."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
