"""The lighthouse, managers, groups, timers and checkpoints of torchft, simulated.

torchft's Manager, Optimizer and DistributedDataParallel run as they are. The rules of quorums, of who heals from whom,
and the defaults are those of torchft 0.2.0 (src/lighthouse.rs, src/manager.rs). The lighthouse's own messages take no
time; a checkpoint crosses the network.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.futures import Future

from distsim.debug.records import Group, HostWait
from distsim.debug.records.obligations import RECONFIGURE
from distsim.sim.c10d.backend import create_group
from distsim.sim.c10d.rendezvous import default_group, recorded
from distsim.sim.isolation.process import require_task
from distsim.text.units import format_time

HEARTBEAT_TIMEOUT_S, JOIN_TIMEOUT_S, MIN_REPLICAS = 5.0, 60.0, 1
"""Defaults of `torchft_lighthouse`, whose --min_replicas has none."""


@dataclass(frozen=True, slots=True)
class _Member:
    """One replica's request for a quorum."""

    manager: ManagerServer
    step: int
    shrink_only: bool
    commit_failures: int
    joined_s: float


@dataclass(slots=True)
class _Lighthouse:
    """Decides which replicas take part in the next step. One serves all replicas of a simulation."""

    port: Any
    min_replicas: int = MIN_REPLICAS
    join_timeout_s: float = JOIN_TIMEOUT_S
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    managers: dict[str, ManagerServer] = field(default_factory=dict)
    """By address."""
    participants: dict[str, _Member] = field(default_factory=dict)
    """Requests since the last quorum, by replica."""
    previous: list[str] | None = None
    """Replicas of the last quorum."""
    quorum_id: int = 0
    waiting: list[tuple[Any, list[_Member]]] = field(default_factory=list)
    """Events of the requests, and the lists into which the quorum is written."""
    ports: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def ask(self, member: _Member) -> tuple[Any, list[_Member]]:
        """Return the event of the next quorum, and the list that has its members then."""
        self.participants[member.manager.replica_id] = member
        answer: tuple[Any, list[_Member]] = self.port.event(), []
        self.waiting.append(answer)
        self.look()
        return answer

    def look(self) -> None:
        """Announce a quorum if there is one, or look again when a heartbeat or the patience for others ends."""
        healthy = {m.replica_id for m in self.managers.values() if m.gone_for_s() < self.heartbeat_timeout_s}
        joined = {name: member for name, member in self.participants.items() if name in healthy}
        chosen = sorted(joined.items())
        if self.previous is not None and any(member.shrink_only for member in joined.values()):
            chosen = [(name, member) for name, member in chosen if name in self.previous]
        is_fast = self.previous is not None and joined.keys() >= set(self.previous)
        patience_s = self.join_timeout_s + min((m.joined_s for m in joined.values()), default=0.0) - self.port.now_s
        enough = len(joined) >= self.min_replicas and len(joined) > len(healthy) // 2
        if not joined or not (is_fast or (enough and (len(joined) == len(healthy) or patience_s <= 0.0))):
            gone_s = [m.gone_for_s() for m in self.managers.values() if 0.0 < m.gone_for_s() < self.heartbeat_timeout_s]
            ends_s = [self.heartbeat_timeout_s - seconds for seconds in gone_s] + [patience_s]
            if joined and (later_s := min((s for s in ends_s if s > 0.0), default=None)) is not None:
                self.port.timer(later_s + 1e-6).callbacks.append(lambda _: self.look())
            return
        names = [name for name, _ in chosen]
        if names != self.previous:
            before, self.previous = self.previous, names
            self.quorum_id += 1
            self._note_change(before, names)
        elif any(member.commit_failures for _, member in chosen):
            self.quorum_id += 1
        self.participants.clear()
        waiting, self.waiting = self.waiting, []
        for event, members in waiting:
            members += [member for _, member in chosen]
            event.succeed()

    def _note_change(self, before: list[str] | None, names: list[str]) -> None:
        who = ", ".join(name.partition(":")[0] for name in names)
        lost = sorted(set(before or ()) - set(names))
        ends_s = [m.gone_for_s() for m in self.managers.values() if m.replica_id in lost]
        after = f", {format_time(max(ends_s))} after {lost[0].partition(':')[0]} ended" if any(ends_s) else ""
        self.port.note(f"torchft: quorum {self.quorum_id} at {format_time(self.port.now_s)}: {who}{after}")


def _lighthouse() -> _Lighthouse:
    port = require_task().port
    existing: _Lighthouse | None = port.shared.libraries.get("torchft")
    if existing is None:
        existing = port.shared.libraries["torchft"] = _Lighthouse(port)
    return existing


def _waits(event: Any, awaited: str, timeout: timedelta) -> None:
    """Wait for *event* in virtual time; raise torchft's error after *timeout*."""
    task = require_task()
    others = tuple(r for r in task.port.rank_processes if r != task.process.rank)
    if not task.wait_until(event, HostWait(awaited, others), timeout.total_seconds()):
        raise TimeoutError(f'status: Cancelled, message: "Timeout expired" ({awaited}, {timeout})')


