"""The streams on which a group's calls run: each call, or batch of messages, is one kernel in one of them.

Of one communicator and GPU, kernels run in the order in which the host launched them, whatever their streams: NCCL has
each wait for its communicator's stream and that stream for each (v2.30.7, src/enqueue.cc, ncclLaunchPrepare and
ncclLaunchFinish). So an all_gather that is launched behind a reduce_scatter waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from distsim.debug.records import P2P, CallRecord
from distsim.sim.c10d.on_gpu.flat_buffer import Flat, flat_of
from distsim.sim.c10d.on_gpu.watchdog import Watchdog, tolerant
from distsim.sim.c10d.on_gpu.work import GpuWork
from distsim.sim.device.gpu import Device
from distsim.sim.device.streams import accelerators_of, current_stream
from distsim.sim.device.timeline import Comm, Load, Mark, Stream
from distsim.sim.isolation.process import RankTask, require_task

if TYPE_CHECKING:
    from distsim.debug.records.arguments import Call
    from distsim.sim.c10d.arrival import Arrival
    from distsim.sim.c10d.communicator import Communicator

__all__ = ["GroupStreams", "device_of"]

Meet = Callable[[Any], None]
Part = tuple["Arrival", GpuWork, Meet]
"""One call: its arrival, its handle, and what brings it to those of the others."""
MOST_CHANNELS = 64
"""Of one kernel: MAXCHANNELS of NCCL v2.30.7, src/include/device.h."""


class GroupStreams:
    """The streams of one member of a group, by GPU and by the rank it sends to or hears from."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._tolerant = tolerant()
        self._streams: dict[tuple[int, int], Stream] = {}
        self._batch: list[Part] | None = None
        self._last: dict[tuple[int, int], tuple[Stream, Mark]] = {}
        """By GPU and peer: where the last kernel is."""
        self._brought: set[int] = set()
        """GPUs of earlier calls: NCCL has a communicator for each."""

    def device_of(self, task: RankTask, tensor: torch.Tensor | None) -> Device:
        """The GPU that a call runs on, which no other member has."""
        device = device_of(task, tensor)
        if device.index not in self._brought and tensor is not None and self._communicator.flavour == "nccl":
            self._communicator.gpus.bring(task, device)
            self._brought.add(device.index)
        return device

    def host_s(self, device: Device) -> float:
        """What a call costs the host: less inside a batch."""
        return device.host.collective_s if self._batch is None else device.host.message_s

    def begin_batch(self) -> None:
        """Calls from here on are one kernel (`_start_coalescing`, `batch_isend_irecv`)."""
        self._batch = []

    def end_batch(self) -> GpuWork | None:
        """Put what has come since `begin_batch` into a stream. The handle of all of it; None: nothing has come."""
        batch, self._batch = self._batch, None
        if not batch:
            return None
        last = batch[-1][1]
        gpu = device_of(require_task(), batch[0][1].stash[0])
        self._put(require_task(), gpu, self._stream(gpu, -1), batch)
        last.together = [work for _, work, _ in batch[:-1]]
        return last

    def finish(self, task: RankTask) -> None:
        """The host waits until all that was launched has ended (ProcessGroupNCCL::shutdown: ncclCommFinalize)."""
        for (index, _), (_, mark) in list(self._last.items()):
            accelerators_of(task.process)[index].synchronize(task, mark)

    def launch(self, task: RankTask, device: Device, call: Call, is_async: bool, part: Part) -> None:
        """Put *call* into a stream of *device*, or into the batch that has begun."""
        _, work, _ = part
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

    def _watch_buffers(self, task: RankTask, device: Device, stream: Stream, comm: Comm, parts: Sequence[Part]) -> None:
        """Report what is written to, or read, before *comm* has ended."""
        for arrival, work, _ in parts:
            used = partial(task.world.guards.used_in_flight, arrival.record)
            outputs = work.stash[len(work.stash) - work.num_outputs :]
            device.in_flight.began(comm, stream, work.stash, outputs, used)

    def _channels(self, records: Sequence[CallRecord]) -> int:
        """SMs of one kernel: those of the group's collectives; of messages what theirs take, which are fewer.

        What goes to the rank *d* places on and what comes from the rank *d* places back is one round of NCCL's, and
        shares its channels (src/enqueue.cc, addP2pToPlan).
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

    def _stream(self, device: Device, peer: int) -> Stream:
        """NCCL's stream of this group; of a pair of ranks for a message outside a batch, *peer* -1 where it is none."""
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
        stream: Stream,
        parts: Sequence[Part],
        peer: int = -1,
        flat: Flat | None = None,
    ) -> None:
        """Put the calls *parts* into *stream* as one kernel, behind what the current stream has so far and behind the
        last kernel of the same communicator: messages outside a batch have one for each pair, *peer*. *flat*: what the
        call copies from or to."""
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
            for arrival, _, meet in parts:
                arrival.on_start = lambda: device.timeline.meet(comm)
                meet(arrival)

        def one_ended(_: Any) -> None:
            nonlocal left
            left -= 1
            if left:
                device.call_ended()
            else:
                device.ended(comm)

        records = [arrival.record for arrival, _, _ in parts]
        load = Load(*device.model.comm_load(self._channels(records), self._communicator.rate_bytes_per_s))
        comm = Comm(now_s + device.model.launch_s, load, begin, records[0], records, waits=True)
        if not self._tolerant:
            comm.expires_s = min(work.expires_s for _, work, _ in parts)
            comm.explicit = any(work.has_own_limit for _, work, _ in parts)
            device.watchdog = device.watchdog or Watchdog(device)
        for _, work, _ in parts:
            assert work.done.callbacks is not None
            work.done.callbacks.append(one_ended)
        mark: Mark = device.communicate(stream, comm)
        if flat is not None and flat.copies_out:
            flat.copy(task, stream)
            mark = device.timeline.mark(stream, task.now_s())
        if device.watchdog is not None:
            device.watchdog.watch(comm)
        self._last[device.index, peer] = stream, mark
        if stream is not current and "buffers" in task.world.guards.watch:
            self._watch_buffers(task, device, stream, comm, parts)
        for _, work, _ in parts:
            work.mark = mark


def device_of(task: RankTask, tensor: torch.Tensor | None) -> Device:
    """The GPU that a call runs on: its tensors', the current one where it has none."""
    index = task.cuda_device if tensor is None else tensor.device.index
    return accelerators_of(task.process)[index]
