"""Programs of the corpus that look at the guard themselves: each asserts or prints what it finds, and ends well."""

from __future__ import annotations

import pytest
from jobs import Zygote

from tests.cases.arms import on_gloo
from tests.cases.corpus import GUARDED, Case

RUNS = [
    pytest.param(
        case,
        level,
        args,
        id="-".join(filter(None, [case.path.stem, level, args])),
        marks=[] if first else pytest.mark.soak,
    )
    for case in GUARDED
    for level in case.several("guard", ",")
    for args in case.several("args", "|") or [""]
    for first in [level == case.several("guard", ",")[-1] and args in ("", *case.several("args", "|")[:2])]
]
"""The suite has the last level and the first two ways of each."""


@pytest.mark.slow
@pytest.mark.parametrize(("case", "level", "args"), RUNS)
def test_it_finds_all_as_it_should_be(case: Case, level: str, args: str, zygote: Zygote) -> None:
    """Every rank ends with 0 and prints what the case says; nobody is accused, but of what the program caught."""
    seen = on_gloo(case, level, zygote, *filter(None, [args]))
    assert seen.codes == (0,) * case.ranks, seen.text
    assert all(case.fields.get("prints", "") in output for output in seen.outputs), seen.text
    assert case.kinds == ("caught",) or not seen.diagnoses, seen.text
