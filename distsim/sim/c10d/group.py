"""Implements torch's process group interface for a simulated rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import Work

from distsim.debug.evidence import guard_findings as seen
from distsim.debug.evidence.guard_findings import forked_call
from distsim.debug.records import P2P, CallRecord, CallWait, Group, HostWait, State, Wait
from distsim.debug.records.arguments import METHODS, Key, MethodCall, Reader
from distsim.debug.records.frames import call_stack
from distsim.debug.records.signature import Signature
from distsim.sim.c10d import refusals
from distsim.sim.c10d.communicator import Communicator, monitored_barrier
from distsim.sim.c10d.gpu_values import known_of, pend
from distsim.sim.c10d.gpu_work import GpuWork, GroupStreams
from distsim.sim.c10d.group_api import (
    OPERATORS,
    Questions,
    add_newer_methods,
    handle_is_the_users,
    through_modes,
    waits_itself,
    with_methods,
)
from distsim.sim.c10d.operations import algorithms, as_gloo_sees
from distsim.sim.c10d.rendezvous import connect_error, meeting_place, timeout_error
from distsim.sim.c10d.stores import lost_error
from distsim.sim.c10d.work import Arrival, SimWork, Tensors, handle_of
from distsim.sim.device.allocator.claims import claim_buffers
from distsim.sim.device.memory import accelerators_of
from distsim.sim.isolation.process import RankTask, SimProcess, current_task, require_task
from distsim.sim.kernel.shared import KeyValues
from distsim.sim.kernel.steps import Access, Objects
from distsim.sim.kernel.turns import TurnQueue, TurnRequest, asking_line, meet_clock
from distsim.text.tracebacks import error_line
from distsim.torch_compat.groups import DISPATCH_MODES

# -- The simulated process group: torch calls these methods, from Python and from C++.
#
# One `SimGroup` is one rank's handle on a `Communicator`. Each method has its arguments read
# (debug/records/arguments.py), refuses what torch's backend refuses (refusals.py), leaves a record, and
# hands its tensors to the communicator; operations.py says what each operation moves and computes.

C10D = vars(c10d)

_num_modes: Callable[[], int] = DISPATCH_MODES.get()
"""Returns the number of dispatch modes of this thread, of which one is the rank's own."""


@lru_cache(4096)
def _fields_of(key: Key) -> dict[str, Any]:
    """Return the fields of a record that the arguments of a call determine."""
    return Signature.of(key).fields()


