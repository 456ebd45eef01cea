"""A world under diagnosis: evidence, contradictions, wait-for graph; and a cause of a diagnosis with its two sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distsim.debug.diagnosis.waits.wait_graph import WaitGraph
from distsim.debug.divergence.divergence import Divergence
from distsim.debug.matching.agreement import Mismatch
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.matching.secondary_errors import timed_out
from distsim.debug.messages import are, call_text, capital, group_text, numbered, ranks_text, site_text, state_text
from distsim.debug.records import CallRecord, CallWait, Group, HostWait, Phase, Site, StoreWait
from distsim.debug.records.call import SERVE
from distsim.debug.records.diagnosis import Call, Diagnosis, Stuck
from distsim.debug.records.kinds import Kind


@dataclass(slots=True)
class Case:
    """Data from which causes, cycles and mismatches are read."""

    index: EvidenceIndex
    graph: WaitGraph
    divergences: Sequence[Divergence]
    pairs: Sequence[tuple[Mismatch, CallRecord, CallRecord]]
    """Matched sends and receives that disagree."""

    def site(self, rank: int) -> Site | None:
        """Return the user's line where a rank is: in the call that it waits in, else its own position, else its last
        call.
        """
        calls = self.index.call_waits(rank)
        if calls and calls[0].site is not None:
            return calls[0].site
        state = self.index.states[rank]
        if state.site is not None:
            return state.site
        last = self.index.last(rank)
        return last.site if last is not None and state.phase is not Phase.RUNNING else None

    def sites(self, ranks: Iterable[int]) -> dict[int, Site]:
        return {rank: site for rank in sorted(set(ranks)) if (site := self.site(rank)) is not None}

    def stuck(self, ranks: Iterable[int]) -> dict[int, Stuck]:
        """Return the positions at which blocked ranks of *ranks* are blocked."""
        return {rank: at for rank in sorted(set(ranks)) if (at := self._stuck(rank)) is not None}

    def _stuck(self, rank: int) -> Stuck | None:
        site = self.site(rank)
        file, line = (site.file, site.line) if site else (None, None)
        calls = self.index.call_waits(rank)
        if calls:
            call = calls[0]
            return Stuck(call.op, call.group.ranks, call.seq, file, line, "" if call.is_of_two else call.group.label)
        if self.index.states[rank].phase is not Phase.BLOCKED:
            return None
        for wait in self.index.waits(rank):
            if isinstance(wait, StoreWait):
                return Stuck("store wait", (), None, file, line)
            if isinstance(wait, HostWait):
                return Stuck(wait.what, (), None, file, line)
        return Stuck("unknown", (), None, file, line)

    def any_raised(self, ranks: Iterable[int]) -> bool:
        """Return whether an exception has ended one of *ranks*."""
        states = self.index.states
        return any(states[rank].phase is Phase.RAISED for rank in ranks if rank in states)

    def unknown(self, rank: int) -> bool:
        """Return whether the rank left no record and no end, so that it may be anywhere."""
        evidence = self.index.evidence
        unrecorded = rank in evidence.unrecorded or rank in self.index.strangers
        return unrecorded and self.index.states[rank].phase is Phase.RUNNING

    def is_over(self, rank: int) -> bool:
        """Return whether the program of a rank has ended, even if its process still exists."""
        state = self.index.states[rank]
        return state.phase is Phase.FINISHED or state.over or (state.phase is Phase.RUNNING and state.leaving)

    def where(self, rank: int) -> str:
        """Return the position of a rank as the rest of a sentence."""
        state = self.index.states[rank]
        if self.unknown(rank):
            return "left no record"
        text = state_text(state, self.index.waits(rank), self.index.last(rank))
        age_s = self.age_s(state.since_s)
        if state.phase in (Phase.FROZEN, Phase.HOST_STUCK, Phase.RUNNING) and age_s is not None and age_s >= 0.1:
            text += f", for {age_s:.1f} s"
        if state.phase in (Phase.HOST_STUCK, Phase.RUNNING) and state.silent_s is not None:
            text += f"; none of its Python threads has run for {state.silent_s:.1f} s: one call holds the GIL"
        if state.reason is not None:
            text += f"; {state.reason}"
        return text

    def age_s(self, since_s: float | None) -> float | None:
        return None if since_s is None else max(0.0, self.index.evidence.now_s - since_s)

    def diagnosis(
        self,
        kind: Kind,
        culprits: Iterable[int],
        victims: Iterable[int],
        *,
        call: CallRecord | None,
        explanation: str,
        suggestion: str,
        since_s: float | None = None,
        group: Group | None = None,
        cycle: tuple[int, ...] | None = None,
        pair: tuple[int, int] | None = None,
        sites: dict[int, Site] | None = None,
    ) -> Diagnosis:
        """Fill in what follows from the ranks and the call: sites, stuck, group, age (*since_s*: of another moment)."""
        guilty = tuple(sorted(set(culprits)))
        others = tuple(sorted(set(victims) - set(guilty)))
        everyone = (*guilty, *others)
        if since_s is None and call is not None:
            since_s = call.issued_s
        return Diagnosis(
            kind=kind,
            culprits=guilty,
            victims=others,
            group=group or (call.group if call is not None else None),
            call=None if call is None else Call(call.op, call.seq),
            sites={**self.sites(everyone), **(sites or {})},
            stuck=self.stuck(everyone),
            cycle=cycle,
            pair=pair,
            detected_after_s=self.age_s(since_s),
            explanation=explanation,
            suggestion=suggestion,
        )

    def store_text(self, ranks: Iterable[int]) -> str:
        """Return a sentence about the address at which *ranks* wait for others to join; empty if it is not known."""
        addresses = {self.index.states[rank].meets_at for rank in ranks}
        return (
            f" The store of their rendezvous is at {addresses.pop()}." if len(addresses) == 1 and all(addresses) else ""
        )

    def first_wait(self, ranks: Iterable[int]) -> CallRecord | None:
        """Return the collective in which *ranks* first waited, or the lowest rank's message if there are only
        messages.

        Whether a message or a collective came first, and which message, differs from run to run.
        """
        waits = [need.wait for _, need in self.graph.waiters_on(tuple(ranks))]
        calls = [wait.record for wait in waits if isinstance(wait, CallWait) and wait.record.op != SERVE]
        collectives = [call for call in calls if not call.is_of_two]
        if collectives:
            return min(collectives, key=lambda c: (c.issued_s, c.rank))
        return min(calls, key=lambda c: (c.rank, c.index), default=None)

    def waiting(self, call: CallRecord | None, ranks: Sequence[int], victims: Sequence[int]) -> str:
        """Return the sentence about those who wait for *ranks*: all of *victims* that are in *call*."""
        if call is None:
            if not victims:
                return self._nobody_waits(ranks)
            return f"{capital(ranks_text(victims))} {are(victims, 'waits', 'wait')} for {are(ranks, 'it', 'them')}."
        inside = [
            rank
            for rank in victims
            for own in self.index.call_waits(rank)
            if (own.op, own.seq, own.group) == (call.op, call.seq, call.group)
        ]
        if call.is_of_two or not inside:
            return f"Rank {call.rank} waits in {call_text(call)} at {site_text(call.site)}."
        over = all(self.index.states[rank].phase is Phase.RAISED for rank in inside)
        verb = "waited" if over else are(inside, "waits", "wait")
        gave_up = over and any(timed_out(self.index.states[rank].exception) for rank in inside)
        return (
            f"{capital(ranks_text(inside))} {verb} in {numbered(call)} "
            f"on {group_text(call.group)}, at {site_text(call.site)}"
            f"{', until the timeout of torch raised an exception there' if gave_up else ''}."
        )

    def _nobody_waits(self, ranks: Sequence[int]) -> str:
        """Return a sentence about the other ranks if none of them waits for *ranks*."""
        others = self.index.states.keys() - set(ranks)
        all_known = len(self.index.states) >= self.index.evidence.world_size
        if others and all_known and all(self.index.states[rank].phase is Phase.RAISED for rank in others):
            return f"Every other rank has raised{', too' if self.any_raised(ranks) else ''}."
        if others or not all_known:
            return f"No other rank waits for {are(ranks, 'it', 'them')}."
        return "That is every rank." if len(ranks) > 1 else ""


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of a diagnosis."""

    suggestion: str
    """The cure, in the first words: a report shows it in lines of 80 columns."""
    says: str = ""
    """A sentence of evidence for the explanation."""
    lines: tuple[Site, ...] = ()
    """Lines of the program that the report shows."""
    leads: bool = False
    """Whether it explains the fault, so that *says* comes first, before where the ranks are."""
    kind: Kind | None = None
    """The kind that it makes of the diagnosis; None: the same."""
    culprits: tuple[int, ...] = ()
    """The ranks at fault, if they are others; empty: the same."""
    sites: Mapping[int, Site] = field(default_factory=dict)
    """Lines of ranks at which the cause is, where they stand elsewhere."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Frames of the culprits and of the other ranks, innermost first; empty for a rank that has ended."""

    culprits: tuple[Site, ...]
    others: tuple[Site, ...]
    op: str
    """Operation in which the other ranks wait."""
    culprit_lines: frozenset[tuple[str, int]] = frozenset()
    """File and line of the frames of all that the first culprit has called, and below of the other rank."""
    other_lines: frozenset[tuple[str, int]] = frozenset()
    before: tuple[Site, ...] = ()
    """Frames of the call that both sides made just before; empty if they came from different ones."""


