"""Collectives of tensors on simulated GPUs: streams, works, and NCCL's watchdog."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from distsim.debug.records import P2P, CallRecord, CallWait, State
from distsim.debug.records.frames import user_stack
from distsim.kernels.cost import Cost
from distsim.sim.c10d.futures import written
from distsim.sim.c10d.work import NO_TIMEOUT, CallFuture, SimWork, drain_backward
from distsim.sim.device.allocator.allocator import COMMUNICATION
from distsim.sim.device.gpu import Device, Held
from distsim.sim.device.memory import accelerators_of, current_stream
from distsim.sim.device.timeline import Comm, Load, Mark, StreamTimeline
from distsim.sim.device.timeline.timeline import NEVER
from distsim.sim.isolation.process import RankTask, not_ordered, require_task
from distsim.sim.kernel.turns import meet_clock
from distsim.text.ranks import of_ranks
from distsim.text.tracebacks import message
from distsim.torch_compat.groups import CURRENT_GRAPH_TASK_ID, EXECUTION_ENGINE

if TYPE_CHECKING:
    from distsim.debug.records.arguments import MethodCall
    from distsim.sim.c10d.communicator import Communicator
    from distsim.sim.c10d.work import Arrival
    from distsim.sim.isolation.process import SimProcess

# -- The flat buffer that NCCL gathers into, or scatters from, when the program gives a list of tensors.
#
# torch's ProcessGroupNCCL allocates it (newLikeFlat) and copies tensor by tensor in the call's stream: after an
# all_gather, before a reduce_scatter. Where the tensors differ in size it has one message for each instead.

_LISTS = {"all_gather": True, "reduce_scatter": False}
"""Operations on lists: whether the list is the outputs (else the inputs)."""


class Flat:
    """Flat buffer of one call: its memory while in use, and the copies."""

    def __init__(self, device: Device, stream: StreamTimeline, count: int, nbytes: int, copies_out: bool) -> None:
        self.copies_out = copies_out
        self._device, self._count = device, count
        self._each = device.plain_cost(2 * nbytes // count)  # read and written
        self.memory = Held(device, device.allocate(nbytes, stream), nbytes)
        block = self.memory.block
        if block is not None and block.tag is not None:
            block.tag.kind = COMMUNICATION

    def copy(self, task: RankTask, stream: StreamTimeline) -> None:
        """Append the copies to *stream* as one kernel."""
        each = self._each
        task.process.accelerators.works_on_host(task, self._count * self._device.host.operator_s)
        seconds = self._count * each.seconds + (self._count - 1) * self._device.model.gap_s
        cost = Cost(seconds, self._count, 0, self._count * each.nbytes, each.kind, each.memory_bound)
        self._device.launch(stream, cost, task, "copy_")


def flat_of(device: Device, stream: StreamTimeline, call: MethodCall) -> Flat | None:
    """Return the flat buffer that *call* needs in *stream*, or None."""
    copies_out = _LISTS.get(call.key[0])
    if copies_out is None:
        return None
    tensors = call.outputs if copies_out else call.inputs
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if not nbytes or any(tensor.shape != tensors[0].shape for tensor in tensors):
        return None
    return Flat(device, stream, len(tensors), nbytes, copies_out)


# -- NCCL's watchdog: a process whose call on a GPU takes longer than its group's timeout is taken down.
#
# Source of the rules and of the texts: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (2.13). The time of a call
# counts from when the host made it (`workStartTime_`), wherever its kernel is in its stream.

_SLACK_S = 1e-9
LOOKS_EVERY_S = 0.1
"""torchrun's --monitor-interval."""
KILLS_AFTER_S = 30.0
"""`PContext.close(timeout=30)` in torch/distributed/elastic/multiprocessing/api.py."""


def _is_set(name: str, default: str = "0") -> bool:
    return os.environ.get(name, default).lower() not in ("0", "false", "n", "no", "")


def blocking_wait() -> bool:
    """Return whether `wait` blocks the host until the call has completed; then there is no watchdog."""
    return _is_set("TORCH_NCCL_BLOCKING_WAIT")


def tolerant() -> bool:
    """Return whether the program has disabled the handling of timeouts, so that a call may take longer than its
    timeout.
    """
    return blocking_wait() or not _is_set("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")


