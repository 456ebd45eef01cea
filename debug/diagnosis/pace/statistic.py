"""Finds the rank that is chronically slower, by own work by rank and step.

The usual sequential tests (CUSUM, SPRT, "who is last") accuse ranks of healthy jobs, because the noise of steps has a
memory. Three things repair that: standard errors from means of batches of steps, a bar that is learnt from episodes
that have ended, and thirds of a window that must agree.

Source of the thresholds: measured on gloo jobs and on generated families of noise (tools/benchmarks/slow_ranks.py
measures them anew).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from distsim.debug.diagnosis.pace.turns import Bools, Floats

WINDOWS = (40, 60, 100, 200, 400, 800)
"""Numbers of last steps that are examined."""
LEAST = 0.04
"""Smallest excess worth reporting, as a share of a step."""
CERTAINTY = 6.0
"""Standard errors by which the excess has to differ from 0 with up to four ranks; more ranks are more chances."""
LEAST_ERROR = 0.004
"""Smallest standard error that is believed, as a share of a step."""
CLIP = 0.12
"""Largest excess of one step that counts for the score, as a share of a step beyond `LEAST`."""
TRUSTED_RANKS = 8
"""Number of ranks from which their own spread is known: GPUs of one kind differ for ever."""
MOST_STEPS = 2000
BLOCK = 10
"""Steps that the score takes at a time."""
USUAL = 40
"""Last steps whose median is the length of a step."""
MOST_SLOW = 1 / 3
"""Share of ranks above which two groups of ranks differ, and none is at fault."""
QUICK_STEPS = 50
"""Steps in which a rank has been slow from which it is named with certainty where noise is small and has no memory."""
QUIET = 0.06
"""Largest noise of a step's own work that is small, as a share of a step."""
QUICK_CERTAINTY = 9.0
"""Standard errors by which the excess then has to differ from 0."""
EVEN = 0.6
"""Smallest share of the whole excess that each ten of those steps must show."""
MEMORY = 1.5
"""Spread of the means of ten steps, relative to that of independent noise, above which noise has a memory: episodes
come and go, and certainty needs twice as many steps.
"""
KEPT = 0.25
"""Share of the excess by which a rank may have changed and still count as keeping its own pace (of two ranks)."""
LAG = 10
SYNCHRONISED = 0.45
"""Largest variance ratio of lateness in a job whose ranks wait for each other in each step: the variance of its change
over `LAG` steps, divided by `LAG` times that over one step. Where ranks run freely, delays add up (a random walk) and
it is 1; where they wait, lateness does not last and it is near 1 / `LAG`.

Source: Lo and MacKinlay, Stock Market Prices Do Not Follow Random Walks, 1988; with medians of squares for variances.
"""


@dataclass(frozen=True)
class SlowRank:
    """A rank that is chronically slower than the other members of its group."""

    rank: int
    excess_s: float
    """Seconds of own work in each step beyond the median of the others."""
    share: float
    """The same, as a share of a step."""
    certainty: float
    """The excess in standard errors."""
    window: int
    """Number of steps that were examined."""
    since_step: int
    """Number of the step from which it has been slow, from 1."""
    step_s: float
    at_step: int
    """Number of steps that were known."""
    is_sure: bool
    """Whether it is named with certainty. Otherwise it looks slow."""


@dataclass(frozen=True)
class Outlook:
    """What can be seen in a job of this noise."""

    steps: int
    step_s: float
    noise: float
    """Spread of a step's own work, as a share of a step."""
    needed_steps: int | None
    """Steps after which a rank that is 10% slower would be named; None if it would not be."""
    unknown: str = ""
    """Reason why no rank can be named; empty if one can."""
    worst_rank: int | None = None
    """Rank with the largest excess, which need not mean anything."""
    worst_share: float = 0.0
    """Its excess, as a share of a step."""
    worst_certainty: float = 0.0
    """The same in standard errors."""


