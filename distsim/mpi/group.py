"""Process group on MPI's non-blocking calls (MPI 3.0), and its registration with torch.

`MpiWork` is the handle of a call; `enable` makes torch's own functions create these groups.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.futures import Future

from distsim.mpi import library
from distsim.mpi.library import PROGRESS, mpi
from distsim.torch_compat import groups
from distsim.torch_compat.names import Patches

_NAMES = {
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.bool: "C_BOOL",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
"""MPI datatype of each torch dtype. MPI has no half precision."""
_OPERATIONS = {"SUM": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
"""MPI reduction for each reduce operation, as in torch's ProcessGroupMPI.cpp (`mpiOp`)."""
_LOGICAL = {"SUM": "LOR", "MAX": "LOR", "PRODUCT": "LAND", "MIN": "LAND"}


class MpiGroup(ProcessGroup):
    """Process group on *comm*, its own mpi4py communicator."""

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
        """Do nothing: sequence numbers are not used."""

    def shutdown(self) -> None:
        """Do nothing: freeing the communicator would be a collective call, which not all ranks need make."""

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
        data, op = buffer(tensor), operation(opts.reduceOp, tensor)
        return self._start("all_reduce", tensors, lambda: self._comm.Iallreduce(mpi().IN_PLACE, data, op))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        data, root = buffer(_single("broadcast", tensors)), self._root("broadcast", opts)
        return self._start("broadcast", tensors, lambda: self._comm.Ibcast(data, root))

    def reduce(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        tensor, root = _single("reduce", tensors), self._root("reduce", opts)
        data, op = buffer(tensor), operation(opts.reduceOp, tensor)
        send, receive = (mpi().IN_PLACE, data) if self.rank() == root else (data, None)
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
                f"MPI: all_gather_into_tensor: expected an output of {self.size()} times the input, of the same dtype"
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
                [part.view(output.shape) for part, output in zip(flat_out.split(counts), outputs, strict=True)], outputs
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
        data = buffer(_single("send", tensors))
        self._refuse_ends("send", peer, tag)
        return self._start("send", tensors, lambda: self._comm.Isend(data, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> MpiWork:
        data = buffer(_single("recv", tensors))
        self._refuse_ends("recv", peer, tag)
        return self._start("recv", tensors, lambda: self._comm.Irecv(data, peer, tag), received=True)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MpiWork:
        data = buffer(_single("recv", tensors))
        self._refuse_ends("recv", 0, tag)
        source = mpi().ANY_SOURCE
        return self._start("recv", tensors, lambda: self._comm.Irecv(data, source, tag), received=True)

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
        """Check that there is one tensor for each rank, each shaped like *like*, and return them."""
        if len(tensors) != self.size():
            raise RuntimeError(f"MPI: {op}: expected a list of {self.size()} tensors, one per rank, got {len(tensors)}")
        for i, tensor in enumerate(tensors):
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise RuntimeError(
                    f"MPI: {op}: tensor {i} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected "
                    f"{like.dtype} of shape {tuple(like.shape)}"
                )
        return list(tensors)

    def _shares(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Return the number of elements for each rank; *splits* counts rows."""
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
    """Return *tensor*, or a copy if *output* overlaps with it: FSDP gathers in place, and MPI needs two buffers."""
    same = tensor.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    return tensor.clone() if same and tensor.is_contiguous() else tensor


def _copy(parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for part, target in zip(parts, places, strict=True):
        target.copy_(part)


class MpiWork(Work):
    """Handle that ends when MPI's requests do. *land* then copies received data to the program's tensors."""

    def __init__(
        self,
        name: str,
        outputs: Sequence[Tensor],
        keep: Sequence[Tensor],
        begin: Callable[[], Sequence[Any]],
        land: Callable[[], None] | None = None,
        received: bool = False,
    ) -> None:
        super().__init__()
        self.requests: list[Any] = []
        self.over = False
        self._name = name
        self._outputs = list(outputs)
        self._keep = (*outputs, *keep)
        """Tensors that MPI reads and writes until the end."""
        self._land = land
        self._received = received
        self._sender = -1
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None
        PROGRESS.start(self, begin)

    def ends(self, statuses: Sequence[Any], error: BaseException | None) -> None:
        """Complete the work when all requests are done; called once, by the thread that noticed it."""
        self._error = error
        if error is None:
            if self._land is not None:
                self._land()
            if self._received:
                self._sender = int(statuses[0].Get_source())
        self._keep, self._land = (), None
        self.over = True
        self._settle()

    def _settle(self) -> None:
        future = self._future
        if future is None or future.done():
            return
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        if not PROGRESS.until(self, seconds):
            raise RuntimeError(f"MPI: {self._name} was not over after {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if not self.over:
            PROGRESS.step()
        return self.over

    def is_success(self) -> bool:
        return self.over and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def source_rank(self) -> int:
        return self._source_rank()

    def _source_rank(self) -> int:
        if not self._received:
            raise RuntimeError(
                "sourceRank() may only be called on work objects that correspond to a recv or recv-from-any call."
            )
        return self._sender

    def result(self) -> list[Tensor]:
        if not self.over:
            raise RuntimeError(
                "Work needs to be completed before calling result(). Should call wait() before result()."
            )
        return self._outputs

    def synchronize(self) -> None:
        """Do nothing: CPU tensors need no stream."""

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        if self._future is None:
            self._future = Future()
            if self.over:
                self._settle()
            else:
                PROGRESS.go_on_alone()
        return self._future


def buffer(tensor: Tensor) -> list[Any]:
    """Return [memory, datatype] of a contiguous CPU tensor, for mpi4py, which counts the elements itself.

    Raises:
        RuntimeError: MPI cannot take the tensor.
    """
    _refuse(tensor)
    library = mpi()
    memory = library.memory.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return [memory, getattr(library, _NAMES[tensor.dtype])]


def spread(tensor: Tensor, counts: list[int]) -> list[Any]:
    """Return [memory, (elements for each rank, offset of each), datatype] for a tensor whose rows are split over
    ranks.
    """
    memory, kind = buffer(tensor)
    begins = [sum(counts[:rank]) for rank in range(len(counts))]
    return [memory, (counts, begins), kind]


def _refuse(tensor: Tensor) -> None:
    if not tensor.is_cpu:
        raise RuntimeError(f"backend 'mpi': tensors of the host are expected, this one is on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise RuntimeError("input tensor has to be dense")
    if not tensor.is_contiguous():
        raise RuntimeError("input tensor has to be contiguous")
    if tensor.dtype not in _NAMES:
        raise RuntimeError(f"MPI process group does not support {tensor.dtype} tensors")


def operation(op: Any, tensor: Tensor) -> Any:
    """Return MPI's reduction for torch's *op* on this tensor.

    Raises:
        RuntimeError: MPI has no such reduction.
    """
    name = ReduceOp.RedOpType(op.op if isinstance(op, ReduceOp) else op).name
    known = _LOGICAL if tensor.dtype is torch.bool else _OPERATIONS
    if name not in known or (tensor.is_complex() and name in ("MIN", "MAX")):
        raise RuntimeError(f"MPI process group does not support ReduceOp.{name} on {tensor.dtype} tensors")
    return getattr(mpi(), known[name])


class ProcessGroupMPI:
    """Process group of the backend `mpi`, as in a torch built with MPI."""

    @staticmethod
    def create(ranks: Sequence[int]) -> MpiGroup | None:
        """Return the group of *ranks* (empty: the world), or None if this process is not a member. All members must
        call this.

        Raises:
            RuntimeError: There is no MPI, or mpirun started another number of ranks than the environment says.
        """
        mpi = library.mpi()
        world = mpi.COMM_WORLD
        if not ranks:
            _refuse_other_size(world.Get_size())
            library.meet(world)
            return MpiGroup(world.Dup())
        members = world.Get_group().Incl(list(ranks))
        if members.Get_rank() == mpi.UNDEFINED:
            return None
        return MpiGroup(world.Create_group(members))


def _refuse_other_size(size: int) -> None:
    size_text = os.environ.get("WORLD_SIZE", "")
    if size_text.isdigit() and int(size_text) != size:
        raise RuntimeError(
            f"backend 'mpi': MPI knows {size} rank{'s' * (size != 1)}, WORLD_SIZE is {size_text}: start them with "
            f"mpirun (mpirun -n {size_text} distsim run --on mpi SCRIPT), by the MPI that mpi4py loads"
        )


_patches = Patches()


def enable(may_end: Callable[[], bool] = lambda: True) -> None:
    """Make backend "mpi" available in this process if torch has none of its own and mpi4py is installed.

    At the end of the process, *may_end* decides whether it waits for all other ranks, as MPI requires.
    """
    if groups.MPI_AVAILABLE.get(True) or not library.is_installed():
        return
    library.finalize_at_exit(may_end)
    _patches.put(c10d, groups.MPI_AVAILABLE.attribute, True)
    _patches.put(c10d, "ProcessGroupMPI", ProcessGroupMPI)


def disable() -> None:
    """Remove the backend; existing groups continue to work."""
    _patches.remove()