class Watchdog:
    """Detects calls on one GPU that time out, like NCCL's watchdog."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._at_s = NEVER
        """Virtual time of the watchdog's next check."""

    def watch(self, comm: Comm) -> None:
        """Watch a call that was launched."""
        if comm.expires_s < self._at_s:
            self._at_s = comm.expires_s
            self._device.process.port.at_deadline(self._at_s, self)

    @property
    def explicit(self) -> bool:
        return any(comm.explicit for comm in self._device.comms)

    @property
    def over(self) -> bool:
        """Stop watching; the next call starts it again."""
        if self._device.comms and self._device.process.alive:
            return False
        self._at_s = NEVER
        return True

    def strike(self) -> None:
        process = self._device.process
        now_s = process.port.now_s
        if not process.alive or now_s + _SLACK_S < self._at_s:  # it looks earlier than that moment, too
            return
        self._at_s = NEVER
        left = [c for c in self._device.comms if c.expires_s < NEVER and c.records[0].state is not State.FAILED]
        if not left:
            return
        first = min(left, key=lambda comm: comm.expires_s)
        if first.expires_s > now_s + _SLACK_S:
            self.watch(first)
        elif first.revoke is not None:
            first.revoke()
        else:
            self._take_down(first.records[0], first.expires_s - first.records[0].issued_s)

    def _take_down(self, record: CallRecord, limit_s: float) -> None:
        process = self._device.process
        port, rank = process.port, process.rank
        port.timed_out(CallWait(record))
        if process.stderr is not None:
            process.stderr.write(
                f"[rank{rank}]:[E ProcessGroupNCCL.cpp] {timeout_error(record, limit_s)}\n"
                f"[rank{rank}]:[E ProcessGroupNCCL.cpp] To avoid data inconsistency, we are taking the entire process "
                "down.\n"
            )
        _end(process, signal.SIGABRT)
        if process.family.parent is None:
            _launcher_looks(process)


def _end(process: SimProcess, number: signal.Signals) -> None:
    frame = None if process.main_task is None else process.main_task.frame()
    if frame is not None:
        process.last_stack = user_stack(frame)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.finish()
            stream.muted = True
    process.port.kill_process(process, number.name, -number)


def _launcher_looks(dead: SimProcess) -> None:
    """Act as torchrun's agent of the node that sees a dead rank and ends its other ranks.

    It sends SIGTERM, and later SIGKILL to ranks with their own handler
    (torch/distributed/elastic/agent/server/local_elastic_agent.py, `_stop_workers`).
    """
    port, host = dead.port, dead.slot.host

    def others() -> list[SimProcess]:
        known = port.rank_processes.values()
        return [other for other in known if other.alive and other.family.parent is None and other.slot.host == host]

    def end(left: list[SimProcess], number: signal.Signals) -> None:
        if left:
            port.note(
                f"torchrun ended {of_ranks(other.rank for other in left)} with {number.name}: NCCL's watchdog had "
                f"taken down rank {dead.rank} of the same node"
            )
        for other in left:
            _end(other, number)

    def later(seconds: float, call: Callable[[], None]) -> None:
        timer = port.timer(seconds)
        timer.callbacks.append(lambda _: call())

    later(LOOKS_EVERY_S, lambda: end([p for p in others() if signal.SIGTERM not in p.signals.handlers], signal.SIGTERM))
    later(LOOKS_EVERY_S + KILLS_AFTER_S, lambda: end(others(), signal.SIGKILL))


def timeout_error(record: CallRecord, seconds: float) -> Exception:
    """Return the watchdog's error for a call that exceeded its timeout."""
    error: Exception = dist.DistBackendError(
        f"[Rank {record.rank}] Watchdog caught collective operation timeout: {record.op} #{record.seq} ran for "
        f"{round(seconds * 1000)} milliseconds before timing out."
    )
    return error


def waited_too_long(record: CallRecord, seconds: float) -> Exception:
    """Return the exception of `wait` with a timeout set by the program."""
    error: Exception = dist.DistBackendError(
        f"[Rank {record.rank}] {record.op} #{record.seq} timed out in blocking wait, after {round(seconds * 1000)} ms."
    )
    return error


_current_graph_task_id = CURRENT_GRAPH_TASK_ID.get()
_execution_engine = EXECUTION_ENGINE.get()


