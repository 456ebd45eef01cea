"""`store_unreachable`: the store of the rendezvous does not answer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, TypeVar

import torch.distributed as dist
from annotated_types import Len

from distsim.debug.records import Finding, Phase, StoreWait
from distsim.debug.records.kinds import Kind
from distsim.sim.faults.fault import Rank, Rule, check_ranks
from distsim.sim.faults.lasting import Lasting
from distsim.text.ranks import of_ranks

if TYPE_CHECKING:
    import simpy

    from distsim.cluster import Cluster
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.isolation.process import RankTask, SimProcess
    from distsim.sim.world import World

__all__ = ["StoreUnreachable", "Unreached"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUnreachable(Rule):
    """The store of the rendezvous does not answer."""

    ranks: Annotated[tuple[Rank, ...], Len(1)] | None = None
    """Default: all."""

    def __str__(self) -> str:
        return f"the store cannot be reached from {'any rank' if self.ranks is None else of_ranks(self.ranks)}"

    def check(self, cluster: Cluster, world_size: int) -> None:
        check_ranks(self.ranks or (), world_size)

    def planted(self, world: World, number: int, links: LinkState) -> _StoreUnreachable:
        return _StoreUnreachable(self, world, number)


R = TypeVar("R", bound=Rule)


class Unreached(Lasting[R]):
    """Ranks that knock in vain: for good, or until the rule's time is over."""

    def __init__(self, rule: R, world: World, number: int) -> None:
        super().__init__(rule, world, number)
        self._cut_off: list[int] = []
        """Ranks that will never reach it."""

    def means(self, process: SimProcess) -> bool:
        """Whether the rule is about *process*."""
        raise NotImplementedError

    def on_connect(self, task: RankTask, host_name: str, port: int, timeout: timedelta, explicit: bool) -> None:
        process, when = task.process, self.rule.when
        if not self.active(task.now_s()) or not self.means(process):
            return
        self.hit()
        refused = dist.DistNetworkError(
            f"The client socket has timed out after {int(timeout.total_seconds() * 1000)}ms while trying to "
            f"connect to ({host_name}, {port})."
        )
        reached = self.world.env.event()
        if when.for_s is not None:
            self.later(max(1e-9, self.until_s - task.now_s()), lambda: _open(reached))
        else:
            self._cut_off.append(process.rank)
        why = StoreWait((f"{host_name}:{port}",), "the store's server")
        process.phase = Phase.ABSENT  # as the others see it
        try:
            if not task.wait_until(reached, why, timeout.total_seconds(), explicit):
                raise refused
        finally:
            if process.phase is Phase.ABSENT:  # it may have been killed, or stopped, meanwhile
                process.phase = Phase.RUNNING

    def findings(self) -> list[Finding]:
        if not self._cut_off:
            return []
        ranks = tuple(sorted(self._cut_off))
        who = of_ranks(ranks)
        return [
            Finding(
                Kind.NETWORK_FAULT,
                ranks,
                f"{who} cannot reach the store at the master",
                at_s=self.struck_s,
                suggestion=f"Look at MASTER_ADDR, the firewall and name resolution on the hosts of {who}.",
            )
        ]


def _open(reached: simpy.Event) -> None:
    reached.succeed()


class _StoreUnreachable(Unreached[StoreUnreachable]):
    def means(self, process: SimProcess) -> bool:
        return self.rule.ranks is None or process.rank in self.rule.ranks
