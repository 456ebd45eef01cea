"""Ranks as ranges, stacks as a prefix tree."""

from __future__ import annotations

import pytest

from distsim.debug.records import Site
from distsim.debug.report.stack_tree import merge_equal, merge_stacks, short_path
from distsim.text.ranks import format_ranks, of_ranks

MAIN, STEP, LOAD, READ = (Site("a.py", n, f) for n, f in ((1, "main"), (2, "step"), (3, "load"), (4, "read")))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([1, 0], "0,1"),
        ([0, 1, 2, *range(4, 64)], "0-2,4-63"),
        ([5, 5, 7, 9, 10], "5,7,9,10"),
        (range(1024), "0-1023"),
    ],
)
def test_ranges(ranks: list[int], text: str) -> None:
    """Neighbours become ranges, two stay a pair, order and repeats do not matter."""
    assert format_ranks(ranks) == text


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([7, 7], "rank 7"), ([1, 2], "ranks 1,2"), (range(64), "ranks 0-63")]
)
def test_one_rank_or_several(ranks: list[int], text: str) -> None:
    """One is `rank`, also where it is named twice; more are `ranks`."""
    assert of_ranks(iter(ranks)) == text


def test_equal_frames_are_merged() -> None:
    """Seven ranks in one line are one branch; the odd one comes first."""
    stacks = {rank: (STEP, MAIN) for rank in range(8) if rank != 3}
    stacks[3] = (READ, LOAD, MAIN)
    lines = [(depth, node.site, format_ranks(node.ranks)) for depth, node in merge_stacks(stacks).lines()]
    assert lines == [
        (0, MAIN, "0-7"),
        (1, LOAD, "3"),
        (1, READ, "3"),
        (1, STEP, "0-2,4-7"),
    ]


def test_one_rank_stops_where_others_go_deeper() -> None:
    """A rank whose stack ends in a frame that others call from is not counted below it."""
    lines = [(d, format_ranks(n.ranks)) for d, n in merge_stacks({0: (MAIN,), 1: (STEP, MAIN)}).lines()]
    assert lines == [(0, "0,1"), (1, "1")]


def test_no_stacks() -> None:
    """Nothing to merge gives an empty tree."""
    assert merge_stacks({}).lines() == []


def test_equal_tracebacks_are_merged() -> None:
    """Equal texts are told once for all their ranks, the rarest first."""
    assert merge_equal({0: "A", 1: "B", 2: "A", 3: "A"}) == [((1,), "B"), ((0, 2, 3), "A")]


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("train.py", "train.py"),
        ("/home/me/job/train.py", "job/train.py"),
        ("C:\\job\\src\\train.py", "src/train.py"),
    ],
)
def test_short_path(path: str, short: str) -> None:
    """The last two parts of a path."""
    assert short_path(path) == short
