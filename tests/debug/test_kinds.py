"""Every kind of fault that records can show, played out on four ranks or so."""

from __future__ import annotations

import pytest

from distsim.debug.diagnosis import diagnose
from distsim.debug.kinds import Kind
from distsim.debug.records import Site
from tests.debug.builders import FILE, all_reduce, barrier, fail, play
from tests.debug.faults import MISCALLED, STEP, odd
from tests.debug.faults_between import STUCK

FAULTS = {**MISCALLED, **STUCK}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(name: str) -> None:
    """The first diagnosis names kind, culprits, call, exit code, and says where."""
    fault = FAULTS[name]
    found = diagnose(play(fault.size, fault.programs, **fault.evidence))
    assert [d.kind for d in found] == [fault.kind], [(d.kind, d.culprits, d.explanation) for d in found]
    (d,) = found
    assert d.culprits == fault.culprits
    assert (str(d.call) if d.call else None) == fault.call
    assert d.exit_code == fault.exit_code
    if fault.victims is not None:
        assert d.victims == fault.victims
    if fault.cycle is not None or fault.pair is not None:
        assert (d.cycle, d.pair) == (fault.cycle, fault.pair)
    for text in fault.says:
        assert text in d.explanation + d.suggestion
    assert d.suggestion
    assert d.detected_after_s is not None or d.kind is Kind.NEVER_JOINED
    assert set(d.stuck) <= {*d.culprits, *d.victims}


def test_exception_on_its_way_through_finally() -> None:
    """A rank that raised and then calls barrier in a finally block is told as the raiser."""
    evidence = play(4, odd([all_reduce(10)], [barrier(90)]))
    evidence.ranks[1].exception = "ValueError: boom"
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.exit_code) == (Kind.RANK_RAISED, (1,), 1)
    assert "ValueError: boom" in d.explanation
    assert "train.py:90" in d.explanation


def test_site_of_culprit_is_given() -> None:
    """The culprit's own line is among the sites, not only the victims'."""
    (d,) = diagnose(play(4, odd(STEP, [all_reduce(10), fail("ValueError: x", 33)])))
    assert d.sites[1] == Site(FILE, 33, "main")
    assert d.sites[0] == Site(FILE, 11, "main")
