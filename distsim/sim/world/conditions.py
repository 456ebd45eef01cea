"""Parameters of a simulation: program, cluster, faults, limits, order of operations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from distsim.debug.diagnosis.silent.facts import check_patterns
from distsim.debug.records import Evidence
from distsim.options import RunOptions
from distsim.sim.faults.fault import Rule
from distsim.sim.kernel.chooser import Orders
from distsim.sim.kernel.limits import Limits
from distsim.sim.outcome import Progress

if TYPE_CHECKING:
    from distsim.sim.world import Setting, World


@dataclass(slots=True)
class Conditions:
    """Value of `RunRequest.conditions`. The run fills in the last two."""

    rules: Sequence[Rule] = ()
    guards: Collection[str] = ()
    """Additional checks beside those of calls (`guards.GUARDS`)."""
    limits: Limits = field(default_factory=Limits)
    orders: Orders | None = None
    """How to order what no rule orders; None for the order of virtual time."""
    keeps_all_calls: bool = True
    """Whether every call is kept, for faults at calls and pages."""
    patience: float | None = None
    """Factor on the host timeout for a rank that computes between two calls."""
    memory: bool = False
    """Whether to measure the peak memory of each rank's tensors."""
    never_struck: list[Rule] = field(default_factory=list)
    """Rules that never took effect."""
    evidence: Evidence | None = None
    """State of all ranks at the end, also of a run that was ended early."""

    def applied_to(self, setting: Setting) -> Setting:
        """Return *setting* with these conditions."""
        from distsim.sim.device.memory import Memory
        from distsim.sim.faults.planted import Faults
        from distsim.sim.faults.tensors import Guards

        return replace(
            setting,
            faults=lambda world: Faults(world, self.rules),
            late_ranks_are_planted=True,
            keeps_all_calls=setting.keeps_all_calls or self.keeps_all_calls,
            guards=Guards(self.guards, warns=False),
            limits=self.limits,
            orders=self.orders,
            patience=setting.patience if self.patience is None else self.patience,
            memory=Memory() if self.memory else None,
        )

    def begin(self, world: World) -> None:
        """Called when *world* has its processes and has not run yet."""
        self.limits.start()
        world.faults.begin()

    def end(self, world: World) -> None:
        """Called when the run is over or was cut short."""
        self.evidence = world.final
        self.never_struck = list(world.faults.never_struck)
        for text in world.faults.notes:
            world.note(text)
        if world.diagnoses:
            self.limits.reached = None
        if self.limits.reached is not None:
            world.note(f"ended by a limit: {self.limits.reached}")


@dataclass
class RunRequest(RunOptions):
    """One simulated run: a program, its options and its conditions."""

    program: str
    """Path of a script, or the name of a module with *module*."""
    _: KW_ONLY
    module: bool = False
    args: list[str] = field(default_factory=list)
    local_rank_flag: str | None = None
    """Name of an additional argument that gives each rank its local rank; None: only the environment does."""
    environ: dict[str, str] = field(default_factory=dict)
    """Environment variables that the launcher sets for every rank, in addition to those that describe the rank."""
    launcher: Literal["torchrun", "srun", "mpirun", "python"] = "torchrun"
    """The program whose variables the ranks have. `python` starts one process, which may start the ranks itself."""
    silent_allow: Sequence[str] = ()
    """Patterns `kind:tensor` of silent findings that are intended and not reported."""
    progress: Callable[[Progress], None] | None = None
    budget_s: float | None = None
    """CPU seconds (estimated) for tracing every rank of a program on GPUs. Above that, a sample of the ranks is
    traced (world/traced.py). None to always trace every rank.
    """
    last_step: int | None = None
    """Optimizer step after which the run ends, once every traced rank has ended it; None to run the whole program."""
    measures_memory: bool = False
    """Whether a full GPU continues as if it were larger, so that the run shows how much memory is needed."""
    keeps_sites: bool = False
    """Whether to keep the lines and operators that use GPU memory."""
    price: float | None = None
    """Price of one GPU hour; None: that of the cluster."""
    planned_tokens: float | None = None
    """Tokens of the whole training, for which the report gives time and cost."""
    sample_is_enough: bool = False
    """Whether a run that finished in a sample of its ranks has exit code 0."""
    conditions: Conditions | None = None
    """Faults, limits and orders; None: an ordinary run."""

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        check_patterns(self.silent_allow)
