"""The tables in a log of nccl-tests."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Columns", "CutLine", "Line", "LogRow", "LogRun"]


@dataclass(frozen=True, slots=True)
class LogRow:
    """A size, and the smaller of out-of-place and in-place time, as first touch spoils either at random."""

    size_bytes: int
    time_us: float
    line: int


@dataclass(frozen=True)
class LogRun:
    """All sizes of one operation on the same GPUs."""

    file: str
    op: str
    """nccl-tests' name: all_reduce, alltoall, ..."""
    gpu: str
    """As the driver names it: NVIDIA H100 80GB HBM3; empty where the log does not (some builds of rccl-tests)."""
    nnodes: int
    nproc_per_node: int
    launcher: str
    """process: a process a GPU; shared: one process drives several."""
    rows: tuple[LogRow, ...]
    library: str = "nccl"
    """nccl or rccl."""
    version: str | None = None
    """Of the library; None where the log does not name it."""
    net: str | None = None
    """What NCCL said that it uses between nodes (NCCL_DEBUG=INFO): ib, roce, tcp, libfabric, tcpx, tcpxo."""
    plugin: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment that NCCL read and that changes times."""

    @property
    def where(self) -> str:
        """`2 x 8`: nodes and GPUs of each."""
        return f"{self.nnodes} x {self.nproc_per_node}"

    @property
    def configuration(self) -> tuple[object, ...]:
        """Runs that are alike in this should take the same time."""
        forced = tuple(self.settings.get(name, "") for name in ("NCCL_ALGO", "NCCL_PROTO"))
        return (self.op, self.nnodes, self.nproc_per_node, self.launcher, *forced)


# -- The table in a log: its head says which columns there are and in which units, a line has a size and its times.
#
# Source: NVIDIA/nccl-tests (2.0 to 2.19, src/common.cu and src/util.cu) and ROCm/rccl-tests (src/common.cu): `%12li`
# for size and count, type, redop (blank in old all_gathers), root (since 2.8), then for out-of-place, in-place or both
# time, algbw, busbw and #wrong, with -I also i_min, i_max, i_p99, i_cv%, with -S a timestamp of two words at the end.

_UNITS = {"time": "(us)", "algbw": "(GB/s)", "busbw": "(GB/s)", "i_cv%": "(%)"}
_UNITS |= dict.fromkeys(("i_min", "i_max", "i_p99"), "(us)")
_TYPES = re.compile(r"^(u?int(8|32|64)|u?char|half|float(16|8\w*)?|double|b(float|f)16|f(p)?8_?e\dm\d\w*|fp\d+)$")
_REDOPS = re.compile(r"^(sum|prod|min|max|avg|mulsum|none)$")


class CutLine(ValueError):
    """A line that begins as one of the table's and has not all of its columns; the text says what is missing."""