SUCCESS, TIMEOUT = 0, 1
"""Numbers of WorkResult (torch/csrc/distributed/c10d/Types.hpp)."""


class GpuWork(SimWork):
    """The handle of a call on a GPU's stream."""

    device: Device
    mark: Mark | None = None
    """Mark in the stream at the end of the kernel; None until its batch has been launched."""
    stash: Sequence[Tensor] = ()
    """The call's tensors, until it was waited for: their memory is not free before."""
    num_outputs: int = 0
    """Number of the last tensors to which the call writes."""
    flat: Flat | None = None
    """For calls on lists: the flat tensor that torch makes of the list."""
    _written: Sequence[weakref.ref[Tensor]] = ()
    """Its outputs, once it was waited for."""
    host_waits = False
    together: Sequence[GpuWork] = ()
    """For the last call of a batch, whose handle the program has: the handles of the other calls."""
    kernel: Comm | None = None
    """Its kernel, from when its turn in the stream has come until all members have arrived."""

    def starts(self) -> None:
        kernel, self.kernel = self.kernel, None
        if kernel is not None:
            self.device.timeline.meet(kernel)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        task = require_task()
        self.record.waited = True
        if self.mark is not None:
            self.device.wait_for(current_stream(task, self.device), self.mark, task.now_s())
            own = isinstance(timeout, timedelta) and timeout.total_seconds() > 0
            if own or blocking_wait():
                limit_s = timeout.total_seconds() if own else max(0.0, self.expires_s - task.now_s())
                if not self.device.synchronize(task, self.mark, limit_s, own or self.has_own_limit):
                    self._error = waited_too_long(self.record, timeout.total_seconds() if own else self._timeout_s)
                    self.record.state, self.record.error = State.FAILED, message(self._error)
                meet_clock(task, self.clock)
            elif self.host_waits:
                self.device.synchronize(task, self.mark)
                meet_clock(task, self.clock)
        for work in (self, *self.together):
            work.record.waited = True
            work._let_go()
        if self._error is not None:
            raise self._error
        self._was_waited_for()
        return True

    def _let_go(self) -> None:
        """Drop the tensors: the pending kernel keeps this work alive, and torch's work holds no tensors."""
        self.stash, self.flat = (), None
        if self._outputs:
            self._written, self._outputs = [weakref.ref(tensor) for tensor in self._outputs], []

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        task = require_task()
        if not self.done.processed:
            not_ordered("asks whether a call is completed")
            task.poll(CallWait(self.record), task.looks_on(self.record))
        if self.done.processed:
            self.record.waited = True
        return bool(self.done.processed)

    def result(self) -> list[Tensor]:
        return list(self._outputs) or [tensor for tensor in (ref() for ref in self._written) if tensor is not None]

    def get_future(self) -> Future[Any]:
        """Return a future that is done at once, as torch's is on a GPU. Waiting for it makes a stream wait."""
        if self._future is None:
            self._future = Future()
            value = self.result()
            if self.mark is not None:
                written(value, self.mark)
            if self.process.groups.ddp_waits_in_cpp:
                self.wait()
            self._future.set_result(value)
            self.record.waited = True
            self.device.in_flight.forget(self.record)
            if _current_graph_task_id() != -1:  # DDP's reducer waits for it in C++
                groups = self.process.groups
                groups.backward.append(self)
                if len(groups.backward) == 1:
                    process = self.process
                    _execution_engine.queue_callback(lambda: drain_backward(process))
        return self._future

    def get_future_result(self) -> Future[Any]:
        """Return a future of torch's WorkResult as a number, which is done when the kernel has ended."""
        future = CallFuture(self)
        self._when_done(lambda: future.settle(SUCCESS if self._error is None else TIMEOUT, None))
        return future


# -- The streams on which a group's calls run: each call, or batch of messages, is one kernel in one of them.
#
# Of one communicator and GPU, kernels run in the order in which the host launched them, whatever their streams: NCCL
# has each wait for its communicator's stream and that stream for each (v2.30.7, src/enqueue.cc, ncclLaunchPrepare and
# ncclLaunchFinish). So an all_gather that is launched behind a reduce_scatter waits for it.

