"""Implements torch's process group interface for a simulated rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, partial
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import Work

from distsim.debug.evidence import guard_findings as seen
from distsim.debug.evidence.guard_findings import forked_call
from distsim.debug.records import P2P, CallRecord, CallWait, Group, HostWait, State, Wait
from distsim.debug.records.arguments import METHODS, MethodCall, Reader
from distsim.debug.records.signature import Signature
from distsim.sim.c10d import refusals
from distsim.sim.c10d.arrival import Arrival, Tensors, known_of, pend
from distsim.sim.c10d.communicator import Communicator, monitored_barrier
from distsim.sim.c10d.gpu_work import GpuWork, GroupStreams
from distsim.sim.c10d.group_api import Questions, add_newer_methods, own_timeout
from distsim.sim.c10d.operations import OPERATIONS, algorithms, as_gloo_sees, c10d_arguments, with_methods
from distsim.sim.c10d.rendezvous import connect_error, timeout_error
from distsim.sim.c10d.work import EstimatedWork, SimWork, handle_of
from distsim.sim.device.allocator.claims import claim_buffers
from distsim.sim.isolation.process import RankTask, SimProcess, current_task, require_task
from distsim.sim.observe.reading import call_stack, handle_is_the_users, waits_itself
from distsim.text.tracebacks import error_line
from distsim.torch_compat.device import POP_MODE_TEMPORARILY
from distsim.torch_compat.groups import DISPATCH_MODES

__all__ = ["OPERATORS", "SimGroup", "are_watched", "through_modes"]

# -- A program's own TorchDispatchModes see the calls of simulated groups, as torch's dispatcher shows them:
# CommDebugMode counts them, DebugMode prints them.
#
# torch leads a call of a real group through an operator `c10d::...`. A simulated group is called by Python and carries
# the call out itself; only where somebody looks is each mode handed that operator, above the rank's own mode.

OPERATORS = {
    "all_reduce": "allreduce_",
    "all_reduce_coalesced": "allreduce_coalesced_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "all_gather": "allgather_",
    "all_gather_coalesced": "allgather_coalesced_",
    "all_gather_into_tensor": "_allgather_base_",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced_",
    "gather": "gather_",
    "scatter": "scatter_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "all_to_all": "alltoall_",
    "all_to_all_single": "alltoall_base_",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier_",
    "send": "send",
    "recv": "recv_",
}
"""The operator `c10d::...` through which torch's dispatcher leads each call (torch/csrc/distributed/c10d/Ops.cpp)."""

_stack_size: Callable[[], int] = DISPATCH_MODES.get()
_pop_mode_temporarily = POP_MODE_TEMPORARILY.get()


def are_watched() -> bool:
    """Return whether this thread has a dispatch mode besides the rank's own."""
    return _stack_size() > 1


def through_modes(group: Any, call: MethodCall, carry_out: Callable[[], Any]) -> Any:
    """Return the result of *carry_out*, called below all dispatch modes of the program."""
    packet = getattr(torch.ops.c10d, OPERATORS[call.key[0]])
    given = c10d_arguments(OPERATORS[call.key[0]], call.inputs, call.outputs)
    tensors = [argument for argument in given if argument is not None]
    real = getattr(packet, packet.overloads()[0])
    also_tensors = len(real._schema.returns) > 1

    def below(*_: Any, **__: Any) -> Any:
        with _pop_mode_temporarily() as mode:
            if not (mode.is_infra_mode() or _is_ours(mode)):
                return mode.__torch_dispatch__(operator, (), (*tensors, group), {})
        work = carry_out()
        return (tensors[0], work) if also_tensors else work

    operator = _Carried(real, below)
    result = below()
    return result[-1] if also_tensors else result


def _is_ours(mode: Any) -> bool:
    return type(mode).__module__.startswith("distsim.")


