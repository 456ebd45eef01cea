"""Opt-in checks of a call's tensors: NaN in outgoing data, and writes to buffers that are in use."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distsim.debug.records.arguments import FIELDS, MethodCall
from distsim.debug.rings import layout as rings
from distsim.realexec.guard.recorder import Recorder

IN_PLACE = frozenset({"recv", *(op for op, fields in FIELDS.items() if fields.in_place)})
"""Operations whose result replaces the buffer's content. A write during the call is only visible if the call runs on
a copy.
"""
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def input_tensors(call: MethodCall, rank: int) -> list[Tensor]:
    """Return the tensors that this rank contributes to a call."""
    if call.key[0] == "broadcast" and call.key[5] != rank:
        return []
    return _plain(call.inputs)


def _plain(tensors: Sequence[Any]) -> list[Tensor]:
    return [tensor for tensor in tensors if type(tensor) in (Tensor, torch.nn.Parameter)]


def _values(tensor: Tensor) -> Tensor | None:
    """Return the numbers of a tensor as a strided tensor, or None if it has none that can be checked."""
    tensor = tensor.detach()
    if tensor.is_meta:
        return None
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.is_nested or tensor.layout in COMPRESSED:
        return tensor.values()
    return tensor if tensor.layout is torch.strided else None


def _has_bytes(tensor: Tensor) -> bool:
    """Return whether the tensor's storage is its content."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def find_nan(recorder: Recorder, call: MethodCall, index: int, rank: int) -> None:
    """Record a finding if the call sends NaN."""
    for tensor in input_tensors(call, rank):
        values = _values(tensor) if tensor.is_floating_point() or tensor.is_complex() else None
        if values is not None and bool(torch.isnan(values).any()):
            recorder.ring.mark(index, rings.NAN_INPUT)
            return


class Checksums:
    """Checksums of a call's buffers before and after the call, to detect writes in between.

    A call that works in place runs on a copy, so that any change of the buffer must come from the program. The
    result is copied into the buffer when the handle is waited for.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def begin(
        self, call: MethodCall, index: int, args: tuple[Any, ...], rank: int
    ) -> tuple[tuple[Any, ...], Callable[[], None] | None]:
        """Return the arguments for the call, and a function to call after the call was waited for (or None)."""
        op = call.key[0]
        if op in IN_PLACE:
            buffers = _plain(call.outputs)
            if not buffers or len(buffers) < len(call.outputs) or not args or call.outputs is not args[0]:
                return args, None
            if not all(_has_bytes(buffer) for buffer in buffers):
                return args, None
            copies = [buffer.detach().clone() for buffer in buffers]
            if any(copy.stride() != buffer.stride() for copy, buffer in zip(copies, buffers, strict=True)):
                return args, None  # backends refuse some that overlap themselves or have gaps
            return (copies, *args[1:]), self._after(index, buffers, copies)
        buffers = [one for one in input_tensors(call, rank) if _has_bytes(one)]
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
    """Return a checksum of a tensor's bytes; on an accelerator the sum of its 32-bit words."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel() == 0:
        return 0
    data = flat.view(torch.uint8)
    if data.device.type != "cpu":
        return int(data.to(torch.int64).sum().item())
    return zlib.crc32(memoryview(data.numpy()))