def _last_digit(figure: str) -> float:
    """What one of the last digit that was printed is worth: 0.01 of 60.25."""
    digits, _, power = figure.lower().partition("e")
    return float(10.0 ** (int(power or 0) - len(digits.partition(".")[2])))


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table: by block (out-of-place, in-place) the time, both bandwidths, and wrong values if any."""

    size_bytes: int
    redop: str
    blocks: tuple[dict[str, str], ...]

    @property
    def times_us(self) -> list[float]:
        """Of each block."""
        return [float(block["time"]) for block in self.blocks]

    @property
    def num_wrong(self) -> float:
        """Wrong values over all blocks; none where they were not looked at (N/A)."""
        return sum(float(block.get("#wrong", "0").replace("N/A", "0") or 0) for block in self.blocks)

    def contradiction(self, factor: float, shares: tuple[float, float]) -> str | None:
        """Where a time and a bandwidth contradict each other, beyond what was not printed of either and a share: of
        algbw, of busbw. *factor* makes the second of the first. None where all agree."""
        for block in self.blocks:
            time_us = float(block["time"])
            own = self.size_bytes / time_us / 1e3
            unprinted = _last_digit(block["time"]) / time_us
            for name, expected, share in (("algbw", own, shares[0]), ("busbw", own * factor, shares[1])):
                if abs(float(block[name]) - expected) > expected * (share + unprinted) + _last_digit(block[name]):
                    return (
                        f"{self.size_bytes} bytes in {block['time']} us make {expected:.2f} GB/s of {name}, it says "
                        f"{block[name]}"
                    )
        return None

    def bandwidths(self) -> list[tuple[float, float, float]]:
        """(time_us, algbw, busbw) of each block."""
        return [(float(b["time"]), float(b["algbw"]), float(b["busbw"])) for b in self.blocks]


@dataclass(frozen=True)
class Columns:
    """What the head of a table says."""

    lead: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    timestamp: bool
    cpu_time: bool

    @staticmethod
    def of(text: str) -> Columns | None:
        """From the head's line of names; None for any other line."""
        names = text.replace("#wrong", "wrong#").lstrip("# ").split()
        names = ["#wrong" if name == "wrong#" else name for name in names]
        if names[:2] != ["size", "count"] or not {"time", "cputime"} & set(names):
            return None
        first = next(place for place, name in enumerate(names) if name in ("time", "cputime"))
        timestamp, rest = names[-1] == "timestamp", names[first : -1 if names[-1] == "timestamp" else None]
        blocks: list[list[str]] = []
        for name in rest:
            if name in ("time", "cputime"):
                blocks.append([])
            blocks[-1].append("time" if name == "cputime" else name)
        return Columns(tuple(names[:first]), tuple(map(tuple, blocks)), timestamp, "cputime" in names)

    def other_unit(self, text: str) -> str | None:
        """What is not in nccl-tests' units, from the head's line of units; None where all is, or for another line."""
        units = re.findall(r"\([^)]*\)", text)
        if not text.lstrip("# ").startswith("(") or not units:
            return None
        expected = ["(B)", "(elements)", *(_UNITS[name] for block in self.blocks for name in block if name in _UNITS)]
        pairs = zip(units, expected, strict=False)
        return next((f"{one} where {other} is expected" for one, other in pairs if one != other), None)

    @property
    def lacking(self) -> str | None:
        """A column without which nothing can be told; None where all are there."""
        needed = ("time", "algbw", "busbw")
        return next((name for name in needed for block in self.blocks if name not in block), None)

    def read(self, text: str) -> Line | None:
        """The figures of a line of the table; None for any other line; CutLine where some are missing."""
        words = text.split()
        if self.lacking or len(words) < 2 or not (words[0].isdigit() and words[1].isdigit()):
            return None
        if len(words) < 3:
            raise CutLine(f"2 of {self.width} columns")
        if not _TYPES.match(words[2]):
            return None
        lead = list(self.lead)
        redop = words[3] if len(words) > 3 else ""
        if "redop" in lead and not _REDOPS.match(redop):
            lead.remove("redop")  # blank in old versions where nothing is reduced
        figures = words[len(lead) :]
        wanted = sum(map(len, self.blocks))
        if len(figures) < wanted:
            raise CutLine(f"{len(words)} of {len(lead) + wanted} columns")
        blocks = []
        for names in self.blocks:
            blocks.append(dict(zip(names, figures, strict=False)))
            figures = figures[len(names) :]
        line = Line(int(words[0]), redop if "redop" in lead else "none", tuple(blocks))
        try:
            known = [*(figure for block in line.bandwidths() for figure in block), line.num_wrong]
        except ValueError as error:
            raise CutLine(f"a figure that is not a number ({error})") from None
        if not all(map(math.isfinite, known)):
            raise CutLine("a figure that is not a number (inf or nan)")
        return line

    @property
    def width(self) -> int:
        """How many columns a line has."""
        return len(self.lead) + sum(map(len, self.blocks))
