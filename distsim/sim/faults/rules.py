"""Faults as rules: what goes wrong, where, when and for how long. Plain data; faults.py makes them strike.

Times are virtual seconds since the run began.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from distsim.debug.records import CallRecord
from distsim.errors import UsageError
from distsim.text.strangers import brief

__all__ = [
    "CUTS",
    "CallPoint",
    "Corrupt",
    "Jitter",
    "LinkFault",
    "PartDown",
    "RankFault",
    "Rule",
    "SlowStorage",
    "Straggler",
    "Unreachable",
    "When",
]

_POINT = re.compile(r"(?:(?P<op>[a-z_]+)\s*)?#(?P<number>\d+)(?:\s+on\s+(?P<group>\S+))?")


@dataclass(frozen=True, slots=True)
class CallPoint:
    """A call as reports name it: `all_reduce #3 on dp`; without operation, a rank's call of that number
    over all its groups (`#7`: its seventh after init_process_group)."""

    number: int
    op: str | None = None
    group: str | None = None

    @classmethod
    def parse(cls, text: str | int) -> CallPoint:
        word = brief(text, 300)
        found = _POINT.fullmatch(f"#{word}" if isinstance(text, int) else word.strip())
        if found is None:
            raise UsageError(
                f"expected a call such as 'all_reduce #3', 'all_reduce #3 on dp' or '#7', got {brief(text)!r}"
            )
        op, group = found["op"], found["group"]
        if group is not None and op is None:
            raise UsageError(f"expected an operation before the group, as 'all_reduce #3 on dp', got {brief(text)!r}")
        return cls(int(found["number"]), op, group)

    def matches(self, record: CallRecord) -> bool:
        if self.op is None:
            return record.index == self.number
        if (record.op, record.seq) != (self.op, self.number):
            return False
        return self.group is None or self.group in (record.group.label, record.group.name)

    def __str__(self) -> str:
        text = f"#{self.number}" if self.op is None else f"{self.op} #{self.number}"
        return text if self.group is None else f"{text} on {self.group}"


@dataclass(frozen=True, slots=True)
class When:
    """From *at_s* on, or from a call on; *after_s* later; *for_s* long (None: for good)."""

    at_s: float = 0.0
    call: CallPoint | None = None
    after_s: float = 0.0
    for_s: float | None = None

    def __str__(self) -> str:
        if self.call is not None:
            text = f"at {self.call}"
            if self.after_s:
                text = f"{self.after_s:g} s after {self.call}"
        else:
            start_s = self.at_s + self.after_s
            text = f"at {start_s:g} s" if start_s else "from the start"
        return text if self.for_s is None else f"{text} for {self.for_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What all rules have."""

    path: str = "faults"
    """Where the rule stands in its file, for messages."""
    when: When = field(default_factory=When)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFault(Fault):
    """link_slow, link_cut, link_flap or link_lossy, on every link that one of the patterns names."""

    what: str
    links: tuple[str, ...]
    factor: float = 1.0
    """Fraction of the bandwidth that is left."""
    extra_latency_s: float = 0.0
    period_s: float = 0.0
    """link_flap: one time up and down again."""
    down_s: float = 0.0
    """link_flap: the part of each period in which it is down."""
    reroute_s: float = 0.0
    """link_cut: how long the fabric takes to find another way, where its switches have one."""
    loss: float = 0.0
    """link_lossy: fraction of packets lost."""
    recovery: str = "go_back_n"
    """link_lossy: `go_back_n` (RoCE without selective repeat sends the whole window again) or `selective`."""

    def __str__(self) -> str:
        where = f"link {', '.join(self.links)}"
        match self.what:
            case "link_slow":
                slow = f"{where} at {self.factor:.3g} of its bandwidth"
                return slow + (f", {self.extra_latency_s:g} s later" if self.extra_latency_s else "")
            case "link_cut":
                return f"{where} cut"
            case "link_flap":
                return f"{where} down for {self.down_s:g} s in every {self.period_s:g} s"
            case _:
                return f"{where} loses {self.loss:.3g} of its packets ({self.recovery})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDown(Fault):
    """nic_down or switch_down: all links of one vertex of the cluster are cut."""

    what: str
    part: str
    detour: str | None = None
    """The part that takes over: a second rail, another spine."""
    detour_after_s: float = 0.0
    """How long the fabric takes to find the way around, this or another."""

    def __str__(self) -> str:
        text = f"{self.part} down"
        if self.detour is None:
            return text
        later = f" after {self.detour_after_s:g} s" if self.detour_after_s else ""
        return f"{text}, its traffic goes through {self.detour}{later}"


