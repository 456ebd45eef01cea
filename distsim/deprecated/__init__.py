"""Names that torch.distributed has dropped: `import distsim.deprecated as dist` in a program for torch 0.x or 1.0.

functions.py has those that took other arguments at that time; multigpu.py the collectives of several devices per rank;
in_torch.py puts all of it into torch.distributed, in a simulation (simulated.py) and under the guard (guarded.py), and
assigns ranks at a file or a `tcp://` multicast address; launch.py is `python -m distsim.deprecated.launch`, which
starts a script like torch.distributed.launch.
"""

from __future__ import annotations

from torch.distributed import ReduceOp as reduce_op
from torch.distributed import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    destroy_process_group,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    new_group,
    recv,
    reduce,
    send,
)

from distsim.deprecated.functions import dist_backend, gather, group, init_master_worker, init_process_group, scatter
from distsim.deprecated.multigpu import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
    reduce_scatter_multigpu,
)

__all__ = [
    "all_gather",
    "all_gather_multigpu",
    "all_reduce",
    "all_reduce_multigpu",
    "barrier",
    "broadcast",
    "broadcast_multigpu",
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
    "reduce_multigpu",
    "reduce_op",
    "reduce_scatter_multigpu",
    "scatter",
    "send",
]