class SimGroup(Questions):
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
        super().__init__(communicator.group, group_rank, backends, timeout, explicit_timeout, store)
        self.process = process
        self._communicator = communicator
        self._on_gpu = GroupStreams(communicator)
        self.others: dict[str, SimGroup] = {}

    def shared_places(self, places: dict[int, int]) -> dict[int, int]:
        """Return the one map equal to *places* that all members of the group share."""
        shared = self._communicator.places
        if shared is None:
            shared = self._communicator.places = places
        return shared if shared == places else places

    def refused(self, op: str, error: BaseException) -> None:
        """Record a call of this group that a public function of torch.distributed refused. It has no number."""
        task, process = require_task(), self.process
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
        )
        process.calls.add(record, task.port.now_s)

    def beside(self, kind: str, backends: dict[str, str], flavour: str) -> SimGroup:
        """Return the group of calls that are matched apart, carried out by the algorithms of *flavour*."""
        other = self.others.get(kind)
        if other is None:
            there = self._communicator.beside(kind, flavour)
            other = SimGroup(self.process, there, self.group_rank, backends, self._timeout, self._explicit, self._store)
            self.others[kind] = other
            self.process.groups.objects.append(other)
        return other

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of the members."""
        return self._communicator.devices

    def _host_group(self) -> SimGroup:
        """Return the backend of CPU tensors if it differs from that of GPU tensors."""
        cpu = self._backends["cpu"]
        return self.beside("cpu", {"cpu": cpu}, algorithms(cpu))

    def flavour_on(self, device: str) -> str:
        return self._communicator.flavour if self._communicator.is_symmetric else super().flavour_on(device)

    def _get_backend(self, device: torch.device) -> SimGroup:
        self._flavour(torch.device(device))
        return self._host_group() if self.has_two_backends and torch.device(device).type == "cpu" else self

    # -- the way of every call

    def _call(self, call: MethodCall, arrival: Arrival, is_async: bool, timeout: timedelta | None) -> SimWork:
        """Record the call, make its handle, and match it with the calls of the other members."""
        task = current_task()
        if task is not None and task.process.family.is_forked and task.process.family.parent is self.process:
            self._wait_in_fork(task, call)
        if task is None or task.process is not self.process:
            raise RuntimeError(f"{call.key[0]} on a simulated process group outside its rank")
        process, port, observers = task.process, task.port, task.process.observers
        port.ticks += 1
        task.compute(port.facts.cluster.cpu.op_overhead_s)
        if process.notes.in_worker == "fork":
            self._wait_in_fork(task, call)
        if process.notes.in_worker:
            raise ValueError(
                "Default process group has not been initialized, please make sure to call init_process_group."
            )
        if observers.silent is not None:
            observers.silent.on_call(call, self._group.ranks, process.rank, sys._getframe(1))
        if port.facts.turns is not None:
            self._take_turn(port.facts.turns, task, call.key[0])
            arrival.clock = task.clock
        if self._runs_on_gpu(call):
            return self._launch(task, call, arrival, is_async, timeout)
        caller = sys._getframe(2)
        above = caller.f_back  # a function of torch.distributed waits for a synchronous call at once
        waits_next = above is not None and above.f_globals is C10D and call.key[0] != "monitored_barrier"
        at_once = is_async or not waits_next or self._is_looked_at(task)
        if at_once:
            task.flush()
            self._refuse_if_broken()
        record = arrival.record = self._recorded(task, call, is_async, caller)
        own = timeout is not None and timeout.total_seconds() > 0 and timeout != self._timeout
        limit: timedelta = timeout if own and timeout is not None else self._timeout
        handle = handle_of(record.op, algorithms(self.backend))
        work = handle(self, record, port.event(), call.outputs, limit.total_seconds(), own or self._explicit)
        arrival.work = work
        if at_once:
            work.outlives_python(of_torch=record.waited)
        if port.traced.counts:
            port.traced.saw_call(process, record, arrival.inputs)
        self._communicator.sends_rows(record.input_splits or ())
        if observers.execution_trace is not None and record.op in OPERATORS:
            observers.execution_trace.called(record, OPERATORS[record.op], self.backend, (call.inputs, call.outputs))
        if at_once:
            self._number(record, arrival.outputs)
            self._tell_others(task, arrival)
            self._communicator.arrive(arrival)
        else:
            task.arrive(arrival)
        return work

    def _take_turn(self, turns: TurnQueue, task: RankTask, op: str) -> None:
        """In an exploration, let the threads of a rank make their calls of the group in each order."""
        if len(task.process.tasks) > 1:
            caller = asking_line(sys._getframe(2))
            objects: Objects = {("group", task.process.rank, self._group.name): Access.WRITE}
            operation = TurnRequest(op, "" if caller is None else caller.line, objects)
            turns.ask(task, operation, None, None, explicit=False)
        else:
            turns.count_call(task)

    def arrive(self, arrival: Arrival) -> None:
        """Let a waiting rank's call arrive, once the world's clock has caught up with the rank's."""
        self._refuse_if_broken()
        self._number(arrival.record, arrival.outputs)
        self._communicator.arrive(arrival)

    def _wait_in_fork(self, task: RankTask, call: MethodCall) -> None:
        """Wait for ever, as a call does in a forked child of the rank, and report it."""
        port, stack = task.port, call_stack(sys._getframe(2))
        finding = forked_call((self.process.rank,), call.key[0], stack[0] if stack else None)
        port.report(finding)
        task.flush()
        task.wait(port.event(), HostWait("a call of a forked child"))

    def _recorded(self, task: RankTask, call: MethodCall, is_async: bool, caller: FrameType) -> CallRecord:
        """Return the record of *call*, which has no number yet.

        A handle that torch keeps for itself is never reported as not waited for.
        """
        stack = call_stack(caller)
        return CallRecord(
            **_fields_of(call.key),
            rank=task.process.rank,
            group=self._group,
            seq=0,
            peer=None if call.peer < 0 else call.peer,
            tag=call.tag if call.key[0] in P2P else None,
            is_async=is_async,
            site=stack[0] if stack else None,
            stack=stack,
            thread=task.name,
            issued_s=task.now_s(),
            waited=is_async and not handle_is_the_users(caller),
        )

    def _backend_of(self, tensor: Tensor) -> str:
        """Return the backend that serves a call whose first tensor is *tensor*."""
        return (self._backends.get("cpu") if tensor.is_cpu else None) or self._flavour(tensor.device)

    def _runs_on_gpu(self, call: MethodCall) -> bool:
        if call.first is None:
            return self.has_two_backends or self.backend == "nccl"
        return bool(call.first.is_cuda)

    def _launch(
        self, task: RankTask, call: MethodCall, arrival: Arrival, is_async: bool, timeout: timedelta | None
    ) -> GpuWork:
        """Launch the call in a stream of its GPU; the host continues."""
        process, port, observers = task.process, task.port, task.process.observers
        device = self._on_gpu.device_of(task, call, self.bound_device_id)
        process.accelerators.works_on_host(task, self._on_gpu.host_s(device))
        if self._is_looked_at(task):
            task.flush()
        self._refuse_if_broken()
        record = arrival.record = self._recorded(task, call, is_async, sys._getframe(3))
        limit = self._timeout if timeout is None or timeout.total_seconds() <= 0 else timeout
        # Nobody has the handle of a call that is not asynchronous, and its memory is free when the program says so.
        outputs = list(call.outputs) if is_async else []
        work = arrival.work = GpuWork(self, record, port.event(), outputs, limit.total_seconds(), self._explicit)
        process.accelerators.steps.called(record)
        if self._group.ranks not in process.accelerators.steps.same_tokens:
            claim_buffers((*call.inputs, *call.outputs))
        work.device, work.host_waits = device, record.op == "barrier"
        side = arrival.host_side = known_of(task, record.op, call.inputs, call.outputs)
        if port.traced.counts:
            port.traced.saw_call(process, record, None if side.guess else side.inputs)
        self._communicator.sends_rows(record.input_splits or ())
        if side.outputs:
            pend(side, work)
        arrival.inputs, arrival.outputs = (), ()
        if record.op in ("all_to_all", "all_to_all_single"):  # their sizes are each member's own
            arrival.inputs = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in call.inputs
            ]
        self._number(record, call.outputs)
        if observers.provenance is not None:
            observers.provenance.called(record, call.inputs, call.outputs)
        if observers.execution_trace is not None:
            observers.execution_trace.called(record, OPERATORS[record.op], self.backend, (call.inputs, call.outputs))
        self._tell_others(task, arrival)
        self._on_gpu.launch(task, device, call, is_async, (arrival, work))
        return work

    def _is_looked_at(self, task: RankTask) -> bool:
        """Return whether an observer has to see the call in the thread that makes it."""
        port, process = task.port, task.process
        return (
            port.faults.are_planted
            or port.has_failed
            or process.observers.recorder is not None
            or bool(process.groups.unsettled)  # their callbacks may be due before the call
            or len(process.tasks) > 1
        )

    def _refuse_if_broken(self) -> None:
        if self._communicator.broken is not None:
            raise RuntimeError(self._communicator.broken)

    def _number(self, record: CallRecord, outputs: Tensors) -> None:
        kind = "p2p" if record.op in P2P else "collective"
        self._numbers[kind] += 1
        record.seq = self._numbers[kind]
        self.process.calls.add(record, self.process.port.now_s)
        if len(outputs) > 1 and outputs[0] is outputs[1]:  # `[tensor] * n`
            self.process.port.guards.saw_aliased(record)

    def _tell_others(self, task: RankTask, arrival: Arrival) -> None:
        """Notify all observers of calls: profiler, guards, and the scenario's faults."""
        process, port, record = task.process, task.port, arrival.record
        if process.observers.recorder is not None:
            process.observers.recorder.call(record, self.backend, any(tensor.is_sparse for tensor in arrival.inputs))
        inside = next(filter(None, (_inside(other, record) for other in process.tasks if other is not task)), None)
        if inside is not None and not port.has_failed:
            port.report(seen.race(record, inside), stops=True)
        port.faults.on_call(task, record)
        port.guards.on_arrival(arrival)

    def _collective(self, call: MethodCall, timeout: timedelta | None) -> Work:
        first = call.first
        flavour = self.backend if first is None else self._backend_of(first)
        refusals.refuse_arguments(call, self.group_rank, self._members, flavour)
        if (late := refusals.refuse(call, flavour)) is not None:
            return self._call(call, Arrival(self, call.inputs, call.outputs, refusal=late), True, timeout)
        inputs, outputs = as_gloo_sees(call, flavour, self.group_rank)
        communicator = self._communicator
        library = communicator.flavour if communicator.is_symmetric else flavour
        arrival = Arrival(self, inputs, outputs, library)
        return self._call(call, arrival, call.is_async, timeout)

    def _monitored_barrier(
        self, call: MethodCall, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        record = self._call(call, Arrival(self), False, None).record
        limit = self._timeout if timeout is None else timeout
        monitored_barrier(record, self._communicator.monitored, self.group_rank, self._members, limit, wait_all_ranks)

    def _message(self, call: MethodCall, any_source: bool, is_async: bool) -> Work:
        refusals.refuse(call, self._backend_of(call.first))
        peer: Any = None if any_source else call.opts
        if peer is not None:
            refusals.refuse_peer(call.key[0], peer, self.group_rank, self._members)
            self._communicator.sends_to(peer)
        return self._call(call, Arrival(self, call.inputs, call.outputs, peer=peer), is_async, None)

    # -- coalescing: on CPU every call goes out by itself, as on gloo; on a GPU they are one kernel

    def _start_coalescing(self, device: torch.device) -> None:
        if self._flavour(device) != "nccl":
            raise RuntimeError(f"Backend {self._flavour(device)} does not implement startCoalescing")
        self._on_gpu.begin_batch()

    def _end_coalescing(self, device: torch.device) -> Work | None:
        if self._flavour(device) != "nccl":
            raise RuntimeError(f"Backend {self._flavour(device)} does not implement endCoalescing")
        return self._on_gpu.end_batch()

    # -- helpers

    def shutdown(self) -> None:
        """Finish the members' launched GPU work before destroy_process_group."""
        task = current_task()
        if task is not None and task.process is self.process:
            self._on_gpu.finish(task)

    def finish(self, task: RankTask) -> None:
        """Wait for collectives that have started and were never waited for, as gloo's destructor does."""
        for moved in list(self._communicator.moving):
            task.wait(moved, HostWait("the end of calls that were never waited for"))

    abort = shutdown

    def revoke(self) -> None:
        """End the calls of the group that have not started, and refuse later ones, for all members."""
        self._communicator.revoke()

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Connect the GPU to which the group is bound."""
        if device is not None and self._communicator.flavour == "nccl":
            task = require_task()
            self._on_gpu.bring(task, accelerators_of(task.process)[device.index], device)

    def in_job(self, members: Sequence[int]) -> list[int]:
        """Return the ranks in the job of some members."""
        return [self._group.ranks[member] for member in members]

    @property
    def supports_splitting(self) -> bool:
        """Return whether `split_group` may divide it. It may not be the source of a group that torch makes by itself:
        torch's options take no simulated group, so backend.py divides it then.
        """
        splits = self.supports_shrinking or torch.__version__ >= "2.15"  # gloo since then
        return splits and self.process.groups.requested is None

    def divide(self, record: CallRecord) -> None:
        """Block until every member divides the communicator of this group (ncclCommSplit)."""
        self.num_splits += 1
        self.beside("split", self._backends, self._communicator.flavour).meet(self._group, None, record, record.seq)

    def meet(self, group: Group, why: Wait | None, record: CallRecord, number: int = 0) -> SimWork:
        """Block until every member of *group* has created this group, as gloo connects at creation. Return the handle.

        *why* is what the rank waits for meanwhile, if it is not *record* because the members are not known yet;
        *number* is that of the meeting.
        """
        task, limit_s, arrival = require_task(), self._timeout.total_seconds(), Arrival(self)
        arrival.clock = task.clock
        arrival.record = record
        arrival.work = SimWork(self, record, task.port.event(), [], limit_s, self._explicit)
        values = meeting_place(self._store)[0]
        if isinstance(values, KeyValues):  # members exchange their addresses through it
            if values.lost.triggered:
                raise lost_error()
            values.lost.callbacks.append(lambda _: arrival.work.fail(lost_error()))
        self._communicator.meet(number, arrival)
        if not task.wait_until(arrival.work.done, why or CallWait(record), limit_s, self._explicit):
            raise connect_error(group, limit_s)
        meet_clock(task, arrival.work.clock)
        if (error := arrival.work.exception()) is not None:
            raise error
        return arrival.work

    def timeout_error(self, record: CallRecord, seconds: float) -> BaseException:
        return timeout_error(self.backend, record, seconds)

    def break_up(self, error: BaseException, culprit: SimWork) -> None:
        self._communicator.break_up(error, culprit)

    def signals(self, source: int, target: int, channel: int | None) -> SimGroup:
        """Return the group of the signals that the member *source* sends to *target*. To send one takes no partner."""
        kind = self._group.of_signals(source, target, channel).name.removeprefix(f"{self._group.name}/")
        group = self.beside(kind, {"cuda": "nccl"}, "one_shot")
        group._communicator.buffers_sends = True
        return group

    def breaks_with_members(self) -> None:
        """Close its connections when a member dies, as gloo does, so that the others may go on without it."""
        processes = self.process.port.rank_processes
        self._communicator.breaks_with([processes[rank] for rank in self._group.ranks])

    def belongs_to(self, group: Group) -> None:
        """Use the numbers of *group* from now on, because its members have met."""
        self._group = group
        self._communicator.belongs_to(group)

    def __repr__(self) -> str:
        return f"SimGroup({self.backend}, {self.size()} ranks, {self._group.label})"  # exceptions of two ranks agree


def _inside(task: RankTask, record: CallRecord) -> CallRecord | None:
    """Return the synchronous collective of the group in which another thread is while this one makes *record*, or
    None.

    A thread that waits for its GPU may wait for a call that another thread launched.
    """
    why = task.wait_reason
    if task.finished or record.is_p2p or not isinstance(why, CallWait):
        return None
    other = why.record
    if other.is_async or other.is_p2p or other.group != record.group or other.thread != task.name:
        return None
    return other


def _method(name: str, read: Reader) -> Callable[..., Any]:
    """Return the method *name* of `SimGroup`, whose arguments *read* reads."""

    def read_call(self: SimGroup, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[SimGroup, MethodCall]:
        try:
            call = read(self._group.ranks, args, kwargs)
        except (TypeError, ValueError, AttributeError, LookupError):
            raise refusals.argument_error(name) from None
        tensors = call.inputs if call.outputs is call.inputs else (*call.inputs, *call.outputs)
        if any(tensor.__dict__ for tensor in tensors):
            call = with_methods(call)
        return (self._host_group() if self.has_two_backends and call.is_for_host() else self), call

    def collective(self: SimGroup, *args: Any, **kwargs: Any) -> Work:
        group, call = read_call(self, args, kwargs)
        timeout = _own_timeout(call, args, kwargs)
        if _num_modes() < 2:
            return group._collective(call, timeout)
        return cast("Work", through_modes(self, call, partial(group._collective, call, timeout)))

    def message(self: SimGroup, *args: Any, **kwargs: Any) -> Work:
        group, call = read_call(self, args, kwargs)
        any_source, is_async = name == "recv_anysource", not waits_itself(sys._getframe(1))
        if _num_modes() < 2:
            return group._message(call, any_source, is_async)
        return cast("Work", through_modes(self, call, partial(group._message, call, any_source, is_async)))

    def monitored(self: SimGroup, *args: Any, **kwargs: Any) -> None:
        group, call = read_call(self, args, kwargs)
        group._monitored_barrier(call, *args, **kwargs)

    ways = {"send": message, "recv": message, "recv_anysource": message, "monitored_barrier": monitored}
    method: Callable[..., Any] = ways.get(name, collective)
    method.__name__ = name
    method.__qualname__ = f"SimGroup.{name}"
    return method


def _own_timeout(call: MethodCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> timedelta | None:
    """Return the timeout of *call* itself, from its options or its argument; None if it has none."""
    result = getattr(call.opts, "timeout", None)
    if result is None:
        result = next((given for given in (*args, *kwargs.values()) if isinstance(given, timedelta)), None)
    return result


for _name, _reader in METHODS.items():
    setattr(SimGroup, _name, _method(_name, _reader))
add_newer_methods(SimGroup)