def sides_of(case: Case, d: Diagnosis) -> Sides:
    """Return the frames of the first culprit, and those of another rank.

    A line that the culprit has called before is preferred, because two ranks may reach a call by different loops.
    """
    calls = met_calls(case, d)
    culprit = d.culprits[0]
    ways = {record.way for record in case.index.records(culprit)}
    rest = [r for r in calls if r not in d.culprits]
    other = next((r for r in rest if calls[r].way in ways), next(iter(rest), None))
    if other is None:
        other = next((r for r in (*d.victims, *sorted(case.index.states)) if r not in d.culprits), None)
    own, reference = _frames(case, culprit, calls), _frames(case, other, calls)
    lines = _lines(case, culprit), _lines(case, other)
    return Sides(own, reference, "" if d.call is None else d.call.op, *lines, _before(case, d, culprit, other))


def meeting_of(case: Case, d: Diagnosis, back: int = 0) -> Mapping[int, CallRecord]:
    """Return the calls of all ranks of the group with the diagnosed number, or *back* numbers before it."""
    log = next((log for log in case.index.group_logs if log.group == d.group), None)
    return {} if log is None or d.call is None else log.meetings.get(d.call.seq - back, {})


def _before(case: Case, d: Diagnosis, *ranks: int | None) -> tuple[Site, ...]:
    met = meeting_of(case, d, back=1)
    ways = {met[rank].way if rank in met else () for rank in ranks if rank is not None}
    return ways.pop() if len(ways) == 1 else ()


def _lines(case: Case, rank: int | None) -> frozenset[tuple[str, int]]:
    ways = set() if rank is None else {record.way for record in case.index.records(rank)}
    return frozenset((frame.file, frame.line) for way in ways for frame in way)


def met_calls(case: Case, d: Diagnosis) -> dict[int, CallRecord]:
    """Return the calls of all ranks with the diagnosed number, by rank."""
    if d.call is None or d.group is None:
        return {}
    for log in case.index.group_logs:
        met = log.meetings.get(d.call.seq)
        if met and log.group == d.group and any(call.op == d.call.op for call in met.values()):
            return met
    return {}


def _frames(case: Case, rank: int | None, calls: dict[int, CallRecord]) -> tuple[Site, ...]:
    if rank is None:
        return ()
    if rank in calls:
        return calls[rank].way
    state = case.index.states[rank]
    if state.phase is Phase.FINISHED or state.over or state.leaving:
        return ()
    return state.stack or (() if state.site is None else (state.site,))