@dataclass
class _Scores:
    """Score of each rank: its excess so far, and how high the scores of ended episodes were."""

    score: Floats
    peak: Floats
    """Highest score since it was 0."""
    lost: Floats
    """Highest score that the rank has lost a quarter of since."""
    over: Floats
    """Highest score that has come back to 0."""
    since: Floats
    """Step at which the score was 0 for the last time."""

    def take(self, step: int, excess: Floats) -> None:
        """Add the excess of one step, as a share of a step."""
        self.score = np.maximum(0.0, self.score + np.clip(excess - LEAST, -CLIP, CLIP))
        self.peak = np.maximum(self.peak, self.score)
        self.lost = np.where(self.score < 0.75 * self.peak, np.maximum(self.lost, self.peak), self.lost)
        ended = self.score <= 0.0
        self.over = np.where(ended, np.maximum(self.over, self.peak), self.over)
        self.peak = np.where(ended, 0.0, self.peak)
        self.since = np.where(ended, step, self.since)

    def bar(self, row: int) -> float:
        """Return the height that episodes of this rank that ended, and of others, have reached."""
        return float(max(np.delete(self.lost, row).max(initial=0.0), self.over[row]))


@dataclass
class StepHistory:
    """Own work of the members of one group in the steps so far.

    Attributes:
        ranks: The members: the rows of the matrices.
        own_clock: Whether own work was measured on each rank's clock between blocking calls. Otherwise it is the
            lateness at asynchronous calls, which means something only if the ranks wait for each other.
        span_s: Seconds that a window has to last. Over shorter times the operating system decides which rank is slow.
        sure_steps: Steps from which a rank is named with certainty; before that it looks slow.
    """

    ranks: tuple[int, ...]
    own_clock: bool = True
    span_s: float = 2.5
    sure_steps: int = 100
    """Twice as many if the noise has a memory, fewer if it is small and the excess even (`QUICK_STEPS`)."""
    steps: int = 0
    """Number of steps so far."""
    _work_s: Floats = field(init=False)
    _length_s: Floats = field(init=False)
    _scores: _Scores = field(init=False)
    _scored: int = 0

    def __post_init__(self) -> None:
        size = len(self.ranks)
        self._work_s, self._length_s = np.empty((size, 0)), np.empty(0)
        self._scores = _Scores(*(np.zeros(size) for _ in range(5)))

    def add(self, work_s: Floats, length_s: Floats) -> None:
        """Append steps.

        Args:
            work_s: Own work in seconds, shape (members, steps).
            length_s: Length of each step in seconds, shape (steps,).
        """
        self.steps += len(length_s)
        self._work_s = np.concatenate((self._work_s, work_s), axis=1)[:, -MOST_STEPS:]
        self._length_s = np.concatenate((self._length_s, length_s))[-MOST_STEPS:]
        while self._scored + BLOCK <= self.steps:
            begin = len(self._length_s) - (self.steps - self._scored)
            usual_s = float(np.median(self._length_s[max(0, begin + BLOCK - USUAL) : begin + BLOCK]))
            if begin >= 0 and usual_s > 0.0:
                shares = excess(self._work_s[:, begin : begin + BLOCK]) / usual_s
                for number in range(BLOCK):
                    self._scores.take(self._scored + number + 1, shares[:, number])
            self._scored += BLOCK

    def matrix(self) -> tuple[Floats, Floats, int]:
        """Return own work and length of the kept steps, and the number of steps before them."""
        return self._work_s, self._length_s, self.steps - len(self._length_s)

    def slow_ranks(self) -> list[SlowRank]:
        """Return the ranks that are slower than the others, the slowest first."""
        if not self._knows():
            return []
        named: dict[int, SlowRank] = {}
        own = excess(self._work_s[:, -WINDOWS[-1] :])
        sure_steps = self.sure_steps * (2 if _has_memory(own[:, -WINDOWS[3] :], self._length_s) else 1)
        for window in WINDOWS:
            if window > own.shape[1]:
                break
            for slow in self._in_window(own[:, -window:], sure_steps):
                named.setdefault(slow.rank, slow)
        many = len(named) > max(1, MOST_SLOW * len(self.ranks))
        return [] if many else sorted(named.values(), key=lambda slow: (-slow.excess_s, slow.rank))

    def keeps_pace(self, rank: int) -> bool:
        """Return whether a rank that was slow is so no more: half the smallest excess in the last steps."""
        last = min(WINDOWS[0], len(self._length_s))
        own = excess(self._work_s[:, -last:])[self.ranks.index(rank)]
        return bool(np.median(own) < LEAST / 2 * np.median(self._length_s[-last:]))

    def outlook(self) -> Outlook:
        """Return the noise of a step, and after how many steps a rank that is 10% slower would be named."""
        if not len(self._length_s):
            return Outlook(0, 0.0, 0.0, None, "no two equal collectives, before which all ranks work, are known yet")
        window = min(WINDOWS[3], len(self._length_s))
        step_s = float(np.median(self._length_s[-window:])) or 1e-12
        own = excess(self._work_s[:, -window:])
        _, spread, clipped = _clipped(own)
        noise = float(np.median(spread)) / step_s
        share = 0.1 * float(np.median(self._work_s[:, -window:])) / step_s
        needed: int | None = None
        if share > LEAST:
            error = max(float(np.median(standard_errors(clipped))) / step_s, LEAST_ERROR * (WINDOWS[0] / window) ** 0.5)
            certain = window * (self._certainty * error / share) ** 2
            scored = 1.5 / min(share - LEAST, CLIP)
            needed = max(WINDOWS[0], round(-(-max(certain, scored) // 10) * 10))
        means, worst = _means(own), int(np.argmax(_means(own)))
        error_s = max(float(standard_errors(clipped)[worst]), LEAST_ERROR * step_s)
        return Outlook(
            self.steps, step_s, noise, needed, self._why_unknown(window, own, step_s),
            self.ranks[worst], float(means[worst]) / step_s, float(means[worst]) / error_s,
        )  # fmt: skip

    @property
    def _certainty(self) -> float:
        return CERTAINTY + 0.25 * max(0.0, float(np.log2(len(self.ranks) / 4)))

    def _why_unknown(self, window: int, own: Floats, step_s: float) -> str:
        if window < WINDOWS[0]:
            return ""
        if not self._knows():
            return (
                "the ranks do not wait for each other in each step (calls return at once, as with NCCL), so that only "
                "times of the device would tell who is slow"
            )
        means = _means(own)
        rows = np.flatnonzero(_comparable(means, step_s))
        if not len(rows):
            return ""
        longer = ",".join(str(self.ranks[row]) for row in rows)
        if len(self.ranks) == 2 and not self.slow_ranks():
            return (
                f"rank {longer} works {means[rows[0]] * 1e3:.3g} ms a step longer than the other one; of two ranks "
                "nobody knows which is at fault"
            )
        if len(rows) > max(1, MOST_SLOW * len(self.ranks)):
            others = ",".join(str(rank) for row, rank in enumerate(self.ranks) if row not in rows)
            return f"two groups of ranks: {longer} work longer than {others}"
        return ""

    def _knows(self) -> bool:
        """Return whether lateness at asynchronous calls is own work, because the ranks wait in each step."""
        if self.own_clock:
            return True
        lateness = self._work_s[:, -WINDOWS[3] :] - self._work_s[:, -WINDOWS[3] :].mean(axis=0)
        if lateness.shape[1] < WINDOWS[0]:
            return False
        single = float(np.median(np.diff(lateness, axis=1) ** 2))
        longer = float(np.median((lateness[:, LAG:] - lateness[:, :-LAG]) ** 2))
        return longer <= SYNCHRONISED * LAG * single

    def _in_window(self, own: Floats, sure_steps: int) -> list[SlowRank]:
        window = own.shape[1]
        lengths = self._length_s[-window:]
        step_s = float(np.median(lengths))
        if lengths.sum() < self.span_s or step_s <= 0.0:
            return []
        means = _means(own)
        if _comparable(means, step_s).sum() > max(1, MOST_SLOW * len(self.ranks)):
            return []
        _, _, clipped = _clipped(own)
        certainty = means / np.maximum(standard_errors(clipped), LEAST_ERROR * step_s)
        thirds = np.stack([part.mean(axis=1) for part in np.array_split(clipped, 3, axis=1)]).min(axis=0)
        is_slow = (means > LEAST * step_s) & (certainty > self._certainty)
        is_slow &= thirds > np.maximum(LEAST * step_s, means / 2)
        if len(self.ranks) >= TRUSTED_RANKS:
            middle = np.median(means)
            is_slow &= means - middle > 4 * 1.4826 * np.median(np.abs(means - middle))
        slow = []
        for row in np.flatnonzero(is_slow).tolist():
            score, bar = self._scores.score[row], self._scores.bar(row)
            since = int(self._scores.since[row]) + 1
            if score <= max(1.5, 2 * bar) or (len(self.ranks) == 2 and not self._other_keeps(row, since, means[row])):
                continue
            if self.steps >= self.sure_steps and score <= max(2.5, 3 * bar):
                continue
            is_sure = self.steps >= sure_steps or (score > 3 * bar and self._is_even(row, since))
            slow.append(
                SlowRank(
                    self.ranks[row], float(means[row]), float(means[row] / step_s), float(certainty[row]), window,
                    since, step_s, self.steps, is_sure,
                )
            )  # fmt: skip
        return slow

    def _is_even(self, row: int, since: int) -> bool:
        """Return whether this rank has been slow since step *since* without doubt, in little noise and evenly."""
        own = excess(self._work_s[:, -(self.steps - since + 1) :])
        step_s = float(np.median(self._length_s[-own.shape[1] :]))
        _, spread, clipped = _clipped(own)
        if own.shape[1] < QUICK_STEPS or np.median(spread) > QUIET * step_s or _has_memory(own, self._length_s):
            return False
        mean_s, least_s = float(_means(own)[row]), float(_blocks(clipped)[row].min())
        error_s = max(float(standard_errors(clipped)[row]), LEAST_ERROR * step_s)
        return bool(mean_s > QUICK_CERTAINTY * error_s and least_s > max(LEAST * step_s, EVEN * mean_s))

    def _other_keeps(self, row: int, since: int, excess_s: float) -> bool:
        """Return whether, of two ranks, this one has become slower since step *since* and the other one has not."""
        now = self.steps - since + 1
        before = self._work_s[:, :-now]
        if before.shape[1] < WINDOWS[0]:
            return False
        grown = np.median(self._work_s[:, -now:], axis=1) - np.median(before, axis=1)
        return bool(grown[row] > excess_s / 2 and abs(grown[1 - row]) < KEPT * excess_s)


def excess(work_s: Floats) -> Floats:
    """Return own work less the median of the other ranks in the same step, shape (ranks, steps)."""
    size = len(work_s)
    ordered = np.sort(work_s, axis=0)
    above = np.argsort(np.argsort(work_s, axis=0, kind="stable"), axis=0)
    low, high = (size - 2) // 2, (size - 1) // 2
    others = [np.where(above > index, ordered[index], ordered[min(index + 1, size - 1)]) for index in (low, high)]
    above_others: Floats = work_s - (others[0] + others[1]) / 2
    return above_others


def _clipped(own: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the median and the spread of each rank, and its values clipped to three spreads around the median."""
    middle = np.median(own, axis=1)
    spread = 1.4826 * np.median(np.abs(own - middle[:, None]), axis=1)
    return middle, spread, np.clip(own, (middle - 3 * spread)[:, None], (middle + 3 * spread)[:, None])


def _means(own: Floats) -> Floats:
    """Return the mean of the clipped values of each rank, or its median if that is smaller."""
    middle, _, clipped = _clipped(own)
    means: Floats = np.minimum(clipped.mean(axis=1), middle)
    return means


def _blocks(values: Floats) -> Floats:
    """Return the means of each `BLOCK` values, or a few more, of each row."""
    parts = np.array_split(values, max(1, values.shape[1] // BLOCK), axis=1)
    means: Floats = np.stack([part.mean(axis=1) for part in parts], axis=1)
    return means


def _has_memory(own: Floats, lengths_s: Floats) -> bool:
    """Return whether means of `BLOCK` steps differ more than those of independent noise would.

    A simulation has no noise: what differs by less than `LEAST_ERROR` of a step says nothing.
    """
    if own.shape[1] < WINDOWS[0]:
        return False
    _, _, clipped = _clipped(own)
    by_block = float(_blocks(clipped).std(axis=1, ddof=1).mean()) * BLOCK**0.5
    noise_s = max(float(clipped.std(axis=1).mean()), LEAST_ERROR * float(np.median(lengths_s)))
    return bool(by_block > MEMORY * noise_s)


def _comparable(means: Floats, step_s: float) -> Bools:
    """Return which ranks are slow, of those that are at least half as slow as the slowest one."""
    comparable: Bools = means > max(LEAST * step_s, float(means.max()) / 2)
    return comparable


def standard_errors(clipped: Floats) -> Floats:
    """Return the standard error of the mean of each row: the largest of those from means of batches of steps.

    Batches of 1, 2, 4 ... steps; the variance of a rank's own batches, and that of all ranks' together. With
    independent noise all sizes agree; imbalance that stays at a rank for a while makes longer batches decide.
    """
    steps = clipped.shape[1]
    largest: Floats = np.zeros(len(clipped))
    length = 1
    while length <= steps // 4:
        number = steps // length
        means = clipped[:, steps - number * length :].reshape(len(clipped), number, length).mean(axis=2)
        variance = means.var(axis=1, ddof=1)
        largest = np.maximum(largest, np.sqrt(np.maximum(variance, variance.mean()) * length / steps))
        length *= 2
    return largest
