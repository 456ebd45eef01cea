"""Faults of ranks: they end, stop, delay or slow down a process."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Len

from distsim.debug.records import CallRecord, Phase, State
from distsim.debug.records.frames import user_stack
from distsim.errors import UsageError
from distsim.sim.faults.fault import Fault, Lasting, Rank, Rule, check_ranks
from distsim.sim.kernel.scheduler import BatonRequest
from distsim.sim.kernel.task import Killed
from distsim.text.exceptions import exception_named
from distsim.text.ranks import of_ranks
from distsim.text.units import format_time

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.cluster.graph.link import Slot
    from distsim.sim.isolation.process import RankTask, SimProcess
    from distsim.sim.world import World

# -- What befalls some ranks once: at a time, wherever they are, or inside a call of theirs.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRule(Rule):
    """A rule about some ranks."""

    ranks: Annotated[tuple[Rank, ...], Len(1)]
    """Affected ranks, such as [1, 3]."""

    @property
    def who(self) -> str:
        return of_ranks(self.ranks)

    def touches(self, slots: Sequence[Slot]) -> Sequence[int]:
        return self.ranks

    def check(self, cluster: Cluster, world_size: int) -> None:
        check_ranks(self.ranks, world_size)


RankR = TypeVar("RankR", bound=RankRule)


class RankFault(Fault[RankR]):
    """A fault that strikes each of its ranks at a time or in a call, or some time after it."""

    ends: ClassVar[bool] = True
    """Whether it ends or stops the rank."""

    def begin(self) -> None:
        if self.rule.when.call is None:
            self.later(self.rule.when.start_s, self._strike)

    def _strike(self) -> None:
        for rank in self.rule.ranks:
            process = self.world.rank_processes.get(rank)
            if process is not None and _target_is_alive(process):
                self.hit()
                self._befall(process)

    def on_call(self, task: RankTask, record: CallRecord) -> None:
        when = self.rule.when
        if when.call is None or record.rank not in self.rule.ranks or not when.call.matches(record):
            return
        self.hit()
        if when.after_s > 0.0:
            self.later(when.after_s, lambda: self._befall(task.process))
        else:
            task.process.ending.injected = self.ends
            self.inside(task, record)
            record.issued_s = task.now_s()

    def _befall(self, process: SimProcess) -> None:
        if not _target_is_alive(process):
            return
        main = process.main_task
        frame = main.frame() if main is not None else None
        if frame is not None:
            process.last_stack = user_stack(frame)
        process.ending.injected = self.ends
        self.outside(process, main)

    def inside(self, task: RankTask, record: CallRecord) -> None:
        """Strike in the rank's thread, while it makes the call."""
        raise NotImplementedError

    def outside(self, process: SimProcess, main: RankTask | None) -> None:
        """Strike from the scheduler, wherever the rank is. *main* is its main thread."""
        raise NotImplementedError


def _target_is_alive(process: SimProcess) -> bool:
    """Return whether a fault can affect *process*. An ABSENT process has not reached the rendezvous yet."""
    return process.phase in (Phase.RUNNING, Phase.ABSENT)


def end_from_outside(process: SimProcess, phase: Phase, code: int, signal_name: str | None = None) -> None:
    """End *process* immediately, whatever it is doing."""
    world = process.port
    if process.has_begun:
        world.kill_process(process, signal_name or "", code)
    else:  # before its first line: its thread finds its doom when it starts
        for task in process.tasks:
            task.doom = Killed()
    process.phase, process.ending.exit_code, process.ending.signal_name = phase, code, signal_name
    process.ending.end_s = world.now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash(RankRule):
    """Kills ranks by a signal."""

    what: ClassVar[str] = "crash"
    signal: str = "SIGKILL"
    """Name of the signal, such as SIGKILL, SIGSEGV or SIGTERM."""
    restart_after_s: Annotated[float, Gt(0)] | None = None
    """Start these ranks again this long after, as torchft's replicas are. torchrun ends all ranks of its job when one
    fails, and starts all again: list them all. Simulated only."""

    @property
    def exit_code(self) -> int:
        return -signal.Signals[self.signal].value

    def __str__(self) -> str:
        again = "" if self.restart_after_s is None else f" and started again after {self.restart_after_s:g} s"
        return f"{self.who} killed by {self.signal}{again}"

    def check(self, cluster: Cluster, world_size: int) -> None:
        RankRule.check(self, cluster, world_size)
        if self.signal not in signal.Signals.__members__:
            raise UsageError(f"no signal {self.signal!r}; try SIGKILL, SIGSEGV or SIGABRT")


