"""How values on simulated GPUs were computed: equal origins mean equal values, although no values are computed.

The origin of a collective's result contains the inputs of all members, so it is equal on all members of an all-reduce.
All inputs are known only after the run: keys are computed then (`resolve`), and compared between ranks. Two ranks that
compute one value in different ways have different keys, so a difference of keys is only worth a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from distsim.debug.diagnosis.silent.collect.sketch import WIDTH
from distsim.debug.diagnosis.silent.facts import Vector
from distsim.debug.records import P2P, CallRecord, Site
from distsim.debug.records.frames import shown

CONSTANT = "constant"
"""Name of the origin of memory that is filled with one number."""


class Origin:
    """How a value was computed."""

    __slots__ = ("key", "name", "numbers", "order", "site", "sources")

    def __init__(self, name: str, numbers: Any, sources: tuple[Origin, ...], site: Any, order: int) -> None:
        self.name = name
        self.numbers = numbers
        self.sources = sources
        self.site = site
        """Code and line number of the user's program; None in backward."""
        self.order = order
        """Number of the origin on its rank."""
        self.key: int | None = None
        """Equal on all ranks for equal origins, once resolved."""

    def needs(self) -> Sequence[Origin]:
        """Return the origins that decide `key`."""
        return self.sources

    def own_key(self) -> int:
        """Return `key`, made of the keys of all that it needs."""
        return hash((self.name, self.numbers, tuple(source.key for source in self.sources)))


Pieces = Sequence[tuple[int, int, Origin]]
"""First byte, end and origin of parts of a memory, in order."""


class Parts(Origin):
    """Several origins side by side in one memory of *nbytes*."""

    __slots__ = ("pieces",)

    def __init__(self, nbytes: int, pieces: Pieces, order: int) -> None:
        places = tuple((first, last) for first, last, _ in pieces)
        super().__init__("parts", (nbytes, places), tuple(origin for *_, origin in pieces), None, order)
        self.pieces = pieces


class Meeting:
    """One collective or message, with the origins of its members' inputs."""

    __slots__ = ("inputs", "number", "op", "root", "size")

    def __init__(self, number: int, op: str, root: int, size: int) -> None:
        self.number, self.op, self.root, self.size = number, op, root, size
        self.inputs: dict[int, Sequence[Pieces]] = {}
        """Origins of the inputs by rank in the group."""

    def contributors(self, member: int, position: tuple[int, int], nbytes: int) -> tuple[list[int], int, int] | None:
        """Return whose inputs make a result, the number of that input and its first byte; None if all inputs do.

        *member* is the member that receives the result, *position* the number of the output and of its part, and
        *nbytes* the size of the output.
        """
        output, part = position
        everyone = sorted(self.inputs)
        match self.op.removesuffix("_coalesced"):
            case "all_reduce":
                return everyone, output, 0
            case "broadcast" | "recv":
                return [max(0, self.root)], output, 0
            case "scatter":
                return [self.root], member, 0
            case "all_gather":
                return [output], 0, 0
            case "all_gather_into_tensor":
                return [part], output, 0
            case "reduce_scatter":
                return everyone, member, 0
            case "reduce_scatter_tensor":
                return everyone, output, member * nbytes
        return None


class Received(Origin):
    """The bytes from *begin* to *end* of a result of a collective or message."""

    __slots__ = ("_needed", "begin", "end", "meeting", "member", "nbytes", "position")

    def __init__(
        self,
        meeting: Meeting,
        member: int,
        position: tuple[int, int],
        extent: tuple[int, int, int],
        site: Any,
        order: int,
    ) -> None:
        super().__init__(meeting.op, (), (), site, order)
        self.meeting, self.member, self.position = meeting, member, position
        self.begin, self.end, self.nbytes = extent
        self._needed: list[Origin] | None = None

    def part(self, begin: int, end: int) -> Received:
        """Return the origin of some of the bytes."""
        extent = (self.begin + begin, self.begin + end, self.nbytes)
        return Received(self.meeting, self.member, self.position, extent, self.site, self.order)

    def needs(self) -> Sequence[Origin]:
        if self._needed is None:
            contributors = self.meeting.contributors(self.member, self.position, self.nbytes)
            by_member = self.meeting.inputs
            if contributors is None:
                inputs = [pieces for _, of_member in sorted(by_member.items()) for pieces in of_member]
                self._needed = [origin for pieces in inputs for *_, origin in pieces]
            else:
                members, index, shift = contributors
                inputs = [by_member[member][index] for member in members if index < len(by_member.get(member, ()))]
                self._needed = [slice_of(pieces, shift + self.begin, shift + self.end) for pieces in inputs]
        return self._needed

    def own_key(self) -> int:
        needed = self.needs()
        op, extent = self.meeting.op.removesuffix("_coalesced"), (self.position, self.begin, self.end)
        is_moved = op in _MOVES and len(needed) == 1
        if is_moved and needed[0].key is not None:
            return needed[0].key
        if not op.startswith(("all_reduce", "all_gather", "broadcast")):
            extent = (*extent, self.member)  # type: ignore[assignment]
        if len(self.meeting.inputs) < self.meeting.size:  # a member made no call, or was not simulated
            return hash((op, self.meeting.number, extent))
        keys = tuple(origin.key for origin in needed)
        return hash((op, keys)) if op in _REDUCES else hash((op, extent, keys))


