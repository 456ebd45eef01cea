"""Distributions that a flag names: shares of experts, and lengths of sequences."""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from distsim.errors import UsageError
from distsim.text.untrusted_input import LARGEST_SOURCE, read_bytes

UNIFORM = "uniform"


class RouterChoice(NamedTuple):
    """Each of *rows* chooses *top_k* of *bins*."""

    rows: int
    bins: int
    top_k: int


_SPREAD = 1e-6
"""Weight of an expert that the measurement never saw, relative to the largest: it gets what the others cannot hold."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How rows choose among experts."""

    text: str = UNIFORM
    exponent: float = 0.0
    """Exponent of Zipf's law: the share of the n-th expert is proportional to n ** -exponent."""
    measured: tuple[float, ...] = ()
    """Measured rows of each expert."""
    seed: int = 0
    """Seed of the order of the experts under Zipf's law."""

    @property
    def is_even(self) -> bool:
        return self.text == UNIFORM

    def counts(self, rows: int, bins: int, top_k: int) -> list[int]:
        """Return how many of *rows* rows choose each of *bins* experts, if each chooses *top_k* different ones.

        No expert gets more than *rows*; what exceeds that goes to the others by their shares. A measurement applies to
        choices among as many experts as it has numbers; others are even.
        """
        if self.text == "worst":
            return [rows] * top_k + [0] * (bins - top_k)
        weights = self._weights(bins)
        floor = _SPREAD * max(weights)
        weights = [max(weight, floor) for weight in weights]
        left, weight_left = float(rows * top_k), sum(weights)
        exact = [0.0] * bins
        for i in sorted(range(bins), key=lambda i: -weights[i]):
            exact[i] = min(float(rows), left * weights[i] / weight_left)
            left, weight_left = left - exact[i], weight_left - weights[i]
        ends = [0]
        total = 0.0
        for number in exact:
            total += number
            ends.append(round(total))
        return [end - start for start, end in itertools.pairwise(ends)]

    def _weights(self, bins: int) -> list[float]:
        if len(self.measured) == bins and any(self.measured):
            return list(self.measured)
        weights = [(n + 1) ** -self.exponent for n in range(bins)]
        random.Random(self.seed).shuffle(weights)
        return weights


EVEN = Routing()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of the lengths of sequences, in tokens."""

    text: str
    mean: float = 0.0
    """Mean of a lognormal distribution."""
    sigma: float = 0.0
    """Standard deviation of its logarithm."""
    measured: tuple[float, ...] = ()
    """Measured lengths, each as likely as the others."""

    def draw(self, rows: int, longest: int, seed: object) -> list[int]:
        """Return *rows* lengths between 1 and *longest*; the same for an equal *seed*."""
        source = random.Random(repr(seed))
        drawn = [source.choice(self.measured) if self.measured else self._lognormal(source) for _ in range(rows)]
        return [max(1, min(longest, round(length))) for length in drawn]

    def _lognormal(self, source: random.Random) -> float:
        return source.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)


@cache
def routing_of(text: str, seed: int = 0) -> Routing:
    """Return the routing that *text* describes: `uniform`, `worst`, `zipf:1.2` or `measured:FILE`.

    Raises:
        UsageError: It describes none, or the file cannot be read.
    """
    kind, _, rest = text.partition(":")
    if text in (UNIFORM, "worst"):
        return Routing(text)
    if kind == "zipf" and (exponent := _number(rest)) is not None and 0.0 < exponent <= 10.0:
        return Routing(text, exponent=exponent, seed=seed)
    if kind == "measured" and rest:
        return Routing(text, measured=_numbers("--routing", rest, "rows of an expert"))
    raise UsageError(f"--routing: expected uniform, zipf:1.2, measured:FILE or worst, got {text!r}")


@cache
def lengths_of(text: str) -> Lengths:
    """Return the lengths that *text* describes: `lognormal:MEAN:SIGMA`, or a file with one length a line.

    Raises:
        UsageError: It describes none, or the file cannot be read.
    """
    kind, _, rest = text.partition(":")
    if kind != "lognormal":
        measured = _numbers("--lengths", text, "tokens of a sequence")
        if not any(measured):
            raise UsageError(f"--lengths {text}: expected lengths above 0, got zeros only")
        return Lengths(text, measured=measured)
    mean, sigma = (_number(part) for part in (rest.partition(":")[0], rest.partition(":")[2]))
    if mean is None or sigma is None or mean < 1.0 or sigma > 10.0:
        raise UsageError(f"--lengths: expected lognormal:MEAN:SIGMA such as lognormal:700:0.8, or a file, got {text!r}")
    return Lengths(text, mean, sigma)


def _numbers(flag: str, file: str, meaning: str) -> tuple[float, ...]:
    """Return the numbers in *file*, which are between blanks, commas, brackets and line ends."""
    try:
        content = read_bytes(file, LARGEST_SOURCE).decode(errors="replace")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{flag}: expected a file of numbers (the {meaning}), got {file}: {reason}") from None
    parts = re.findall(r"[^\s,;\[\]]+", content)
    numbers = [_number(part) for part in parts]
    wrong = next((part for part, number in zip(parts, numbers, strict=True) if number is None), None)
    if not numbers or wrong is not None:
        got = "none" if wrong is None else repr(wrong)
        raise UsageError(f"{flag} {file}: expected numbers, the {meaning}, got {got}")
    return tuple(number for number in numbers if number is not None)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0.0 <= number < math.inf else None