class ManagerServer:
    """The server of one replica, which its rank 0 starts."""

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        bind: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        quorum_retries: int,
    ) -> None:
        self.replica_id, self.store_address, self.world_size = replica_id, store_addr, world_size
        self.process = require_task().process
        self.lighthouse = _lighthouse()
        self._address = f"http://{hostname}:{next(self.lighthouse.ports)}"
        self.lighthouse.managers[self._address] = self
        self.metadata: dict[int, str] = {}
        """Where each rank's checkpoint is, by rank in the replica."""
        self.asking: dict[int, _Member] = {}
        self.votes: dict[int, bool] = {}
        self.quorum: tuple[Any, list[_Member]] = (self.process.port.event(), [])
        self.decision: tuple[Any, list[bool]] = (self.process.port.event(), [])
        self._closed_s: float | None = None

    def address(self) -> str:
        """Return the address that clients connect to."""
        return self._address

    def shutdown(self) -> None:
        """End the heartbeats."""
        self._closed_s = self.process.port.now_s
        self.lighthouse.look()

    def gone_for_s(self) -> float:
        """Return the seconds since its last heartbeat; 0 while it runs."""
        end_s = self._closed_s if self.process.alive else self.process.ending.end_s
        return 0.0 if end_s is None else max(1e-9, self.process.port.now_s - end_s)


class ManagerClient:
    """A rank's connection to a replica's server."""

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self._server = _lighthouse().managers[addr]

    def _quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        timeout: timedelta,
        commit_failures: int,
        init_sync: bool = True,
    ) -> SimpleNamespace:
        task, server = require_task(), self._server
        task.flush()
        server.metadata[group_rank] = checkpoint_metadata
        member = server.asking[group_rank] = _Member(server, step, shrink_only, commit_failures, task.port.now_s)
        event, members = server.quorum
        if len(server.asking) == server.world_size:
            server.asking, server.quorum = {}, (task.port.event(), [])
            request, chosen = server.lighthouse.ask(member)

            def tell(_: Any) -> None:
                members.extend(chosen)
                event.succeed()

            if request.triggered:
                tell(request)
            else:
                request.callbacks.append(tell)
        _waits(event, "torchft's quorum", timeout)
        return _result(server, group_rank, members, init_sync)

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        return self._server.metadata[rank]

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        """Return whether all ranks of the replica want to commit the step."""
        task, server = require_task(), self._server
        task.flush()
        server.votes[group_rank] = should_commit
        event, answer = server.decision
        if len(server.votes) == server.world_size:
            answer.append(all(server.votes.values()))
            server.votes, server.decision = {}, (task.port.event(), [])
            event.succeed()
            if not answer[0]:
                name = server.replica_id.partition(":")[0]
                task.port.note(f"torchft: {name} lost its work of step {step} at {format_time(task.port.now_s)}")
        _waits(event, "the other ranks of its replica", timeout)
        return answer[0]


def _result(server: ManagerServer, group_rank: int, members: list[_Member], init_sync: bool) -> SimpleNamespace:
    """Return what a quorum means for one rank: its place, and who heals from whom."""
    names = [member.manager.replica_id for member in members]
    if server.replica_id not in names:
        raise RuntimeError(f"replica {server.replica_id} not participating in returned quorum")
    own, max_step = names.index(server.replica_id), max(member.step for member in members)
    newest = [i for i, member in enumerate(members) if member.step == max_step]
    primary = newest[group_rank % len(newest)]
    forced = init_sync and max_step == 0
    healing = [i for i, member in enumerate(members) if member.step != max_step or (forced and i != primary)]
    sources = [i for i in range(len(members)) if i not in healing]
    source_of = {i: sources[(n + group_rank) % len(sources)] for n, i in enumerate(healing)}
    source = source_of.get(own)
    return SimpleNamespace(
        quorum_id=server.lighthouse.quorum_id,
        replica_rank=own,
        replica_world_size=len(members),
        recover_src_manager_address="" if source is None else members[source].manager.address(),
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=[i for i, at in source_of.items() if at == own],
        store_address=members[primary].manager.store_address,
        max_step=max_step,
        max_replica_rank=newest.index(own) if own in newest else None,
        max_world_size=len(newest),
        heal=source is not None,
        commit_failures=max(member.commit_failures for member in members),
        replica_ids=names,
    )


class LighthouseServer:
    """The lighthouse, where the program starts it itself."""

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        lighthouse = _lighthouse()
        lighthouse.min_replicas = min_replicas
        lighthouse.join_timeout_s = JOIN_TIMEOUT_S if join_timeout_ms is None else join_timeout_ms / 1000
        if heartbeat_timeout_ms is not None:
            lighthouse.heartbeat_timeout_s = heartbeat_timeout_ms / 1000

    def address(self) -> str:
        """Return an address; managers need none."""
        return "http://lighthouse"

    def shutdown(self) -> None:
        """Do nothing: the lighthouse ends with the simulation."""


