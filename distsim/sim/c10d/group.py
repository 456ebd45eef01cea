"""The simulated process group: torch calls these methods, from Python and from C++.

One `SimGroup` is one rank's handle on a `Communicator`. Each method has its arguments read
(debug/records/arguments.py), refuses what torch's backend refuses (refusals.py), leaves a record, and
hands its tensors to the communicator; operations.py says what each operation moves and computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Work
from torch.distributed import c10d_logger

from distsim.debug.evidence import guard_findings as seen
from distsim.debug.records import P2P, CallRecord, CallWait, Group, State
from distsim.debug.records.arguments import METHODS, SYNCHRONOUS_P2P, Call, Reader
from distsim.debug.records.signature import Signature
from distsim.debug.words.error_text import error_line
from distsim.sim.c10d import refusals
from distsim.sim.c10d.buffers import as_gloo_sees
from distsim.sim.c10d.communicator import Arrival, Communicator
from distsim.sim.c10d.monitored_barrier import monitored_barrier
from distsim.sim.c10d.operations import OPERATIONS
from distsim.sim.c10d.work import SimWork
from distsim.sim.isolation.process import RankTask, SimProcess, current_task, require_task
from distsim.sim.observe.user_stack import call_stack, handle_is_the_users

__all__ = ["SimGroup"]

C10D, C10D_LOGGER = vars(c10d), vars(c10d_logger)

signature_of = lru_cache(4096)(Signature.of)


class SimGroup(dist.ProcessGroup):
    """A process group of one simulated rank."""

    def __init__(
        self,
        process: SimProcess,
        communicator: Communicator,
        group_rank: int,
        backends: dict[str, str],
        timeout: timedelta,
        explicit_timeout: bool,
        store: Any,
    ) -> None:
        group = communicator.group
        super().__init__(group_rank, len(group.ranks))
        self._process = process
        self._communicator = communicator
        self._backends = backends
        """Device type -> the backend the user asked for."""
        self._timeout = timeout
        self._explicit = explicit_timeout
        self._store = store
        self._numbers = {"collective": 0, "p2p": 0}
        self._group = group

    # -- questions

    def getBackendName(self) -> str:
        """What C++ asks. Not `gloo`: DDP's logger would take the group for a C++ ProcessGroupGloo."""
        return "sim"

    def name(self) -> str:
        return next(iter(self._backends.values()), "sim")

    _get_backend_name = name

    @property
    def group_name(self) -> str:
        return self._group.name

    @property
    def group_desc(self) -> str:
        return self._group.description

    def _set_group_name(self, name: str) -> None:
        """Known since the group was made."""

    _set_group_desc = _set_group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._backends]

    def _get_backend(self, device: torch.device) -> SimGroup:
        self._flavour(torch.device(device))
        return self

    def _flavour(self, device: torch.device) -> str:
        flavour = self._backends.get(device.type)
        if flavour is None:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return flavour

    create_device = staticmethod(dist.ProcessGroupGloo.create_device)
    create_default_device = staticmethod(dist.ProcessGroupGloo.create_default_device)

    supports_splitting = False
    supports_coalescing = False

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._explicit = True

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._numbers["collective"]

    def _wait_for_pending_works(self) -> None:
        pass

    def _enable_collectives_timing(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    abort = shutdown

    def refused(self, op: str, error: BaseException) -> None:
        """A public function of torch.distributed refused a call of this group: it has no number, and has not come."""
        task, process = require_task(), self._process
        task.flush()
        stack = call_stack(sys._getframe(1))
        now_s = task.now_s()
        record = CallRecord(
            rank=process.rank,
            group=self._group,
            seq=self._numbers["p2p" if op in P2P else "collective"] + 1,
            op=op,
            site=stack[0] if stack else None,
            stack=stack,
            thread=task.name,
            issued_s=now_s,
            completed_s=now_s,
            state=State.FAILED,
            error=error_line(error),
            rejected=True,
            index=len(process.records),
        )
        process.records.append(record)

    # -- the way of every call

    def _call(self, call: Call, is_async: bool, timeout: timedelta | None) -> Arrival:
        """Record the call and make its handle; the caller passes both to the communicator."""
        task = current_task()
        if task is None or task.process is not self._process:
            raise RuntimeError(f"{call.key[0]} on a simulated process group outside its rank")
        world = task.world
        world.ticks += 1
        task.compute(world.cluster.cpu.op_overhead_s)
        if world.schedule is not None:
            task.compute(world.schedule.delay_s(self._process.rank, len(self._process.records)))
        task.flush()
        if self._communicator.broken is not None:
            raise RuntimeError(self._communicator.broken)
        said = signature_of(call.key)
        p2p = said.op in P2P
        kind = "p2p" if p2p else "collective"
        self._numbers[kind] += 1
        caller = sys._getframe(2)
        stack = call_stack(caller)
        process = self._process
        record = said.record(
            rank=process.rank,
            group=self._group,
            seq=self._numbers[kind],
            peer=None if call.peer < 0 else call.peer,
            tag=call.tag if p2p else None,
            is_async=is_async,
            site=stack[0] if stack else None,
            stack=stack,
            thread=task.name,
            issued_s=task.now_s(),
            index=len(process.records),
        )
        if is_async and not handle_is_the_users(caller):
            record.waited = True
        process.records.append(record)
        if process.recorder is not None:
            process.recorder.call(record, self.name(), any(tensor.is_sparse for tensor in call.inputs))
        inside = next(filter(None, (_inside(other, record) for other in process.tasks if other is not task)), None)
        if inside is not None and world.lookahead is None:
            world.findings.append(seen.race(record, inside))
            world.stop_for_fault()
        if world.faults is not None:
            world.faults.on_call(task, record)
        own = timeout is not None and timeout.total_seconds() > 0 and timeout != self._timeout
        limit: timedelta = timeout if own and timeout is not None else self._timeout
        limit_s = limit.total_seconds()
        work = SimWork(
            process,
            record,
            world.env.event(),
            list(call.outputs),
            limit_s,
            own or self._explicit,
            lambda seconds: refusals.timeout_error(self.name(), record, seconds),
            lambda error: self._communicator.break_up(error, work),
        )
        arrival = Arrival(process, record, work, tuple(call.inputs), tuple(call.outputs))
        world.guards.on_arrival(arrival)
        return arrival

    def _collective(self, call: Call, timeout: timedelta | None) -> Work:
        op, rank, first = call.key[0], self.rank(), call.first
        flavour = self.name() if first is None else self._flavour(first.device)
        refusals.refuse_arguments(call, rank, self.size())
        refusals.refuse(call, flavour)
        memory = as_gloo_sees(op, rank, call.inputs, call.outputs)
        arrival = self._call(call, call.is_async, timeout)
        arrival.inputs, arrival.outputs = memory
        operation, communicator = OPERATIONS[op], self._communicator
        communicator.arrive(
            arrival.record.seq,
            rank,
            arrival,
            lambda members: operation.transfer(communicator, flavour, members),
            operation.data,
        )
        return arrival.work

    def _monitored_barrier(self, call: Call, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        record = self._call(call, False, None).record
        limit = self._timeout if timeout is None else timeout
        monitored_barrier(record, self._communicator.monitored, self.rank(), self.size(), limit, wait_all_ranks)

    def _message(self, call: Call, any_source: bool, is_async: bool) -> Work:
        op, me = call.key[0], self.rank()
        refusals.refuse(call, self._flavour(call.first.device))
        end = None if any_source else call.opts
        if end is not None:
            refusals.refuse_peer(op, end, me, self.size())
        arrival = self._call(call, is_async, None)
        if op == "send":
            self._communicator.send(me, end, call.tag, arrival)
        else:
            self._communicator.recv(end, me, call.tag, arrival)
        return arrival.work

    # -- coalescing: on CPU every call goes out by itself, as on gloo

    def _start_coalescing(self, device: torch.device) -> None:
        raise RuntimeError(f"Backend {self._flavour(device)} does not implement startCoalescing")

    def _end_coalescing(self, device: torch.device) -> Work:
        raise RuntimeError(f"Backend {self._flavour(device)} does not implement endCoalescing")

    # -- helpers

    def meet(self, group: Group, record: CallRecord) -> None:
        """Block until every member of *group* has made this group (gloo connects when it is made)."""
        arrival = Arrival(
            self._process,
            record,
            SimWork(
                self._process,
                record,
                require_task().world.env.event(),
                [],
                self._timeout.total_seconds(),
                self._explicit,
                lambda seconds: refusals.timeout_error(self.name(), record, seconds),
                lambda error: None,
            ),
        )
        self._communicator.arrive(0, self.rank(), arrival, lambda members: None, lambda members: None)
        limit_s = self._timeout.total_seconds()
        if not require_task().wait_until(arrival.work.done, CallWait(record), limit_s, self._explicit):
            raise refusals.connect_error(group, limit_s)

    def __repr__(self) -> str:
        return f"SimGroup({self.name()}, rank {self.rank()} of {self.size()}, {self._group.label})"


def _inside(task: RankTask, record: CallRecord) -> CallRecord | None:
    """The synchronous collective in which a thread is, of the group on which another makes *record*."""
    why = task.wait_reason
    if task.finished or record.is_p2p or not isinstance(why, CallWait):
        return None
    other = why.record
    return other if not (other.is_async or other.is_p2p) and other.group == record.group else None


def _timeout(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> timedelta | None:
    """The call's own: of its options, or given by itself."""
    found = getattr(call.opts, "timeout", None)
    if found is None:
        found = next((given for given in (*args, *kwargs.values()) if isinstance(given, timedelta)), None)
    return found


def _waits(frame: FrameType | None) -> bool:
    """Whether the function of torch.distributed that a program called waits for its message itself: `send` calls
    `isend`, and `send_object_list` calls `send`."""
    while frame is not None and (frame.f_globals is C10D or frame.f_globals is C10D_LOGGER):
        if frame.f_code.co_name in SYNCHRONOUS_P2P:
            return True
        frame = frame.f_back
    return False


def _method(name: str, read: Reader) -> Callable[..., Any]:
    def asked(self: SimGroup, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        try:
            return read(self._group.ranks, args, kwargs)
        except (TypeError, AttributeError, LookupError):  # as pybind says it
            forms = getattr(dist.ProcessGroup, name).__doc__
            told = f"{name}(): incompatible function arguments. The following argument types are supported:\n{forms}"
            raise TypeError(told) from None

    def collective(self: SimGroup, *args: Any, **kwargs: Any) -> Work:
        call = asked(self, args, kwargs)
        return self._collective(call, _timeout(call, args, kwargs))

    def message(self: SimGroup, *args: Any, **kwargs: Any) -> Work:
        return self._message(asked(self, args, kwargs), name == "recv_anysource", not _waits(sys._getframe(1)))

    def monitored(self: SimGroup, *args: Any, **kwargs: Any) -> None:
        self._monitored_barrier(asked(self, args, kwargs), *args, **kwargs)

    ways: dict[str, Callable[..., Any]] = {**dict.fromkeys(("send", "recv", "recv_anysource"), message)}
    call = ways.get(name, monitored if name == "monitored_barrier" else collective)
    call.__name__ = name
    call.__qualname__ = f"SimGroup.{name}"
    return call


for _name, _reader in METHODS.items():
    setattr(SimGroup, _name, _method(_name, _reader))
