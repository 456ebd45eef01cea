"""What a simulated rank may ask of its world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from typing import Any, Protocol

from distsim.cluster import Cluster, CpuModel, Slot
from distsim.debug.records import CallRecord, Finding, Group, Wait
from distsim.kernels import Gpu
from distsim.network import Network
from distsim.sim.kernel.baton import OneCore
from distsim.sim.kernel.schedule import Schedule
from distsim.sim.kernel.scheduler import Clock, Due, Event
from distsim.sim.kernel.shared import SharedObjects

__all__ = ["Facts", "Injected", "RankPort"]


@dataclass(frozen=True)
class Facts:
    """What does not change while a world runs."""

    cluster: Cluster
    slots: list[Slot]
    """Locations of the ranks."""
    network: Network
    """The network, whose clock is the world's clock."""
    cpu: CpuModel
    """CPU model of one rank's share of its node."""
    seed: int
    data: Any
    """Policy that decides which values on simulated GPUs are known (values.ValuePolicy)."""
    schedule: Schedule | None
    """Order and delays that a scenario asks for."""
    last_step: int | None
    """Optimizer step after which the run ends, once every traced rank has ended it; None to run the whole program."""
    keeps_slices: bool
    """Whether the times of each rank's CPU operators are kept, for a trace."""
    keeps_sites: bool
    """Whether to keep the lines and operators that use GPU memory."""
    measures_memory: bool
    """Whether a full GPU continues as if it were larger, so that the run shows how much memory is needed."""

    @cached_property
    def gpu(self) -> Gpu:
        """Return the model of the cluster's GPUs, which is read when a program first uses one."""
        facts = self.cluster.node.gpu
        assert facts is not None
        return _gpu(facts.model, facts.memory_bytes, facts.memory_bytes_per_s)


@cache
def _gpu(model: str, memory: float, memory_bandwidth: float) -> Gpu:
    return Gpu.named(model, memory=memory, memory_bandwidth=memory_bandwidth)


class Injected(Protocol):
    """Faults of a world (planted.Faults), called where something can go wrong. *members* are the arrivals of a call.

    Without faults, nothing happens.
    """

    @property
    def are_planted(self) -> bool: ...

    def begin(self) -> None: ...

    def on_call(self, task: Any, record: CallRecord) -> None: ...

    def on_start(self, members: Sequence[Any]) -> None: ...

    def after_data(self, members: Sequence[Any]) -> None: ...

    def compute_s(self, process: Any, start_s: float, seconds: float) -> float: ...

    def host_s(self, process: Any, start_s: float, seconds: float) -> float: ...

    def kernel_s(self, process: Any, start_s: float, seconds: float) -> float: ...

    def on_connect(self, task: Any, host_name: str, port: int, timeout: timedelta, explicit: bool) -> None: ...

    def accesses(self) -> AbstractContextManager[None]: ...

    def findings(self) -> Sequence[Finding]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def never_struck(self) -> Sequence[Any]: ...


