"""Buffers of collectives that nothing has waited for yet: a kernel that uses one races with the collective.

Told is only what the streams' order proves: the program launched the kernel in a stream that has waited for nothing
since the collective was launched, whose stream it is not, and the collective had not ended by then. Whoever waits for
anything, stream or host, is taken to have waited for this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from distsim.sim.device.timeline.items import Comm
from distsim.sim.device.timeline.timeline import Stream

__all__ = ["InFlight"]

Tell = Callable[[bool, bool], None]
"""Takes whether the kernel writes, and whether any stream has waited since."""
Bytes = tuple[Any, int, int]
"""Of a storage's memory, from and up to."""


@dataclass(slots=True)
class _Open:
    comm: Comm
    stream: Stream
    buffers: list[Bytes]
    outputs: list[Bytes]
    """Those of `buffers` that the collective writes to."""
    tell: Tell
    ordered: set[int] = field(default_factory=set)
    """Streams that have waited for something since."""


class InFlight:
    """Of one GPU."""

    def __init__(self) -> None:
        self.open: list[_Open] = []

    def began(
        self, comm: Comm, stream: Stream, tensors: Iterable[Tensor], outputs: Iterable[Tensor], tell: Tell
    ) -> None:
        """*comm* was launched for *tensors*; *tell* is called once if one is written to, or one of *outputs* read."""
        buffers = _all_bytes(tensors)
        if buffers:
            self.open.append(_Open(comm, stream, buffers, _all_bytes(outputs), tell))

    def stream_waits(self, stream: Stream) -> None:
        for one in self.open:
            one.ordered.add(stream.number)

    def host_waits(self) -> None:
        self.open.clear()

    def forget(self, record: Any) -> None:
        """Somebody has a future of that call, and may wait for it where nobody sees it."""
        self.open = [one for one in self.open if record not in one.comm.records]

    def used(self, stream: Stream, written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        """A kernel that writes to *written* and reads *read* was launched in *stream*."""
        self.open = [one for one in self.open if one.comm.ended_s is None]
        for one in list(self.open):
            if stream is one.stream or stream.number in one.ordered:
                continue
            writes = _meet(_all_bytes(written), one.buffers)
            if writes or _meet(_all_bytes(read), one.outputs):
                one.tell(writes, bool(one.ordered))
                self.open.remove(one)


def _all_bytes(tensors: Iterable[Tensor]) -> list[Bytes]:
    return [held for tensor in tensors if tensor.is_cuda and (held := _bytes(tensor)) is not None]


def _meet(some: Sequence[Bytes], others: Sequence[Bytes]) -> bool:
    return any(_overlap(one, other) for one in some for other in others)


def _bytes(tensor: Tensor) -> Bytes | None:
    held = tensor.untyped_storage().__dict__.get("_distsim_held")
    if held is None or not tensor.numel():
        return None
    size = tensor.element_size()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * size
    return weakref.ref(held), begin, begin + (last + 1) * size


def _overlap(one: Bytes, other: Bytes) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]
