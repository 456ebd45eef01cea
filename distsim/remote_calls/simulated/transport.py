"""Messages between RPC workers, with the pipes, threads and futures at both ends."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from distsim.debug.records import HostWait
from distsim.sim.isolation.process import current_task, require_task
from distsim.sim.kernel.clocks import START, Clock, joined
from distsim.sim.kernel.scheduler import Event
from distsim.sim.kernel.task import is_done, made_of
from distsim.sim.kernel.turns import meet_clock
from distsim.sim.processes.threads import thread_of
from distsim.torch_compat.device import DISABLE_TORCH_DISPATCH
from distsim.torch_compat.groups import COLLECT_ALL, ENABLE_RECORD_FUNCTION

if TYPE_CHECKING:
    from distsim.debug.records import CallRecord, Wait
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.kernel.port import RankPort

# -- What goes over a pipe between two workers: pickled bytes, tensors beside them, and whose backward pass it is.

_DisableTorchDispatch = DISABLE_TORCH_DISPATCH.get()
_enable_record_function = ENABLE_RECORD_FUNCTION.get()

ENVELOPE_BYTES = 64
"""Kind, ids and sizes that every message has (TensorPipe's descriptor of a message without tensors)."""

LEAST_RECOPIED_BYTES = 8 * 1024
"""A smaller storage is sent whole for a view of it (torch/csrc/distributed/rpc/utils.cpp, kMinRecopyBytes)."""


@dataclass(slots=True)
class RpcMessage:
    """One request or reply. *kind* is torch's `MessageType`."""

    kind: str
    payload: bytes = b""
    tensors: Sequence[Tensor] = ()
    """Copies of the sender's, which the receiver may keep."""
    fields: Any = None
    """The few numbers and names that C++ writes in addition to the payload."""
    wants_grad: Sequence[bool] = ()
    """For each tensor whether the sender's tensor requires a gradient."""
    context_id: int | None = None
    """The autograd context it was sent in; None: in none."""
    autograd_id: int = 0
    sender: int = -1
    """Worker that sent it."""
    record: CallRecord | None = None
    """For a request of the program: the caller's record."""
    profile: Any = None
    """Settings of the sender's profile, which also apply to the callee (profiling.py); None without a profile."""
    events: Any = ()
    """Events that the callee's profile recorded."""

    def sized(self) -> int:
        """Return bytes on the wire."""
        return ENVELOPE_BYTES + len(self.payload) + sum(_nbytes(tensor) for tensor in self.tensors)


@dataclass(slots=True)
class Failed:
    """Replacement for a reply that failed, with the reason. *kind* is torch's `RPCErrorType`."""

    text: str
    kind: int = 0
    """0: unknown, 1: timed out."""

    @property
    def error(self) -> RuntimeError:
        return RuntimeError(f"RPCErr:{self.kind}:{self.text}" if self.kind else self.text)


def _nbytes(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return _nbytes(tensor._values()) + _nbytes(tensor._indices()) if tensor.is_sparse else 0
    return int(tensor.numel() * tensor.element_size())


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the tensors without their autograd history.

    The copying takes no virtual time, because the network card would do it.
    """
    _enable_record_function(False)
    try:
        with _DisableTorchDispatch(), torch.no_grad():
            return [_copy(tensor.detach()) for tensor in tensors]
    finally:
        _enable_record_function(True)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the tensor's strides, as torch sends it: a view with its storage, unless that is much
    larger.
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor.clone()
    held, own = tensor.untyped_storage().nbytes(), _nbytes(tensor)
    if held >= LEAST_RECOPIED_BYTES and held >= 2 * own:
        return tensor.clone()
    copy = torch.empty(0, dtype=tensor.dtype)
    return copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.size(), tensor.stride())


# -- What `rpc_async` returns: torch's own future, waited for in virtual time.

_collect_all = COLLECT_ALL.get()


class Reply(Future[Any]):
    """Reply to one request. *read* returns its value or raises; *why* is the reason of a thread that waits for it."""

    def __init__(self, process: SimProcess, why: Wait, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self._came: Event = process.port.event()
        self.why = why
        self._read = read
        self._waiters = 0
        self._raw: list[Any] = []
        self._clock: Clock = START
        """In an exploration, what happens before the reply."""
        self.error: Exception | None = None

    @property
    def is_waited_for(self) -> bool:
        """Return whether a thread of its process sleeps until the reply arrives and can process it."""
        return self._waiters > 0

    def hand_to_waiter(self, raw: Any, clock: Clock) -> None:
        """Let the waiting thread read the reply, before which happens what has *clock* (scheduler side)."""
        self._raw.append(raw)
        self._clock = clock
        self._came.succeed()

    def settle(self, raw: Any) -> None:
        """Read the reply in the running thread, which runs the callbacks."""
        if (task := current_task()) is not None:
            self._clock = joined(self._clock, task.clock)
        try:
            value = self._read(raw)
        except Exception as error:
            self.error = error
            self.set_exception(error)
        else:
            self.set_result(value)
        if not self._came.triggered:
            self._came.succeed()

    def wait(self) -> Any:
        task = current_task()
        if task is not None and not is_done(self):
            self._waiters += 1
            try:
                task.wait(self._came, self.why)
            finally:
                self._waiters -= 1
            meet_clock(task, self._clock)
            while self._raw:
                self.settle(self._raw.pop())
        meet_clock(task, self._clock)
        return super().wait()


_real_collect_all: Any = _collect_all


def collect_all(futures: Sequence[Any]) -> Any:
    """Replace torch's function; with a failed call, the result fails at once, as with futures in C++."""
    if current_task() is None or not any(hasattr(future, "why") for future in futures):
        collected = _real_collect_all(futures)
        made_of(collected, futures)
        return collected
    together: Future[Any] = Future()
    left = len(futures)

    def one_more(future: Any) -> None:
        nonlocal left
        left -= 1
        if is_done(together):
            return
        if (error := _error_of(future)) is not None:
            together.set_exception(error)
        elif not left:
            together.set_result(list(futures))

    for future in futures:
        future.add_done_callback(lambda _, future=future: one_more(future))
    made_of(together, futures)
    return together


def _error_of(future: Any) -> Exception | None:
    """Return the error with which it failed."""
    try:
        future.value()
    except Exception as error:
        return error
    return None


# -- The workers of one `init_rpc`, and the pipes between them.


class Worker(Protocol):
    """An agent as other agents see it (agent.SimAgent)."""

    id: int
    process: SimProcess

    def lost(self, worker: int) -> None:
        """Record that *worker* no longer replies."""


@dataclass(slots=True)
class _Pipe:
    """One direction of a connection: messages arrive in the order they were sent."""

    under_way: deque[list[Any]] = field(default_factory=deque)
    """For each message, whether it has arrived, and the action that follows."""


@dataclass(slots=True)
class _Meeting:
    came: dict[int, Any]
    everybody: Event
    clock: Clock = field(default_factory=dict)


class Workers:
    """All workers that joined through one store, shared by their processes."""

    def __init__(self, port: RankPort, key: str) -> None:
        self.port = port
        self.key = key
        self.agents: dict[int, Any] = {}
        """Agents by number (agent.SimAgent)."""
        self._pipes: dict[tuple[int, int, bool], _Pipe] = {}
        self._meetings: dict[str, _Meeting] = {}

    def meet(self, name: str, worker: int, size: int, value: Any, purpose: str) -> dict[int, Any]:
        """Wait until all *size* workers are here; what each has brought, by its number."""
        task = require_task()
        task.compute(self.port.facts.cluster.cpu.store_latency_s)
        task.flush()
        meeting = self._meetings.get(name)
        if meeting is None:
            meeting = self._meetings[name] = _Meeting({}, self.port.event())
        meeting.came[worker] = value
        meeting.clock = joined(meeting.clock, task.clock)
        if len(meeting.came) == size:
            del self._meetings[name]
            meeting.everybody.succeed()
        else:
            missing = [rank for rank in range(size) if rank not in meeting.came]
            task.wait(meeting.everybody, HostWait(purpose, tuple(missing)))
        meet_clock(task, meeting.clock)
        return dict(sorted(meeting.came.items()))

    def carry(self, source: Worker, to: Worker, nbytes: int, is_reply: bool, then: Callable[[], None]) -> None:
        """Move a message over the network, and call *then* when it and all earlier ones have arrived; called by the
        scheduler.
        """
        pipe = self._pipes.setdefault((source.id, to.id, is_reply), _Pipe())
        entry = [False, then]
        pipe.under_way.append(entry)

        def arrived(_: Event) -> None:
            entry[0] = True
            while pipe.under_way and pipe.under_way[0][0]:
                pipe.under_way.popleft()[1]()

        moved: Event
        if source.process is to.process:
            moved = self.port.timer(0.0)
        else:
            moved = self.port.facts.network.send(
                source.process.slot.device,
                to.process.slot.device,
                nbytes,
                "gloo",
                zlib.crc32(f"{source.id} {to.id}".encode()),
            )
        assert moved.callbacks is not None
        moved.callbacks.append(arrived)

    def left(self, agent: Worker) -> None:
        """Fail all calls to *agent*, which no longer replies."""
        if self.agents.get(agent.id) is agent:
            del self.agents[agent.id]
        for other in list(self.agents.values()):
            other.lost(agent.id)


def workers_of(port: RankPort, store: Any) -> Workers:
    """Return the workers that meet in *store*, the same object for all processes that opened it under this name."""
    prefix, inner = "", store
    while hasattr(inner, "underlying_store"):
        prefix = f"{inner._prefix}/{prefix}"
        inner = inner.underlying_store
    key = f"{id(inner._values)}:{prefix}"
    workers = port.shared.rpc_workers.get(key)
    if workers is None:
        workers = port.shared.rpc_workers[key] = Workers(port, key)
    return workers


# -- The threads in which a worker serves requests and takes replies: `num_worker_threads` of them, simulated threads of
# its process.

Job = Callable[[], None]


class ThreadPool:
    """At most *size* threads of *process*, of which one runs at a time, like under Python's interpreter lock.

    Another thread takes a job only if all that are awake wait for something.
    """

    def __init__(self, process: SimProcess, size: int) -> None:
        self.process = process
        self.size = size
        self._started = 0
        self._busy = 0
        """Threads in a job, waiting or not."""
        self._awake = 0
        """Threads that were woken, and will look for another job before they sleep."""
        self._idle: list[Event] = []
        self._jobs: deque[Job] = deque()
        self._stopped = False

    @property
    def num_idle(self) -> int:
        return self.size - self._busy

    @property
    def has_room(self) -> bool:
        """Return whether a job would start at once, or as soon as a running job that does not wait has ended."""
        return self._busy + len(self._jobs) < self.size

    def submit(self, job: Job) -> None:
        """Let a thread of the pool run *job*. May be called from the scheduler or any thread."""
        if self._stopped or not self.process.alive:
            return
        self._jobs.append(job)
        if not self._awake:
            self._wake_one()

    def _wake_one(self) -> None:
        if self._idle:
            self._idle.pop().succeed()
            self._awake += 1
        elif self._started < self.size:
            self._started += 1
            self._awake += 1
            self.process.port.start_task(self.process, self._body, f"RPC {self._started}", daemon=True)

    def stop(self) -> None:
        """End idle threads now, and the others when they become idle."""
        self._stopped = True
        self._jobs.clear()
        waiting, self._idle = self._idle, []
        for event in waiting:
            event.succeed()

    def _body(self) -> None:
        with thread_of(self.process):
            task = require_task()
            sleeps: Any = task._hand_over

            def hand_over(request: Any) -> None:
                """Free the pool's slot while a job waits, so that the next job can start."""
                self._awake -= 1
                if self._jobs and not self._awake:
                    self._wake_one()
                try:
                    sleeps(request)
                finally:
                    self._awake += 1

            while not self._stopped:
                if self._jobs:
                    self._busy += 1
                    task.serves = True
                    task._hand_over = hand_over  # type: ignore[method-assign]
                    try:
                        self._jobs.popleft()()  # under no name: it holds what it was sent
                    finally:
                        self._busy -= 1
                        task.serves = False
                        task._hand_over = sleeps  # type: ignore[method-assign]
                    continue
                event = self.process.port.event()
                self._idle.append(event)
                self._awake -= 1
                task.wait(event, HostWait("a request"))
