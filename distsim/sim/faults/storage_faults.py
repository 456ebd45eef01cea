"""Faults of the rendezvous store and of file storage."""

from __future__ import annotations

import builtins
import contextlib
import fnmatch
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from annotated_types import Ge, Gt, Len

from distsim.debug.records import Finding, Phase, StoreWait
from distsim.debug.records.frames import Owner, owner
from distsim.debug.records.kinds import Kind
from distsim.sim.faults.fault import Lasting, Rank, Rule, check_ranks
from distsim.sim.isolation.process import RankTask, current_task
from distsim.sim.isolation.wraps import resembling
from distsim.sim.kernel.scheduler import Event
from distsim.text.ranks import of_ranks

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.world import World

# -- `store_unreachable`: the store of the rendezvous does not answer.


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUnreachable(Rule):
    """The store of the rendezvous does not answer."""

    what: ClassVar[str] = "store_unreachable"
    ranks: Annotated[tuple[Rank, ...], Len(1)] | None = None
    """Affected ranks (default: all)."""

    def __str__(self) -> str:
        return f"the store cannot be reached from {'any rank' if self.ranks is None else of_ranks(self.ranks)}"

    def check(self, cluster: Cluster, world_size: int) -> None:
        check_ranks(self.ranks or (), world_size)


R = TypeVar("R", bound=Rule)


class Unreached(Lasting[R]):
    """Ranks that cannot reach the store, forever or until the rule ends."""

    def __init__(self, rule: R, world: World, number: int) -> None:
        super().__init__(rule, world, number)
        self._cut_off: list[int] = []
        """Ranks that will never reach the store."""

    def means(self, process: SimProcess) -> bool:
        """Return whether the rule concerns *process*."""
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
        reached = self.world.event()
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


def _open(reached: Event) -> None:
    reached.succeed()


class _StoreUnreachable(Unreached[StoreUnreachable], rule=StoreUnreachable):
    def means(self, process: SimProcess) -> bool:
        return self.rule.ranks is None or process.rank in self.rule.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterUnreachable(Rule):
    """The other hosts cannot reach the host of rank 0."""

    what: ClassVar[str] = "master_unreachable"

    def __str__(self) -> str:
        return "the master cannot be reached from other hosts"

    def check(self, cluster: Cluster, world_size: int) -> None:
        """Do nothing: the rule names nothing that could be missing."""


class _MasterUnreachable(Unreached[MasterUnreachable], rule=MasterUnreachable):
    def means(self, process: SimProcess) -> bool:
        return process.slot.host != self.world.facts.slots[0].host


# -- `slow_storage`: file accesses of the program (open, torch.save, torch.load) that take longer.


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStorage(Rule):
    """The program's file accesses (open, torch.save, torch.load) take longer."""

    what: ClassVar[str] = "slow_storage"
    ranks: Annotated[tuple[Rank, ...], Len(1)] | None = None
    """Affected ranks (default: all)."""
    delay_s: Annotated[float, Gt(0)]
    """Additional time of each access."""
    files: str = "*"
    """Pattern of the paths."""
    number: Annotated[int, Ge(1)] | None = None
    """Affect only the n-th access of a rank."""

    def __str__(self) -> str:
        who = "all ranks" if self.ranks is None else of_ranks(self.ranks)
        return f"files {self.files} come {self.delay_s:g} s late on {who}"

    def check(self, cluster: Cluster, world_size: int) -> None:
        check_ranks(self.ranks or (), world_size)


class _SlowStorage(Lasting[SlowStorage], rule=SlowStorage):
    def __init__(self, rule: SlowStorage, world: World, number: int) -> None:
        super().__init__(rule, world, number)
        self._accesses = Counter[int]()
        """Number of accesses by rank."""

    def on_access(self, task: RankTask, path: str) -> None:
        rule, rank = self.rule, task.process.rank
        if not fnmatch.fnmatchcase(path, rule.files) or (rule.ranks is not None and rank not in rule.ranks):
            return
        self._accesses[rank] += 1
        if rule.number in (None, self._accesses[rank]) and self.active(task.now_s()):
            self.hit()
            task.sleep(rule.delay_s)


@contextlib.contextmanager
def seen_accesses(tell: Callable[[RankTask, str], None]) -> Iterator[None]:
    """Call *tell* for every file that a rank's own code opens, loads or saves."""
    places: list[tuple[Any, str]] = [(builtins, "open"), (torch, "save"), (torch, "load")]
    saved = [(holder, name, getattr(holder, name)) for holder, name in places]

    def seen(real: Callable[..., Any], position: int) -> Callable[..., Any]:
        def access(*args: Any, **kwargs: Any) -> Any:
            task = current_task()
            if task is not None and owner(sys._getframe(1).f_code.co_filename) is Owner.USER:
                path = args[position] if len(args) > position else kwargs.get("f", kwargs.get("file", ""))
                tell(task, str(getattr(path, "name", path)))
            return real(*args, **kwargs)

        return access

    for holder, name, real in saved:
        setattr(holder, name, resembling(real, seen(real, 1 if name == "save" else 0)))
    try:
        yield
    finally:
        for holder, name, real in saved:
            setattr(holder, name, real)
