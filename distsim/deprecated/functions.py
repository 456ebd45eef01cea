"""Functions of torch.distributed in torch 0.4 that take other arguments today.

In 1.0 they are in torch.distributed.deprecated.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import get_rank, is_initialized

from distsim.deprecated import in_torch
from distsim.errors import UsageError


class dist_backend:
    """The backends by number."""

    UNDEFINED = -1
    TCP = 0
    MPI = 1
    GLOO = 2
    NCCL = 3


class group:
    """`group.WORLD` is all ranks."""

    WORLD = None


_BACKENDS = ("tcp", "mpi", "gloo", "nccl")


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