class _Crash(RankFault[Crash], rule=Crash):
    def on_call(self, task: RankTask, record: CallRecord) -> None:
        if not task.process.family.restarts:  # who was started again is not killed again
            super().on_call(task, record)

    def inside(self, task: RankTask, record: CallRecord) -> None:
        self._plan_restart(task.process)
        self.world.end_process(task.process, Phase.KILLED, self.rule.exit_code, self.rule.signal)

    def outside(self, process: SimProcess, main: RankTask | None) -> None:
        self._plan_restart(process)
        end_from_outside(process, Phase.KILLED, self.rule.exit_code, self.rule.signal)

    def _plan_restart(self, process: SimProcess) -> None:
        if self.rule.restart_after_s is not None:
            self.world.restarts.begin_again(process, self.rule.restart_after_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit(RankRule):
    """Makes ranks exit."""

    what: ClassVar[str] = "exit"
    code: Annotated[int, Ge(0), Le(255)] = 1
    """Exit code of the ranks."""

    def __str__(self) -> str:
        return f"{self.who} left with exit code {self.code}"


class _Exit(RankFault[Exit], rule=Exit):
    def inside(self, task: RankTask, record: CallRecord) -> None:
        self.world.end_process(task.process, Phase.EXITED, self.rule.code)

    def outside(self, process: SimProcess, main: RankTask | None) -> None:
        end_from_outside(process, Phase.EXITED, self.rule.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise(RankRule):
    """Raises an exception in ranks."""

    what: ClassVar[str] = "exception"
    exception: str = "RuntimeError"
    """Name of an exception of Python or torch.distributed, or with its module: 'torch.cuda.OutOfMemoryError'."""
    message: str = "injected fault"
    """Text of the exception."""

    def __str__(self) -> str:
        return f"{self.exception} raised on {self.who}"

    def new_exception(self) -> Exception:
        """Return the exception; raise `UsageError` if there is no exception of that name."""
        kind = exception_named(self.exception)
        try:
            return kind(self.message)
        except TypeError:  # UnicodeDecodeError and its like want more than a text
            raise UsageError(f"{self.exception} cannot be made of a message alone; try RuntimeError") from None

    def check(self, cluster: Cluster, world_size: int) -> None:
        RankRule.check(self, cluster, world_size)
        self.new_exception()


class _Raise(RankFault[Raise], rule=Raise):
    def inside(self, task: RankTask, record: CallRecord) -> None:
        record.state, record.error = State.FAILED, self.rule.message
        raise self.rule.new_exception()

    def outside(self, process: SimProcess, main: RankTask | None) -> None:
        if main is not None and main.request is not None:  # only where it can be delivered
            main.interrupt(self.rule.new_exception())


# -- `freeze`: ranks stopped (SIGSTOP), for good or for some time.


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(RankRule):
    """Stops ranks (SIGSTOP), forever or for a time."""

    what: ClassVar[str] = "freeze"

    def __str__(self) -> str:
        return f"{self.who} stopped (SIGSTOP)"


class _Freeze(RankFault[Freeze], rule=Freeze):
    def inside(self, task: RankTask, record: CallRecord) -> None:
        task.process.last_stack = record.stack
        self._stop(task.process)
        task._hand_over(BatonRequest(None, None))

    def outside(self, process: SimProcess, main: RankTask | None) -> None:
        self._stop(process)

    def _stop(self, process: SimProcess) -> None:
        process.thaw = self.world.event()
        process.phase, process.ending.end_s = Phase.FROZEN, self.world.now_s
        if self.rule.when.for_s is not None:
            self.later(self.rule.when.for_s, lambda: _go_on(process))


def _go_on(process: SimProcess) -> None:
    thaw, process.thaw = process.thaw, None
    if process.phase is Phase.FROZEN and thaw is not None:
        process.phase, process.ending.end_s = Phase.RUNNING, None
        thaw.succeed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay(RankRule):
    """Delays ranks once."""

    what: ClassVar[str] = "delay"
    delay_s: Annotated[float, Gt(0)]
    """Length of the delay."""

    def __str__(self) -> str:
        return f"{self.who} delayed by {self.delay_s:g} s"


class _Delay(RankFault[Delay], rule=Delay):
    ends = False

    def inside(self, task: RankTask, record: CallRecord) -> None:
        task.sleep(self.rule.delay_s)

    def outside(self, process: SimProcess, main: RankTask | None) -> None:
        if main is not None and main.request is not None:  # it waits, and something is there to prolong
            main.debt_s += self.rule.delay_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter(Rule):
    """Pauses ranks periodically, as an operating system does. The pauses affect CPU work and kernel launches."""

    what: ClassVar[str] = "jitter"
    ranks: Annotated[tuple[Rank, ...], Len(1)] | None = None
    """Affected ranks (default: all)."""
    period_s: Annotated[float, Gt(0)]
    """Time from one pause to the next."""
    pause_s: Annotated[float, Gt(0)]
    """Length of each pause."""
    synchronous: bool = True
    """Whether all ranks pause at the same moments."""

    def touches(self, slots: Sequence[Slot]) -> Sequence[int]:
        return self.ranks or ()

    def __str__(self) -> str:
        who = "all ranks" if self.ranks is None else of_ranks(self.ranks)
        how = "at the same moments" if self.synchronous else "each at its own moments"
        return f"{who} pause {self.pause_s:g} s in every {self.period_s:g} s, {how}"

    def check(self, cluster: Cluster, world_size: int) -> None:
        check_ranks(self.ranks or (), world_size)
        if self.pause_s >= self.period_s:
            durations = f"{format_time(self.pause_s)} and {format_time(self.period_s)}"
            raise UsageError(f"expected pause_s below period_s, got {durations}: no time would be left to compute")


class _Jitter(Lasting[Jitter], rule=Jitter):
    def compute_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        rule = self.rule
        if rule.ranks is not None and process.rank not in rule.ranks:
            return seconds
        phase_s = 0.0
        if not rule.synchronous:
            phase_s = random.Random(f"{self.world.facts.seed}:{self.number}:{process.rank}").uniform(0.0, rule.period_s)
        begin_s = max(start_s, self._from_s)
        rest_s = seconds - (begin_s - start_s)
        if rest_s <= 0.0 or begin_s >= self.until_s:
            return seconds
        here_s, worked_s = begin_s + phase_s, self._worked_s(begin_s + phase_s)
        end_s, over_s = self._when_s(worked_s + rest_s), self.until_s + phase_s
        if end_s > over_s:  # it ends in the middle of the operator
            end_s = over_s + max(0.0, rest_s - (self._worked_s(over_s) - worked_s))
        lost_s = end_s - here_s - rest_s
        if lost_s < 1e-9 * rule.pause_s:
            return seconds
        self.hit()
        return seconds + lost_s

    host_s = compute_s

    def _worked_s(self, until_s: float) -> float:
        """Return the seconds between 0 and *until_s* without pauses. The pause is at the end of each period."""
        rule = self.rule
        full, part_s = divmod(until_s, rule.period_s)
        share_s = rule.period_s - rule.pause_s
        return full * share_s + min(part_s, share_s)

    def _when_s(self, worked_s: float) -> float:
        """Return the time at which a total of *worked_s* seconds outside of pauses has passed."""
        rule = self.rule
        share_s = rule.period_s - rule.pause_s
        full = max(0, math.ceil(worked_s / share_s - 1e-12) - 1)
        return full * rule.period_s + (worked_s - full * share_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler(RankRule):
    """Slows ranks down for the whole run."""

    what: ClassVar[str] = "straggler"
    factor: Annotated[float, Ge(1)] = 1.0
    """Factor by which the operators of these ranks take longer, on CPU or GPU."""
    delay_s: Annotated[float, Ge(0)] = 0.0
    """Mean delay before each call."""
    distribution: Literal["constant", "exponential", "uniform", "pareto"] = "constant"
    """Distribution of the delay. uniform: from 0 to twice the mean; pareto: with a long tail."""

    def __str__(self) -> str:
        parts = []
        if self.factor != 1.0:
            parts.append(f"computes {self.factor:g} times as long")
        if self.delay_s:
            parts.append(f"loses {self.delay_s:g} s ({self.distribution}) before each call")
        return f"{self.who} {' and '.join(parts) or 'is as fast as ever'}"


class _Straggler(Lasting[Straggler], rule=Straggler):
    def __init__(self, rule: Straggler, world: World, number: int) -> None:
        super().__init__(rule, world, number)
        self._draws: dict[int, random.Random] = {}
        """Random generators by rank."""

    def on_call(self, task: RankTask, record: CallRecord) -> None:
        super().on_call(task, record)
        rule = self.rule
        if record.rank in rule.ranks and rule.delay_s > 0.0 and self.active(task.now_s()):
            self.hit()
            task.compute(self._lost_s(record.rank))
            task.flush()
            record.issued_s = task.now_s()

    def _lost_s(self, rank: int) -> float:
        draw = self._draws.get(rank)
        if draw is None:
            draw = self._draws[rank] = random.Random(f"{self.world.facts.seed}:{self.number}:{rank}")
        mean_s = self.rule.delay_s
        match self.rule.distribution:
            case "exponential":
                return draw.expovariate(1.0 / mean_s)
            case "uniform":
                return draw.uniform(0.0, 2.0 * mean_s)
            case "pareto":  # shape 2: the mean is twice the scale, and is moved to begin at zero
                return (draw.paretovariate(2.0) - 1.0) * mean_s
            case _:
                return mean_s

    def compute_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        if process.rank not in self.rule.ranks or self.rule.factor == 1.0 or not self.active(start_s):
            return seconds
        self.hit()
        return seconds * self.rule.factor

    kernel_s = compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSlow(Rule):
    """Slows the kernels of one GPU down, as a lower clock does."""

    what: ClassVar[str] = "gpu_slow"
    gpu: str
    """Name of the GPU, such as n2/gpu5."""
    factor: Annotated[float, Gt(0), Le(1)]
    """Fraction of its speed that is left."""

    def __str__(self) -> str:
        return f"{self.gpu} at {self.factor:g} of its speed"

    def touches(self, slots: Sequence[Slot]) -> Sequence[int]:
        return [slot.rank for slot in slots if slot.device == self.gpu]

    def check(self, cluster: Cluster, world_size: int) -> None:
        if self.gpu not in cluster.devices or not cluster.node.num_gpus:
            gpus = cluster.devices if cluster.node.num_gpus else []
            ends = f"{gpus[0]} to {gpus[-1]}" if gpus else "none"
            raise UsageError(f"no GPU {self.gpu!r} in {cluster.name}: it has {ends}")


class _GpuSlow(Lasting[GpuSlow], rule=GpuSlow):
    def kernel_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        if process.slot.device != self.rule.gpu or not self.active(start_s):
            return seconds
        self.hit()
        return seconds / self.rule.factor
