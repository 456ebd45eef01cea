"""hypothesis and bodies on ranks: one engine, all ranks, the smallest example."""

from __future__ import annotations

import pytest
from plugin.conftest import Run

GIVEN = """
from hypothesis import HealthCheck, Phase, assume, given, note, settings, strategies as st

few = settings(max_examples=10, database=None, derandomize=True)
"""


@pytest.mark.slow
def test_all_ranks_run_each_example_and_the_smallest_failing_one_is_told(run: Run) -> None:
    """A value that each rank drew for itself would be a mismatch; here it is the sum's size that fails."""
    result = run(
        GIVEN
        + """
@pytest.mark.ranks(2)
@few
@given(x=st.integers(0, 1000))
def test_sum(rank, x):
    t = torch.tensor([x])
    dist.all_reduce(t)
    assert t.item() == 2 * x
    if rank == 1:
        assert x < 10

class TestMethod:
    @pytest.mark.ranks(2)
    @few
    @given(sizes=st.lists(st.integers(1, 3), max_size=3))
    def test_method(self, sizes):
        for size in sizes:
            dist.all_reduce(torch.ones(size))
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["rank 1: AssertionError: assert 10 < 10", "Failing test case: test_sum(", "*x=10,"])
    result.stdout.fnmatch_lines(["    rank=<each rank's own>,"])
    assert "mismatch" not in result.stdout.str()
    said = result.stdout.str().partition("Explanation:")[2].partition("_____")[0]
    assert all("smallest_failing" in line for line in said.splitlines() if ".py:" in line)  # none of distsim's


@pytest.mark.soak
def test_assume_and_note_are_the_engines(run: Run) -> None:
    """One rank that rejects an example rejects it for all, whoever waits for it; drawing in the body is refused."""
    result = run(
        GIVEN
        + """
@pytest.mark.ranks(2)
@settings(few, suppress_health_check=[HealthCheck.filter_too_much])
@given(x=st.integers(0, 100))
def test_even(rank, x):
    note(f"x is {x}")
    if rank:
        assume(x % 2 == 0)
    dist.barrier()
    assert x % 2 == 0

@pytest.mark.ranks(2)
@few
@given(data=st.data())
def test_data(data):
    data.draw(st.integers())
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["data=st.data(): each rank would draw*"])


def test_a_users_own_fixture_that_changes_is_told_by_hypothesis(run: Run) -> None:
    """Only our fixtures are known not to change from example to example."""
    result = run(
        GIVEN
        + """
@pytest.fixture
def box():
    return []

@pytest.mark.ranks(2)
@few
@given(x=st.integers())
def test_box(box, x): pass
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*function-scoped fixture 'box'*"])


@pytest.mark.soak
@pytest.mark.slow
def test_on_gloo(run: Run) -> None:
    """Each example is run by processes of its own, and shrinks."""
    result = run(
        GIVEN
        + """
@pytest.mark.ranks(2, on="gloo")
@settings(few, max_examples=4)
@given(x=st.integers(0, 4))
def test_sum(rank, x):
    t = torch.tensor([x])
    dist.all_reduce(t)
    assert t.item() < 2 or rank == 0
""",
        apart=True,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["rank 1: AssertionError: assert (2 < 2 or 1 == 0)*", "*x=1,"])
