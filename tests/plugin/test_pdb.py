"""`--pdb` and ranks."""

from __future__ import annotations

import sys

import pytest
from plugin.conftest import HEAD

from distsim.plugin.verdict import choose_frame

TEXT = """
@pytest.mark.ranks(2)
def test_value(rank):
    mine = 40 + rank
    assert mine == 40

@pytest.mark.ranks(2)
def test_hang(rank):
    waiting = "for nobody"
    if rank == 0:
        dist.barrier()
"""
REAL = """
@pytest.mark.ranks(2, on="gloo")
def test_real(rank):
    assert rank == 0
"""


@pytest.mark.slow
def test_the_prompt_is_in_the_frame_of_the_rank(pytester: pytest.Pytester) -> None:
    """Of the one that failed; where none did, of the one that hangs."""
    pytester.makepyfile(HEAD + TEXT)
    said = pytester.run(
        *(sys.executable, "-m", "pytest", "--pdb", "-p", "no:cacheprovider"),
        stdin=b"p 'mine', mine, rank\nc\np waiting, rank\nc\n",
    )
    said.assert_outcomes(failed=2)
    said.stdout.fnmatch_lines(
        [
            "note: --pdb: in rank 1's own frame*",
            "-> assert mine == 40",
            "(Pdb) ('mine', 41, 1)",
            "HANG  missing rank  rank 1*",
            "note: --pdb: in rank 0's own frame*",
            "-> dist.barrier()",
            "(Pdb) ('for nobody', 0)",
        ]
    )


@pytest.mark.soak
@pytest.mark.slow
def test_there_is_no_prompt_where_there_is_no_frame(pytester: pytest.Pytester) -> None:
    """Of a real rank nothing is left to look at: the failure says so, and pytest goes on."""
    pytester.makepyfile(test_it=HEAD + REAL)
    said = pytester.run(sys.executable, "-m", "pytest", "--pdb", "-p", "no:cacheprovider", stdin=b"")
    said.assert_outcomes(failed=1)
    said.stdout.fnmatch_lines(["rank 1: AssertionError*", "note: --pdb: on gloo a rank is a process*"])
    said.stdout.fnmatch_lines(["FAILED test_it.py::test_real - line *: rank 1: AssertionError*"])
    assert "NoPrompt" not in said.stdout.str()
    assert "(Pdb)" not in said.stdout.str()


def test_without_a_frame_it_says_why() -> None:
    """A real rank was a process; a simulated one may have been left behind."""
    assert "use on='sim'" in choose_frame({}, {1}, "gloo")[1]
    assert choose_frame({}, {1}, "sim") == (None, "--pdb: no rank has a frame to debug")
