"""Which ranks of a job stand for the others, once it is too large to trace every one.

A training job's ranks differ in their data, not in what they do with it. A sample is traced: the first and the last of
each kind, and of a single kind one from its middle, so that there are two against one where they differ. In a
collective the first of a kind arrives for those of its kind that are not traced. Nothing is known of these, and nothing
is said of them (`Traced.not_traced`): that they would do the same is an assumption of the figures, not of the verdict.
Ranks that send to each other are kinds by their places in their groups (pipeline stages).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from distsim.debug.records import P2P, CallRecord

__all__ = ["RankTrace", "Sample", "StartAgain", "Unlike", "families", "kinds_by_place"]


class StartAgain(BaseException):
    """The run has to begin anew with another sample of its ranks. Raised by whoever runs a world."""

    def __init__(self, sample: Sample, why: str) -> None:
        super().__init__(why)
        self.sample = sample
        self.why = why


class Unlike(Exception):
    """No traced member of a group is of the kind of some other member."""


@dataclass(slots=True)
class RankTrace:
    """What a rank has done so far, as numbers that are equal where two ranks did the same."""

    operators: int = 0
    everything: int = 0
    """Checksum of its operators and calls."""
    calls: int = 0
    """Checksum of its calls alone."""
    values: list[int] = field(default_factory=list)
    """Checksums of the known values that it brought to its collectives."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Both checksums at the end of each optimizer step."""

    def add_operator(self, number: int | None) -> None:
        self.operators += 1
        if number is not None:
            self.everything = hash((self.everything, number))

    def add_call(self, record: CallRecord, inputs: Sequence[torch.Tensor] | None) -> None:
        """*inputs*: its values, where they are known."""
        call = record.op, record.nbytes, len(record.group.ranks)
        self.everything, self.calls = hash((self.everything, call)), hash((self.calls, call))
        if not inputs or record.op in P2P:
            return
        total = 0
        for tensor in inputs:
            total = zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
        self.values.append(total)

    def end_step(self) -> None:
        self.steps.append((self.everything, self.calls))


class Sample:
    """The ranks that are traced, by the *kinds* of all: ranks of one kind are assumed to do the same."""

    def __init__(self, kinds: Sequence[int], reasons: Sequence[str] = ()) -> None:
        self.kinds = list(kinds)
        self.reasons = list(reasons)
        """Why there is more than one kind."""
        members: dict[int, list[int]] = {}
        for rank, kind in enumerate(kinds):
            members.setdefault(kind, []).append(rank)
        self.by_kind: dict[int, list[int]] = {}
        """Kind -> its ranks that are traced, the one that stands for the others first."""
        for kind, ranks in members.items():
            chosen = [ranks[0], ranks[-1]] if len(members) > 1 else [ranks[0], ranks[len(ranks) // 2], ranks[-1]]
            self.by_kind[kind] = list(dict.fromkeys(chosen))
        self.traced = frozenset(rank for ranks in self.by_kind.values() for rank in ranks)

    def split(self, places: dict[int, int], why: str) -> Sample:
        """Kinds that differ in *places*, too: by rank, its place in a group; -1 where it is in none."""
        pairs = [(kind, places.get(rank, -1)) for rank, kind in enumerate(self.kinds)]
        return Sample(_numbered(pairs), [*self.reasons, why])

    def add(self, ranks: Sequence[int]) -> None:
        """Trace *ranks*, too."""
        for rank in ranks:
            if rank not in self.by_kind[self.kinds[rank]]:
                self.by_kind[self.kinds[rank]].append(rank)
        self.traced |= frozenset(ranks)

    def leave_to(self, kind: int, leader: int) -> None:
        """*leader* stands for the ranks of *kind* that are not traced."""
        ranks = self.by_kind[kind]
        ranks.remove(leader)
        ranks.insert(0, leader)

    def standing_for(self, members: Sequence[int]) -> list[int]:
        """For each member of a group the place of who arrives for it: itself, or a traced member of its kind.
        Raises Unlike with the first member that nobody stands for."""
        places = {rank: place for place, rank in enumerate(members)}
        by_kind: dict[int, int] = {}
        for kind, ranks in self.by_kind.items():
            place = next((places[rank] for rank in ranks if rank in places), None)
            if place is not None:
                by_kind[kind] = place
        stands = []
        for place, rank in enumerate(members):
            if rank in self.traced:
                stands.append(place)
            elif self.kinds[rank] in by_kind:
                stands.append(by_kind[self.kinds[rank]])
            else:
                raise Unlike(rank)
        return stands

    def stands_for(self, rank: int) -> list[int]:
        """The ranks whose figures are taken to be those of *rank*, itself included."""
        others = self.by_kind[self.kinds[rank]]
        if rank != others[0]:
            return [rank]
        kind = self.kinds[rank]
        return [r for r, its in enumerate(self.kinds) if r == rank or (its == kind and r not in self.traced)]

    def complete(self, groups: Sequence[Sequence[int]], sending: Sequence[Sequence[int]]) -> None:
        """Trace who is needed in *groups* that have a traced member: all of those whose members send to each other,
        and in others a rank of each kind."""
        grows = True
        while grows:
            before = len(self.traced)
            for members in groups:
                if self.traced.isdisjoint(members):
                    continue
                here = {self.kinds[rank] for rank in members if rank in self.traced}
                self.add([rank for rank in members if self.kinds[rank] not in here])
            for members in sending:
                if not self.traced.isdisjoint(members):
                    self.add(members)
            grows = len(self.traced) > before


def kinds_by_place(world_size: int, sending: Sequence[tuple[tuple[int, ...], str]]) -> Sample:
    """The sample of a job in which the members of each group of *sending* (ranks, label) send to each other."""
    sample = Sample([0] * world_size)
    for family in families([ranks for ranks, _ in sending]):
        label = next(label for ranks, label in sending if ranks == family[0])
        places = {rank: place for ranks in family for place, rank in enumerate(ranks)}
        sample = sample.split(places, f"its place in groups such as {label}")
    return sample


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


def _numbered(pairs: Sequence[tuple[int, int]]) -> list[int]:
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault(pair, len(numbers)) for pair in pairs]
