"""Merges the findings of guards with the diagnoses from records, and ranks them, root cause first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distsim.debug.diagnosis.context import Case
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.matching.secondary_errors import aftermath
from distsim.debug.messages import advice, call_text, site_text, some_ranks_text
from distsim.debug.records import Finding
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.frames import Owner, owner
from distsim.debug.records.kinds import INCONSISTENT, Kind

SYMPTOMS = frozenset(
    {
        Kind.MISSING_RANK,
        Kind.HOST_STUCK,
        Kind.NEVER_JOINED,
        Kind.UNEVEN_ITERATIONS,
        Kind.STRAGGLER,
        Kind.P2P_UNMATCHED,
        Kind.OP_MISMATCH,
        Kind.SHAPE_MISMATCH,
        Kind.EXTRA_COLLECTIVE,
        Kind.RANK_RAISED,
    }
)
"""Kinds that a finding about the same ranks explains."""

EXPLAINING = frozenset(
    {
        Kind.DDP_UNUSED_PARAMETER,
        Kind.NETWORK_FAULT,
        Kind.THREAD_RACE,
        Kind.PROCESS_FROZEN,
        Kind.HOST_STUCK,
        Kind.RANK_KILLED,
        Kind.NEVER_JOINED,
        Kind.RANK_EXITED,
    }
)


def merge_findings(case: Case, diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Merge findings into *diagnoses*: a finding that explains a hang takes over its victims; the others are added."""
    left = list(diagnoses)
    merged: list[Diagnosis] = []
    for finding in case.index.evidence.findings:
        effect = next((d for d in left if finding.kind in EXPLAINING and _explains(finding, d)), None)
        if effect is not None:
            left.remove(effect)
        same = next((d for d in left if d.kind is finding.kind and set(d.culprits) & set(finding.ranks)), None)
        if same is not None and effect is None:
            left.remove(same)
            effect = same
        if effect is None and finding.guess:
            continue
        merged.append(_from_finding(case, finding, effect))
    return [*merged, *left]


def _explains(finding: Finding, diagnosis: Diagnosis) -> bool:
    if finding.kind is Kind.THREAD_RACE:  # whose calls came in the other order is not its doing alone
        kinds = SYMPTOMS | INCONSISTENT | {Kind.DEADLOCK_CYCLE}
        return diagnosis.kind in kinds and finding.group == diagnosis.group and diagnosis.pair is None
    return diagnosis.kind in SYMPTOMS and bool(set(finding.ranks) & set(diagnosis.culprits))


def _from_finding(case: Case, finding: Finding, effect: Diagnosis | None) -> Diagnosis:
    call = finding.call
    site = finding.site or (call.site if call is not None else None)
    text = finding.text[0].upper() + finding.text[1:] + ("" if finding.text.endswith(".") else ".")
    here = case.sites(finding.ranks)  # of an executor's thread, no line of the program is known
    is_of_library = site is not None and owner(site.file) is not Owner.USER
    if finding.kind is Kind.THREAD_RACE and effect is not None and effect.call is not None and call is not None:
        # One number in one report: that of the calls that met, which need not be the one that was seen to race.
        text = (
            f"Thread {call.thread} of rank {call.rank} called {call.op} at {site_text(site)} while another thread was "
        )
        text += "inside a call on the same group: which comes first differs from run to run and from rank to rank."
    base = case.diagnosis(
        finding.kind,
        finding.ranks,
        effect.victims if effect is not None else _waiting_in(case, finding),
        call=call,
        group=finding.group,
        explanation=f"{text} {_consequence(effect, finding)}".strip(),
        suggestion=finding.suggestion
        or advice(finding.kind, who=some_ranks_text(finding.ranks), mine=site_text(site), other=site_text(site)),
        since_s=finding.at_s,
        sites={} if site is None else dict.fromkeys(finding.ranks, site) | (here if is_of_library else {}),
    )
    if call is not None and call.site is not None and call.site != site:
        base = replace(base, causes=(call.site,))
    if effect is None:
        return replace(base, only_warns=finding.warns, pace=finding.pace)
    return replace(
        base,
        group=base.group or effect.group,
        call=(finding.kind is Kind.THREAD_RACE and effect.call) or base.call or effect.call,
        sites={**effect.sites, **base.sites},
        stuck={**effect.stuck, **base.stuck},
        cycle=effect.cycle,
        pair=effect.pair,
        detected_after_s=base.detected_after_s if base.detected_after_s is not None else effect.detected_after_s,
        proof=effect.proof,
    )


def _waiting_in(case: Case, finding: Finding) -> list[int]:
    """Return the ranks that a fault of the network or of a GPU blocks: those that wait with its ranks in a call that
    all members have reached.
    """
    if finding.kind not in (Kind.NETWORK_FAULT, Kind.DEVICE_MISMATCH):
        return []
    hit = set(finding.ranks)
    return [
        rank
        for rank in case.index.states
        if any(hit & set(call.members) for call in case.index.call_waits(rank)) and rank not in hit
    ]


def _consequence(effect: Diagnosis | None, finding: Finding) -> str:
    if finding.kind is Kind.THREAD_RACE and effect is not None:
        return f"After that, ranks made calls that do not fit: {effect.explanation[0].lower()}{effect.explanation[1:]}"
    if effect is not None and effect.call is not None and effect.victims:
        return f"The others wait for it in {effect.call}" + (
            f" on group {effect.group.label}." if effect.group else "."
        )
    if finding.call is not None and not finding.pace:
        call = finding.call
        if finding.kind is Kind.THREAD_RACE:
            return f"The call is at {site_text(call.site)}."
        return f"It was in {call_text(call)} on group {call.group.label}, at {site_text(call.site)}."
    return ""


def order(index: EvidenceIndex, diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Sort diagnoses: errors before warnings, and facts before guesses about unrecorded ranks.

    A fault comes before the exceptions that only report a lost peer. Then what happened first, then what affects most
    ranks.
    """
    unrecorded = index.evidence.unrecorded

    def key(d: Diagnosis) -> tuple[bool, bool, bool, float, int, tuple[int, ...]]:
        age = d.detected_after_s if d.detected_after_s is not None else -1.0
        guessed = bool(d.culprits) and unrecorded.issuperset(d.culprits)
        lost = d.kind is Kind.RANK_RAISED and all(aftermath(index.states[rank].exception) for rank in d.culprits)
        return (d.is_warning, guessed, lost, -age, -len(d.victims), d.culprits)

    return sorted(diagnoses, key=key)
