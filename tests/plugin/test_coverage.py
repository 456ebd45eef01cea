"""pytest-cov counts what ranks run, without a line of configuration."""

from __future__ import annotations

import pytest
from plugin.conftest import HEAD

LIBRARY = """
import threading

def share(rank, size):
    if rank == 0:
        found = first(rank)
    else:
        found = other(rank)
    return found

def first(rank):
    return rank

def other(rank):
    done = []
    thread = threading.Thread(target=lambda: done.append(in_thread(rank)))
    thread.start()
    thread.join()
    return done[0]

def in_thread(rank):
    total = 0
    for number in range(rank):
        total += number
    return total
"""

TESTS = """
import library

@pytest.mark.ranks(2, on={on!r})
def test_share(rank):
    library.share(rank, dist.get_world_size())
    dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("on", ["sim", pytest.param("gloo", marks=pytest.mark.soak)])
def test_every_line_and_branch_that_a_rank_runs_is_counted(pytester: pytest.Pytester, on: str) -> None:
    """What either rank runs, and a thread of one; on gloo, too, where each rank is a process that leaves at once."""
    pytester.makepyfile(HEAD + TESTS.format(on=on), library=LIBRARY)
    result = pytester.runpytest_subprocess(
        *("-p", "no:cacheprovider", "--cov=library", "--cov-branch", "--cov-report=term-missing")
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["library.py *100%*"])
    assert sorted(path.name for path in pytester.path.glob(".coverage*")) == [".coverage"]
