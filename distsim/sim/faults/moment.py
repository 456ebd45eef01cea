"""When a fault strikes: at a time or at a call, some time after it, and for how long.

Times are virtual seconds since the run began.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from distsim.debug.records import CallRecord
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief

__all__ = ["CallPoint", "When"]

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
    """When a fault strikes: at a time or at a call, some time after it, and for how long."""

    at_s: Annotated[float, Ge(0)] | None = None
    """Virtual time at which it strikes (default: from the start)."""
    call: CallPoint | None = None
    """The call at which it strikes: 'all_reduce #3', 'all_reduce #3 on dp', or a rank's n-th."""
    after_s: Annotated[float, Ge(0)] = 0.0
    """Strike this long after the time or call."""
    for_s: Annotated[float, Ge(0)] | None = None
    """How long (default: for good)."""

    def __post_init__(self) -> None:
        if self.at_s is not None and self.call is not None:
            raise UsageError("expected at_s or call, got both")

    @property
    def start_s(self) -> float:
        """The virtual time at which it strikes, where that is not a call."""
        return (self.at_s or 0.0) + self.after_s

    @property
    def end_s(self) -> float:
        return math.inf if self.for_s is None else self.start_s + self.for_s

    def __str__(self) -> str:
        if self.call is not None:
            text = f"at {self.call}"
            if self.after_s:
                text = f"{self.after_s:g} s after {self.call}"
        else:
            text = f"at {self.start_s:g} s" if self.start_s else "from the start"
        return text if self.for_s is None else f"{text} for {self.for_s:g} s"
