"""Own work of a group's members before each collective in which all wait.

A *turn* ends at a collective in which every member needs every other. Own work of a rank in a turn is the time from its
release out of the previous turn to its arrival at this one, without the time that it spent inside other calls.

- A blocking call ends a turn. Its release is its end on the rank's own clock, so that clocks of hosts may differ.
- The end of an asynchronous call is recorded when somebody polls it, which is too late. Such a call ends a turn if the
  time in which no rank is at a call after it is long (`GAP`): all have waited there. Its release is the arrival of
  the last rank, because none continues before that.
- Asynchronous calls before a blocking one (buckets, then the loss) may be waited for in between, which no record
  shows. Own work is then counted up to the last of them only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

GAP = 0.5
"""Share of the usual long gap (90th percentile) from which an asynchronous call ends a turn."""
CLOCK = 0.01
"""Largest error of clocks, as a share of the usual long gap, with which arrivals on several hosts are compared."""
NEIGHBOURS = 50
"""Number of calls before and after a block of as many from which the usual long gap is taken."""


@dataclass(frozen=True)
class RankCalls:
    """Ended calls of one rank in the order of their issue: arrays of shape (calls,). Times in seconds."""

    group: Ints
    """Number of the group, equal on all members; negative for messages between two ranks."""
    seq: Ints
    key: Ints
    """Equal if the operation, the shapes and the line of the program are equal."""
    issued_s: Floats
    ended_s: Floats
    meets: Bools
    """Whether each member waits for every other one in the call."""
    is_async: Bools


@dataclass(frozen=True)
class Turns:
    """Turns of one group in their order."""

    work_s: Floats
    """Own work, shape (members, turns)."""
    key: Ints
    """What the turn ends with, shape (turns,)."""
    at_s: Floats
    """Arrival of the last member, shape (turns,)."""
    seq: Ints
    """Number of the call that ends the turn, shape (turns,)."""
    moved_s: Floats
    """From the arrival of the last member to the first end, shape (turns,); NaN if the end is not known."""
    own_clock: Bools
    """Whether a blocking call precedes the turn, so that each member's time is from its own clock; shape (turns,)."""


def find_turns(
    calls: Mapping[int, RankCalls], group: int, ranks: Sequence[int], clock_error_s: float | None = 0.0, after: int = -1
) -> Turns | None:
    """Return the turns of a group, or None if its members share too few calls.

    Args:
        calls: The last calls of each member, by rank.
        group: Number of the group in `RankCalls.group`.
        ranks: Members of the group: the rows of the result.
        clock_error_s: Error of the difference of two ranks' clocks; None if it is not known. Where it is too large to
            compare arrivals of different ranks (`CLOCK`), only blocking calls count.
        after: Turns that end at this number or earlier are left out.
    """
    own = [np.flatnonzero((calls[rank].group == group) & calls[rank].meets) for rank in ranks]
    # Threads make calls out of order.
    own = [at[np.argsort(calls[rank].seq[at], kind="stable")] for rank, at in zip(ranks, own, strict=True)]
    numbers = reduce(np.intersect1d, (calls[rank].seq[index] for rank, index in zip(ranks, own, strict=True)))
    if len(numbers) < 3:
        return None
    index = [at[np.searchsorted(calls[rank].seq[at], numbers)] for rank, at in zip(ranks, own, strict=True)]
    arrived = np.stack([calls[rank].issued_s[at] for rank, at in zip(ranks, index, strict=True)])
    ended = np.stack([calls[rank].ended_s[at] for rank, at in zip(ranks, index, strict=True)])
    is_async = reduce(np.logical_or, (calls[rank].is_async[at] for rank, at in zip(ranks, index, strict=True)))
    last = arrived.max(axis=0)
    if clock_error_s is not None:
        is_async |= ended.min(axis=0) < last - clock_error_s  # it returns before the last rank has come, as with NCCL
    ends = ~is_async
    if clock_error_s is not None and is_async.any():
        gaps = np.append(arrived[:, 1:].min(axis=0) - last[:-1], -np.inf)
        usual = _usual_long(gaps)
        ends |= (gaps > GAP * usual) & (clock_error_s <= CLOCK * usual)
    at = np.flatnonzero(ends)
    if len(at) < 2:
        return None
    before, to = at[:-1], at[1:]
    arrival = np.where(~is_async[to] & (to - before > 1), to - 1, to)
    work, clean = [], np.ones(len(to), bool)
    for row, rank in enumerate(ranks):
        mine = calls[rank]
        release_s = np.where(is_async[before], last[before], ended[row, before])
        arrival_s = arrived[row, arrival]
        work.append(np.maximum(arrival_s - release_s - _inside(mine, group, release_s, arrival_s), 0.0))
        clean &= ~_unknown_waits(mine, group, release_s, arrival_s)
    wanted = clean & (numbers[to] > after)
    moved_s = ended.min(axis=0) - last if clock_error_s == 0.0 else (ended - arrived).min(axis=0)
    first = calls[ranks[0]]
    return Turns(
        np.stack(work)[:, wanted],
        first.key[index[0][to]][wanted],
        last[to][wanted],
        numbers[to][wanted],
        np.where(is_async[to], np.nan, moved_s[to])[wanted],
        ~is_async[before][wanted],
    )


def _usual_long(gaps: Floats) -> Floats:
    """Return the 90th percentile of the gaps around each."""
    usual = np.empty(len(gaps))
    for begin in range(0, len(gaps), NEIGHBOURS):
        around = gaps[max(0, begin - NEIGHBOURS) : begin + 2 * NEIGHBOURS]
        usual[begin : begin + NEIGHBOURS] = max(np.percentile(around[np.isfinite(around)], 90), 0.0)
    return usual


def _inside(calls: RankCalls, group: int, from_s: Floats, to_s: Floats) -> Floats:
    """Return for each span the time inside blocking calls that end no turn of *group*."""
    other = ~calls.is_async & ~(calls.meets & (calls.group == group))
    if not other.any():
        return np.zeros(len(from_s))
    ends = np.maximum.accumulate(calls.ended_s[other])
    begins = np.maximum(calls.issued_s[other], np.concatenate(([-np.inf], ends[:-1])))  # calls of threads overlap
    before = np.concatenate(([0.0], np.cumsum(np.maximum(ends - begins, 0.0))))

    def until(moment_s: Floats) -> Floats:
        at = np.searchsorted(begins, moment_s, "right") - 1
        inside = np.clip(np.minimum(moment_s, ends[at]) - begins[at], 0.0, None)
        return np.where(at < 0, 0.0, before[at] + inside)

    return until(to_s) - until(from_s)


def _unknown_waits(calls: RankCalls, group: int, from_s: Floats, to_s: Floats) -> Bools:
    """Return for each span whether the rank made an asynchronous call elsewhere in it, for which it may have waited."""
    elsewhere = calls.issued_s[calls.is_async & ((calls.group != group) | ~calls.meets)]
    return np.searchsorted(elsewhere, to_s) > np.searchsorted(elsewhere, from_s)
