"""One diagnosis, as data and as JSON (`"schema": "distsim.report/1"`, key `diagnoses`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from distsim.debug.kinds import INCONSISTENT, WARNINGS, Kind
from distsim.debug.records import Group, Site

__all__ = ["Call", "Diagnosis", "Stuck"]


@dataclass(frozen=True, slots=True)
class Call:
    """The collective (or send / recv) a diagnosis is about: its operation and number in its group."""

    op: str
    seq: int

    def __str__(self) -> str:
        return f"{self.op} #{self.seq}"


@dataclass(frozen=True, slots=True)
class Stuck:
    """Where one rank cannot go on. Waits on a store or on the host have no group and no number."""

    op: str
    group_ranks: tuple[int, ...] = ()
    seq: int | None = None
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong, who did it, who suffers, and what to do next."""

    kind: Kind
    culprits: tuple[int, ...]
    """Global ranks at fault: the minority, the missing, the raiser; every rank of a cycle."""
    victims: tuple[int, ...] = ()
    """Global ranks that cannot go on because of it."""
    group: Group | None = None
    call: Call | None = None
    """The call that went wrong: where ranks are missing, the one the others wait in."""
    sites: Mapping[int, Site] = field(default_factory=dict)
    """Per rank, the line it is at."""
    stuck: Mapping[int, Stuck] = field(default_factory=dict)
    cycle: tuple[int, ...] | None = None
    """Each rank waits for the next one, the last for the first."""
    pair: tuple[int, int] | None = None
    """Sender and receiver."""
    detected_after_s: float | None = None
    explanation: str = ""
    suggestion: str = ""
    only_warns: bool = False
    """Found by a guard that nobody asked for (`Finding.warns`)."""

    @property
    def is_warning(self) -> bool:
        """Nobody is stuck and nothing is inconsistent: the program may go on."""
        if self.only_warns:
            return True
        return self.kind in WARNINGS and not (self.stuck and self.kind is Kind.ASYNC_NEVER_WAITED)

    def adds_to(self, raised: Collection[int]) -> bool:
        """Whether it says more than the exceptions of the ranks that *raised*, which are shown beside it."""
        if self.kind is Kind.STRAGGLER:
            return any(rank in raised for rank in self.stuck)
        if self.kind is Kind.RANK_RAISED and not self.victims:
            return not set(self.culprits) <= set(raised)
        return not self.is_warning

    @property
    def exit_code(self) -> int:
        """0 nothing or a warning, 1 the program raised, 3 hang, 4 inconsistent collectives."""
        if self.kind is Kind.HEALTHY or self.is_warning:
            return 0
        if self.kind in (Kind.RANK_RAISED, Kind.NAN, Kind.DDP_UNUSED_PARAMETER):
            return 1
        if self.kind in (Kind.RANK_EXITED, Kind.RANK_KILLED) and not self.victims:
            return 1
        return 4 if self.kind in INCONSISTENT else 3

    def to_json(self) -> dict[str, Any]:
        """The schema of the report: stable, held by golden tests."""
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
            "sites": {
                str(rank): {"file": site.file, "line": site.line, "function": site.function}
                for rank, site in sorted(self.sites.items())
            },
            "stuck": {
                str(rank): {
                    "op": at.op,
                    "group_ranks": ranks(at.group_ranks),
                    "seq": at.seq,
                    "file": at.file,
                    "line": at.line,
                }
                for rank, at in sorted(self.stuck.items())
            },
            "cycle": None if self.cycle is None else list(self.cycle),
            "pair": None if self.pair is None else list(self.pair),
            "detected_after_s": self.detected_after_s,
            "explanation": self.explanation,
            "suggestion": self.suggestion,
            **({"warning": True} if self.only_warns else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Diagnosis:
        """The inverse of `to_json`; keys it does not know are passed over."""
        group, call, pair = data.get("group"), data.get("call"), data.get("pair")
        return cls(
            kind=Kind(data["kind"]),
            culprits=tuple(data["culprits"]),
            victims=tuple(data["victims"]),
            group=None if group is None else Group(group["name"], group["description"], tuple(group["ranks"])),
            call=None if call is None else Call(call["op"], call["seq"]),
            sites={int(r): Site(s["file"], s["line"], s["function"]) for r, s in data["sites"].items()},
            stuck={
                int(r): Stuck(s["op"], tuple(s["group_ranks"]), s["seq"], s["file"], s["line"])
                for r, s in data["stuck"].items()
            },
            cycle=None if data.get("cycle") is None else tuple(data["cycle"]),
            pair=None if pair is None else (pair[0], pair[1]),
            detected_after_s=data.get("detected_after_s"),
            explanation=data.get("explanation", ""),
            suggestion=data.get("suggestion", ""),
            only_warns=bool(data.get("warning", False)),
        )
