"""One collective, as it is asked of the network."""

from __future__ import annotations

from dataclasses import dataclass

from distsim.errors import UsageError
from distsim.text.untrusted_input import brief

__all__ = ["OPS", "Transfer", "canonical_op"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective of one group."""

    op: str
    """torch.distributed's name: all_reduce, all_gather_into_tensor, all_to_all_single, barrier, ..."""
    flavour: str
    """Whose algorithms: nccl, gloo or mpi."""
    devices: tuple[str, ...]
    """Where the ranks are, in group-rank order."""
    nbytes: int
    """The whole buffer (all ranks' shares) for all_gather, reduce_scatter and all_to_all, as in
    nccl-tests; one rank's share for the others, gather and scatter among them."""
    root: int = 0
    """Group rank."""
    splits: tuple[tuple[int, ...], ...] | None = None
    """all_to_all: bytes from each rank to each rank, where they are not even."""
    reduce_op: str = "SUM"
    key: int = 0
    """Of the group: decides ECMP paths."""


_SPELLINGS = {
    "all_reduce": ("allreduce", "all_reduce_coalesced", "all_reduce_perf"),
    "all_gather": (
        "allgather",
        "all_gather_into_tensor",
        "all_gather_coalesced",
        "all_gather_into_tensor_coalesced",
    ),
    "reduce_scatter": ("reducescatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
    "all_to_all": ("alltoall", "all_to_all_single", "alltoallv"),
    "broadcast": (),
    "reduce": (),
    "gather": (),
    "scatter": (),
    "sendrecv": ("send_recv",),
    "barrier": ("monitored_barrier", "new_group", "init_process_group", "destroy_process_group"),
}
OPS = tuple(_SPELLINGS)
"""Every operation, by the name the algorithms know it by."""

_CANONICAL = {name: op for op, names in _SPELLINGS.items() for name in (op, *names)}


def canonical_op(name: str) -> str:
    """The algorithms' name of an operation, from torch's or nccl-tests' spelling."""
    op = _CANONICAL.get(name.lower().replace("-", "_").removesuffix("_perf"))
    if op is None:
        raise UsageError(f"expected an operation ({', '.join(OPS)}), got {brief(name)!r}")
    return op
