"""Faults of the network in a real run: the hosts they cut off, and the plug pulled when they say so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.scenario.file.cut_off import cut_off
from distsim.sim.faults.link_faults import NetworkRule
from distsim.sim.faults.links import CUTS

if TYPE_CHECKING:
    from distsim.scenario.file.load import Scenario
    from distsim.scenario.real.namespaces import Hosts

__all__ = ["Cuts", "spans_hosts"]

MEETING_S = 1.0
"""Seconds that monitors take to connect once they know each other's address; they try several times a second."""
LONGEST_MEETING_S = 10.0
"""A job that makes no process group has monitors that never meet."""
_monotonic = time.monotonic


def spans_hosts(scenario: Scenario) -> bool:
    """Return whether a real run of *scenario* needs a network namespace for each host."""
    return any(fault.what in CUTS for fault in scenario.spec.faults)


@dataclass(slots=True)
class _Cut:
    """One rule: which hosts, and how far it is."""

    number: int
    hosts: tuple[int, ...]
    at_call: bool
    after_s: float
    for_s: float | None
    due_s: float | None = None
    mends_s: float | None = None
    struck: bool = False


@dataclass(slots=True)
class Cuts:
    """Pulls plugs while a job runs. Ranks say in files of *folder* that they have begun (`begun.RANK`), and that
    the call has come at which a rule strikes (`strike.NUMBER`; they wait for `struck.NUMBER`)."""

    folder: Path
    job: Hosts
    num_ranks: int
    cuts: list[_Cut] = field(default_factory=list)
    begun_s: float | None = None
    met_s: float | None = None
    """Time at which the hosts' monitors knew each other; before that, no monitor can report a lost host."""

    @classmethod
    def of(cls, scenario: Scenario, folder: Path, job: Hosts) -> Cuts:
        result = cls(folder, job, scenario.world_size)
        for number, rule in enumerate(scenario.rules):
            if isinstance(rule, NetworkRule):
                when, cut_hosts = rule.when, cut_off(scenario.cluster, rule, len(job.names))
                after_s = when.after_s if when.call is not None else when.start_s
                result.cuts.append(_Cut(number, cut_hosts, when.call is not None, after_s, when.for_s))
        return result

    def tick(self) -> None:
        """Apply the faults that are due.

        Times count from the call, or from the start of the last rank; in both cases not before the monitors know each
        other.
        """
        now_s = _monotonic()
        ready = self._ready(now_s)
        for cut in self.cuts:
            called = ready and (not cut.at_call or (self.folder / f"strike.{cut.number}").exists())
            if cut.due_s is None and called:
                cut.due_s = now_s + cut.after_s
            if not cut.struck and cut.due_s is not None and now_s >= cut.due_s:
                cut.struck = True
                for host in cut.hosts:
                    self.job.cut(host)
                (self.folder / f"struck.{cut.number}").touch()
                cut.mends_s = None if cut.for_s is None else now_s + cut.for_s
            if cut.mends_s is not None and now_s >= cut.mends_s:
                cut.mends_s = None
                for host in cut.hosts:
                    self.job.mend(host)

    def _ready(self, now_s: float) -> bool:
        if self.begun_s is None and sum(1 for _ in self.folder.glob("begun.*")) >= self.num_ranks:
            self.begun_s = now_s
        if self.met_s is None:
            followers = [self.folder / f"rings{node}" / "follow.json" for node in range(1, len(self.job.names))]
            if all(path.exists() for path in followers):
                self.met_s = now_s
        if self.begun_s is None:
            return False
        met = self.met_s is not None and now_s >= self.met_s + MEETING_S
        return met or now_s >= self.begun_s + LONGEST_MEETING_S

    @property
    def struck(self) -> Sequence[int]:
        """Numbers of the rules that have pulled a plug."""
        return [cut.number for cut in self.cuts if cut.struck]

    @property
    def hosts_cut(self) -> Sequence[int]:
        """The hosts whose plugs those were."""
        return sorted({host for cut in self.cuts if cut.struck for host in cut.hosts})
