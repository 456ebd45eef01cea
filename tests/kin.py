"""Which of many tests of one kind the suite runs; `.ci/soak` runs them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["one_in"]

NOBODY = pytest.param()


def one_in(every: int, cases: Iterable[Any], *, first: int = 0) -> list[Any]:
    """The *cases*, as parameters: each *every*-th from the *first* on runs always, the others are marked `soak`. A case
    that is the values of several parameters comes as `pytest.param`."""
    params = [case if isinstance(case, type(NOBODY)) else pytest.param(case) for case in cases]
    return [
        param if number % every == first else pytest.param(*param.values, marks=pytest.mark.soak)
        for number, param in enumerate(params)
    ]
