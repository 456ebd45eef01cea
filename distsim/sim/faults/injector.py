"""Faults of a simulated world: at every place where one may strike, the simulator asks here.

`World.faults` is None in an ordinary run. The rules are in fault_rules.py, what they do to links in
network_faults.py; this file is about ranks, payloads, storage and stores.
"""

from __future__ import annotations

import builtins
import contextlib
import fnmatch
import math
import random
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distsim.debug.evidence import guard_findings as seen
from distsim.debug.records import CallRecord, Finding, Phase, State, StoreWait
from distsim.debug.records.frames import Owner, owner
from distsim.debug.records.kinds import Kind
from distsim.debug.report.stack_tree import format_ranks
from distsim.errors import UsageError
from distsim.sim.faults import tensors as guards
from distsim.sim.faults.links import NetworkFaults, _detours, links_of, links_of_part
from distsim.sim.faults.rules import (
    Corrupt,
    Jitter,
    LinkFault,
    PartDown,
    RankFault,
    Rule,
    SlowStorage,
    Straggler,
    Unreachable,
)
from distsim.sim.isolation.process import RankTask, SimProcess, current_task
from distsim.sim.isolation.resemblance import resembling
from distsim.sim.kernel.scheduler import Request
from distsim.sim.observe.user_stack import user_stack

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.c10d.communicator import Arrival
    from distsim.sim.world import World

__all__ = ["Faults", "check_rule"]


def check_rule(rule: Rule, cluster: Cluster, world_size: int) -> None:
    """Raise `UsageError` where *rule* names what is not there."""
    if isinstance(rule, LinkFault):
        links_of(cluster, rule.links)
    elif isinstance(rule, PartDown):
        links_of_part(cluster, rule.part, rule.what)
        if rule.detour is not None:
            _detours(cluster, rule)
    ranks = (rule.rank,) if isinstance(rule, Corrupt) else getattr(rule, "ranks", None) or ()
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        raise UsageError(f"no rank {outside[0]}: the world has ranks 0 to {world_size - 1}")
    if isinstance(rule, RankFault):
        if rule.what == "exception":
            _exception(rule)
        if rule.what == "crash" and rule.signal not in signal.Signals.__members__:
            raise UsageError(f"no signal {rule.signal!r}; try SIGKILL, SIGSEGV or SIGABRT")


