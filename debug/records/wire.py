"""States, calls and findings as JSON, for monitors that talk to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any

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
from distsim.debug.records.kinds import Kind
from distsim.debug.records.remote import Remote

__all__ = ["evidence_from_json", "evidence_to_json"]

_CALL = {f.name: f for f in fields(CallRecord) if f.name not in ("rank", "group", "site", "stack", "remote")}
"""Fields of a call that are said as they are; most have their default, and are left out then."""
_STATE = [f.name for f in fields(RankState) if f.name not in ("rank", "phase", "waits", "site", "stack", "caught")]
_FINDING = [f.name for f in fields(Finding) if f.name not in ("kind", "ranks", "group", "call", "site")]


def evidence_to_json(evidence: Evidence) -> dict[str, Any]:
    """One host's part of the evidence; groups, stacks and calls that repeat are written once."""
    writer = _Writer(evidence)
    said: dict[str, Any] = {
        "states": [writer.state(state) for state in evidence.ranks.values()],
        "records": {str(rank): [[writer.record(call)] for call in calls] for rank, calls in evidence.records.items()},
        "findings": [writer.finding(finding) for finding in evidence.findings],
        "sources": dict(evidence.sources),
    }
    said["groups"] = [[group.name, group.description, list(group.ranks)] for group in writer.groups]
    said["stacks"] = [[site.to_json() for site in stack] for stack in writer.stacks]
    return said


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
            "caught": [[one.error, one.site.to_json(), one.times, one.calls] for one in state.caught],
            **{name: getattr(state, name) for name in _STATE},
        }

    def record(self, call: CallRecord) -> dict[str, Any]:
        said: dict[str, Any] = {"group": self._group(call.group), "stack": self._stack(call.stack)}
        if call.site != next(iter(call.stack), None):
            said["site"] = _site(call.site)
        for name, field in _CALL.items():
            value = getattr(call, name)
            if field.default is MISSING or value != field.default:
                said[name] = value
        if call.remote is not None:
            said["remote"] = call.remote.to_json()
        return said

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
        """A call that is among the records by its number, another one whole."""
        where = [call.rank, call.index]
        return where if tuple(where) in self._written else [*where, self.record(call)]

    def _group(self, group: Group) -> int:
        return self.groups.setdefault(group, len(self.groups))

    def _stack(self, stack: Sequence[Site]) -> int:
        return self.stacks.setdefault(tuple(stack), len(self.stacks))


def _site(site: Site | None) -> list[Any] | None:
    return None if site is None else site.to_json()


def evidence_from_json(
    said: dict[str, Any],
) -> tuple[dict[int, RankState], dict[int, Sequence[CallRecord]], list[Finding], dict[str, str]]:
    """States, calls, findings and sources of another host."""
    groups = [Group(name, description, tuple(ranks)) for name, description, ranks in said["groups"]]
    stacks = [tuple(Site.from_json(frame) for frame in stack) for stack in said["stacks"]]
    records: dict[int, Sequence[CallRecord]] = {
        int(rank): [_read_record(int(rank), call[0], groups, stacks) for call in calls]
        for rank, calls in said["records"].items()
    }
    by_number = {(rank, call.index): call for rank, calls in records.items() for call in calls}

    def read_call(where: Sequence[Any]) -> CallRecord:
        rank, index, *whole = where
        return _read_record(rank, whole[0], groups, stacks) if whole else by_number[rank, index]

    states = {}
    for entry in said["states"]:
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
        for entry in said["findings"]
    ]
    return states, records, findings, dict(said["sources"])


def _read_wait(said: dict[str, Any], read_call: Callable[[Sequence[Any]], CallRecord]) -> Wait:
    if "call" in said:
        return CallWait(read_call(said["call"]))
    if "keys" in said:
        return StoreWait(tuple(said["keys"]), said["purpose"])
    return HostWait(said["what"], tuple(said["on_ranks"]))


def _read_site(said: list[Any] | None) -> Site | None:
    return None if said is None else Site.from_json(said)


def _read_record(
    rank: int, said: dict[str, Any], groups: Sequence[Group], stacks: Sequence[tuple[Site, ...]]
) -> CallRecord:
    stack = stacks[said["stack"]]
    given = {name: _tuples(said[name]) for name in _CALL if name in said}
    return CallRecord(
        **{**given, "state": State(said["state"]) if "state" in said else State.ISSUED},
        rank=rank,
        group=groups[said["group"]],
        site=_read_site(said["site"]) if "site" in said else next(iter(stack), None),
        stack=stack,
        remote=Remote.from_json(said["remote"]) if "remote" in said else None,
    )


def _tuples(value: Any) -> Any:
    """JSON has no tuples, and a call no lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