_MOVES = ("broadcast", "recv", "scatter", "all_gather", "all_gather_into_tensor")
_REDUCES = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")


def slice_of(pieces: Pieces, begin: int, end: int) -> Origin:
    """Return the origin of the bytes from *begin* to *end* of a memory."""
    inside = [piece for piece in pieces if piece[0] < end and piece[1] > begin]
    if len(inside) == 1 and inside[0][0] <= begin and end <= inside[0][1]:
        first, last, origin = inside[0]
        return origin if (first, last) == (begin, end) else part_of(origin, begin - first, end - first)
    if inside and all(origin.name == CONSTANT and origin.numbers == inside[0][2].numbers for *_, origin in inside):
        return inside[0][2]
    cut = []
    for first, last, origin in inside:
        start, stop = max(first, begin), min(last, end)
        origin = origin if (start, stop) == (first, last) else part_of(origin, start - first, stop - first)
        cut.append((start - begin, stop - begin, origin))
    return Parts(end - begin, cut, max((origin.order for *_, origin in cut), default=0))


def part_of(origin: Origin, begin: int, end: int) -> Origin:
    """Return the origin of some bytes of a value."""
    if origin.name == CONSTANT:
        return origin
    if isinstance(origin, Received):
        return origin.part(begin, end)
    if isinstance(origin, Parts):
        return slice_of(origin.pieces, begin, end)
    if origin.name == "part":
        first = origin.numbers[0]
        return Origin("part", (first + begin, first + end), origin.sources, origin.site, origin.order)
    return Origin("part", (begin, end), (origin,), origin.site, origin.order)


class Meetings:
    """The collectives and messages of all ranks of a run, by group and number."""

    def __init__(self) -> None:
        self._meetings: dict[Any, Meeting] = {}
        self._messages: dict[Any, int] = {}

    def of(self, record: CallRecord) -> Meeting:
        """Return the meeting that a call is part of; the n-th send from a rank to another is its n-th receive's."""
        group = record.group
        key: Any = (group.name, group.ranks, record.op, record.seq)
        if record.op in P2P:
            ends = (record.rank, record.peer) if record.op == "send" else (record.peer, record.rank)
            stream = (group.name, record.op, ends, record.tag)
            number = self._messages[stream] = self._messages.get(stream, 0) + 1
            key = (group.name, ends, record.tag, number)
        meeting = self._meetings.get(key)
        if meeting is None:
            root = -1 if record.root is None else group.ranks.index(record.root)
            op, size = ("recv", 1) if record.op in P2P else (record.op, len(group.ranks))
            meeting = self._meetings[key] = Meeting(len(self._meetings), op, root, size)
        return meeting


def resolve(sketches: Iterable[tuple[Vector, Origin]]) -> None:
    """Fill the sketches of all ranks: equal for equal origins, and otherwise without any relation."""
    for vector, origin in sketches:
        if origin.name == CONSTANT:
            vector[:] = origin.numbers
        else:
            draw = np.random.Generator(np.random.PCG64(_key(origin) & (1 << 64) - 1))
            vector[:] = draw.standard_normal(WIDTH, dtype=np.float32)


def _key(origin: Origin) -> int:
    """Return a key of an origin that comes after the keys of all origins on which it depends."""
    waiting = [origin]
    while waiting:
        last = waiting[-1]
        missing = [source for source in last.needs() if source.key is None] if last.key is None else []
        if missing:
            waiting += missing
        else:
            last.key = last.own_key() if last.key is None else last.key
            waiting.pop()
    assert origin.key is not None
    return origin.key


def first_difference(one: Origin, other: Origin) -> tuple[str, Site | None] | None:
    """Return the operation, and its line, with which the origins of two different values begin to differ.

    Of several the first in the program's order counts, but for what comes from other differences.
    """
    roots: list[Origin] = []
    seen: set[tuple[int, int]] = set()
    waiting = [(one, other)]
    while waiting:
        left, right = waiting.pop()
        if (id(left), id(right)) in seen:
            continue
        seen.add((id(left), id(right)))
        needs = list(zip(left.needs(), right.needs(), strict=False))
        unlike = [(a, b) for a, b in needs if _key(a) != _key(b)]
        if unlike and left.name == right.name:
            waiting += unlike
        else:
            roots.append(left)
    named = [root for root in roots if root.site is not None]
    if not named:
        return None
    root = min(named, key=lambda origin: origin.order)
    code, line = root.site
    return root.name, Site(shown(code.co_filename), line, code.co_name)
