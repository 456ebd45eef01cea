"""Ranks that do the same are traced once: who is traced, and for whom it stands.

A training job's ranks differ in their data, not in what they do with it. Where a program works on simulated GPUs
(their data are not there anyway), one rank of each kind is traced, its leader, and others, its doubles, for as long as
it takes to see that they do the same: every operator, its shapes, every call. Of a few ranks all are doubles as long as
the program is small; of many, and of a few once it is not small, the last of each kind, a sample. What is traced
arrives in a collective for all ranks of its kind. Kinds begin as one; a message to a rank that nobody stands for in
that group makes each place in such groups a kind (pipeline stages), and the run starts again.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from distsim.debug.records import P2P, CallRecord

__all__ = ["Difference", "EqualRanks", "StartAgain", "Unlike", "families"]

FEW = 8
"""Up to so many ranks all are traced, as long as the program is small; of more a sample."""
WORTH_IT = 50_000
"""Operators that all of a few ranks would make together: a program with more is not small (5 s or so), and a sample of
them is traced on."""
WORTH_HOST_S = 0.8
"""Seconds of computing on the host that all of a few ranks would make together: a program with more is not small. Eight
ranks that each fill the weights of 300 million parameters on the host, as a model is made before it is moved to its
GPU, take as long: they would hold ten gigabytes here at a time."""
LONG = 5_000
"""Operators of a step: with so many one is enough to compare by, it repeats itself (layers, micro-batches)."""


WORDS = 1_000
"""Operators after its first step until when a rank has printed what it prints of each."""


class StartAgain(BaseException):
    """The run has to begin anew with other kinds of ranks. Raised by whoever runs a world."""

    def __init__(self, equal: EqualRanks | None, why: str) -> None:
        super().__init__(why)
        self.equal = equal
        self.why = why


@dataclass(frozen=True, slots=True)
class Difference:
    """Two ranks that were taken for equal have not done the same by the end of a step."""

    leader: int
    double: int
    step: int
    same_calls: bool
    """Only what lies between their calls differs: the last ranks may have less of a tensor that was cut."""


class Unlike(Exception):
    """Nobody stands for a member of a group."""


@dataclass(slots=True)
class EqualRanks:
    """*kinds*: of every rank."""

    kinds: Sequence[int]
    reasons: list[str] = field(default_factory=list)
    """Why there is more than one kind."""
    witnessed: bool = False
    """A third of each kind is traced, from its middle: where the first and the last differ, it says who is odd."""
    set_apart: int = 0
    """Ranks that are a kind of their own because they did more than their kind."""
    leaders: dict[int, int] = field(default_factory=dict)
    """By kind: the rank that is traced."""
    doubles: dict[int, list[int]] = field(default_factory=dict)
    """By kind: ranks that are traced as well, until they are seen to do the same."""
    traced: frozenset[int] = frozenset()
    sums: dict[int, int] = field(default_factory=dict)
    """By traced rank: a checksum of its operators and calls so far."""
    brought: dict[int, list[int]] = field(default_factory=dict)
    """By traced rank: checksums of the known values that it brought to its collectives."""
    calls: dict[int, int] = field(default_factory=dict)
    """By traced rank: a checksum of its calls alone."""
    steps: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By traced rank: both checksums at the end of each optimizer step."""
    own: set[int] = field(default_factory=set)
    """Doubles that make their leader's calls with other operators between them: they stand for nobody else, and are
    traced throughout."""
    values_differ: bool = False
    """A rank that does the same brings other values to calls."""
    operators: dict[int, int] = field(default_factory=dict)
    """By traced rank: how many so far."""
    host_s: float = 0.0
    """The longest that a traced rank has computed on the host so far, in its virtual time."""
    speaks_until: dict[int, int] = field(default_factory=dict)
    """By traced rank: its operator by which it has told of its first step."""
    sampled: bool = False
    """Not all ranks are traced, or were: the last of each kind is compared with the first."""
    compared: bool = False
    """All doubles have done what their leaders did, and are traced no more."""

    def __post_init__(self) -> None:
        self.sampled = len(self.kinds) > FEW
        for rank, kind in enumerate(self.kinds):
            if kind not in self.leaders:
                self.leaders[kind] = rank
            elif self.sampled:
                self.doubles[kind] = [rank]
            else:
                self.doubles.setdefault(kind, []).append(rank)
        if self.witnessed:
            for kind, doubles in self.doubles.items():
                of_it = [rank for rank, its in enumerate(self.kinds) if its == kind]
                if len(of_it) > 2 and len(self.kinds) > FEW:
                    doubles.insert(0, of_it[len(of_it) // 2])
        self.traced = frozenset([*self.leaders.values(), *(rank for rank, _ in self.pairs())])

    @classmethod
    def of_one_kind(cls, world_size: int) -> EqualRanks:
        return cls([0] * world_size)

    def split(self, places: dict[int, int], why: str) -> EqualRanks:
        """Kinds that differ in *places*, too: by rank, its place in a group; -1 where it is in none."""
        numbers: dict[tuple[int, int], int] = {}
        kinds = [numbers.setdefault((kind, places.get(rank, -1)), len(numbers)) for rank, kind in enumerate(self.kinds)]
        return EqualRanks(kinds, [*self.reasons, why], set_apart=self.set_apart)

    def with_witnesses(self) -> EqualRanks:
        """The same kinds, with a third rank of each."""
        return EqualRanks(self.kinds, self.reasons, witnessed=True, set_apart=self.set_apart)

    def without(self, odd: int) -> EqualRanks:
        """The same kinds, *odd* not among its own any more; a third of each says whether the next is odd, too."""
        apart = self.split({odd: 0}, f"rank {odd} does more than others between its calls")
        apart.set_apart += 1
        return apart.with_witnesses()

    def odd_one(self, found: Difference) -> int | None:
        """Of the leader, the witness and the last of a kind the one that does not do as the other two; -1: all three
        differ, None: they have not all come to the end of that step."""
        three = [found.leader, *self.doubles[self.kinds[found.leader]]]
        did = [self.steps.get(rank, [])[found.step - 1 : found.step] for rank in three]
        if len(three) < 3 or not all(did):
            return -1 if len(three) < 3 else None
        first, witness, last = did
        if first == witness:
            return three[2]
        if witness == last:
            return three[0]
        return three[1] if first == last else -1

    def pairs(self) -> list[tuple[int, int]]:
        """(double, leader) of every double."""
        return [(double, self.leaders[kind]) for kind, doubles in self.doubles.items() for double in doubles]

    # -- what they do

    def saw_call(self, rank: int, record: CallRecord, inputs: Sequence[torch.Tensor] | None) -> None:
        """*rank* makes a call; *inputs*: its values, where they are known."""
        call = record.op, record.nbytes, len(record.group.ranks)
        self.sums[rank] = hash((self.sums.get(rank, 0), call))
        self.calls[rank] = hash((self.calls.get(rank, 0), call))
        if not inputs or record.op in P2P:
            return
        total = 0
        for tensor in inputs:
            total = zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
        brought = self.brought.setdefault(rank, [])
        brought.append(total)
        for double, leader in self.pairs():
            if rank in (double, leader):
                theirs = self.brought.get(leader if rank == double else double, ())
                if len(theirs) >= len(brought) and theirs[len(brought) - 1] != total:
                    self.values_differ = True

    def saw_operator(self, rank: int, number: int) -> bool:
        """Whether it is one with which something may be decided: a program of a few ranks is no longer small, or
        *rank* has told of its first step."""
        self.sums[rank] = hash((self.sums.get(rank, 0), number))
        so_far = self.operators[rank] = self.operators.get(rank, 0) + 1
        return (not self.sampled and self.is_no_longer_small) or self.speaks_until.get(rank) == so_far

    def sample(self) -> frozenset[int]:
        """From now on only the last of each kind is compared with the first; those that are not any more."""
        before = self.traced
        self.sampled = True
        self.doubles = {kind: doubles[-1:] for kind, doubles in self.doubles.items()}
        self.traced = frozenset([*self.leaders.values(), *(rank for rank, _ in self.pairs())])
        return before - self.traced

    def ended_step(self, rank: int) -> None:
        """*rank* has made an optimizer's step."""
        self.steps.setdefault(rank, []).append((self.sums.get(rank, 0), self.calls.get(rank, 0)))
        self.speaks_until.setdefault(rank, self.operators.get(rank, 0) + WORDS)

    def difference(self) -> Difference | None:
        """Where the two of a kind have not done the same; the operators of those in `own` are not looked at."""
        for double, leader in self.pairs():
            both = zip(self.steps.get(leader, ()), self.steps.get(double, ()), strict=False)
            for step, (one, other) in enumerate(both):
                if one[1] != other[1] or (one != other and double not in self.own):
                    return Difference(leader, double, step + 1, one[1] == other[1])
        return None

    @property
    def is_no_longer_small(self) -> bool:
        """Whether so much is to come that of a few ranks not all are traced."""
        made = max(self.operators.get(leader, 0) for leader in self.leaders.values())
        size = len(self.kinds)
        return not self.sampled and (made * size >= WORTH_IT or self.host_s * size >= WORTH_HOST_S)

    @property
    def are_all_traced(self) -> bool:
        """Whether nobody stands for another yet."""
        return not self.sampled and not self.compared

    @property
    def is_believed(self) -> bool:
        """Whether all doubles have done what their leaders did for long enough."""
        if self.are_all_traced and sum(self.operators.values()) < WORTH_IT:
            return False
        compared = {rank for pair in self.pairs() for rank in pair}
        made = min((len(self.steps.get(rank, ())) for rank in compared), default=2)
        if made != 1 or not (len(self.kinds) <= FEW or self._is_long):
            return made >= 2
        return all(self.operators.get(rank, 0) >= self.speaks_until[rank] for rank in compared)

    @property
    def _is_long(self) -> bool:
        return all(self.operators.get(leader, 0) >= LONG for _, leader in self.pairs())

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

    def needed_by(self, groups: Sequence[Sequence[int]], traced: frozenset[int]) -> set[int]:
        """Members of those of *groups* in which a rank of *traced* comes, and none of them for some other member."""
        needed: set[int] = set()
        for members in groups:
            if traced.isdisjoint(members):
                continue
            try:
                self.standing_for(members, traced)
            except Unlike:
                needed.update(members)
        return needed


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
