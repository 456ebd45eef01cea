"""One-sided windows of torch 2.14 for groups of NCCL on simulated GPUs.

A put takes the time of its bytes over the links between the two GPUs, and ends with a signal, as ncclPutSignal; each
wait consumes one signal (torch's WindowNCCL.hpp). What a peer has put is not known here: a window has no values.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from distsim.errors import NotSimulated
from distsim.sim.c10d.extensions.symmetric_memory import receive_signal, remote_tensor, send_signal
from distsim.sim.c10d.group import SimGroup
from distsim.sim.isolation.process import require_task


class SimWindow:
    """A tensor of each member of *group* into which the other members write."""

    def __init__(self, group: SimGroup) -> None:
        self._group = group
        self._tensor: Tensor | None = None

    def tensor_register(self, tensor: Tensor, owning: bool = True) -> None:
        """Offer *tensor* to all members; each calls this."""
        if not tensor.is_cuda:
            raise RuntimeError(f"expected a tensor on a GPU for a window, got one on {tensor.device}")
        if self._tensor is not None:
            raise RuntimeError("the window has a tensor already: call tensor_deregister first")
        if require_task().port.facts.data.real:
            raise NotSimulated("a window with --data real", "leave --data out, or send and receive the tensors")
        self._tensor = tensor
        self._meet(tensor)

    def tensor_deregister(self) -> None:
        """Take the tensor back; each member calls this."""
        self._meet(self._own())
        self._tensor = None

    def put(self, tensor: Tensor, dst_rank: int, target_offset_nelems: int, async_op: bool, opts: Any = None) -> Any:
        """Write *tensor* into the window of the member *dst_rank* from an element on, and signal it."""
        own = self._own()
        if target_offset_nelems < 0 or target_offset_nelems + tensor.numel() > own.numel():
            given = f"{tensor.numel()} from {target_offset_nelems}"
            raise RuntimeError(f"expected at most {own.numel()} elements in the window, got {given}")
        self.map_remote_tensor(dst_rank).view(-1)[: tensor.numel()].copy_(tensor.reshape(-1))
        return self.signal(dst_rank, async_op)

    def map_remote_tensor(self, rank: int) -> Tensor:
        """Return the tensor of the member *rank*."""
        own = self._own()
        self._check(rank)
        return own if rank == self._group.rank() else remote_tensor(own.shape, own.dtype, own.device, self._group, rank)

    def signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> Any:
        """Signal the member *peer_rank*."""
        self._check(peer_rank)
        return self._ended(send_signal(self._group, peer_rank, self._own().device), async_op)

    def wait_signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> Any:
        """Wait in the stream for the next signal of the member *peer_rank*."""
        self._check(peer_rank)
        return self._ended(receive_signal(self._group, peer_rank, self._own().device), async_op)

    def get_attr(self, peer_rank: int) -> NoReturn:
        """Refuse, as the classes of its answer are those of C++."""
        raise NotSimulated("Window.get_attr", "leave it out: all memory of a window is UNIFIED")

    def _own(self) -> Tensor:
        if self._tensor is None:
            raise RuntimeError("the window has no tensor: call tensor_register first")
        return self._tensor

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self._group.size():
            raise RuntimeError(f"expected a rank from 0 to {self._group.size() - 1}, got {rank}")

    def _meet(self, tensor: Tensor) -> None:
        options = c10d.BarrierOptions()
        options.device = tensor.device
        options.asyncOp = False
        self._group.beside("windows", {"cuda": "nccl"}, "nccl").barrier(options).wait()

    @staticmethod
    def _ended(work: Any, async_op: bool) -> Any:
        if not async_op:
            work.wait()
        return work


def new_window(self: SimGroup, tensor: Tensor | None = None) -> SimWindow:
    """Do what `ProcessGroup.new_window` does."""
    if not self.supports_window:
        raise RuntimeError(f"Backend {self.name()} does not support new_window")
    window = SimWindow(self)
    if tensor is not None:
        window.tensor_register(tensor)
    return window
