"""A diagnosis as data and as JSON (`"schema": "distsim.report/1"`, key `diagnoses`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.debug.records import Group, Site
from distsim.debug.records.kinds import INCONSISTENT, WARNINGS, Kind, Proof, ends
from distsim.text.untrusted_input import MOST_RANKS, number, text, whole, wholes

__all__ = [
    "SCHEMA",
    "Call",
    "Diagnosis",
    "Stuck",
    "diagnoses_from_json",
    "diagnoses_to_json",
    "exit_code",
    "message_key",
]

SCHEMA = "distsim.report/1"
"""Grows by new keys only; a key that changes its meaning makes it `/2`."""


@dataclass(frozen=True, slots=True)
class Call:
    """The collective, send or receive that a diagnosis is about."""

    op: str
    """Operation, as torch.distributed names it."""
    seq: int
    """Number of the call in its group, from 1."""

    def __str__(self) -> str:
        return f"{self.op} #{self.seq}"


@dataclass(frozen=True, slots=True)
class Stuck:
    """Location at which one rank is blocked. A wait for a store or on the host has no group and no number."""

    op: str
    """Call in which the rank waits."""
    group_ranks: tuple[int, ...] = ()
    """Global ranks of the call's group."""
    seq: int | None = None
    """Number of the call in its group."""
    file: str | None = None
    """Source file of the call."""
    line: int | None = None
    """Line of the call."""
    group: str = ""
    """Label of the group, because several groups may have the same ranks; empty for a message."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A fault: its kind, the ranks at fault, the blocked ranks, and what to do next."""

    kind: Kind
    """Kind of the diagnosis (docs/kinds.md)."""
    culprits: tuple[int, ...]
    """Global ranks at fault: the minority, the missing rank, the rank that raised, or all ranks of a cycle."""
    victims: tuple[int, ...] = ()
    """Global ranks that are blocked because of the fault."""
    group: Group | None = None
    """Process group of the call."""
    call: Call | None = None
    """The call at fault; if ranks are missing, the call in which the others wait."""
    sites: Mapping[int, Site] = field(default_factory=dict)
    """Current source line of each rank."""
    stuck: Mapping[int, Stuck] = field(default_factory=dict)
    """Locations of the blocked ranks."""
    cycle: tuple[int, ...] | None = None
    """Ranks in a cycle: each waits for the next, and the last for the first."""
    pair: tuple[int, int] | None = None
    """Sender and receiver of a message."""
    detected_after_s: float | None = None
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
        if self.kind in (Kind.RANK_RAISED, Kind.NAN, Kind.DDP_UNUSED_PARAMETER):
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
        lists: dict[int, list[int]] = {}  # big groups are shared by all their stuck ranks

        def ranks(of: tuple[int, ...]) -> list[int]:
            if id(of) not in lists:
                lists[id(of)] = list(of)
            return lists[id(of)]

        group = self.group
        return {
            "kind": self.kind.value,
            "culprits": list(self.culprits),
            "victims": list(self.victims),
            "group": None
            if group is None
            else {"name": group.name, "description": group.description, "ranks": list(group.ranks)},
            "call": None if self.call is None else {"op": self.call.op, "seq": self.call.seq},
            "sites": {str(rank): _whole_place(site) for rank, site in sorted(self.sites.items())},
            "stuck": {
                str(rank): {
                    "op": at.op,
                    "group_ranks": ranks(at.group_ranks),
                    "seq": at.seq,
                    "file": at.file,
                    "line": at.line,
                }
                | ({"group": at.group} if at.group else {})
                for rank, at in sorted(self.stuck.items())
            },
            "cycle": None if self.cycle is None else list(self.cycle),
            "pair": None if self.pair is None else list(self.pair),
            "detected_after_s": self.detected_after_s,
            "explanation": self.explanation,
            "suggestion": self.suggestion,
            "see": self.see,
            **({"provisional": True} if self.provisional else {}),
            **({"warning": True} if self.only_warns else {}),
            **({"causes": [_whole_place(site) for site in self.causes]} if self.causes else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Diagnosis:
        """Return the diagnosis that `to_json` wrote. Unknown keys are ignored.

        Raises:
            ValueError: *data* is not a diagnosis. Also KeyError, TypeError or AttributeError.
        """
        group, call, pair = data.get("group"), data.get("call"), data.get("pair")
        cycle, after = data.get("cycle"), data.get("detected_after_s")
        return cls(
            kind=Kind(text(data["kind"], "kind")),
            culprits=_ranks(data["culprits"], "culprits"),
            victims=_ranks(data["victims"], "victims"),
            group=None
            if group is None
            else Group(
                text(group["name"], "group.name"),
                text(group["description"], "group.description"),
                _ranks(group["ranks"], "group.ranks"),
            ),
            call=None if call is None else Call(text(call["op"], "call.op"), whole(call["seq"], "call.seq")),
            sites={_rank(r): _site(s) for r, s in data["sites"].items()},
            stuck={_rank(r): _stuck(s) for r, s in data["stuck"].items()},
            cycle=None if cycle is None else _ranks(cycle, "cycle"),
            pair=None if pair is None else _pair(pair),
            detected_after_s=None if after is None else number(after, "detected_after_s"),
            explanation=text(data.get("explanation", ""), "explanation", LONGEST),
            suggestion=text(data.get("suggestion", ""), "suggestion", LONGEST),
            proof=Proof.NOT_YET if data.get("provisional") else None,
            only_warns=data.get("warning") is True,
            causes=tuple(map(_site, data.get("causes", ()))),
        )


LONGEST = 1 << 16
"""Maximum number of characters in an explanation."""


def _rank(value: object) -> int:
    return whole(value, "a rank", 0, MOST_RANKS - 1)


def _ranks(value: object, where: str) -> tuple[int, ...]:
    return wholes(value, where, 0, MOST_RANKS - 1)


def _pair(value: object) -> tuple[int, int]:
    sender, receiver = _ranks(value, "pair")
    return sender, receiver


def _place(site: Site) -> dict[str, Any]:
    return {"file": site.file, "line": site.line, "function": site.function}


def _whole_place(site: Site) -> dict[str, Any]:
    return _place(site) | ({} if site.through is None else {"through": _place(site.through)})


def _site(content: Mapping[str, Any]) -> Site:
    file, line, function = (
        text(content["file"], "file"),
        whole(content["line"], "line"),
        text(content["function"], "function"),
    )
    below = content.get("through")
    through = None if below is None else _site({**below, "through": None})
    return Site(file, line, function, through)


def _stuck(content: Mapping[str, Any]) -> Stuck:
    seq, file, line = content["seq"], content["file"], content["line"]
    return Stuck(
        text(content["op"], "op"),
        _ranks(content["group_ranks"], "group_ranks"),
        None if seq is None else whole(seq, "seq"),
        None if file is None else text(file, "file"),
        None if line is None else whole(line, "line"),
        text(content.get("group", ""), "group"),
    )


def diagnoses_to_json(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """Return `{"schema": ..., "diagnoses": [...]}` for `json.dumps`; the list is empty for a healthy run."""
    return {"schema": SCHEMA, "diagnoses": [d.to_json() for d in diagnoses]}


def diagnoses_from_json(report: Mapping[str, Any]) -> list[Diagnosis]:
    """Return the diagnoses of a report of this schema."""
    schema = report.get("schema")
    if schema != SCHEMA:
        got = repr(schema[:60]) if isinstance(schema, str) else type(schema).__name__
        raise ValueError(f"expected schema {SCHEMA!r}, got {got}")
    return [Diagnosis.from_json(d) for d in report["diagnoses"]]


def exit_code(diagnoses: Sequence[Diagnosis]) -> int:
    """Return the root cause's exit code; 0 if nothing but warnings is left."""
    return next((code for d in diagnoses if (code := d.exit_code)), 0)


def message_key(diagnosis: Diagnosis) -> tuple[object, ...] | None:
    """Return a key that two diagnoses of the same pair of lines share; None if *diagnosis* is not about a message."""
    if diagnosis.pair is None or diagnosis.kind not in (Kind.P2P_SIZE_MISMATCH, Kind.DTYPE_MISMATCH):
        return None
    return (diagnosis.kind, diagnosis.pair, *(diagnosis.sites.get(rank) for rank in diagnosis.pair))
