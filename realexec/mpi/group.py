"""A process group whose calls are MPI's non-blocking ones (MPI 3.0)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distsim.realexec.mpi.library import mpi
from distsim.realexec.mpi.progress import PROGRESS
from distsim.realexec.mpi.types import buffer, operation, spread
from distsim.realexec.mpi.work import MpiWork

__all__ = ["MpiGroup"]


class MpiGroup(ProcessGroup):
    """The ranks of *comm*, an mpi4py communicator of its own."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm = comm
        self._names = {"name": "", "desc": "undefined"}

    # C++ keeps both in the group's backends, of which this one has none.
    @property
    def group_name(self) -> str:
        return self._names["name"]

    @property
    def group_desc(self) -> str:
        return self._names["desc"]

    def _set_group_name(self, name: str) -> None:
        self._names["name"] = name

    def _set_group_desc(self, desc: str) -> None:
        self._names["desc"] = desc

    def getBackendName(self) -> str:
        return "mpi"

    def name(self) -> str:
        return "mpi"

    def _get_backend(self, device: Any) -> MpiGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    supports_splitting = False
    supports_coalescing = False

    def _set_sequence_number_for_group(self) -> None:
        """Nobody counts."""

    def shutdown(self) -> None:
        """MPI keeps the communicator until its end: to free it is a collective call, which nobody promised."""

    abort = shutdown

    def _start(
        self,
        name: str,
        outputs: Sequence[Tensor],
        begin: Callable[[], Any],
        land: Callable[[], None] | None = None,
        keep: Sequence[Tensor] = (),
        received: bool = False,
    ) -> MpiWork:
        work = MpiWork(name, outputs, keep, lambda: [begin()], land, received)
        PROGRESS.go_on_alone()
        return work

    # Collectives ------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        tensor = _single("allreduce", tensors)
        what, op = buffer(tensor), operation(opts.reduceOp, tensor)
        return self._start("all_reduce", tensors, lambda: self._comm.Iallreduce(mpi().IN_PLACE, what, op))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        what, root = buffer(_single("broadcast", tensors)), self._root("broadcast", opts)
        return self._start("broadcast", tensors, lambda: self._comm.Ibcast(what, root))

    def reduce(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        tensor, root = _single("reduce", tensors), self._root("reduce", opts)
        what, op = buffer(tensor), operation(opts.reduceOp, tensor)
        send, receive = (mpi().IN_PLACE, what) if self.rank() == root else (what, None)
        return self._start("reduce", tensors, lambda: self._comm.Ireduce(send, receive, op, root))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        tensor = _single("allgather", inputs)
        places = self._places("allgather", outputs[0] if len(outputs) == 1 else [], tensor)
        flat = tensor.new_empty((self.size(), *tensor.shape))
        send, receive = buffer(tensor), buffer(flat)
        return self._start(
            "all_gather",
            places,
            lambda: self._comm.Iallgather(send, receive),
            lambda: _copy(flat.unbind(0), places),
            (tensor, flat),
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> MpiWork:
        if output.numel() != self.size() * tensor.numel() or output.dtype != tensor.dtype:
            raise RuntimeError(
                f"MPI: all_gather_into_tensor: the output has to be {self.size()} times the input, and of its dtype"
            )
        tensor = _apart(tensor, output)
        send, receive = buffer(tensor), buffer(output)
        return self._start(
            "all_gather_into_tensor", [output], lambda: self._comm.Iallgather(send, receive), keep=[tensor]
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> MpiWork:
        tensor, root = _single("gather", inputs), self._root("gather", opts)
        if self.rank() != root:
            if outputs:
                raise RuntimeError("Gather: number of output tensors should be 0 for non-root")
            send = buffer(tensor)
            return self._start("gather", [], lambda: self._comm.Igather(send, None, root), keep=[tensor])
        places = self._places("gather", outputs[0] if len(outputs) == 1 else [], tensor)
        flat = tensor.new_empty((self.size(), *tensor.shape))
        send, receive = buffer(tensor), buffer(flat)
        return self._start(
            "gather",
            places,
            lambda: self._comm.Igather(send, receive, root),
            lambda: _copy(flat.unbind(0), places),
            (tensor, flat),
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MpiWork:
        tensor, root = _single("scatter", outputs), self._root("scatter", opts)
        receive = buffer(tensor)
        if self.rank() != root:
            if inputs:
                raise RuntimeError("Scatter: number of input tensors should be 0 for non-root")
            return self._start("scatter", outputs, lambda: self._comm.Iscatter(None, receive, root))
        flat = torch.stack(self._places("scatter", inputs[0] if len(inputs) == 1 else [], tensor))
        send = buffer(flat)
        return self._start("scatter", outputs, lambda: self._comm.Iscatter(send, receive, root), keep=[flat])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MpiWork:
        tensor = _single("reduce_scatter", outputs)
        flat = torch.stack(self._places("reduce_scatter", inputs[0] if len(inputs) == 1 else [], tensor))
        return self._reduce_scatter(tensor, flat, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> MpiWork:
        if tensor.numel() != self.size() * output.numel() or output.dtype != tensor.dtype:
            raise RuntimeError(
                f"MPI: reduce_scatter_tensor: the input has to be {self.size()} times the output, and of its dtype"
            )
        return self._reduce_scatter(output, tensor, opts)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, opts: Any) -> MpiWork:
        tensor = _apart(tensor, output)
        send, receive, op = buffer(tensor), buffer(output), operation(opts.reduceOp, output)
        return self._start(
            "reduce_scatter", [output], lambda: self._comm.Ireduce_scatter_block(send, receive, op), keep=[tensor]
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        for tensors in (outputs, inputs):
            if len(tensors) != self.size():
                raise RuntimeError("Number of tensor splits not equal to group size")
        flat_in = torch.cat([tensor.reshape(-1) for tensor in inputs])
        flat_out = torch.cat([torch.empty_like(tensor).reshape(-1) for tensor in outputs])
        counts = [tensor.numel() for tensor in outputs]
        send, receive = spread(flat_in, [tensor.numel() for tensor in inputs]), spread(flat_out, counts)

        def land() -> None:
            _copy(
                [part.view(place.shape) for part, place in zip(flat_out.split(counts), outputs, strict=True)], outputs
            )

        return self._start(
            "all_to_all", outputs, lambda: self._comm.Ialltoallv(send, receive), land, (flat_in, flat_out)
        )

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> MpiWork:
        tensor = _apart(tensor, output)
        send = spread(tensor, self._shares(tensor, input_splits))
        receive = spread(output, self._shares(output, output_splits))
        return self._start("all_to_all_single", [output], lambda: self._comm.Ialltoallv(send, receive), keep=[tensor])

    def barrier(self, opts: Any = None) -> MpiWork:
        return self._start("barrier", [], self._comm.Ibarrier)

    # The names of torch before 2.13, which a backend still answers to.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # Point to point ---------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> MpiWork:
        what = buffer(_single("send", tensors))
        self._refuse_ends("send", peer, tag)
        return self._start("send", tensors, lambda: self._comm.Isend(what, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> MpiWork:
        what = buffer(_single("recv", tensors))
        self._refuse_ends("recv", peer, tag)
        return self._start("recv", tensors, lambda: self._comm.Irecv(what, peer, tag), received=True)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MpiWork:
        what = buffer(_single("recv", tensors))
        self._refuse_ends("recv", 0, tag)
        source = mpi().ANY_SOURCE
        return self._start("recv", tensors, lambda: self._comm.Irecv(what, source, tag), received=True)

    def _refuse_ends(self, op: str, peer: int, tag: int) -> None:
        if tag < 0:
            raise RuntimeError("Tag must be nonnegative")
        if not 0 <= peer < self.size():
            raise RuntimeError(f"MPI: {op}: peer {peer} is out of range for a group of {self.size()}")

    # Arguments --------------------------------------------------------------------------------------

    def _root(self, op: str, opts: Any) -> int:
        root = int(opts.rootRank)
        if not 0 <= root < self.size():
            raise RuntimeError(f"MPI: {op}: invalid root rank: {root}")
        return root

    def _places(self, op: str, tensors: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """One tensor a rank, each as *like*."""
        if len(tensors) != self.size():
            raise RuntimeError(f"MPI: {op}: expected a list of {self.size()} tensors, one a rank, got {len(tensors)}")
        for place, tensor in enumerate(tensors):
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise RuntimeError(
                    f"MPI: {op}: tensor {place} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected "
                    f"{like.dtype} of shape {tuple(like.shape)}"
                )
        return list(tensors)

    def _shares(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Elements for each rank; *splits* are rows."""
        rows = int(tensor.shape[0]) if tensor.dim() else 1
        if splits and len(splits) != self.size():
            raise RuntimeError("Number of tensor splits not equal to group size")
        if splits and sum(splits) != rows:
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
        if not splits and rows % self.size():
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        row = tensor.numel() // rows if rows else 0
        return [row * count for count in (splits or [rows // self.size()] * self.size())]


def _single(op: str, tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) != 1:
        raise RuntimeError(f"MPI process group only supports a single tensor op, {op} got {len(tensors)}")
    return tensors[0]


def _apart(tensor: Tensor, output: Tensor) -> Tensor:
    """*tensor*, or a copy where *output* lies in the same memory: FSDP gathers in place, MPI wants two buffers."""
    same = tensor.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    return tensor.clone() if same and tensor.is_contiguous() else tensor


def _copy(parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for part, place in zip(parts, places, strict=True):
        place.copy_(part)