class RankPort(Protocol):
    """The one interface between the code that runs in a rank and the world around it.

    A rank waits, sleeps and polls through its `Task`, hands over its calls by `Task.arrive`, and puts kernels into
    streams (`device.timeline`); all else that it asks or reports is here. Ranks are threads, so the world itself
    answers, without a step between (world/world.py). Processes are `SimProcess`es, tasks `RankTask`s.
    """

    facts: Facts

    # -- time

    env: Clock

    @property
    def now_s(self) -> float:
        """Return the virtual time in seconds. A task may be ahead of it (`Task.now_s`)."""
        ...

    @property
    def next_event_s(self) -> float:
        """Return the virtual time of the next event; infinity if nothing is going to happen."""
        ...

    @property
    def only_polls(self) -> bool:
        """Return whether for the last virtual second the threads only polled."""
        ...

    def event(self) -> Event:
        """Return an event that happens when somebody calls its `succeed`."""
        ...

    def timer(self, seconds: float) -> Event:
        """Return an event that happens in *seconds* of virtual time."""
        ...

    def any_of(self, events: Sequence[Event]) -> Event:
        """Return an event that happens with the first of *events*."""
        ...

    def poll_event(self, quiet_polls: int) -> Event:
        """Return an event that happens when something else has, or a little later."""
        ...

    def at_deadline(self, at_s: float, due: Due) -> None:
        """Run *due* at *at_s*, unless it is no longer needed then."""
        ...

    # -- signs of life, for the watchdog of ranks that spin or block

    ticks: int
    """Counts operators, calls and module loads of the running thread."""
    in_operator: bool
    core: OneCore
    """Core on which the threads run."""

    def lift_limits(self) -> None:
        """Lift the limits of wall time, while a rank is at the prompt of a debugger."""
        ...

    # -- what ranks share

    shared: SharedObjects
    """Stores, groups, workers and more that ranks share."""

    def communicator(self, key: tuple[Any, ...], group: Group, flavour: str) -> Any:
        """Return the communicator of the group with *key*, whose calls use the algorithms of *flavour*."""
        ...

    # -- processes

    world_size: int
    processes: list[Any]
    rank_processes: dict[int, Any]
    launcher: Any
    """The process that starts the ranks; None if they are started before the program runs."""

    def claim_rank(self, process: Any, rank: int) -> None:
        """Set the rank of *process*. Spawned ranks state theirs in init_process_group."""
        ...

    def renumber(self, ranks: Any) -> None:
        """Change the ranks of processes, for a program that numbers them differently from their launcher."""
        ...

    def widen(self, world_size: int) -> None:
        """Set the number of ranks, for a program that starts its own ranks."""
        ...

    def only_first_has_begun(self) -> bool:
        """Return whether only the first process has started. It may be a launcher that starts the ranks."""
        ...

    def become_launcher(self, process: Any) -> None:
        """Make *process* the launcher of the ranks, which is not a rank itself."""
        ...

    def prefix_lines(self, process: Any) -> None:
        """Show the rank of *process* before each line of its output from now on."""
        ...

    def new_process(self, slot: Slot, environ: dict[bytes, bytes], argv: list[str], rank: int | None) -> Any:
        """Return a new process on *slot*. *rank* is None for a helper process of a rank."""
        ...

    def start_process(self, process: Any, program: Callable[[], Any], daemon: bool = False) -> None:
        """Let *process* run *program* in its main thread."""
        ...

    def start_task(self, process: Any, body: Callable[[], Any], name: str, daemon: bool = False) -> Any:
        """Start another thread of *process*."""
        ...

    def end_process(self, process: Any, phase: Any, exit_code: int, signal_name: str | None = None) -> None:
        """End the running process without cleanup (`os._exit`, a signal). Does not return."""
        ...

    def kill_process(self, process: Any, signal_name: str, exit_code: int) -> None:
        """End *process* from another process."""
        ...

    # -- reports

    def note(self, text: str) -> None:
        """Report once something that the simulation does differently from a real run."""
        ...

    def report(self, finding: Finding, *, stops: bool = False) -> None:
        """Report a fault of the program. If it *stops* the run, further steps are meaningless."""
        ...

    def timed_out(self, why: Wait | None) -> None:
        """Stop the world because of a timeout while other ranks still run."""
        ...

    def ended_last_step(self, task: Any) -> None:
        """Let the rank of *task* wait after step `last_step`. Does not return."""
        ...

    has_failed: bool
    """Whether calls met that contradict each other, or a guard found a fault, so that the run is over."""

    # -- observers, which ranks show what they do

    traced: Any
    """Decides which ranks run themselves (traced.Traced)."""
    faults: Injected
    guards: Any
    """Checks of the tensors of calls (tensors.Guards)."""
    memory: Any
    """Recorder of the memory of CPU tensors (memory.Memory), or None."""
