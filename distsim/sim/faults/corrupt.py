"""`corrupt`: a bit flipped in what a rank receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Ge, Le

from distsim.debug.evidence import guard_findings as seen
from distsim.debug.records import CallRecord, Finding
from distsim.sim.faults.fault import Fault, Rank, Rule, check_ranks
from distsim.sim.faults.tensors import checksum

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.c10d.arrival import Arrival
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.world import World

__all__ = ["Corrupt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupt(Rule):
    """A bit flipped in what a rank receives."""

    rank: Rank
    """Who receives it."""
    element: Annotated[int, Ge(0)] = 0
    """Which number of the tensor, from 0."""
    bit: Annotated[int, Ge(0), Le(127)] = 0
    """Which bit of it, from the lowest."""

    def __str__(self) -> str:
        return f"bit {self.bit} of element {self.element} flipped on the way to rank {self.rank}"

    def check(self, cluster: Cluster, world_size: int) -> None:
        check_ranks((self.rank,), world_size)

    def planted(self, world: World, number: int, links: LinkState) -> _Corrupt:
        return _Corrupt(self, world, number)


class _Corrupt(Fault[Corrupt]):
    def __init__(self, rule: Corrupt, world: World, number: int) -> None:
        super().__init__(rule, world, number)
        self._found: list[Finding] = []

    def after_data(self, members: Sequence[Arrival]) -> None:
        for member in members:
            if member.record.rank == self.rule.rank and member.outputs and self._meant(member.record):
                tensor = member.outputs[0]
                sent = checksum(tensor)
                flip(tensor, self.rule)
                self.hit()
                if "payloads" in self.world.guards.watch and checksum(tensor) != sent:
                    self._found.append(seen.corrupted(member.record, str(self.rule)))
                    self.world.stop_for_fault()

    def _meant(self, record: CallRecord) -> bool:
        when = self.rule.when
        if when.call is None:
            return when.start_s <= float(self.world.env.now) < when.end_s
        return self.struck_s is None and when.call.matches(record)

    def findings(self) -> list[Finding]:
        return self._found


def flip(tensor: torch.Tensor, rule: Corrupt) -> None:
    """Turn the bit of *tensor* that *rule* means."""
    if tensor.numel() == 0:
        return
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    raw = whole.reshape(-1).view(torch.uint8)
    place = (rule.element % tensor.numel()) * tensor.element_size() + rule.bit // 8 % tensor.element_size()
    raw[place] ^= 1 << rule.bit % 8
    with torch.no_grad():
        tensor.data.copy_(whole)
