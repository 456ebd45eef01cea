"""The simulated process group: torch calls these methods, from Python and from C++.

One `SimGroup` is one rank's handle on a `Communicator`. Each method validates as torch's backend
does, leaves a record, and hands its tensors to the communicator; operations.py says what each
operation moves and computes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp, Work
from torch.distributed import distributed_c10d

from distsim.debug.evidence import guard_findings as seen
from distsim.debug.records import P2P, CallRecord, CallWait, Group, State
from distsim.debug.words.error_text import error_line
from distsim.sim.c10d import refusals
from distsim.sim.c10d.buffers import as_gloo_sees
from distsim.sim.c10d.communicator import Arrival, Communicator
from distsim.sim.c10d.data import Tensors, reduce_op_name
from distsim.sim.c10d.monitored_barrier import monitored_barrier
from distsim.sim.c10d.operations import OPERATIONS
from distsim.sim.c10d.work import SimWork
from distsim.sim.isolation.process import RankTask, SimProcess, current_task, require_task
from distsim.sim.observe.user_stack import call_stack, handle_is_the_users

__all__ = ["SimGroup"]

_UNSET = timedelta(milliseconds=-1)
_TORCH = distributed_c10d.__file__
_dtype_names: dict[torch.dtype, str] = {}


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

    def _flavour_of(self, tensor: Tensor) -> str:
        return (self._backends.get("cpu") if tensor.is_cpu else None) or self._flavour(tensor.device)

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

    def _call(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        opts: Any = None,
        *,
        meet: Callable[[Arrival], None] | None = None,
        memory: tuple[Tensors, Tensors] | None = None,
        reduce_op: Any = None,
        root: int | None = None,
        peer: int | None = None,
        tag: int | None = None,
        splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
        nbytes: int = 0,
        is_async: bool | None = None,
        extra: Any = None,
    ) -> Arrival:
        """Record the call, make its handle, and have it *meet* those of the others. *memory*: what of the inputs
        and outputs the network moves, where not they themselves."""
        task = current_task()
        if task is None or task.process is not self._process:
            raise RuntimeError(f"{op} on a simulated process group outside its rank")
        process, world = task.process, task.world
        world.ticks += 1
        task.compute(world.cluster.cpu.op_overhead_s)
        if world.schedule is not None:
            task.compute(world.schedule.delay_s(process.rank, len(process.records)))
        caller = sys._getframe(2)
        is_async = bool(getattr(opts, "asyncOp", False)) if is_async is None else is_async
        at_once = is_async or meet is None or not _waits_next(caller) or self._is_looked_at(task)
        if at_once:
            task.flush()
            self._refuse_if_broken()
        stack = call_stack(caller)
        ranks = self._group.ranks
        dtypes = [_dtype_name(t.dtype) for t in (inputs or outputs)]
        if len(dtypes) > 1 and len(set(dtypes)) == 1:
            dtypes = dtypes[:1]
        record = CallRecord(
            rank=process.rank,
            group=self._group,
            seq=0,
            op=op,
            input_shapes=_shapes(inputs),
            output_shapes=_shapes(outputs),
            dtypes=tuple(dtypes),
            reduce_op=None if reduce_op is None else reduce_op_name(reduce_op),
            root=None if root is None else ranks[root],
            peer=None if peer is None else ranks[peer],
            tag=tag,
            input_splits=None if splits is None else splits[0],
            output_splits=None if splits is None else splits[1],
            nbytes=nbytes,
            is_async=is_async,
            site=stack[0] if stack else None,
            stack=stack,
            thread=task.name,
            issued_s=task.now_s(),
        )
        if is_async and not handle_is_the_users(caller):
            record.waited = True
        timeout = getattr(opts, "timeout", None)
        own = timeout is not None and timeout.total_seconds() > 0 and timeout != self._timeout
        limit: timedelta = timeout if own and timeout is not None else self._timeout
        work = SimWork(
            process,
            record,
            world.env.event(),
            list(outputs),
            limit.total_seconds(),
            own or self._explicit,
            self._timeout_error,
            self._communicator.break_up,
        )
        if at_once:
            work.outlives_python()
        received, given = (tuple(inputs), tuple(outputs)) if memory is None else memory
        arrival = Arrival(process, record, work, received, given, extra)
        if at_once or meet is None:
            self._number(record)
            self._tell_others(task, arrival)
            if meet is not None:
                meet(arrival)
        else:
            task.arrive(lambda: self._arrive(arrival, meet))
        return arrival

    def _is_looked_at(self, task: RankTask) -> bool:
        """Whether somebody wants to see the call in the thread that makes it."""
        world, process = task.world, task.process
        return (
            world.faults.are_planted
            or world.schedule is not None
            or world.lookahead is not None
            or process.recorder is not None
            or len(process.tasks) > 1
        )

    def _arrive(self, arrival: Arrival, meet: Callable[[Arrival], None]) -> None:
        """The world has caught up with a rank that waits for the call it has made."""
        self._refuse_if_broken()
        self._number(arrival.record)
        meet(arrival)

    def _refuse_if_broken(self) -> None:
        if self._communicator.broken is not None:
            raise RuntimeError(self._communicator.broken)

    def _timeout_error(self, record: CallRecord, seconds: float) -> BaseException:
        return refusals.timeout_error(self.name(), record, seconds)

    def _number(self, record: CallRecord) -> None:
        kind = "p2p" if record.op in P2P else "collective"
        self._numbers[kind] += 1
        record.seq = self._numbers[kind]
        records = self._process.records
        record.index = len(records)
        records.append(record)

    def _tell_others(self, task: RankTask, arrival: Arrival) -> None:
        """All who look at calls: profiler, guards, a scenario's faults."""
        process, world, record = task.process, task.world, arrival.record
        if process.recorder is not None:
            process.recorder.call(record, self.name(), any(tensor.is_sparse for tensor in arrival.inputs))
        inside = next(filter(None, (_inside(other, record) for other in process.tasks if other is not task)), None)
        if inside is not None and world.lookahead is None:
            world.findings.append(seen.race(record, inside))
            world.stop_for_fault()
        world.faults.on_call(task, record)
        world.guards.on_arrival(arrival)

    def _collective(
        self, op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], opts: Any, **facts: Any
    ) -> Work:
        some = (*inputs, *outputs)
        flavour = self._flavour_of(some[0]) if some else self.name()
        refusals.refuse(op, flavour, some, facts.get("reduce_op"))
        memory = as_gloo_sees(op, self.rank(), inputs, outputs)
        operation = OPERATIONS[op]
        communicator = self._communicator

        def meet(arrival: Arrival) -> None:
            communicator.arrive(
                arrival.record.seq,
                self.rank(),
                arrival,
                lambda members: operation.transfer(communicator, flavour, members),
                operation.data,
            )

        return self._call(op, inputs, outputs, opts, meet=meet, memory=memory, **facts).work

    # -- collectives

    def broadcast(
        self, tensors: Any, opts: Any = None, root: int | None = None, timeout: timedelta | None = None
    ) -> Work:
        tensors = _tensor_list(tensors)
        if isinstance(opts, int):
            opts, root = None, opts
        root = opts.rootRank if root is None and opts is not None else (root or 0)
        self._check_root("broadcast", root)
        refusals.check_single("broadcast", tensors)
        facts = {"root": root, "nbytes": _nbytes(tensors), "extra": root}
        return self._collective("broadcast", tensors, tensors, opts or _Timeout(timeout), **facts)

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> Work:
        tensors = _tensor_list(tensors)
        op = _reduce_op(opts, op)
        refusals.check_single("allreduce", tensors)
        facts = {"reduce_op": op, "nbytes": _nbytes(tensors), "extra": op}
        return self._collective("all_reduce", tensors, tensors, _opts(opts, timeout), **facts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op = _reduce_op(opts, None)
        facts = {"reduce_op": op, "nbytes": _nbytes(tensors), "extra": op}
        return self._collective("all_reduce_coalesced", tensors, tensors, opts, **facts)

    def reduce(self, tensors: Any, opts: Any = None, root: int | None = None, op: Any = None) -> Work:
        tensors = _tensor_list(tensors)
        op = _reduce_op(opts, op)
        root = opts.rootRank if root is None and hasattr(opts, "rootRank") else (root or 0)
        self._check_root("reduce", root)
        refusals.check_single("reduce", tensors)
        facts = {"reduce_op": op, "root": root, "nbytes": _nbytes(tensors), "extra": (root, op)}
        return self._collective("reduce", tensors, tensors, opts, **facts)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        inputs = _tensor_list(input_tensors)
        lists = output_tensors if output_tensors and isinstance(output_tensors[0], list | tuple) else [output_tensors]
        refusals.check_equal_lists("allgather", lists[0], inputs, self.size())
        facts = {"nbytes": _nbytes(lists[0])}
        return self._collective("all_gather", inputs, lists[0], opts, **facts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        refusals.check_scaled("all_gather", output, input, self.size())
        facts = {"nbytes": _nbytes([output])}
        return self._collective("all_gather_into_tensor", [input], [output], opts, **facts)

    _allgather_base = all_gather_single

    def allgather_coalesced(self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None) -> Work:
        flat = [t for tensors in output_lists for t in tensors]
        facts = {"nbytes": _nbytes(flat)}
        return self._collective("all_gather_coalesced", input_list, flat, opts, **facts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        facts = {"nbytes": _nbytes(outputs)}
        return self._collective("all_gather_into_tensor_coalesced", inputs, outputs, opts, **facts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        inputs = _tensor_list(input_tensors)
        root = opts.rootRank if opts is not None else 0
        self._check_root("gather", root)
        outputs = list(output_tensors[0]) if output_tensors and self.rank() == root else []
        if self.rank() == root:
            refusals.check_equal_lists("gather", outputs, inputs, self.size())
        facts = {"root": root, "nbytes": _nbytes(inputs), "extra": root}
        return self._collective("gather", inputs, outputs, opts, **facts)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        outputs = _tensor_list(output_tensors)
        root = opts.rootRank if opts is not None else 0
        self._check_root("scatter", root)
        inputs = list(input_tensors[0]) if input_tensors and self.rank() == root else []
        if self.rank() == root:
            refusals.check_scatter_lists(inputs, outputs[0], self.size())
        facts = {"root": root, "nbytes": _nbytes(outputs), "extra": root}
        return self._collective("scatter", inputs, outputs, opts, **facts)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        outputs = _tensor_list(output_tensors)
        lists = input_tensors if input_tensors and isinstance(input_tensors[0], list | tuple) else [input_tensors]
        refusals.check_reduce_scatter_lists(lists[0], outputs[0], self.size())
        op = _reduce_op(opts, None)
        facts = {"reduce_op": op, "nbytes": _nbytes(lists[0]), "extra": op}
        return self._collective("reduce_scatter", lists[0], outputs, opts, **facts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        refusals.check_scaled("reduce_scatter", input, output, self.size())
        op = _reduce_op(opts, None)
        facts = {"reduce_op": op, "nbytes": _nbytes([input]), "extra": op}
        return self._collective("reduce_scatter_tensor", [input], [output], opts, **facts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        op = _reduce_op(opts, None)
        facts = {"reduce_op": op, "nbytes": _nbytes(inputs), "extra": op}
        return self._collective("reduce_scatter_tensor_coalesced", inputs, outputs, opts, **facts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        sent = refusals.check_splits("input", input, input_splits, self.size())
        received = refusals.check_splits("output", output, output_splits, self.size())
        facts = {"splits": (sent, received), "nbytes": _nbytes([input])}
        return self._collective("all_to_all_single", [input], [output], opts, **facts)

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> Work:
        for tensors in (input_tensors, output_tensors):
            if len(tensors) != self.size():
                raise RuntimeError("Number of tensor splits not equal to group size")
            refusals.check_equal_lists("alltoall", tensors, tensors[:1], self.size())
        splits = (tuple(t.numel() for t in input_tensors), tuple(t.numel() for t in output_tensors))
        facts = {"splits": splits, "nbytes": _nbytes(input_tensors)}
        return self._collective("all_to_all", input_tensors, output_tensors, opts, **facts)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        return self._collective("barrier", [], [], _opts(opts, timeout))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        record = self._call("monitored_barrier", [], [], is_async=False).record
        limit = self._timeout if timeout is None else timeout
        monitored_barrier(record, self._communicator.monitored, self.rank(), self.size(), limit, wait_all_ranks)

    # -- point to point

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        tensors = _tensor_list(tensors)
        self._check_peer("send", dst, tensors, tag)
        facts: dict[str, Any] = {"peer": dst, "tag": tag, "nbytes": _nbytes(tensors), "is_async": _caller_is("isend")}
        meet = functools.partial(self._communicator.send, self.rank(), dst, tag)
        return self._call("send", tensors, [], meet=meet, **facts).work

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        tensors = _tensor_list(tensors)
        self._check_peer("recv", src, tensors, tag)
        facts: dict[str, Any] = {"peer": src, "tag": tag, "nbytes": _nbytes(tensors), "is_async": _caller_is("irecv")}
        meet = functools.partial(self._communicator.recv, src, self.rank(), tag)
        return self._call("recv", [], tensors, meet=meet, **facts).work

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        tensors = _tensor_list(tensors)
        refusals.refuse("recv", self._flavour_of(tensors[0]), tensors, None, tag=tag)
        facts: dict[str, Any] = {"peer": None, "tag": tag, "nbytes": _nbytes(tensors), "is_async": _caller_is("irecv")}
        meet = functools.partial(self._communicator.recv, None, self.rank(), tag)
        return self._call("recv", [], tensors, meet=meet, **facts).work

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
                self._timeout_error,
                lambda error, work: None,
            ),
        )
        self._communicator.arrive(0, self.rank(), arrival, lambda members: None, lambda members: None)
        limit_s = self._timeout.total_seconds()
        if not require_task().wait_until(arrival.work.done, CallWait(record), limit_s, self._explicit):
            raise refusals.connect_error(group, limit_s)

    def _check_root(self, op: str, root: int) -> None:
        if not 0 <= root < self.size():
            raise RuntimeError(f"ProcessGroupGloo::{op}: invalid root rank: {root}")

    def _check_peer(self, op: str, peer: int, tensors: list[Tensor], tag: int) -> None:
        refusals.refuse(op, self._flavour_of(tensors[0]), tensors, None, tag=tag)
        if peer == self.rank():
            raise RuntimeError(f"ProcessGroupGloo::{op}: a rank cannot {op} to or from itself (rank {peer})")
        if not 0 <= peer < self.size():
            raise RuntimeError(f"ProcessGroupGloo::{op}: peer {peer} is out of range for a group of {self.size()}")

    def __repr__(self) -> str:
        return f"SimGroup({self.name()}, rank {self.rank()} of {self.size()}, {self._group.label})"


class _Timeout:
    asyncOp = False

    def __init__(self, timeout: timedelta | None) -> None:
        self.timeout = timeout or _UNSET


def _waits_next(frame: FrameType | None) -> bool:
    """Whether a function of torch.distributed made the call: unless it was asked not to, it waits for it at once."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _TORCH


def _dtype_name(dtype: torch.dtype) -> str:
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name


def _shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(tensor.shape) for tensor in tensors])


def _inside(task: RankTask, record: CallRecord) -> CallRecord | None:
    """The synchronous collective in which a thread is, of the group on which another makes *record*."""
    why = task.wait_reason
    if task.finished or record.is_p2p or not isinstance(why, CallWait):
        return None
    other = why.record
    return other if not (other.is_async or other.is_p2p) and other.group == record.group else None


def _opts(opts: Any, timeout: timedelta | None) -> Any:
    return opts if opts is not None and not isinstance(opts, ReduceOp | ReduceOp.RedOpType) else _Timeout(timeout)


def _reduce_op(opts: Any, op: Any) -> Any:
    if op is None:
        op = getattr(opts, "reduceOp", opts)
    return ReduceOp.SUM if op is None else op


def _tensor_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum([t.numel() * t.element_size() for t in tensors])


def _caller_is(name: str) -> bool:
    """Whether torch.distributed's own *name* made this call (send and isend reach the same method)."""
    frame = sys._getframe(2)
    return frame.f_code.co_name == name
