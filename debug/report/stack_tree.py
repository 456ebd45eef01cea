"""Ranks as ranges, and the stacks of many ranks as one prefix tree (after STAT).

Equal frames are merged from the outermost inward, so 511 ranks in the same line are one branch and
the one rank that is elsewhere is the other.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from distsim.debug.records import Site

T = TypeVar("T", bound=Hashable)

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
_OWN_GPU = re.compile(r"\bGPU \d+(?= has a total capacity)")
"""GPU number in torch's message about being out of memory."""


def blank_addresses(text: str) -> str:
    """Return *text* without the parts that differ between ranks and runs: addresses, and the GPU that is out of
    memory.
    """
    return _OWN_GPU.sub("GPU ...", _ADDRESS.sub("0x...", text))


def merge_equal(per_rank: Mapping[int, T]) -> list[tuple[tuple[int, ...], T]]:
    """Group ranks with equal values (tracebacks, lines).

    The largest group is last, so that unusual values are read first; groups of one size are in the order of their
    lowest rank.
    """
    groups: dict[T, list[int]] = {}
    for rank in sorted(per_rank):
        groups.setdefault(per_rank[rank], []).append(rank)
    merged = [(tuple(ranks), value) for value, ranks in groups.items()]
    return sorted(merged, key=lambda item: (len(item[0]), item[0]))


@dataclass(slots=True)
class StackNode:
    """One frame and the ranks that are in it."""

    site: Site | None
    """None: the root, above every stack."""
    ranks: list[int] = field(default_factory=list)
    children: dict[Site, StackNode] = field(default_factory=dict)

    def ordered(self) -> list[StackNode]:
        """Return the branches with the fewest ranks first: the odd one out is the story."""
        return sorted(self.children.values(), key=lambda n: (len(n.ranks), n.ranks))

    def lines(self) -> list[tuple[int, StackNode]]:
        """Return the nodes depth-first with their indentation. A chain of single children stays on one level."""
        result: list[tuple[int, StackNode]] = []
        left = [(0, child) for child in reversed(self.ordered())]  # a stack may be deeper than Python's own may get
        while left:
            depth, node = left.pop()
            result.append((depth, node))
            forks = len(node.children) > 1 or any(len(c.ranks) < len(node.ranks) for c in node.children.values())
            left.extend((depth + forks, child) for child in reversed(node.ordered()))
        return result


def folded_frames(lines: Sequence[tuple[int, StackNode]]) -> list[tuple[int, StackNode, int]]:
    """Merge repeated frames of a recursion that have the same ranks."""
    folded: list[tuple[int, StackNode, int]] = []
    for depth, node in lines:
        if folded:
            before, last, times = folded[-1]
            if (before, last.site, last.ranks) == (depth, node.site, node.ranks):
                folded[-1] = (before, last, times + 1)
                continue
        folded.append((depth, node, 1))
    return folded


def merge_stacks(stacks: Mapping[int, Sequence[Site]]) -> StackNode:
    """Merge stacks (innermost frame first, as records hold them) into one tree of frames."""
    root = StackNode(None)
    for rank in sorted(stacks):
        node = root
        node.ranks.append(rank)
        for frame in _outward(stacks[rank]):
            child = node.children.get(frame)
            if child is None:
                child = node.children[frame] = StackNode(frame)
            node = child
            node.ranks.append(rank)
    return root


def _outward(stack: Sequence[Site]) -> Iterator[Site]:
    """Yield the frames of a stack, outermost first. The library's line below the user's is a separate frame."""
    for frame in reversed(stack):
        yield frame if frame.through is None else Site(frame.file, frame.line, frame.function)
        if frame.through is not None:
            yield frame.through


def short_path(file: str) -> str:
    """Return the last two parts of a path: enough to know it by."""
    parts = file.replace("\\", "/").rsplit("/", 2)
    return "/".join(parts[-2:]) if len(parts) == 3 else file
