"""What a simulated rank may ask of its world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from distsim.cluster import Cluster, CpuModel, Slot
from distsim.debug.records import Finding, Group, Wait
from distsim.kernels import Gpu
from distsim.network import Network
from distsim.sim.kernel.baton import OneCore
from distsim.sim.kernel.scheduler import Clock, Due, Event
from distsim.sim.kernel.shared import SharedObjects
from distsim.sim.kernel.turns import TurnQueue


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
    turns: TurnQueue | None
    """In an exploration, where an operation waits for its turn; None in an ordinary run."""
    last_step: int | None
    """Optimizer step after which the run ends, once every traced rank has ended it; None to run the whole program."""
    keeps_slices: bool
    """Whether the times of each rank's CPU operators are kept, for a trace."""
    keeps_sites: bool
    """Whether to keep the lines and operators that use GPU memory."""
    measures_memory: bool
    """Whether a full GPU continues as if it were larger, so that the run shows how much memory is needed."""

    @property
    def gpu(self) -> Gpu:
        """Return the model of the first node's GPUs."""
        return self.gpu_on(0)

    def gpu_on(self, host: int) -> Gpu:
        """Return the model of the GPUs of a node."""
        facts = self.cluster.node_of(host).gpu
        assert facts is not None
        return self._gpus[id(facts)]

    @cached_property
    def _gpus(self) -> dict[int, Gpu]:
        """Return the models of the cluster's GPUs, which are read when a program first uses one."""
        return {id(node.gpu): Gpu.of(node.gpu) for node, _ in self.cluster.kinds if node.gpu is not None}


class RankPort(Protocol):
    """The one interface between the code that runs in a rank and the world around it.

    A rank waits, sleeps and polls through its `Task`, hands over its calls by `Task.arrive`, and puts kernels into
    streams (`device.timeline`); all else that it asks or reports is here. Ranks are threads, so the world itself
    answers, without a step between: world/world.py says what each of these does. Processes are `SimProcess`es, tasks
    `RankTask`s.
    """

    facts: Facts
    shared: SharedObjects
    """Stores, groups, workers and more that ranks share."""

    # Time. A task may be ahead of `now_s`; `next_event_s` is infinity if nothing is going to happen.
    env: Clock

    @property
    def now_s(self) -> float: ...
    @property
    def next_event_s(self) -> float: ...
    @property
    def only_polls(self) -> bool: ...

    def event(self) -> Event: ...
    def timer(self, seconds: float) -> Event: ...
    def any_of(self, events: Sequence[Event]) -> Event: ...
    def poll_event(self, quiet_polls: int) -> Event: ...
    def at_deadline(self, at_s: float, due: Due) -> None: ...

    # Signs of life of the running thread, and the core on which the threads run.
    ticks: int
    in_operator: bool
    core: OneCore

    def lift_limits(self) -> None: ...

    # Processes, and groups of ranks.
    world_size: int
    processes: list[Any]
    rank_processes: dict[int, Any]
    launcher: Any

    def communicator(self, key: tuple[Any, ...], group: Group, flavour: str) -> Any: ...
    def claim_rank(self, process: Any, rank: int) -> None: ...
    def renumber(self, ranks: Any) -> None: ...
    def widen(self, world_size: int) -> None: ...
    def only_first_has_begun(self) -> bool: ...
    def become_launcher(self, process: Any) -> None: ...
    def prefix_lines(self, process: Any) -> None: ...
    def new_process(self, slot: Slot, environ: dict[bytes, bytes], argv: list[str], rank: int | None) -> Any: ...
    def start_process(self, process: Any, program: Callable[[], Any], daemon: bool = False) -> None: ...
    def start_task(self, process: Any, body: Callable[[], Any], name: str, daemon: bool = False) -> Any: ...
    def end_process(self, process: Any, phase: Any, exit_code: int, signal_name: str | None = None) -> None: ...
    def kill_process(self, process: Any, signal_name: str, exit_code: int) -> None: ...

    # Reports.
    has_failed: bool

    def note(self, text: str) -> None: ...
    def report(self, finding: Finding, *, stops: bool = False) -> None: ...
    def timed_out(self, why: Wait | None) -> None: ...
    def ended_last_step(self, task: Any) -> None: ...

    # Observers, which ranks show what they do: traced.Traced, planted.Faults, tensors.Guards, memory.Memory or None.
    traced: Any
    faults: Any
    guards: Any
    memory: Any
