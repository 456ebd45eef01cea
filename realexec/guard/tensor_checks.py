"""Opt-in looks at the tensors of a call: NaN before it goes out, buffers written while in flight."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distsim.debug.rings import layout as rings
from distsim.realexec.guard.recorder import Recorder
from distsim.realexec.guard.signature import Call

__all__ = ["Checksums", "find_nan", "input_tensors"]

IN_PLACE = frozenset({"all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "recv"})
"""Calls whose own result lands in the buffer: a change while in flight shows only against a copy."""


def input_tensors(said: Call, args: tuple[Any, ...], rank: int) -> list[Tensor]:
    """The tensors that this rank contributes to a call."""
    op, root = said.key[0], said.key[5]
    if not args or op in ("recv", "barrier", "monitored_barrier"):
        return []
    if op == "broadcast":
        return _tensors(args[0]) if root == rank else []
    if op in ("all_reduce", "all_reduce_coalesced", "reduce", "send"):
        return _tensors(args[0])
    return _tensors(args[1]) if len(args) > 1 else []


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given] if type(given) in (Tensor, torch.nn.Parameter) else []
    if isinstance(given, (list, tuple)):
        return [tensor for part in given for tensor in _tensors(part)]
    return []


def find_nan(recorder: Recorder, said: Call, index: int, args: tuple[Any, ...]) -> None:
    """Flag a call that sends NaN."""
    for tensor in input_tensors(said, args, recorder.ring.rank):
        if tensor.is_floating_point() and bool(torch.isnan(tensor.detach()).any()):
            recorder.ring.mark(index, rings.NAN_INPUT)
            return


class Checksums:
    """Compares a call's buffers before and after its flight.

    A call that works in place runs on a copy, so what is found in the buffer afterwards was written
    by somebody else; the result is put there when the handle is waited for.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def begin(self, said: Call, index: int, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Callable[[], None] | None]:
        """The arguments to call with, and what to do once the call has been waited for."""
        op = said.key[0]
        if op in IN_PLACE:
            buffers = _tensors(args[0])
            if not buffers or not isinstance(args[0], (list, tuple)):
                return args, None
            copies = [buffer.detach().clone() for buffer in buffers]
            return (copies, *args[1:]), self._after(index, buffers, copies)
        buffers = input_tensors(said, args, self._recorder.ring.rank)
        return args, self._after(index, buffers, []) if buffers else None

    def _after(self, index: int, buffers: Sequence[Tensor], copies: Sequence[Tensor]) -> Callable[[], None]:
        sums = [checksum(buffer) for buffer in buffers]

        def check() -> None:
            if any(checksum(buffer) != before for buffer, before in zip(buffers, sums, strict=True)):
                self._recorder.ring.mark(index, rings.MODIFIED)
            with torch.no_grad():
                for buffer, copy in zip(buffers, copies, strict=False):
                    buffer.copy_(copy)

        return check


def checksum(tensor: Tensor) -> int:
    """Of a tensor's bytes; on an accelerator of their 32-bit sum."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.numel() == 0:
        return 0
    data = flat.view(torch.uint8)
    if data.device.type != "cpu":
        return int(data.to(torch.int64).sum().item())
    return zlib.crc32(memoryview(data.numpy()))
