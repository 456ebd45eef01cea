"""States, calls and findings as JSON, for monitors that talk to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distsim.debug.kinds import Kind
from distsim.debug.records import (
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

__all__ = ["evidence_from_json", "evidence_to_json"]

_PLAIN = (
    "seq",
    "op",
    "reduce_op",
    "root",
    "peer",
    "tag",
    "nbytes",
    "device",
    "is_async",
    "waited",
    "thread",
    "issued_s",
    "started_s",
    "completed_s",
    "error",
    "rejected",
    "index",
)
_STATE = (
    "since_s",
    "exit_code",
    "signal",
    "exception",
    "traceback",
    "host",
    "pid",
    "over",
    "silent_s",
    "reason",
    "at_large",
    "leaving",
)
_TUPLES = ("dtypes", "input_splits", "output_splits", "new_ranks")
_SHAPES = ("input_shapes", "output_shapes")


def evidence_to_json(evidence: Evidence) -> dict[str, Any]:
    """One host's part of the evidence; groups and stacks that repeat are written once."""
    groups: dict[Group, int] = {}
    stacks: dict[tuple[Site, ...], int] = {}
    said: dict[str, Any] = {
        "states": [_state(state, stacks) for state in evidence.ranks.values()],
        "records": {
            str(rank): [_record(call, groups, stacks) for call in calls] for rank, calls in evidence.records.items()
        },
        "findings": [_finding(finding) for finding in evidence.findings],
        "sources": dict(evidence.sources),
    }
    said["groups"] = [[group.name, group.description, list(group.ranks)] for group in groups]
    said["stacks"] = [[site.to_json() for site in stack] for stack in stacks]
    return said


def _state(state: RankState, stacks: dict[tuple[Site, ...], int]) -> dict[str, Any]:
    return {
        "rank": state.rank,
        "phase": state.phase.value,
        "waits": [_wait(wait) for wait in state.waits],
        "site": _site(state.site),
        "stack": stacks.setdefault(tuple(state.stack), len(stacks)),
        **{name: getattr(state, name) for name in _STATE},
    }


def _wait(wait: Wait) -> dict[str, Any]:
    if isinstance(wait, CallWait):
        return {"call": wait.record.index}
    if isinstance(wait, StoreWait):
        return {"keys": list(wait.keys), "purpose": wait.purpose}
    return {"what": wait.what, "on_ranks": list(wait.on_ranks)}


def _site(site: Site | None) -> list[Any] | None:
    return None if site is None else site.to_json()


def _record(call: CallRecord, groups: dict[Group, int], stacks: dict[tuple[Site, ...], int]) -> list[Any]:
    said: dict[str, Any] = {"group": groups.setdefault(call.group, len(groups)), "state": call.state.value}
    said["stack"] = stacks.setdefault(tuple(call.stack), len(stacks))
    for name in (*_PLAIN, *_TUPLES, *_SHAPES):
        value = getattr(call, name)
        if value not in (None, (), 0, False):
            said[name] = value
    return [said]


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind.value,
        "ranks": list(finding.ranks),
        "text": finding.text,
        "call": [finding.call.rank, finding.call.index] if finding.call is not None else None,
        "site": _site(finding.site),
        "suggestion": finding.suggestion,
        "at_s": finding.at_s,
        "guess": finding.guess,
    }


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
    states = {}
    for entry in said["states"]:
        rank = int(entry["rank"])
        by_index = {call.index: call for call in records.get(rank, ())}
        states[rank] = RankState(
            rank=rank,
            phase=Phase(entry["phase"]),
            waits=tuple(w for wait in entry["waits"] if (w := _read_wait(wait, by_index)) is not None),
            site=_read_site(entry["site"]),
            stack=stacks[entry["stack"]],
            **{name: entry[name] for name in _STATE},
        )
    findings = []
    for entry in said["findings"]:
        call = None
        if entry["call"] is not None:
            rank, index = entry["call"]
            call = next((c for c in records.get(rank, ()) if c.index == index), None)
        findings.append(
            Finding(
                Kind(entry["kind"]),
                tuple(entry["ranks"]),
                entry["text"],
                group=call.group if call is not None else None,
                call=call,
                site=_read_site(entry["site"]),
                suggestion=entry["suggestion"],
                at_s=entry["at_s"],
                guess=bool(entry["guess"]),
            )
        )
    return states, records, findings, dict(said["sources"])


def _read_wait(said: dict[str, Any], records: dict[int, CallRecord]) -> Wait | None:
    if "call" in said:
        record = records.get(said["call"])
        return None if record is None else CallWait(record)
    if "keys" in said:
        return StoreWait(tuple(said["keys"]), said["purpose"])
    return HostWait(said["what"], tuple(said["on_ranks"]))


def _read_site(said: list[Any] | None) -> Site | None:
    return None if said is None else Site.from_json(said)


def _read_record(
    rank: int, said: dict[str, Any], groups: Sequence[Group], stacks: Sequence[tuple[Site, ...]]
) -> CallRecord:
    stack = stacks[said["stack"]]
    given: dict[str, Any] = {name: said[name] for name in _PLAIN if name in said}
    given.update({name: tuple(said[name]) for name in _TUPLES if name in said})
    given.update({name: tuple(tuple(shape) for shape in said[name]) for name in _SHAPES if name in said})
    return CallRecord(
        rank=rank,
        group=groups[said["group"]],
        state=State(said["state"]),
        site=stack[0] if stack else None,
        stack=stack,
        **given,
    )
