"""Start of groups: rendezvous handlers, default timeouts, and the class of NCCL's group."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distsim.debug.messages import ranks_text
from distsim.debug.records import CallRecord, Group
from distsim.debug.records.frames import call_stack
from distsim.errors import NotSimulated, UsageError
from distsim.sim.c10d import gpu_work
from distsim.sim.c10d.stores import PrefixStore
from distsim.sim.isolation.for_ranks import name_for_ranks
from distsim.sim.isolation.process import RankTask, require_task
from distsim.torch_compat.groups import STORE_BARRIER

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.kernel.port import RankPort

# -- Worlds of a simulation: which process is which rank in each rendezvous that it has joined.
#
# Processes are numbered as their launcher does. A default group of as many ranks gives them its own numbers instead,
# once all have met; in groups of other worlds members go by the numbers that their processes have.


@dataclass(eq=False)
class Rendezvous:
    """One world, and the processes that have joined it so far."""

    size: int
    is_default: bool
    members: dict[int, SimProcess] = field(default_factory=dict)
    """Rank in this world -> process."""
    ranks: tuple[int, ...] = ()
    """For each member, once all have met: the number of its process in the job."""
    is_job: bool = False
    """Whether these numbers are the ranks of this world."""

    def is_over(self, rank: int) -> bool:
        """Return whether the process that was *rank* has ended, so that a new process with this rank belongs to
        another job.
        """
        other = self.members.get(rank)
        return other is not None and not other.alive

    def join(self, rank: int, process: SimProcess) -> None:
        """Let *process* join as *rank*. Raises UsageError if another process has joined with the same rank."""
        other = self.members.setdefault(rank, process)
        if other is not process:
            raise UsageError(
                f"two processes call themselves rank {rank} of {self.size} (their launcher's ranks {other.rank} and "
                f"{process.rank}): give each process a rank of its own in init_process_group(rank=...) or RANK"
            )

    def form(self, port: RankPort) -> None:
        """Mark the rendezvous as complete; the first rank to continue does this."""
        if self.ranks:
            return
        given = {process: rank for rank, process in self.members.items()}
        renamed = self.is_default and self.size == port.world_size == len(given)
        if renamed and any(process.rank != rank for process, rank in given.items()):
            port.renumber(given)
        there = {rank: process.rank for rank, process in self.members.items()}
        self.ranks = tuple(there.get(rank, rank) for rank in range(self.size))
        self.is_job = self.ranks == tuple(range(self.size))

    def in_job(self, group: Group) -> Group:
        """Return *group* with its ranks in this world replaced by the ranks in the whole job."""
        if self.is_job:
            return group
        ranks = tuple(self.ranks[rank] for rank in group.ranks)
        return group if ranks == group.ranks else Group(group.name, group.description, ranks)


@functools.lru_cache(8)
def default_group(size: int) -> Group:
    """Return the default group, one object for all ranks, because it is as large as the world."""
    return Group("0", "default_pg", tuple(range(size)))


@functools.lru_cache(8)
def _creation_group(size: int) -> Group:
    return Group("new_group", "default_pg", tuple(range(size)))


def creations(process: SimProcess) -> Group:
    """Return a group of all ranks whose calls are the `new_group` calls.

    The guard has the same: `new_group` has call numbers of its own and waits only for the members of the new group.
    """
    return _creation_group(process.groups.c10d.default_pg.size())


def recorded(
    process: SimProcess, op: str, group: Group, new_ranks: tuple[int, ...] | None, is_numbered: bool = True
) -> CallRecord:
    """Record a call of *process* that no group numbers."""
    task = require_task()
    task.flush()
    stack = call_stack(sys._getframe(1))
    record = CallRecord(
        rank=process.rank,
        group=group,
        seq=process.groups.next_number(f"{op} {group.name} {len(group.ranks)}") if is_numbered else 0,
        op=op,
        new_ranks=new_ranks,
        site=stack[0] if stack else None,
        stack=stack,
        thread=task.name,
        issued_s=task.now_s(),
    )
    process.calls.add(record, task.port.now_s)
    return record


def meeting_place(store: Any) -> tuple[object, ...]:
    """Return the identity of the rendezvous in a store: its content and prefixes."""
    prefixes = []
    while isinstance(store, PrefixStore):
        prefixes.append(store._prefix)
        store = store.underlying_store
    return getattr(store, "_values", store), *prefixes


def timeout_error(backend: str, record: CallRecord, seconds: float) -> Exception:
    """Return the error of a call after its group's timeout: gloo's text followed by an explanation."""
    milliseconds = round(seconds * 1000)
    where = f"{record.op} #{record.seq} on group {record.group.label}, rank {record.rank}"
    if backend == "nccl":
        return gpu_work.timeout_error(record, seconds)
    direction = "send" if record.op == "send" else "recv"
    return RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
        f"Timed out waiting {milliseconds}ms for {direction} operation to complete ({where})"
    )


def connect_error(group: Group, seconds: float) -> Exception:
    """Return gloo's error for members that waited *seconds* in the store for the addresses of the other members."""
    error: Exception = dist.DistStoreError(
        f"wait timeout after {int(seconds * 1000)}ms, keys: /{group.name}//cpu//... "
        f"(the addresses of {ranks_text(group.ranks)})"
    )
    return error


# -- `torch.distributed.ProcessGroupNCCL` and its options, which a torch without NCCL lacks.
#
# Megatron-core and FSDP2 make options before they make a group. The group itself is a simulated one.


class NCCLConfig:
    """Replacement for ncclConfig_t (nccl.h): it takes every field, and the simulation ignores them."""


class Options:
    """Options of a communicator; the simulation ignores them."""

    backend = "nccl"

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = NCCLConfig()
        self.split_from: object = None
        self.split_color = -(2**31)
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout = timedelta(minutes=10)


class ProcessGroupNCCL:
    """Replacement for torch's class, with options; it is not constructed by hand."""

    NCCL_CTA_POLICY_DEFAULT, NCCL_CTA_POLICY_EFFICIENCY, NCCL_CTA_POLICY_ZERO = 0, 1, 2
    NCCLConfig, Options = NCCLConfig, Options

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotSimulated("ProcessGroupNCCL(store, rank, size) made by hand", "use init_process_group or new_group")


for _class, _name in ((NCCLConfig, "NCCLConfig"), (Options, "Options")):
    _class.__module__, _class.__qualname__ = c10d.__name__, f"ProcessGroupNCCL.{_name}"
ProcessGroupNCCL.__module__ = c10d.__name__


_real_store_barrier = STORE_BARRIER.get()


def _store_barrier(
    task: RankTask, rank: int, store: Any, group_name: str, count: int, *args: Any, **kwargs: Any
) -> Any:
    """Meet in the store (`TORCH_DIST_INIT_BARRIER=1`) with the ranks that are traced."""
    return _real_store_barrier(rank, store, group_name, task.port.traced.number_of(count), *args, **kwargs)


def start_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for how groups start; NCCL's class for a torch without it."""
    lacking = [holder for holder in (dist, c10d) if not hasattr(holder, "ProcessGroupNCCL")]
    return [
        *name_for_ranks(STORE_BARRIER, _store_barrier),
        *((holder, "ProcessGroupNCCL", ProcessGroupNCCL) for holder in lacking),
    ]
