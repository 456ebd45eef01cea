"""The flat buffer that NCCL gathers into, or scatters from, when the program gives a list of tensors.

torch's ProcessGroupNCCL allocates it (newLikeFlat) and copies tensor by tensor in the call's stream: after an
all_gather, before a reduce_scatter. Where the tensors differ in size it has one message for each instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distsim.kernels.cost import Cost
from distsim.sim.device.allocator.ledger import COMMUNICATION
from distsim.sim.device.gpu import Device, Held
from distsim.sim.device.timeline import Stream
from distsim.sim.isolation.process import RankTask

if TYPE_CHECKING:
    from distsim.debug.records.arguments import Call

__all__ = ["Flat", "flat_of"]

_LISTS = {"all_gather": True, "reduce_scatter": False}
"""Whether the list is the call's outputs; else it is its inputs."""


class Flat:
    """Of one call: its memory, as long as somebody has it, and the copies."""

    def __init__(self, device: Device, stream: Stream, count: int, nbytes: int, copies_out: bool) -> None:
        self.copies_out = copies_out
        self._device, self._count = device, count
        self._each = device.plain_cost(2 * nbytes // count)  # read and written
        self.memory = Held(device, device.allocate(nbytes, stream), nbytes)
        block = self.memory.block
        if block is not None and block.tag is not None:
            block.tag.kind = COMMUNICATION

    def copy(self, task: RankTask, stream: Stream) -> None:
        """Put the copies at the end of *stream*; all are one kernel here, as long as they are together."""
        each = self._each
        task.process.accelerators.works_on_host(task, self._count * self._device.host.operator_s)
        seconds = self._count * each.seconds + (self._count - 1) * self._device.model.gap_s
        cost = Cost(seconds, self._count, 0, self._count * each.nbytes, each.kind, each.memory_bound)
        self._device.launch(stream, cost, task, "copy_")


def flat_of(device: Device, stream: Stream, call: Call) -> Flat | None:
    """What *call* needs in *stream*; None: nothing."""
    copies_out = _LISTS.get(call.key[0])
    if copies_out is None:
        return None
    tensors = call.outputs if copies_out else call.inputs
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if not nbytes or any(tensor.shape != tensors[0].shape for tensor in tensors):
        return None
    return Flat(device, stream, len(tensors), nbytes, copies_out)