Part = tuple["Arrival", GpuWork]
"""One call of a kernel, and its handle."""
MOST_CHANNELS = 64
"""Maximum number of channels of one kernel (MAXCHANNELS of NCCL v2.30.7, src/include/device.h)."""


class GroupStreams:
    """The streams of one member of a group, by GPU and by the rank it sends to or hears from."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._tolerant = tolerant() or communicator.is_symmetric
        self._streams: dict[tuple[int, int], StreamTimeline] = {}
        self._batch: list[Part] | None = None
        self._last: dict[tuple[int, int], tuple[StreamTimeline, Mark]] = {}
        """Stream and mark of the last kernel, by GPU and peer."""
        self._brought: set[int] = set()
        """GPUs of earlier calls: NCCL has a communicator for each."""

    def device_of(self, task: RankTask, call: MethodCall, bound: torch.device | None) -> Device:
        """Return the GPU on which a call runs, after checking that no other member uses it. The group may be *bound*
        to one.

        A barrier has no tensor: ProcessGroupNCCL takes the GPU of its device_ids, else the bound one, else the first
        of those that the group has used, else one by the rank, whatever the current one is (guessDeviceId, torch 2.13).
        """
        if self._communicator.flavour != "nccl":
            return device_of(task, call.first)
        gpus = accelerators_of(task.process)
        if call.first is not None:
            index = call.first.device.index
        elif given := getattr(call.opts, "device_ids", None):
            index = given[0]
        else:
            index = bound.index if bound else min(self._brought, default=task.process.rank % gpus.count)
        device = gpus[index]
        self.bring(task, device, bound)
        return device

    def bring(self, task: RankTask, device: Device, bound: torch.device | None) -> None:
        """Connect a GPU of this member to those of the other members, if it is not."""
        if device.index in self._brought:
            return
        if bound not in (None, torch.device("cuda", device.index)):
            raise dist.DistBackendError(
                "Attempt to perform collective on tensor not on device passed to init_process_group"
                f" (the tensor is on cuda:{device.index}, device_id is {bound})"
            )
        if not self._brought:
            self._communicator.gpus.bring(task, device)
        self._brought.add(device.index)

    def host_s(self, device: Device) -> float:
        """Return the seconds of the host for a call, which are fewer inside a batch, or where it is a mere kernel."""
        if self._communicator.is_symmetric:
            return device.host.operator_s
        return device.host.collective_s if self._batch is None else device.host.message_s

    def begin_batch(self) -> None:
        """Start to collect calls into one kernel (`_start_coalescing`, `batch_isend_irecv`)."""
        self._batch = []

    def end_batch(self) -> GpuWork | None:
        """Launch the calls since `begin_batch` and return their handle, or None without calls."""
        batch, self._batch = self._batch, None
        if not batch:
            return None
        last = batch[-1][1]
        gpu = device_of(require_task(), batch[0][1].stash[0])
        self._put(require_task(), gpu, self._stream(gpu, -1), batch)
        last.together = [work for _, work in batch[:-1]]
        return last

    def finish(self, task: RankTask) -> None:
        """Make the host wait for all launched calls (ProcessGroupNCCL::shutdown: ncclCommFinalize)."""
        for (index, _), (_, mark) in list(self._last.items()):
            accelerators_of(task.process)[index].synchronize(task, mark)

    def launch(self, task: RankTask, device: Device, call: MethodCall, is_async: bool, part: Part) -> None:
        """Launch *call* in a stream of *device*, or add it to the open batch."""
        _, work = part
        fusion = task.process.accelerators.fusion
        if fusion is not None:
            fusion.is_read((*call.inputs, *call.outputs))
        if is_async or self._batch is not None:
            work.stash = (*call.inputs, *call.outputs)
            work.num_outputs = len(call.outputs)
        if self._batch is not None:
            self._batch.append(part)
            return
        peer = call.peer if call.key[0] in P2P else -1
        stream = self._stream(device, peer) if is_async else current_stream(task, device)
        flat = flat_of(device, stream, call)
        if flat is not None and is_async:
            work.flat = flat
        self._put(task, device, stream, [part], peer, flat)

    def _watch_buffers(
        self, task: RankTask, device: Device, stream: StreamTimeline, comm: Comm, parts: Sequence[Part]
    ) -> None:
        """Report buffers that are written, or results that are read, before *comm* has completed."""
        for arrival, work in parts:
            used = partial(task.port.guards.used_in_flight, arrival.record)
            outputs = work.stash[len(work.stash) - work.num_outputs :]
            device.in_flight.began(comm, stream, work.stash, outputs, used)

    def _channels(self, records: Sequence[CallRecord]) -> int:
        """Return the number of SMs of one kernel: those of the group's collectives, or fewer for messages.

        A message to the rank *d* positions ahead and one from the rank *d* positions behind are one round of NCCL,
        which shares its channels (src/enqueue.cc, addP2pToPlan).
        """
        communicator = self._communicator
        if any(record.op not in P2P or record.peer is None for record in records):
            return communicator.channels
        rounds: dict[int, int] = {}
        for record in records:
            assert record.peer is not None
            own, peer = (communicator.group.ranks.index(rank) for rank in (record.rank, record.peer))
            channels = communicator.message_channels(own, peer, record.nbytes)
            distance = (peer - own if record.op == "send" else own - peer) % len(communicator.group.ranks)
            rounds[distance] = max(rounds.get(distance, 0), channels)
        return min(sum(rounds.values()), MOST_CHANNELS)

    def _stream(self, device: Device, peer: int) -> StreamTimeline:
        """Return NCCL's stream of this group, or of the pair of ranks for a message outside a batch (*peer* is not
        -1).
        """
        stream = self._streams.get((device.index, peer))
        if stream is None:
            label = self._communicator.group.label
            stream = device.new_stream(f"nccl {label}" + (f" with rank {peer}" if peer >= 0 else ""))
            self._streams[device.index, peer] = stream
        return stream

    def _put(
        self,
        task: RankTask,
        device: Device,
        stream: StreamTimeline,
        parts: Sequence[Part],
        peer: int = -1,
        flat: Flat | None = None,
    ) -> None:
        """Put the calls *parts* into *stream* as one kernel.

        It runs after everything in the current stream, and after the last kernel of the same communicator; messages
        outside a batch have a communicator for each *peer*. *flat* is the tensor that the call copies from or to.
        """
        now_s = task.now_s()
        current = current_stream(task, device)
        if stream is not current and current.items:
            device.wait_for(stream, device.timeline.mark(current, now_s), now_s)
        before = self._last.get((device.index, peer))
        if before is not None and before[0] is not stream:
            device.wait_for(stream, before[1], now_s)
        if flat is not None and not flat.copies_out:
            flat.copy(task, stream)
            now_s = task.now_s()
        left = len(parts)
        comm: Comm

        def begin(_: Comm) -> None:
            for arrival, work in parts:
                work.kernel = comm
                self._communicator.arrive(arrival)

        def one_ended(_: Any) -> None:
            nonlocal left
            left -= 1
            if left:
                device.call_ended()
            else:
                device.ended(comm)

        records = [arrival.record for arrival, _ in parts]
        shares = device.model.comm_load(self._channels(records), self._communicator.rate_bytes_per_s)
        load = Load(*shares, of_collective=any(record.op not in P2P for record in records))
        comm = Comm(now_s + device.model.launch_s, load, begin, records[0], records, waits=True)
        if not self._tolerant:
            comm.expires_s = min(work.expires_s for _, work in parts)
            comm.explicit = any(work.has_own_limit for _, work in parts)
            comm.revoke = self._communicator.revoke if self._communicator.is_revocable else None
            device.watchdog = device.watchdog or Watchdog(device)
        for _, work in parts:
            assert work.done.callbacks is not None
            work.done.callbacks.append(one_ended)
        mark: Mark = device.communicate(stream, comm)
        if flat is not None and flat.copies_out:
            flat.copy(task, stream)
            mark = device.timeline.mark(stream, task.now_s())
        if device.watchdog is not None:
            device.watchdog.watch(comm)
        self._last[device.index, peer] = stream, mark
        if stream is not current and "buffers" in task.port.guards.watch:
            self._watch_buffers(task, device, stream, comm, parts)
        for _, work in parts:
            work.mark = mark


def device_of(task: RankTask, tensor: torch.Tensor | None) -> Device:
    """Return the GPU on which a call runs: that of its tensors, or the current one if it has none."""
    index = task.cuda_device if tensor is None else tensor.device.index
    return accelerators_of(task.process)[index]