def _exception(rule: RankFault) -> Exception:
    kind = getattr(builtins, rule.exception, None) or getattr(dist, rule.exception, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise UsageError(f"no exception {rule.exception!r} in Python or torch.distributed; try RuntimeError")
    return kind(rule.message)


class Faults:
    """The faults of one world, and the guards that look for what they do."""

    def __init__(self, world: World, rules: Sequence[Rule], watch: Collection[str] = ()) -> None:
        self.world = world
        self.rules = list(rules)
        self.guards = frozenset(watch)
        self.network = NetworkFaults(world.env, world.network)
        self.struck: dict[int, float] = {}
        """Place in `rules` -> when it first struck."""
        self._found: list[Finding] = []
        self._waiting = {i for i, rule in enumerate(self.rules) if rule.when.call is not None}
        self._randoms: dict[tuple[int, int], random.Random] = {}
        self._accesses: dict[tuple[int, int], int] = {}
        self._cut_off: dict[int, list[int]] = {}

    def begin(self) -> None:
        """Set the clock of every rule that strikes at a time."""
        for number, rule in enumerate(self.rules):
            check_rule(rule, self.world.cluster, self.world.world_size)
            if number not in self._waiting and isinstance(rule, LinkFault | PartDown | RankFault):
                self._later(rule.when.at_s + rule.when.after_s, lambda n=number: self._strike(n))  # type: ignore[misc]

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        if delay_s <= 0.0:
            call()
            return
        timer = self.world.env.timeout(delay_s)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: call())

    # -- what the report says

    @property
    def notes(self) -> list[str]:
        """One sentence for each fault that struck."""
        return [f"injected: {self.rules[n]}, {self.rules[n].when}" for n in sorted(self.struck)]

    @property
    def never_struck(self) -> list[Rule]:
        """Rules that waited for a call, a file or a connection that never came."""
        return [rule for number, rule in enumerate(self.rules) if number not in self.struck]

    def findings(self) -> list[Finding]:
        """What a guard with an eye on links, payloads and arrivals would have seen by now."""
        found = [*self._found, *(self._unreached(number) for number in sorted(self._cut_off))]
        stalled = [link for link in self.world.network.stalled() if link in self.network.down]
        if stalled:
            names = [self.world.cluster.links[link].name for link in stalled[:3]]
            more = f" and {len(stalled) - 3} more" if len(stalled) > 3 else ""
            rule = self.network.down[stalled[0]][0]
            calls = self._moving()
            found.append(
                Finding(
                    Kind.NETWORK_FAULT,
                    self._behind(stalled, calls),
                    f"nothing moves over link{'s' if len(stalled) > 1 else ''} {', '.join(names)}{more} ({rule})",
                    group=calls[0].group if calls else None,
                    call=calls[0] if calls else None,
                    site=calls[0].site if calls else None,
                    at_s=self.struck.get(self.rules.index(rule)),
                    suggestion=f"Look at {names[0]}: cable, port counters, the switch's log. A second rail "
                    "(detour) would have carried the traffic.",
                )
            )
        return found

    def _unreached(self, number: int) -> Finding:
        ranks = tuple(sorted(self._cut_off[number]))
        who = f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"
        return Finding(
            Kind.NETWORK_FAULT,
            ranks,
            f"{who} cannot reach the store at the master",
            at_s=self.struck[number],
            suggestion=f"Look at MASTER_ADDR, the firewall and name resolution on the hosts of {who}.",
        )

    def _moving(self) -> list[CallRecord]:
        """Calls that have all their members and are not done, the oldest first."""
        calls = [
            r
            for process in self.world.rank_processes.values()
            for r in process.records
            if r.state is State.STARTED and r.dtypes
        ]
        return sorted(calls, key=lambda r: (r.started_s or 0.0, r.rank))

    def _behind(self, links: Sequence[int], calls: Sequence[CallRecord]) -> tuple[int, ...]:
        """The ranks whose traffic crosses *links*: those on the hosts at their ends, or behind a switch
        that they cut off, else all of the call."""
        vertices = {v.name: v for v in self.world.cluster.vertices}
        ends = [
            vertices[name] for i in links for link in [self.world.cluster.links[i]] for name in (link.src, link.dst)
        ]
        hosts = {v.host for v in ends if v.host is not None} or self.network.cut_off({v.name for v in ends})
        members = calls[0].members if calls else tuple(range(self.world.world_size))
        on_hosts = tuple(r for r in members if self.world.slots[r].host in hosts)
        inside = all(v.kind not in ("nic", "leaf", "spine", "switch") for v in ends)
        near = [r for r in on_hosts if inside and any(v.name == self.world.slots[r].device for v in ends)]
        return tuple(near) or on_hosts or tuple(members)

    # -- ranks

    def _hit(self, number: int) -> None:
        self.struck.setdefault(number, float(self.world.env.now))

    def _strike(self, number: int) -> None:
        """Scheduler side: a rule that waits for no call, or whose call came a while ago."""
        rule = self.rules[number]
        if isinstance(rule, LinkFault | PartDown):
            self._hit(number)
            self.network.begin(rule)
        elif isinstance(rule, RankFault):
            for rank in rule.ranks:
                process = self.world.rank_processes.get(rank)
                if process is not None and process.phase in (Phase.RUNNING, Phase.ABSENT):  # ABSENT: on its way in
                    self._hit(number)
                    self._fell(process, rule)

    def _fell(self, process: SimProcess, rule: RankFault) -> None:
        if process.phase not in (Phase.RUNNING, Phase.ABSENT):
            return
        main = process.main_task
        frame = main.frame() if main is not None else None
        if frame is not None:
            process.last_stack = user_stack(frame)
        if rule.what == "freeze":
            self._freeze(process, rule)
        elif rule.what == "crash":
            self._end(process, Phase.KILLED, -signal.Signals[rule.signal].value, rule.signal)
        elif rule.what == "exit":
            self._end(process, Phase.EXITED, rule.code, None)
        elif main is not None and main.request is not None:  # exception, delay: only where it can be delivered
            if rule.what == "exception":
                main.interrupt(_exception(rule))
            else:
                main.debt_s += rule.delay_s

    def _end(self, process: SimProcess, phase: Phase, code: int, signal_name: str | None) -> None:
        if process.has_begun:
            self.world.kill_process(process, signal_name or "", code)
        else:  # before its first line: its thread finds its doom when it starts
            from distsim.sim.kernel.task import Killed

            for task in process.tasks:
                task.doom = Killed()
        process.phase, process.exit_code, process.signal_name = phase, code, signal_name
        process.end_s = float(self.world.env.now)

    def _freeze(self, process: SimProcess, rule: RankFault) -> None:
        process.thaw = self.world.env.event()
        process.phase, process.end_s = Phase.FROZEN, float(self.world.env.now)
        if rule.when.for_s is not None:
            self._later(rule.when.for_s, lambda: self._continue(process))

    def _continue(self, process: SimProcess) -> None:
        thaw, process.thaw = process.thaw, None
        if process.phase is Phase.FROZEN and thaw is not None:
            process.phase, process.end_s = Phase.RUNNING, None
            thaw.succeed()

    def on_call(self, task: RankTask, record: CallRecord) -> None:
        """In the rank's own thread: it has made a call, which has not reached the others yet."""
        rank = record.rank
        for number, rule in enumerate(self.rules):
            if isinstance(rule, Straggler) and rank in rule.ranks and rule.delay_s > 0.0 and self._active(rule):
                self._hit(number)
                task.compute(self._lost_s(number, rule, rank))
                task.flush()
                record.issued_s = task.now_s()
            elif isinstance(rule, RankFault) and rank in rule.ranks and rule.when.call is not None:
                if rule.when.call.matches(record):
                    self._hit(number)
                    if rule.when.after_s > 0.0:
                        self._later(rule.when.after_s, lambda p=task.process, r=rule: self._fell(p, r))  # type: ignore[misc]
                    else:
                        self._inside(task, record, rule)

    def _inside(self, task: RankTask, record: CallRecord, rule: RankFault) -> None:
        world, process = self.world, task.process
        match rule.what:
            case "crash":
                world.end_process(process, Phase.KILLED, -signal.Signals[rule.signal].value, rule.signal)
            case "exit":
                world.end_process(process, Phase.EXITED, rule.code)
            case "exception":
                record.state, record.error = State.FAILED, rule.message
                raise _exception(rule)
            case "freeze":
                process.last_stack = record.stack
                self._freeze(process, rule)
                task._hand_over(Request(None, None))
            case _:
                task.sleep(rule.delay_s)
        record.issued_s = task.now_s()

    def _lost_s(self, number: int, rule: Straggler, rank: int) -> float:
        draw = self._randoms.get((number, rank))
        if draw is None:
            draw = self._randoms[number, rank] = random.Random(f"{self.world.seed}:{number}:{rank}")
        match rule.distribution:
            case "exponential":
                return draw.expovariate(1.0 / rule.delay_s)
            case "uniform":
                return draw.uniform(0.0, 2.0 * rule.delay_s)
            case "pareto":  # shape 2: the mean is twice the scale, and is moved to begin at zero
                return (draw.paretovariate(2.0) - 1.0) * rule.delay_s
            case _:
                return rule.delay_s

    def _active(self, rule: Rule) -> bool:
        start_s = rule.when.at_s + rule.when.after_s
        end_s = math.inf if rule.when.for_s is None else start_s + rule.when.for_s
        return start_s <= float(self.world.env.now) < end_s

    def compute_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        """How long an operator takes here that takes *seconds* elsewhere."""
        for number, rule in enumerate(self.rules):
            if isinstance(rule, Straggler):
                if process.rank in rule.ranks and rule.factor != 1.0 and self._active(rule):
                    self._hit(number)
                    seconds *= rule.factor
            elif isinstance(rule, Jitter) and (rule.ranks is None or process.rank in rule.ranks):
                phase_s = 0.0
                if not rule.synchronous:
                    phase_s = random.Random(f"{self.world.seed}:{number}:{process.rank}").uniform(0.0, rule.period_s)
                pauses = math.floor((start_s + seconds + phase_s) / rule.period_s)
                pauses -= math.floor((start_s + phase_s) / rule.period_s)
                if pauses and self._active(rule):
                    self._hit(number)
                    seconds += pauses * rule.pause_s
        return seconds

    # -- calls

    def on_start(self, members: Sequence[Arrival]) -> None:
        """A call has all its members: its first byte moves now."""
        for number in sorted(self._waiting):
            rule = self.rules[number]
            if isinstance(rule, LinkFault | PartDown):
                assert rule.when.call is not None
                if any(rule.when.call.matches(m.record) for m in members):
                    self._waiting.discard(number)
                    self._later(rule.when.after_s, lambda n=number: self._strike(n))  # type: ignore[misc]

    def may_finish(self, members: Sequence[Arrival], again: Callable[[], None]) -> bool:
        """Whether a call whose bytes have moved ends now: not while a member is stopped, never once one is dead."""
        for member in members:
            process = member.process
            if process.phase in (Phase.KILLED, Phase.EXITED) and process.exit_code:
                return False
            if process.thaw is not None and process.thaw.callbacks is not None:
                process.thaw.callbacks.append(lambda _: again())
                return False
        return True

    def after_data(self, members: Sequence[Arrival]) -> None:
        """The members' outputs are written: flip what a rule wants flipped."""
        for number, rule in enumerate(self.rules):
            if not isinstance(rule, Corrupt) or (rule.when.call is not None and number in self.struck):
                continue
            for member in members:
                record = member.record
                if record.rank == rule.rank and member.outputs and self._meant(rule, record):
                    tensor = member.outputs[0]
                    sent = guards.checksum(tensor)
                    guards.flip(tensor, rule)
                    self._hit(number)
                    if "payloads" in self.guards and guards.checksum(tensor) != sent:
                        self._found.append(seen.corrupted(record, str(rule)))
                        self.world.stop_for_fault()

    def _meant(self, rule: Corrupt, record: CallRecord) -> bool:
        return rule.when.call.matches(record) if rule.when.call is not None else self._active(rule)

    # -- storage and stores

    @contextlib.contextmanager
    def patches(self) -> Iterator[None]:
        """Lead file accesses of ranks through `_storage` where a rule is about them."""
        if not any(isinstance(rule, SlowStorage) for rule in self.rules):
            yield
            return
        import sys

        places: list[tuple[Any, str]] = [(builtins, "open"), (torch, "save"), (torch, "load")]
        saved = [(holder, name, getattr(holder, name)) for holder, name in places]

        def slow(real: Callable[..., Any], position: int) -> Callable[..., Any]:
            def access(*args: Any, **kwargs: Any) -> Any:
                task = current_task()
                if task is not None and owner(sys._getframe(1).f_code.co_filename) is Owner.USER:
                    path = args[position] if len(args) > position else kwargs.get("f", kwargs.get("file", ""))
                    self._storage(task, str(getattr(path, "name", path)))
                return real(*args, **kwargs)

            return access

        for holder, name, real in saved:
            setattr(holder, name, resembling(real, slow(real, 1 if name == "save" else 0)))
        try:
            yield
        finally:
            for holder, name, real in saved:
                setattr(holder, name, real)

    def _storage(self, task: RankTask, path: str) -> None:
        for number, rule in enumerate(self.rules):
            if not isinstance(rule, SlowStorage) or not fnmatch.fnmatchcase(path, rule.files):
                continue
            rank = task.process.rank
            if rule.ranks is not None and rank not in rule.ranks:
                continue
            access = self._accesses[number, rank] = self._accesses.get((number, rank), 0) + 1
            if rule.number in (None, access) and self._active(rule):
                self._hit(number)
                task.sleep(rule.delay_s)

    def connect(self, task: RankTask, host_name: str, port: int, timeout: timedelta, explicit: bool) -> None:
        """A rank opens its connection to the store."""
        for number, rule in enumerate(self.rules):
            if not isinstance(rule, Unreachable) or not self._active(rule):
                continue
            process = task.process
            if rule.what == "master_unreachable":
                if process.slot.host == self.world.slots[0].host:
                    continue
            elif rule.ranks is not None and process.rank not in rule.ranks:
                continue
            self._hit(number)
            refused = dist.DistNetworkError(
                f"The client socket has timed out after {int(timeout.total_seconds() * 1000)}ms while trying to "
                f"connect to ({host_name}, {port})."
            )
            reached = self.world.env.event()
            if rule.when.for_s is not None:
                left_s = rule.when.at_s + rule.when.after_s + rule.when.for_s - task.now_s()
                self._later(max(1e-9, left_s), lambda r=reached: r.succeed() and None)  # type: ignore[misc]
            else:
                self._cut_off.setdefault(number, []).append(process.rank)
            why = StoreWait((f"{host_name}:{port}",), "the store's server")
            process.phase = Phase.ABSENT  # as the others see it
            try:
                if not task.wait_until(reached, why, timeout.total_seconds(), explicit):
                    raise refused
            finally:
                if process.phase is Phase.ABSENT:  # it may have been killed, or stopped, meanwhile
                    process.phase = Phase.RUNNING