# -- What torchft's own modules get after their import.


def _create_pg(self: Any, store: Any, rank: int, world_size: int) -> Any:
    """Return a group of gloo that breaks when a member dies."""
    process, name = require_task().process, f"torchft@{self._quorum_id}"
    record = recorded(process, RECONFIGURE, Group(name, name, default_group(world_size).ranks), None)
    process.groups.requested = {"cpu": "gloo"}, name, record
    options = SimpleNamespace(
        group_id=name,
        group_size=world_size,
        group_rank=rank,
        global_ranks_in_group=[],
        timeout=self._timeout,
        store=store,
    )
    pg = create_group(options, None)
    pg.breaks_with_members()
    return pg


def _register(self: Any, fut: Future[Any], timeout: timedelta) -> Future[Any]:
    """Return a future that has the result of *fut*, or fails after *timeout*."""
    timed: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        if not timed.done():
            try:
                timed.set_result(done.value())
            except Exception as error:
                timed.set_exception(error)

    def expire() -> None:
        if not timed.done():
            timed.set_exception(TimeoutError(f"future did not complete within {timeout}"))

    _after(timeout, expire)
    fut.add_done_callback(settle)
    return timed


@contextlib.contextmanager
def _context_timeout(self: Any, callback: Callable[[], None], timeout: timedelta) -> Iterator[None]:
    is_open = [True]
    _after(timeout, lambda: callback() if is_open else None)
    yield
    is_open.clear()


def _after(timeout: timedelta, call: Callable[[], None]) -> None:
    """Let the process call *call* after *timeout* of virtual time."""
    task = require_task()
    process = task.process
    timer = task.port.timer(timeout.total_seconds())
    timer.callbacks.append(lambda _: process.completions.add(call) if process.alive else None)


@dataclass(slots=True)
class _Checkpoint:
    """What one rank offers to others."""

    process: Any
    changed: Any
    step: int = -1
    state: Any = None


def _begin_transport(self: Any, timeout: timedelta, num_chunks: int) -> None:
    task = require_task()
    self._at = f"http://checkpoint:{next(_lighthouse().ports)}/checkpoint/"
    self._offer = _Checkpoint(task.process, task.port.event())
    task.port.shared.libraries[self._at] = self._offer


def _send_checkpoint(self: Any, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
    task, offer = require_task(), self._offer
    offer.step, offer.state = step, copy.deepcopy(state_dict)
    offer.changed, changed = task.port.event(), offer.changed
    changed.succeed()


def _recv_checkpoint(self: Any, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
    task = require_task()
    offer = task.port.shared.libraries[metadata]
    while offer.step != step:
        _waits(offer.changed, f"the checkpoint of step {step} of replica {src_rank}", timeout)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(offer.state))
    begun_s = task.now_s()
    moved = task.port.facts.network.send(offer.process.slot.device, task.process.slot.device, nbytes, "gloo", 0)
    _waits(moved, "a checkpoint to arrive", timeout)
    took = format_time(task.now_s() - begun_s)
    if step:
        task.port.note(
            f"torchft: rank {task.process.rank} healed to step {step} at {format_time(task.now_s())}, in {took}"
        )
    return copy.deepcopy(offer.state)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in dicts, lists and tuples of *state*."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors(value)


_REPLACED: dict[str, dict[str, dict[str, Any]]] = {
    "torchft.process_group": {"ProcessGroupGloo": {"_create_pg": _create_pg}},
    "torchft.futures": {"_TimeoutManager": {"register": _register, "context_timeout": _context_timeout}},
    "torchft.checkpointing.http_transport": {
        "HTTPTransport": {
            "__init__": _begin_transport,
            "metadata": lambda self: self._at,
            "send_checkpoint": _send_checkpoint,
            "recv_checkpoint": _recv_checkpoint,
            "allow_checkpoint": lambda self, step: None,
            "disallow_checkpoint": lambda self: None,
            "shutdown": lambda self, wait=True: None,
        }
    },
}
"""Methods of classes that would open sockets, start an event loop, or make a group of C++."""


def after_import(module: ModuleType) -> None:
    """Replace what torchft's module *module* has for real sockets and groups."""
    for name, methods in _REPLACED.get(module.__name__, {}).items():
        for method, replacement in methods.items():
            setattr(getattr(module, name), method, replacement)
    if module.__name__ == "torchft.manager":
        module.Manager.__init__ = _finds_lighthouse(module.Manager.__init__)


def _finds_lighthouse(real: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        os.environ.setdefault("TORCHFT_LIGHTHOUSE", "http://lighthouse")
        real(self, *args, **kwargs)

    return init


MODULES = {
    "torchft._torchft": {
        "ManagerServer": ManagerServer,
        "ManagerClient": ManagerClient,
        "LighthouseServer": LighthouseServer,
    },
    "torchft.otel": {"setup_logger": lambda name: None},  # opentelemetry starts threads when it is imported
}
