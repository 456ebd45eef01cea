"""A worker's RPC agent: sends requests, lets threads serve incoming ones, and times out late replies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.rpc import WorkerInfo

from distsim.debug.records import HostWait
from distsim.remote_calls.simulated.transport import Failed, Job, Reply, RpcMessage, ThreadPool, Workers, workers_of
from distsim.sim.isolation.process import current_task, require_task
from distsim.sim.kernel.clocks import START, Clock, joined
from distsim.sim.kernel.scheduler import Event
from distsim.sim.kernel.turns import name_of
from distsim.sim.orders.requests import RequestQueue, WaitingRequest

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess

# -- A worker's agent: it sends requests, has a thread serve those that come, and gives up on replies that do not.
#
# Stands in for torch's TensorPipeAgent, whose constructor, methods, errors and order of events it has: a reply, too,
# needs a thread of the pool, so that a chain of calls with more links than threads stands still here as it does there.

CALL_S = 30e-6
"""Seconds of torch's C++ on the caller's host for a request with its reply.

This is a third of rpc_sync's 150 to 200 us between two processes of one machine; the rest is the network's and
Python's, which is charged as it runs.
"""
SERVE_S = 30e-6
"""Seconds of torch's C++ on the callee's host for a request with its reply."""
DEFAULT_TIMEOUT_S = 60.0
INFINITE = 0.0

Answered = Callable[["RpcMessage | Failed"], None]

FETCHES = ("PYTHON_RREF_FETCH_CALL", "SCRIPT_RREF_FETCH_CALL")
CHOICES = (*FETCHES, "PYTHON_CALL", "PYTHON_REMOTE_CALL", "TORCHSCRIPT_CALL", "TORCHSCRIPT_REMOTE_CALL")
"""Requests whose order at a worker makes a difference. Operators of aten work on copies of what they are sent."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """A request that has no reply yet. It is a deadline, too."""

    agent: SimAgent
    number: int
    to: int
    timeout_s: float
    explicit: bool
    answered: Answered
    future: Reply | None = None
    over: bool = False
    clock: Clock = field(default_factory=dict)
    """In an exploration, what happens before the request, and later before the reply."""
    name: str = ""
    """In an exploration, name of a request whose order is a choice."""

    def strike(self) -> None:
        ms = round(self.timeout_s * 1000)
        text = f"RPC ran for more than set timeout ({ms} ms) and will now be marked with an error"
        self.agent.end_call(self, Failed(text, 1))


class SimAgent:
    """`TensorPipeAgent(store, name, rank, world_size, options, reverse_device_maps, devices)` of a process."""

    serve: Callable[[SimAgent, RpcMessage, Answered], None]
    """Function that serves a request in a thread (serving.serve)."""

    def __init__(
        self,
        store: Any,
        name: str,
        worker_id: int,
        world_size: int | None,
        opts: Any,
        reverse_device_maps: dict[str, dict[torch.device, torch.device]],
        devices: list[torch.device],
    ) -> None:
        task = require_task()
        self.process: SimProcess = task.process
        self.port = task.port
        self.info = WorkerInfo(name, worker_id)
        self.id = worker_id
        self.store = store
        self.options = opts
        self.size = world_size
        self.reverse_device_maps = dict(reverse_device_maps)
        self.devices = list(devices)
        self.timeout_s = float(opts.rpc_timeout)
        self.pool = ThreadPool(self.process, opts.num_worker_threads)
        self.running = False
        self.profiles_gil = False
        self.active_calls = 0
        """Requests that this worker sent and that are not completed."""
        self.served_calls = 0
        """Requests that this worker received and has not replied to."""
        self._calls: dict[int, PendingCall] = {}
        self._next_call = 0
        self._quiet: list[Event] = []
        self.infos: dict[int, WorkerInfo] = {}
        self._names: dict[str, WorkerInfo] = {}
        self.workers: Workers = workers_of(self.port, store)
        turns = self.port.facts.turns
        self._requests = None if turns is None else RequestQueue(turns, worker_id)
        self._join_group()

    def _join_group(self) -> None:
        mode = b"static" if self.size else b"dynamic"
        answer = self.store.compare_set("rpc_group", "", mode)
        if bytes(answer) != mode:
            raise RuntimeError(
                "RPC group mixes statically and dynamically initialized members which is not supported. Static group "
                "members have `world_size` set in init_rpc, dynamic group members do not."
            )
        if self.size:
            purpose = f"init_rpc: the other workers of {self.size}"
            infos = self.workers.meet("names", self.id, self.size, self.info, purpose)
        else:
            infos = {agent.id: agent.info for agent in self.workers.agents.values()} | {self.id: self.info}
        for number, info in infos.items():
            self._add(number, info)
        self.workers.agents[self.id] = self
        assert self.process.ended.callbacks is not None
        self.process.ended.callbacks.append(lambda _: self._stop())

    def _add(self, number: int, info: WorkerInfo) -> None:
        known = self._names.get(info.name)
        if known is not None and known.id != number:
            raise RuntimeError(
                f"RPC worker name {info.name} is not unique. Workers {known.id} and {number} share the same name."
            )
        self.infos[number] = self._names[info.name] = info

    # -- what torch's Python asks

    @property
    def is_static_group(self) -> bool:
        return bool(self.size)

    def start(self) -> None:
        self.running = True

    def get_worker_info(self, worker: str | int | None = None, /) -> WorkerInfo:
        if worker is None:
            return self.info
        result = self._names.get(worker) if isinstance(worker, str) else self.infos.get(worker)
        if result is None:
            kind = "name" if isinstance(worker, str) else "id"
            raise RuntimeError(f"name:{self.info.name},rank:{self.id} could not find destination {kind} {worker}")
        return result

    def get_worker_infos(self) -> list[WorkerInfo]:
        return list(self.infos.values())

    def _get_device_map(self, dst: WorkerInfo) -> dict[torch.device, torch.device]:
        return dict(self.options.device_maps.get(dst.name, {}))

    def _get_backend_options(self) -> Any:
        return self.options

    def _update_group_membership(
        self,
        worker_info: WorkerInfo,
        my_devices: list[torch.device],
        reverse_device_map: dict[str, dict[torch.device, torch.device]],
        is_join: bool,
    ) -> None:
        if is_join:
            self._add(worker_info.id, worker_info)
            self.devices = list(my_devices)
            self.reverse_device_maps = dict(reverse_device_map)
        else:
            self.infos.pop(worker_info.id, None)
            self._names.pop(worker_info.name, None)

    def get_metrics(self) -> dict[str, str]:
        metrics = {
            "agent.thread_pool_size": str(self.pool.size),
            "agent.num_idle_threads": str(self.pool.num_idle),
            "agent.client_active_calls": str(self.active_calls),
            "agent.server_active_calls": str(self.served_calls),
            "agent.server_active_async_calls": "0",
        }
        return metrics | ({"agent.gil_average_wait_time_us": "0"} if self.profiles_gil else {})

    def get_debug_info(self) -> dict[str, str]:
        return self.get_metrics()

    def sync(self) -> None:
        """Do nothing, as torch does."""

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until no call of any worker is in progress."""
        if not self.size:
            self._wait_until_quiet("shutdown: its calls to end")
            return
        calls = 1
        while calls:
            self._wait_until_quiet("shutdown: its calls to end")
            purpose = "shutdown: the other workers"
            calls = sum(self.workers.meet("join", self.id, self.size, self._num_calls(), purpose).values())

    def _num_calls(self) -> int:
        return self.active_calls + self.served_calls

    def _wait_until_quiet(self, purpose: str) -> None:
        task = require_task()
        while self._num_calls():
            event = self.port.event()
            self._quiet.append(event)
            asked_ranks = {self.rank_of(call.to) for call in self._calls.values()}
            task.wait(event, HostWait(purpose, tuple(sorted(asked_ranks))))

    def shutdown(self) -> None:
        require_task().flush()
        self._stop()

    def _stop(self) -> None:
        if self.running or self.workers.agents.get(self.id) is self:
            self.running = False
            self.workers.left(self)
            for call in list(self._calls.values()):
                call.over = True
            self._calls.clear()
            self.pool.stop()

    # -- requests

    def send(
        self,
        to: int,
        message: RpcMessage,
        answered: Answered,
        timeout_s: float = -1.0,
        future: Reply | None = None,
    ) -> PendingCall:
        """Send a request to worker *to*.

        *answered* is called with the reply in a thread of the pool; if a thread already waits for *future*, that
        gets the reply. A *timeout_s* below 0 is the agent's default; 0 means no timeout.
        """
        if not self.running:
            raise RuntimeError(
                f"Node {self.id} tried to send() a message of type {message.kind} but RPC is no longer running on this "
                "node."
            )
        explicit = timeout_s > 0 or self.timeout_s != DEFAULT_TIMEOUT_S
        timeout_s = self.timeout_s if timeout_s < 0 else timeout_s
        task = current_task()
        ahead_s = 0.0
        if task is not None and task.process is self.process:
            task.compute(CALL_S)
            ahead_s = task.debt_s
        self._next_call += 1
        call = PendingCall(self, self._next_call, to, timeout_s, explicit, answered, future)
        self._calls[call.number] = call
        self.active_calls += 1
        message.sender = self.id
        if task is not None and (turns := self.port.facts.turns) is not None:
            call.clock = task.clock
            if message.record is not None and message.kind in CHOICES:
                turns.count_call(task)
                name = name_of(task)
                call.name = f"{to}@{name}#{turns.number('request', name, str(to))}"
        nbytes = message.sized()
        if timeout_s != INFINITE:
            self.port.at_deadline(self.port.now_s + ahead_s + timeout_s, call)
        leaves = self.port.timer(ahead_s)
        assert leaves.callbacks is not None
        leaves.callbacks.append(lambda _: self._leave(call, message, nbytes))
        return call

    def _leave(self, call: PendingCall, message: RpcMessage, nbytes: int) -> None:
        other = self.workers.agents.get(call.to)
        if other is None:
            self.end_call(call, Failed("ECONNREFUSED: connection refused (simulated: the worker has ended)"))
        elif self.running:
            self.workers.carry(self, other, nbytes, False, lambda: other.came(self, call, message))

    def came(self, sender: SimAgent, call: PendingCall, message: RpcMessage) -> None:
        """Handle a request that has arrived; called by the scheduler."""
        if self.workers.agents.get(self.id) is not self or not self.process.alive:
            return
        self.served_calls += 1

        def respond(reply: RpcMessage | Failed) -> None:
            task = current_task()
            call.clock = START if task is None else task.clock
            ahead_s = task.debt_s if task is not None and task.process is self.process else 0.0
            leaves = self.port.timer(ahead_s)
            assert leaves.callbacks is not None
            leaves.callbacks.append(lambda _: self._reply(sender, call, reply))

        def job() -> None:
            require_task().compute(SERVE_S)
            try:
                self.serve(self, message, respond)
            except Exception as error:
                respond(Failed(error_text(error)))

        if self._requests is None or not call.name:
            self._submit(job, call.clock)
            return
        assert message.record is not None
        site, remote = message.record.site, message.record.remote
        fetches = message.kind in FETCHES
        request = WaitingRequest(
            call.name,
            f"serve {remote.function if remote is not None and remote.function else message.record.op}",
            "" if site is None else f"{site.file}:{site.line}",
            lambda: joined(call.clock, self._value(message).clock) if fetches else call.clock,
            lambda clock: self._submit(job, clock, call.name),
            lambda: self.pool.has_room and (not fetches or self._value(message).has_value),
            fetches,
        )
        self._requests.post(request)

    def _value(self, message: RpcMessage) -> Any:
        """Return the value that a request fetches (state.OwnedValue)."""
        return self.process.rpc.rrefs.owner_of(message.fields)

    def _submit(self, job: Job, clock: Clock, name: str = "") -> None:
        """Let a thread of the pool run *job*; in an exploration under the *name* of its request, after *clock*."""

        def named() -> None:
            task = require_task()
            before, task.clock = task.label, clock
            task.label = name or before
            try:
                job()
            finally:
                task.label = before

        self.pool.submit(job if self._requests is None else named)

    def _reply(self, sender: SimAgent, call: PendingCall, reply: RpcMessage | Failed) -> None:
        self.served_calls -= 1
        self._ask_quiet()
        if self.workers.agents.get(sender.id) is not sender or self.workers.agents.get(self.id) is not self:
            return
        nbytes = len(reply.text) if isinstance(reply, Failed) else reply.sized()
        if isinstance(reply, RpcMessage):
            reply.sender = self.id
        self.workers.carry(self, sender, nbytes, True, lambda: sender.end_call(call, reply))

    def end_call(self, call: PendingCall, reply: RpcMessage | Failed) -> None:
        """Complete a request, on the scheduler's side."""
        if call.over:
            return
        call.over = True
        self._calls.pop(call.number, None)
        future = call.future
        if future is not None and future.is_waited_for and self.pool.has_room:
            self._ended()
            future.hand_to_waiter(reply, call.clock)
        else:
            self._submit(lambda: self._answer(call, reply), call.clock)

    def _answer(self, call: PendingCall, reply: RpcMessage | Failed) -> None:
        try:
            call.answered(reply)
        finally:
            self._ended()

    def _ended(self) -> None:
        self.active_calls -= 1
        self._ask_quiet()

    def _ask_quiet(self) -> None:
        if not self._num_calls():
            waiting, self._quiet = self._quiet, []
            for event in waiting:
                event.succeed()

    def lost(self, worker: int) -> None:
        """Fail all calls to *worker*, which is gone."""
        for call in [call for call in self._calls.values() if call.to == worker]:
            self.end_call(call, Failed("EOF: end of file (simulated: the worker has ended)"))

    def tell(self, to: int, message: RpcMessage, answered: Answered = lambda _: None) -> None:
        """Send a message of torch's own; no thread waits for the reply."""
        with contextlib.suppress(RuntimeError):
            self.send(to, message, answered)

    @property
    def limits(self) -> bool:
        """Return whether the program has set a timeout for its calls."""
        return self.timeout_s not in (DEFAULT_TIMEOUT_S, INFINITE)

    def name_of(self, worker: int) -> str:
        """Return the name of a worker."""
        info = self.infos.get(worker)
        return info.name if info else str(worker)

    def rank_of(self, worker: int) -> int:
        """Return the rank of the worker's process."""
        agent = self.workers.agents.get(worker)
        return worker if agent is None else agent.process.rank

    def waits_for(self, purpose: str, worker: int) -> HostWait:
        """Return the description of a wait for a reply of *worker*."""
        return HostWait(f"{purpose} to {self.name_of(worker)}", (self.rank_of(worker),))


def error_text(error: BaseException) -> str:
    """Format a Python exception like torch's C++ code."""
    return f"{type(error).__name__}: {error}" if not isinstance(error, RuntimeError) else str(error)
