"""A diagnosis as data and as JSON (`"schema": "distsim.report/1"`, key `diagnoses`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import Struct

from distsim.debug.records import Group, Site
from distsim.debug.records.kinds import INCONSISTENT, WARNINGS, Kind, Proof, ends
from distsim.text.codec import Number, Rank, Whole, convert, plain

SCHEMA = "distsim.report/1"
"""Grows by new keys only; a key that changes its meaning makes it `/2`."""


@dataclass(frozen=True, slots=True)
class Call:
    """The collective, send or receive that a diagnosis is about."""

    op: str
    """Operation, as torch.distributed names it."""
    seq: Whole
    """Number of the call in its group, from 1."""

    def __str__(self) -> str:
        return f"{self.op} #{self.seq}"


@dataclass(frozen=True, slots=True)
class Stuck:
    """Location at which one rank is blocked. A wait for a store or on the host has no group and no number."""

    op: str
    """Call in which the rank waits."""
    group_ranks: tuple[Rank, ...] = ()
    """Global ranks of the call's group."""
    seq: Whole | None = None
    """Number of the call in its group."""
    file: str | None = None
    """Source file of the call."""
    line: Whole | None = None
    """Line of the call."""
    group: str = ""
    """Label of the group, because several groups may have the same ranks; empty for a message."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A fault: its kind, the ranks at fault, the blocked ranks, and what to do next."""

    kind: Kind
    """Kind of the diagnosis (docs/kinds.md)."""
    culprits: tuple[Rank, ...]
    """Global ranks at fault: the minority, the missing rank, the rank that raised, or all ranks of a cycle."""
    victims: tuple[Rank, ...] = ()
    """Global ranks that are blocked because of the fault."""
    group: Group | None = None
    """Process group of the call."""
    call: Call | None = None
    """The call at fault; if ranks are missing, the call in which the others wait."""
    sites: Mapping[int, Site] = field(default_factory=dict)
    """Current source line of each rank."""
    stuck: Mapping[Rank, Stuck] = field(default_factory=dict)
    """Locations of the blocked ranks."""
    cycle: tuple[Rank, ...] | None = None
    """Ranks in a cycle: each waits for the next, and the last for the first."""
    pair: tuple[Rank, Rank] | None = None
    """Sender and receiver of a message."""
    detected_after_s: Number | None = None
    """Seconds from the fault to the diagnosis."""
    explanation: str = ""
    """Description of what happened, in sentences."""
    suggestion: str = ""
    """Advice on what to do next."""
    proof: Proof | None = None
    """Ground of the verdict; None if the job has ended or cannot move, so that everything is certain."""
    only_warns: bool = False
    """Whether it is a warning regardless of its kind (`Finding.warns`)."""
    causes: tuple[Site, ...] = ()
    """Further lines of the program that caused it."""
    pace: Mapping[str, float] = field(default_factory=dict)
    """What was measured of a slow rank: its rank, `excess_s` (seconds of each step that it works longer), `share` (of a
    step), `certainty` (standard errors), `window` and `at_step` (steps), `since_step`, `step_s`."""
    came_after_s: Number | None = None
    """Seconds for which the others had waited when a straggler came; None while it is late."""
    shown: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Further keys of its JSON, which show the evidence (`report.shown`); `source` has the text of each line."""

    @property
    def provisional(self) -> bool:
        """Return whether the job may still continue by itself; the diagnosis is withdrawn if it does."""
        return self.proof is Proof.NOT_YET

    @property
    def ends_job(self) -> bool:
        """Return whether there is proof that the job cannot continue, so that it may be ended."""
        return bool(self.exit_code) and ends(self.kind, self.proof, self.victims)

    @property
    def is_warning(self) -> bool:
        """Return whether the program may continue: no rank is blocked for good, and the calls are consistent."""
        if self.provisional or self.only_warns:
            return True
        return self.kind in WARNINGS and not (self.stuck and self.kind is Kind.ASYNC_NEVER_WAITED)

    @property
    def nobody_waits(self) -> bool:
        """Return whether no other rank waits for the reported ranks.

        They are blocked on their host, or in a call that all ranks have reached.
        """
        in_call = self.kind is Kind.NETWORK_FAULT and self.call is not None and self.provisional
        return (in_call or self.kind in (Kind.HOST_STUCK, Kind.NEVER_JOINED)) and not self.victims

    def adds_to(self, raised: Collection[int]) -> bool:
        """Return whether the diagnosis contains more than the exceptions of the ranks that *raised*."""
        if self.kind is Kind.STRAGGLER:
            return any(rank in raised for rank in self.stuck)
        if self.kind is Kind.RANK_RAISED and not self.victims:
            return not set(self.culprits) <= set(raised)
        return not self.is_warning

    @property
    def exit_code(self) -> int:
        """Return 0 for healthy or a warning, 1 if the program raised, 3 for a hang, 4 for inconsistent collectives."""
        if self.kind is Kind.HEALTHY or self.is_warning:
            return 0
        if self.kind in (Kind.RANK_RAISED, Kind.NAN, Kind.DDP_UNUSED_PARAMETER, Kind.JOB_ENDED):
            return 1
        if self.kind in (Kind.RANK_EXITED, Kind.RANK_KILLED) and not self.victims:
            return 1
        return 4 if self.kind in INCONSISTENT else 3

    @property
    def see(self) -> str:
        """Return the section of the documentation that explains the kind."""
        return f"docs/kinds.md#{self.kind.value}"

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON data. The schema is stable."""
        content: dict[str, Any] = plain(self)
        for name in ("proof", "only_warns", "causes", "shown"):
            del content[name]
        source = self.shown.get("source", {})
        content["sites"] = {str(rank): place_json(site, source) for rank, site in sorted(self.sites.items())}
        content["stuck"] = {
            str(rank): {name: value for name, value in content["stuck"][str(rank)].items() if value != ""}
            for rank in sorted(self.stuck)
        }
        content["see"] = self.see
        if self.provisional:
            content["provisional"] = True
        if self.only_warns:
            content["warning"] = True
        if not self.pace:
            del content["pace"]
        if self.causes:
            content["causes"] = [place_json(site, source) for site in self.causes]
        if self.came_after_s is None:
            del content["came_after_s"]
        return content | {name: value for name, value in self.shown.items() if name != "source"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Diagnosis:
        """Return the diagnosis that `to_json` wrote. Unknown keys are ignored.

        Raises:
            ValueError: *data* is not a diagnosis.
        """
        diagnosis = convert({**data, "sites": {}, "proof": None, "only_warns": False, "causes": (), "shown": {}}, cls)
        places = convert(data, _Places)
        return replace(
            diagnosis,
            sites={rank: _site(at) for rank, at in places.sites.items()},
            proof=Proof.NOT_YET if places.provisional else None,
            only_warns=places.warning,
            causes=tuple(map(_site, places.causes)),
        )


class _Place(Struct):
    """A site in a report."""

    file: str
    line: Whole
    function: str
    through: _Place | None = None


class _Places(Struct):
    """What a report writes in another form than a diagnosis has it."""

    sites: dict[Rank, _Place]
    provisional: bool = False
    warning: bool = False
    causes: tuple[_Place, ...] = ()


def place_json(site: Site, source: Mapping[str, str]) -> dict[str, Any]:
    """Return a line of the program as JSON data, with its text if *source* has it (by `file:line`)."""
    content: dict[str, Any] = {"file": site.file, "line": site.line, "function": site.function}
    if (text := source.get(str(site))) is not None:
        content["source"] = text
    return content if site.through is None else {**content, "through": place_json(site.through, source)}


def _site(at: _Place) -> Site:
    return Site(at.file, at.line, at.function, None if at.through is None else _site(at.through))


def diagnoses_to_json(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """Return `{"schema": ..., "diagnoses": [...]}` for `json.dumps`; the list is empty for a healthy run."""
    return {"schema": SCHEMA, "diagnoses": [d.to_json() for d in diagnoses]}


def diagnoses_from_json(report: Mapping[str, Any]) -> list[Diagnosis]:
    """Return the diagnoses of a report of this schema."""
    schema = report.get("schema")
    if schema != SCHEMA:
        got = repr(schema[:60]) if isinstance(schema, str) else type(schema).__name__
        raise ValueError(f"expected schema {SCHEMA!r}, got {got}")
    return [Diagnosis.from_json(d) for d in convert(report["diagnoses"], list[dict[str, Any]])]


def exit_code(diagnoses: Sequence[Diagnosis]) -> int:
    """Return the root cause's exit code; 0 if nothing but warnings is left."""
    return next((code for d in diagnoses if (code := d.exit_code)), 0)


def message_key(diagnosis: Diagnosis) -> tuple[object, ...] | None:
    """Return a key that two diagnoses of the same pair of lines share; None if *diagnosis* is not about a message."""
    if diagnosis.pair is None or diagnosis.kind not in (Kind.P2P_SIZE_MISMATCH, Kind.DTYPE_MISMATCH):
        return None
    return (diagnosis.kind, diagnosis.pair, *(diagnosis.sites.get(rank) for rank in diagnosis.pair))
