"""torch.distributed as of torch 0.4 (in 1.0: torch.distributed.deprecated), with its names, arguments and results, on
today's process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distsim.deprecated import in_torch
from distsim.errors import UsageError

__all__ = [
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "dist_backend",
    "gather",
    "get_rank",
    "get_world_size",
    "group",
    "init_master_worker",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "new_group",
    "recv",
    "reduce",
    "reduce_op",
    "scatter",
    "send",
]


class dist_backend:
    """The backends by number."""

    UNDEFINED = -1
    TCP = 0
    MPI = 1
    GLOO = 2
    NCCL = 3


class reduce_op:
    """The reduction operations of torch 0.4."""

    SUM = dist.ReduceOp.SUM
    PRODUCT = dist.ReduceOp.PRODUCT
    MAX = dist.ReduceOp.MAX
    MIN = dist.ReduceOp.MIN


class group:
    """`group.WORLD` is all ranks."""

    WORLD = None


class Request:
    """Handle that isend and irecv return."""

    def __init__(self, request: Any) -> None:
        self.request = request

    def is_completed(self) -> bool:
        """Return whether the tensor has been sent or received."""
        return bool(self.request.is_completed())

    def wait(self) -> None:
        """Wait until the call has ended."""
        self.request.wait()


_BACKENDS = ("tcp", "mpi", "gloo", "nccl")


def is_available() -> bool:
    """Return whether torch was built with torch.distributed."""
    return bool(dist.is_available())


def is_initialized() -> bool:
    """Return whether init_process_group was called."""
    return bool(dist.is_initialized())


def init_process_group(backend: str, init_method: str = "env://", **kwargs: Any) -> None:
    """Join the job.

    *backend* is tcp (which gloo serves), mpi, gloo or nccl. *init_method* is `env://`, `tcp://HOST:PORT`,
    `tcp://MULTICAST:PORT` or `file://PATH`. Further arguments are world_size, rank (optional with the last two
    methods) and group_name, which separates jobs that share a file or an address.
    """
    world_size, rank = kwargs.pop("world_size", -1), kwargs.pop("rank", -1)
    group_name = kwargs.pop("group_name", "")
    if kwargs:
        raise AssertionError(f"got unexpected keyword arguments: {','.join(kwargs)}")
    if is_initialized():
        raise RuntimeError("trying to initialize torch.distributed.deprecated twice!")
    if not isinstance(backend, str) or backend.lower() not in _BACKENDS:
        raise RuntimeError(f"Invalid distributed backend name: {backend} (expected {', '.join(_BACKENDS)})")
    backend = in_torch.known_backend(backend.lower())
    keywords: dict[str, Any] = {"init_method": init_method, "world_size": world_size, "rank": rank}
    keywords |= in_torch.with_ranks(backend, init_method, None, world_size, rank, group_name)
    dist.init_process_group(backend, **keywords)


def init_master_worker(backend: str, init_method: str = "env://", **kwargs: Any) -> None:
    """Raise an error: torch had this experiment, but never documented it."""
    raise UsageError("init_master_worker: no torch has it since 1.1, nor had its documentation; use init_process_group")


def destroy_process_group() -> None:
    """Leave the job."""
    dist.destroy_process_group()


def get_rank() -> int:
    """Return the rank of this process."""
    return int(dist.get_rank())


def get_world_size() -> int:
    """Return the number of ranks."""
    return int(dist.get_world_size())


def new_group(ranks: Sequence[int] | None = None) -> Any:
    """Return a group of *ranks*, all by default. Every rank calls it, also those that are not in it."""
    return dist.new_group(None if ranks is None else list(ranks))


def isend(tensor: Tensor, dst: int) -> Request:
    """Send *tensor* to rank *dst*, without waiting."""
    return Request(dist.isend(tensor, dst))


def irecv(tensor: Tensor, src: int) -> Request:
    """Receive *tensor* from rank *src*, without waiting."""
    return Request(dist.irecv(tensor, src))


def send(tensor: Tensor, dst: int) -> None:
    """Send *tensor* to rank *dst*."""
    dist.send(tensor, dst)


def recv(tensor: Tensor, src: int | None = None) -> int:
    """Receive *tensor* from rank *src*, from any by default; the sender's rank."""
    return int(dist.recv(tensor, src))


def broadcast(tensor: Tensor, src: int, group: Any = None) -> None:
    """Copy *tensor* of rank *src* to all ranks."""
    dist.broadcast(tensor, src, group)


def all_reduce(tensor: Tensor, op: Any = reduce_op.SUM, group: Any = None) -> None:
    """Combine *tensor* of all ranks with *op*; every rank gets the result in *tensor*."""
    dist.all_reduce(tensor, op, group)


def reduce(tensor: Tensor, dst: int, op: Any = reduce_op.SUM, group: Any = None) -> None:
    """Combine *tensor* of all ranks with *op*; only rank *dst* gets the result."""
    dist.reduce(tensor, dst, op, group)


def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None) -> None:
    """Collect *tensor* of every rank in *tensor_list*, in the order of ranks."""
    dist.all_gather(tensor_list, tensor, group)


def gather(tensor: Tensor, **kwargs: Any) -> None:
    """Collect *tensor* of every rank in *gather_list* of rank *dst*. On that rank *dst* may be left out. *group* is
    accepted too.
    """
    dst, gather_list, where = kwargs.pop("dst", get_rank()), kwargs.pop("gather_list", None), kwargs.pop("group", None)
    if kwargs:
        raise RuntimeError("got unexpected kwargs")
    _check_list("gather", "gather_list", "destination", gather_list, dst)
    dist.gather(tensor, gather_list if dst == get_rank() else None, dst, where)


def scatter(tensor: Tensor, **kwargs: Any) -> None:
    """Set *tensor* to this rank's part of *scatter_list* of rank *src*. On that rank *src* may be left out. *group*
    is accepted too.
    """
    src, scatter_list, where = (
        kwargs.pop("src", get_rank()),
        kwargs.pop("scatter_list", None),
        kwargs.pop("group", None),
    )
    if kwargs:
        raise RuntimeError(f"got unexpected kwargs: {', '.join(kwargs)}")
    _check_list("scatter", "scatter_list", "source", scatter_list, src)
    dist.scatter(tensor, scatter_list if src == get_rank() else None, src, where)


def _check_list(op: str, name: str, root: str, given: Any, rank: int) -> None:
    if rank == get_rank() and given is None:
        raise RuntimeError(f"{name} is a required argument in {op} {root}")
    if rank != get_rank() and given:
        raise RuntimeError(f"non-empty {name} can be given only to {op} {root}")


def barrier(group: Any = None) -> None:
    """Wait for all ranks."""
    dist.barrier(group)
