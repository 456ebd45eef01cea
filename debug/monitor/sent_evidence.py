"""One host's evidence as its monitor sends it, with each group and stack once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

from msgspec import Struct

from distsim.debug.records import CallRecord, CallWait, Evidence, Finding, Group, RankState, Site
from distsim.text.codec import Rank

Stack = tuple[Site, ...]
_DEFAULTS = {field.name: field.default for field in fields(CallRecord)}


class HostEvidence(Struct):
    """The part of `Evidence` that one host knows."""

    ranks: Mapping[Rank, RankState]
    records: Mapping[Rank, Sequence[CallRecord]]
    findings: Sequence[Finding]
    sources: Mapping[str, str]


class SentEvidence(Struct):
    """Evidence in which a group's name is its index in `groups`, and the line of a stack's frame that in `stacks`."""

    part: HostEvidence
    groups: Sequence[Group]
    stacks: Sequence[Stack]


def sent(evidence: Evidence) -> SentEvidence:
    """Return one host's evidence in the form that is sent."""
    groups: dict[Group, int] = {}
    stacks: dict[tuple[tuple[str, ...], ...], tuple[int, Stack]] = {}
    """Index of each stack, by its frames and their circumstances, which equal sites may not share."""

    def number(stack: Stack) -> int:
        key = tuple((*site.inside, str(site), site.function, str(site.through)) for site in stack)
        return stacks.setdefault(key, (len(stacks), tuple(stack)))[0]

    part = _exchanged(
        HostEvidence(evidence.ranks, evidence.records, evidence.findings, evidence.sources),
        lambda group: Group(str(groups.setdefault(group, len(groups))), "", ()),
        lambda stack: (Site("", number(stack), ""),),
    )
    sparse = {
        rank: [
            {n: value for n, default in _DEFAULTS.items() if (value := getattr(call, n)) != default} for call in calls
        ]
        for rank, calls in part.records.items()
    }
    part.records = cast("Any", sparse)  # few fields differ from their defaults
    return SentEvidence(part, list(groups), [stack for _, stack in stacks.values()])


def received(message: SentEvidence) -> HostEvidence:
    """Return the evidence of another host. Raises ValueError or IndexError for a group or stack that is not in it."""
    return _exchanged(
        message.part,
        lambda group: message.groups[int(group.name)],
        lambda stack: message.stacks[stack[0].line],
    )


def _exchanged(
    part: HostEvidence, group_of: Callable[[Group], Group], stack_of: Callable[[Stack], Stack]
) -> HostEvidence:
    """Return a copy with other groups and stacks, in which a call that several entries name is one object."""

    def copied(call: CallRecord) -> CallRecord:
        return replace(call, group=group_of(call.group), stack=stack_of(call.stack))

    records = {rank: [copied(call) for call in calls] for rank, calls in part.records.items()}
    known = {(rank, call.index): call for rank, calls in records.items() for call in calls}

    def same(call: CallRecord) -> CallRecord:
        return known.get((call.rank, call.index)) or copied(call)

    ranks = {
        rank: replace(
            state,
            stack=stack_of(state.stack),
            waits=tuple(CallWait(same(wait.record)) if isinstance(wait, CallWait) else wait for wait in state.waits),
        )
        for rank, state in part.ranks.items()
    }
    findings = [
        replace(
            finding,
            group=None if finding.group is None else group_of(finding.group),
            call=None if finding.call is None else same(finding.call),
        )
        for finding in part.findings
    ]
    return HostEvidence(ranks, records, findings, part.sources)