CUTS = ("link_cut", "nic_down", "switch_down")
"""What may cut hosts off: these rules can be carried out on a real network, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFault(Fault):
    """crash, freeze, exit, exception or delay of some ranks."""

    what: str
    ranks: tuple[int, ...]
    code: int = 1
    exception: str = "RuntimeError"
    message: str = "injected fault"
    signal: str = "SIGKILL"
    delay_s: float = 0.0

    def __str__(self) -> str:
        who = _who(self.ranks)
        match self.what:
            case "crash":
                return f"{who} killed by {self.signal}"
            case "freeze":
                return f"{who} stopped (SIGSTOP)"
            case "exit":
                return f"{who} left with exit code {self.code}"
            case "exception":
                return f"{self.exception} raised on {who}"
            case _:
                return f"{who} delayed by {self.delay_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler(Fault):
    """Ranks whose operators take *factor* times as long, and that lose a random time before each call."""

    ranks: tuple[int, ...]
    factor: float = 1.0
    delay_s: float = 0.0
    """Mean time lost before each call."""
    distribution: str = "constant"
    """Of that time: `constant`, `exponential`, `uniform` (0 to twice the mean) or `pareto` (shape 2: a long tail)."""

    def __str__(self) -> str:
        parts = []
        if self.factor != 1.0:
            parts.append(f"computes {self.factor:g} times as long")
        if self.delay_s:
            parts.append(f"loses {self.delay_s:g} s ({self.distribution}) before each call")
        return f"{_who(self.ranks)} {' and '.join(parts) or 'is as fast as ever'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter(Fault):
    """The operating system takes the CPU away for *pause_s* in every *period_s*: at the same moments
    everywhere where *synchronous*, else each rank at its own."""

    ranks: tuple[int, ...] | None = None
    period_s: float
    pause_s: float
    synchronous: bool = True

    def __str__(self) -> str:
        who = "all ranks" if self.ranks is None else _who(self.ranks)
        how = "at the same moments" if self.synchronous else "each at its own moments"
        return f"{who} pause {self.pause_s:g} s in every {self.period_s:g} s, {how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupt(Fault):
    """A bit of what *rank* receives in a call is flipped on the way."""

    rank: int
    bit: int = 0
    element: int = 0

    def __str__(self) -> str:
        return f"bit {self.bit} of element {self.element} flipped on the way to rank {self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStorage(Fault):
    """Opening, loading or saving a file takes *delay_s* longer; *files* is a pattern of paths."""

    ranks: tuple[int, ...] | None = None
    delay_s: float
    files: str = "*"
    number: int | None = None
    """Only the file access of this number (from 1) of each rank."""

    def __str__(self) -> str:
        who = "all ranks" if self.ranks is None else _who(self.ranks)
        return f"files {self.files} come {self.delay_s:g} s late on {who}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable(Fault):
    """store_unreachable (from some ranks) or master_unreachable (from every rank on another host)."""

    what: str
    ranks: tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.what == "master_unreachable":
            return "the master cannot be reached from other hosts"
        return f"the store cannot be reached from {'any rank' if self.ranks is None else _who(self.ranks)}"


Rule = LinkFault | PartDown | RankFault | Straggler | Jitter | Corrupt | SlowStorage | Unreachable


def _who(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