class _Carried:
    """Stand-in for torch's operator *real*.

    Calling it continues with the next dispatch mode, or carries out the collective.
    """

    def __init__(self, real: Any, call: Callable[..., Any]) -> None:
        self._real = real
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._real == other)

    def __hash__(self) -> int:
        return hash(self._real)

    def __str__(self) -> str:
        return str(self._real)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._real)


# -- The simulated process group: torch calls these methods, from Python and from C++.
#
# One `SimGroup` is one rank's handle on a `Communicator`. Each method has its arguments read
# (debug/records/arguments.py), refuses what torch's backend refuses (refusals.py), leaves a record, and
# hands its tensors to the communicator; operations.py says what each operation moves and computes.

C10D = vars(c10d)

signature_of = lru_cache(4096)(Signature.of)


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
        self._process = process
        self._communicator = communicator
        self._on_gpu = GroupStreams(communicator)
        self.others: dict[str, SimGroup] = {}
        self._timeout_error = partial(timeout_error, self.name())

    def shared_places(self, places: dict[int, int]) -> dict[int, int]:
        """Return the one map equal to *places* that all members of the group share."""
        shared = self._communicator.places
        if shared is None:
            shared = self._communicator.places = places
        return shared if shared == places else places

    def refused(self, op: str, error: BaseException) -> None:
        """Record a call of this group that a public function of torch.distributed refused. It has no number."""
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
        )
        process.made_call(record)

    def beside(self, kind: str, backends: dict[str, str], flavour: str) -> SimGroup:
        """Return the group of calls that are matched apart, carried out by the algorithms of *flavour*."""
        other = self.others.get(kind)
        if other is None:
            there = self._communicator.beside(kind, flavour)
            other = SimGroup(self._process, there, self._place, backends, self._timeout, self._explicit, self._store)
            self.others[kind] = other
            self._process.group_objects.append(other)
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

    def _call(
        self,
        call: MethodCall,
        is_async: bool,
        timeout: timedelta | None,
        meet: Callable[[Arrival], None] | None,
        memory: tuple[Tensors, Tensors] | None = None,
    ) -> Arrival:
        """Record the call, make its handle, and let it *meet* the calls of the other members.

        *memory* is what the network moves of the inputs and outputs, if not the tensors themselves.
        """
        task = current_task()
        if task is not None and task.process.family.is_forked and task.process.family.parent is self._process:
            self._wait_in_fork(task, call)
        if task is None or task.process is not self._process:
            raise RuntimeError(f"{call.key[0]} on a simulated process group outside its rank")
        process, world = task.process, task.world
        world.ticks += 1
        task.compute(world.cluster.cpu.op_overhead_s)
        if process.notes.in_worker == "fork":
            self._wait_in_fork(task, call)
        if process.notes.in_worker:
            raise ValueError(
                "Default process group has not been initialized, please make sure to call init_process_group."
            )
        if process.silent is not None:
            process.silent.on_call(call, self._group.ranks, process.rank, sys._getframe(1))
        if world.schedule is not None:
            task.compute(world.schedule.delay_s(process.rank, process.calls.count))
        if self._runs_on_gpu(call):
            return self._launch(task, call, is_async, timeout, meet)
        caller = sys._getframe(2)
        above = caller.f_back  # a function of torch.distributed waits for a synchronous call at once
        waits_next = above is not None and above.f_globals is C10D
        at_once = is_async or meet is None or not waits_next or self._is_looked_at(task)
        if at_once:
            task.flush()
            self._refuse_if_broken()
        record = self._recorded(task, call, is_async, caller)
        own = timeout is not None and timeout.total_seconds() > 0 and timeout != self._timeout
        limit: timedelta = timeout if own and timeout is not None else self._timeout
        work = handle_of(record.op, algorithms(self.name()))(
            process,
            record,
            world.event(),
            call.outputs,
            limit.total_seconds(),
            own or self._explicit,
            self._timeout_error,
            self._communicator.break_up,
        )
        if at_once:
            work.outlives_python(of_torch=record.waited)
        received, given = (tuple(call.inputs), tuple(call.outputs)) if memory is None else memory
        arrival = Arrival(process, record, work, received, given)
        if world.traced.counts:
            world.traced.saw_call(process, record, received)
        if process.execution_trace is not None and record.op in OPERATORS:
            process.execution_trace.called(record, OPERATORS[record.op], self.name(), (call.inputs, call.outputs))
        if at_once or meet is None:
            self._number(record, given)
            self._tell_others(task, arrival)
            if meet is not None:
                meet(arrival)
        else:
            task.arrive(lambda: self._arrive(arrival, meet))
        return arrival

    def _wait_in_fork(self, task: RankTask, call: MethodCall) -> None:
        """Wait for ever, as a call does in a forked child of the rank, and report it."""
        world, stack = task.world, call_stack(sys._getframe(2))
        finding = forked_call((self._process.rank,), call.key[0], stack[0] if stack else None)
        same = [f for f in world.findings if (f.kind, f.text, f.site) == (finding.kind, finding.text, finding.site)]
        world.findings = [f for f in world.findings if f not in same]
        world.findings.append(
            replace(finding, ranks=tuple(sorted({*finding.ranks, *(r for f in same for r in f.ranks)})))
        )
        task.flush()
        task.wait(world.event(), HostWait("a call of a forked child"))

    def _recorded(self, task: RankTask, call: MethodCall, is_async: bool, caller: FrameType) -> CallRecord:
        """Return the record of *call*, which has no number yet.

        A handle that torch keeps for itself is never reported as not waited for.
        """
        stack = call_stack(caller)
        signature = signature_of(call.key)
        return signature.record(
            rank=task.process.rank,
            group=self._group,
            seq=0,
            peer=None if call.peer < 0 else call.peer,
            tag=call.tag if signature.op in P2P else None,
            is_async=is_async,
            site=stack[0] if stack else None,
            stack=stack,
            thread=task.name,
            issued_s=task.now_s(),
            waited=is_async and not handle_is_the_users(caller),
        )

    def _runs_on_gpu(self, call: MethodCall) -> bool:
        if call.first is None:
            return self.has_two_backends or self.name() == "nccl"
        return bool(call.first.is_cuda)

    def _launch(
        self,
        task: RankTask,
        call: MethodCall,
        is_async: bool,
        timeout: timedelta | None,
        meet: Callable[[Arrival], None] | None,
    ) -> Arrival:
        """Launch the call in a stream of its GPU; the host continues."""
        process, world = task.process, task.world
        device = self._on_gpu.device_of(task, call.first)
        process.accelerators.works_on_host(task, self._on_gpu.host_s(device))
        if self._is_looked_at(task):
            task.flush()
        self._refuse_if_broken()
        record = self._recorded(task, call, is_async, sys._getframe(3))
        limit = self._timeout if timeout is None or timeout.total_seconds() <= 0 else timeout
        work = GpuWork(
            process,
            record,
            world.event(),
            # Nobody has the handle of a call that is not asynchronous, and its memory is free when the program says so.
            list(call.outputs) if is_async else [],
            limit.total_seconds(),
            self._explicit,
            self._timeout_error,
            self._communicator.break_up,
        )
        process.accelerators.steps.called(record)
        if self._group.ranks not in process.accelerators.steps.same_tokens:
            claim_buffers((*call.inputs, *call.outputs))
        work.device, work.host_waits = device, record.op == "barrier"
        side = known_of(task, call.inputs, call.outputs)
        if world.traced.counts:
            world.traced.saw_call(process, record, None if side.guess else side.inputs)
        if side.outputs:
            pend(side, work)
        inputs: Tensors = ()
        if record.op in ("all_to_all", "all_to_all_single"):  # their sizes are each member's own
            inputs = tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in call.inputs)
        arrival = Arrival(process, record, work, inputs, (), side)
        self._number(record, call.outputs)
        if process.provenance is not None:
            process.provenance.called(record, call.inputs, call.outputs)
        if process.execution_trace is not None:
            process.execution_trace.called(record, OPERATORS[record.op], self.name(), (call.inputs, call.outputs))
        self._tell_others(task, arrival)
        assert meet is not None
        self._on_gpu.launch(task, device, call, is_async, (arrival, work, meet))
        return arrival

    def _is_looked_at(self, task: RankTask) -> bool:
        """Return whether an observer has to see the call in the thread that makes it."""
        world, process = task.world, task.process
        return (
            world.faults.are_planted
            or world.schedule is not None
            or world.lookahead is not None
            or process.recorder is not None
            or bool(process.notes.unsettled)  # their callbacks may be due before the call
            or len(process.tasks) > 1
        )

    def _arrive(self, arrival: Arrival, meet: Callable[[Arrival], None]) -> None:
        """Let a waiting rank's call arrive, once the world's clock has caught up with the rank's."""
        self._refuse_if_broken()
        self._number(arrival.record, arrival.outputs)
        meet(arrival)

    def _refuse_if_broken(self) -> None:
        if self._communicator.broken is not None:
            raise RuntimeError(self._communicator.broken)

    def _number(self, record: CallRecord, outputs: Tensors) -> None:
        kind = "p2p" if record.op in P2P else "collective"
        self._numbers[kind] += 1
        record.seq = self._numbers[kind]
        self._process.made_call(record)
        if len(outputs) > 1 and outputs[0] is outputs[1]:  # `[tensor] * n`
            self._process.world.guards.saw_aliased(record)

    def _tell_others(self, task: RankTask, arrival: Arrival) -> None:
        """Notify all observers of calls: profiler, guards, and the scenario's faults."""
        process, world, record = task.process, task.world, arrival.record
        if process.recorder is not None:
            process.recorder.call(record, self.name(), any(tensor.is_sparse for tensor in arrival.inputs))
        inside = next(filter(None, (_inside(other, record) for other in process.tasks if other is not task)), None)
        if inside is not None and world.lookahead is None:
            world.findings.append(seen.race(record, inside))
            world.stop_for_fault()
        world.faults.on_call(task, record)
        world.guards.on_arrival(arrival)

    def _collective(self, call: MethodCall, timeout: timedelta | None) -> Work:
        op, rank, first = call.key[0], self._place, call.first
        flavour = self.name() if first is None else self._flavour_of(first)
        refusals.refuse_arguments(call, rank, self._members, flavour)
        if (late := refusals.refuse(call, flavour)) is not None:
            return self._call(call, True, timeout, lambda arrival: arrival.work.fail(late)).work
        memory = as_gloo_sees(call, flavour, rank)
        operation, communicator = OPERATIONS[op], self._communicator
        if self.estimated_s is not None:
            task = require_task()
            record = self._recorded(task, call, False, sys._getframe(2))
            arrival = Arrival(
                task.process, record, EstimatedWork(call.outputs), tuple(call.inputs), tuple(call.outputs)
            )
            transfer = operation.transfer(communicator, flavour, [arrival] * self._members)
            self.estimated_s += task.world.network.alone_s(transfer)
            return arrival.work

        library = communicator.flavour if communicator.is_symmetric else flavour

        def meet(arrival: Arrival) -> None:
            communicator.arrive(
                arrival.record.seq,
                rank,
                arrival,
                lambda members: operation.transfer(communicator, library, members),
                operation.data,
            )

        return self._call(call, call.is_async, timeout, meet, memory).work

    def _monitored_barrier(
        self, call: MethodCall, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        record = self._call(call, False, None, None).record
        limit = self._timeout if timeout is None else timeout
        monitored_barrier(record, self._communicator.monitored, self.rank(), self.size(), limit, wait_all_ranks)

    def _message(self, call: MethodCall, any_source: bool, is_async: bool) -> Work:
        op, me = call.key[0], self._place
        refusals.refuse(call, self._flavour_of(call.first))
        end: Any = None if any_source else call.opts
        if end is not None:
            refusals.refuse_peer(op, end, me, self._members)
            self._communicator.sends_to(end)
        if op == "send":
            meet = partial(self._communicator.send, me, end, call.tag)
        else:
            meet = partial(self._communicator.recv, end, me, call.tag)
        return self._call(call, is_async, None, meet).work

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
        if task is not None and task.process is self._process:
            self._on_gpu.finish(task)

    def abort(self) -> None:
        self.shutdown()
        if self.hooks is not None:
            self.hooks.abort()

    def meet(self, group: Group, why: Wait | None, record: CallRecord) -> None:
        """Block until every member of *group* has created this group, as gloo connects at creation.

        *why* is what the rank waits for meanwhile, if it is not *record* because the members are not known yet.
        """
        arrival = Arrival(
            self._process,
            record,
            SimWork(
                self._process,
                record,
                require_task().world.event(),
                [],
                self._timeout.total_seconds(),
                self._explicit,
                self._timeout_error,
                lambda error, work: None,
            ),
        )
        self._communicator.arrive(0, self.rank(), arrival, lambda members: None, lambda members: None)
        limit_s = self._timeout.total_seconds()
        if not require_task().wait_until(arrival.work.done, why or CallWait(record), limit_s, self._explicit):
            raise connect_error(group, limit_s)

    def belongs_to(self, group: Group) -> None:
        """Use the numbers of *group* from now on, because its members have met."""
        self._group = group
        self._communicator.belongs_to(group)

    def __repr__(self) -> str:
        return f"SimGroup({self.name()}, {self.size()} ranks, {self._group.label})"  # exceptions of two ranks agree


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
    def read_call(self: SimGroup, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[SimGroup, MethodCall]:
        try:
            call = read(self._group.ranks, args, kwargs)
        except (TypeError, ValueError, AttributeError, LookupError):
            raise refusals.argument_error(name) from None
        if any(tensor.__dict__ for tensor in (*call.inputs, *call.outputs[:1])):
            call = with_methods(call)
        return (self._host_group() if self.has_two_backends and call.is_for_host() else self), call

    def watched(self: SimGroup, call: MethodCall, carry_out: Callable[[], Work]) -> Work:
        """Carry *call* out below the program's dispatch modes, between the group's hooks, as torch does."""

        def between_hooks() -> Work:
            if self.hooks is None:
                return carry_out()
            finish = self.hooks.begin(call)
            work = carry_out()
            finish(work)
            return work

        return cast("Work", through_modes(self, call, between_hooks)) if are_watched() else between_hooks()

    def collective(self: SimGroup, *args: Any, **kwargs: Any) -> Work:
        group, call = read_call(self, args, kwargs)
        timeout = own_timeout(call, args, kwargs)
        if self.hooks is None and not are_watched():
            return group._collective(call, timeout)
        return watched(self, call, lambda: group._collective(call, timeout))

    def message(self: SimGroup, *args: Any, **kwargs: Any) -> Work:
        group, call = read_call(self, args, kwargs)
        any_source, is_async = name == "recv_anysource", not waits_itself(sys._getframe(1))
        if self.hooks is None and not are_watched():
            return group._message(call, any_source, is_async)
        return watched(self, call, lambda: group._message(call, any_source, is_async))

    def monitored(self: SimGroup, *args: Any, **kwargs: Any) -> None:
        group, call = read_call(self, args, kwargs)
        group._monitored_barrier(call, *args, **kwargs)

    ways = {"send": message, "recv": message, "recv_anysource": message, "monitored_barrier": monitored}
    call: Callable[..., Any] = ways.get(name, collective)
    call.__name__ = name
    call.__qualname__ = f"SimGroup.{name}"
    return call


for _name, _reader in METHODS.items():
    setattr(SimGroup, _name, _method(_name, _reader))
add_newer_methods(SimGroup)
