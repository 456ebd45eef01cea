"""Which of many tests of one kind the suite runs; `.ci/soak` runs them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["one_in"]


def one_in(every: int, cases: Iterable[Any], *, first: int = 0) -> list[Any]:
    """The *cases*, as parameters: each *every*-th from the *first* on runs always, the others are marked `soak`."""
    return [
        case if number % every == first else pytest.param(case, marks=pytest.mark.soak)
        for number, case in enumerate(cases)
    ]
