"""The calls of one host's ranks as its monitor sends them, for the pace of the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from msgspec import Struct

from distsim.debug.diagnosis.pace.job import JobPace
from distsim.debug.diagnosis.pace.turns import RankCalls
from distsim.debug.records import Group
from distsim.text.codec import Rank, Whole

_FIELDS = [one.name for one in fields(RankCalls)]
_FLOATS = ("issued_s", "ended_s")
LATEST_S = 1e10
"""Monotonic clocks begin when a host starts."""
_BOOLS = ("meets", "is_async")


@dataclass(frozen=True)
class HostClock:
    """Monotonic clock of another host compared with this one's."""

    ahead_s: float
    error_s: float


class SentCalls(Struct):
    """Calls of the ranks of one host."""

    host: str
    groups: Sequence[tuple[Group, Whole]]
    """Groups in the order in which `RankCalls.group` numbers them here, each with its generation."""
    pairs: Sequence[tuple[Rank, Rank]]
    calls: Mapping[Rank, tuple[Whole, bytes]]
    """For each rank the number of the first call that was not sent, and the fields of `RankCalls`, eight bytes each."""


def packed(host: str, job: JobPace, calls: Mapping[int, tuple[int, RankCalls]]) -> SentCalls:
    """Return calls as they are sent; *calls*: by rank, with the number of the next one."""
    data = {
        rank: (following, np.stack([np.asarray(getattr(of, name)).astype(_kind(name)).view("<i8") for name in _FIELDS]))
        for rank, (following, of) in calls.items()
    }
    rows = {rank: (following, array.tobytes()) for rank, (following, array) in data.items()}
    return SentCalls(host, list(job.numbers), sorted(job.pairs), rows)


def unpacked(sent: SentCalls, job: JobPace) -> dict[int, tuple[int, RankCalls]]:
    """Return the calls by rank, with the number of the next one; groups are numbered as in *job*.

    Raises:
        ValueError: The data do not fit.
    """
    job.pairs.update(sent.pairs)
    numbers = [job.numbers.setdefault((group, number), len(job.numbers)) for group, number in sent.groups]
    known = np.array([*numbers, -1], np.int64)
    calls = {}
    for rank, (following, data) in sent.calls.items():
        columns = np.frombuffer(data, "<i8").reshape(len(_FIELDS), -1)
        values = {name: column.view(_kind(name)) for name, column in zip(_FIELDS, columns, strict=True)}
        of = RankCalls(**{**values, **{name: values[name] != 0 for name in _BOOLS}})
        if len(of.group) and not -len(known) <= int(of.group.min()) <= int(of.group.max()) < len(numbers):
            raise ValueError("a call of an unknown group")
        if not all((np.abs(values[name]) < LATEST_S).all() for name in _FLOATS):  # a comparison that NaN fails, too
            raise ValueError("a time that is none")
        calls[rank] = following, replace(of, group=known[of.group])
    return calls


def joined(before: RankCalls, after: RankCalls, most: int) -> RankCalls:
    """Return the calls of both, and of the earlier ones at most *most*."""
    return RankCalls(*(np.concatenate((getattr(before, name)[-most:], getattr(after, name))) for name in _FIELDS))


def shifted(calls: RankCalls, ahead_s: float) -> RankCalls:
    """Return the calls with the times of a clock that is *ahead_s* behind."""
    return replace(calls, issued_s=calls.issued_s - ahead_s, ended_s=calls.ended_s - ahead_s)


def _kind(name: str) -> str:
    return "<f8" if name in _FLOATS else "<i8"
