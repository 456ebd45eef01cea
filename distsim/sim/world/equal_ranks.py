"""Ranks that do the same are traced once: who is traced, and for whom it stands.

A training job's ranks differ in their data, not in what they do with it. Where a program works on simulated GPUs
(their data are not there anyway), one rank of each kind is traced, and one more, its last, for as long as it takes to
see that the two do the same: every operator, its shapes, every call. What is traced arrives in a collective for all
ranks of its kind. Kinds begin as one; a message to a rank that nobody stands for in that group makes each place in
such groups a kind (pipeline stages), and the run starts again.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distsim.debug.records import P2P, CallRecord

__all__ = ["Different", "EqualRanks", "StartAgain", "Unlike", "families"]

COMPARED_STEPS = 2
"""Optimizer steps after which a rank that has done the same as its leader is believed."""


class StartAgain(BaseException):
    """The run has to begin anew with other kinds of ranks. Raised by whoever runs a world."""

    def __init__(self, equal: EqualRanks | None, why: str) -> None:
        super().__init__(why)
        self.equal = equal
        self.why = why


class Different(Exception):
    """Two ranks that were taken for equal have not done the same by the end of a step."""

    def __init__(self, leader: int, double: int, step: int) -> None:
        super().__init__(leader, double, step)
        self.leader, self.double, self.step = leader, double, step


class Unlike(Exception):
    """Nobody stands for a member of a group."""


@dataclass(slots=True)
class EqualRanks:
    """*kinds*: of every rank."""

    kinds: Sequence[int]
    reasons: list[str] = field(default_factory=list)
    """Why there is more than one kind."""
    leaders: dict[int, int] = field(default_factory=dict)
    """By kind: the rank that is traced."""
    doubles: dict[int, int] = field(default_factory=dict)
    """By kind: the rank that is traced as well, until it is seen to do the same."""
    traced: frozenset[int] = frozenset()
    sums: dict[int, list[int]] = field(default_factory=dict)
    """By traced rank: [of its operators and calls so far, of the values that it brought to calls]."""
    steps: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By traced rank: those two at the end of each optimizer step."""
    values_differ: bool = False
    """A rank that does the same brings other values to calls."""
    compared: bool = False
    """All doubles have done what their leaders did, and are traced no more."""

    def __post_init__(self) -> None:
        for rank, kind in enumerate(self.kinds):
            if kind not in self.leaders:
                self.leaders[kind] = rank
            else:
                self.doubles[kind] = rank
        self.traced = frozenset([*self.leaders.values(), *self.doubles.values()])

    @classmethod
    def of_one_kind(cls, world_size: int) -> EqualRanks:
        return cls([0] * world_size)

    def split(self, places: dict[int, int], why: str) -> EqualRanks:
        """Kinds that differ in *places*, too: by rank, its place in a group; -1 where it is in none."""
        numbers: dict[tuple[int, int], int] = {}
        kinds = [numbers.setdefault((kind, places.get(rank, -1)), len(numbers)) for rank, kind in enumerate(self.kinds)]
        return EqualRanks(kinds, [*self.reasons, why])

    # -- what they do

    def saw_call(self, process: Any, record: CallRecord, side: Any) -> None:
        """*process* makes a call; *side*: what is known of its values (on_gpu.HostSide)."""
        if self.compared:
            return
        sums = self.sums.setdefault(process.rank, [0, 0])
        sums[0] = hash((sums[0], record.op, record.nbytes, len(record.group.ranks), record.dtypes))
        if side.inputs and not side.guess and record.op not in P2P:
            for tensor in side.inputs:
                raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                sums[1] = zlib.crc32(raw.data, sums[1])

    def saw_operator(self, process: Any, number: int) -> None:
        sums = self.sums.setdefault(process.rank, [0, 0])
        sums[0] = hash((sums[0], number))

    def ended_step(self, rank: int) -> None:
        """*rank* has made an optimizer's step. Raises Different where the two of a kind have not done the same."""
        if self.compared:
            return
        sums = self.sums.setdefault(rank, [0, 0])
        self.steps.setdefault(rank, []).append((sums[0], sums[1]))
        for kind, double in self.doubles.items():
            leader = self.leaders[kind]
            pairs = zip(self.steps.get(leader, ()), self.steps.get(double, ()), strict=False)
            for step, (one, other) in enumerate(pairs):
                if one[0] != other[0]:
                    raise Different(leader, double, step + 1)
                if one[1] != other[1]:
                    self.values_differ = True

    def is_believed(self, double: int) -> bool:
        leader = self.leaders[self.kinds[double]]
        return min(len(self.steps.get(rank, ())) for rank in (leader, double)) >= COMPARED_STEPS

    def leader_of(self, rank: int) -> int:
        return self.leaders[self.kinds[rank]]

    def standing_for(self, members: Sequence[int], traced: frozenset[int]) -> list[int]:
        """For each member of a group the place of who arrives for it: itself, or a traced member of its kind.
        Raises Unlike with the first member that nobody stands for."""
        by_kind: dict[int, int] = {}
        for place, rank in enumerate(members):
            if rank in traced:
                by_kind.setdefault(self.kinds[rank], place)
        found = []
        for place, rank in enumerate(members):
            if rank in traced:
                found.append(place)
                continue
            for_it = by_kind.get(self.kinds[rank])
            if for_it is None:
                raise Unlike(rank)
            found.append(for_it)
        return found


def families(groups: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """*groups*, made one after the other, in sets of one size that have no rank in common (all the pipelines, all
    the data-parallel groups of a job)."""
    found: list[list[tuple[int, ...]]] = []
    used: set[int] = set()
    for group in groups:
        if not found or len(found[-1][0]) != len(group) or used & set(group):
            found.append([])
            used = set()
        found[-1].append(group)
        used |= set(group)
    return found
