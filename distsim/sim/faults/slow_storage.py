"""`slow_storage`: file accesses of the program (open, torch.save, torch.load) that take longer."""

from __future__ import annotations

import builtins
import contextlib
import fnmatch
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge, Gt, Len

from distsim.debug.records.frames import Owner, owner
from distsim.sim.faults.fault import Rank, Rule, check_ranks
from distsim.sim.faults.lasting import Lasting
from distsim.sim.isolation.process import RankTask, current_task
from distsim.sim.isolation.wraps import resembling
from distsim.text.ranks import of_ranks

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.world import World

__all__ = ["SlowStorage", "seen_accesses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStorage(Rule):
    """File accesses of the program (open, torch.save, torch.load) that take longer."""

    ranks: Annotated[tuple[Rank, ...], Len(1)] | None = None
    """Default: all."""
    delay_s: Annotated[float, Gt(0)]
    """How much longer each takes."""
    files: str = "*"
    """Pattern of their paths."""
    number: Annotated[int, Ge(1)] | None = None
    """Only the n-th access of a rank."""

    def __str__(self) -> str:
        who = "all ranks" if self.ranks is None else of_ranks(self.ranks)
        return f"files {self.files} come {self.delay_s:g} s late on {who}"

    def check(self, cluster: Cluster, world_size: int) -> None:
        check_ranks(self.ranks or (), world_size)

    def planted(self, world: World, number: int, links: LinkState) -> _SlowStorage:
        return _SlowStorage(self, world, number)


class _SlowStorage(Lasting[SlowStorage]):
    def __init__(self, rule: SlowStorage, world: World, number: int) -> None:
        super().__init__(rule, world, number)
        self._accesses = Counter[int]()
        """By rank."""

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
    """*tell* of every file that a rank's own code opens, loads or saves."""
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
