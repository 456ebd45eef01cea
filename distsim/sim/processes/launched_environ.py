"""What a launcher says to the ranks it starts: torchrun's names where the program starts its ranks itself, srun's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from distsim.cluster import Slot
from distsim.sim.isolation.environ import TORCHRUN, without_launchers
from distsim.sim.isolation.process import SimProcess
from distsim.sim.processes.hosts import master_address, node_name

__all__ = ["launcher_environ", "place_environ", "sruns_environ", "was_told_of_torchrun"]


def launcher_environ(process: SimProcess) -> None:
    """*process* starts its ranks itself, so torchrun did not start it: of torchrun's names it has those that it
    set itself and, as it has seen them until now, those that the shell has as well. One that asked whether
    torchrun started it has built on the answer (Lightning's `ddp_spawn`): it keeps what it has."""
    if was_told_of_torchrun(process):
        process.world.note(
            "the program was told that torchrun started it, then started its ranks: they have torchrun's variables "
            f"(WORLD_SIZE={process.environ.get(b'WORLD_SIZE', b'').decode()}); simulate as many ranks as it starts"
        )
        return
    shell = without_launchers(process.world.host.environ)
    defaults: dict[bytes, bytes] = process.notes.environ_defaults
    for key in [*map(os.fsencode, TORCHRUN), *(k for k in process.environ if k.startswith(b"TORCHELASTIC_"))]:
        if key in process.changed_environ or key in shell:
            continue
        process.environ.pop(key, None)
        if key in defaults:
            os.environb[key] = defaults[key]


def was_told_of_torchrun(process: SimProcess) -> bool:
    """Whether *process* has asked torch whether torchrun started it, and was told so."""
    return process.notes.told_of_torchrun


def place_environ(parent: SimProcess, rank: int) -> dict[bytes, bytes]:
    """What torchrun would say of the place of *rank* to a child of the launcher *parent*, except what that set."""
    copies = parent.world.processes[: len(parent.world.slots)]
    said = copies[rank % len(copies)].environ
    keys = [key for key in map(os.fsencode, TORCHRUN) if key not in parent.changed_environ]
    return {key: said[key] for key in keys if key in said}


def sruns_environ(slots: Sequence[Slot], per_node: int, nodes: int) -> Callable[[Slot], dict[bytes, bytes]]:
    """What srun puts into the environment of the task on a slot (slurm.schedmd.com/srun.html)."""
    hosts = sorted({slot.host for slot in slots})
    said = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOBID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(len(slots)),
        "SLURM_NPROCS": str(len(slots)),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_TASKS_PER_NODE": str(per_node) if nodes == 1 else f"{per_node}(x{nodes})",
        "SLURM_JOB_NODELIST": ",".join(map(node_name, hosts)),
        "SLURM_NODELIST": ",".join(map(node_name, hosts)),
        "SLURM_GPUS_ON_NODE": str(per_node),
        "SLURM_LAUNCH_NODE_IPADDR": master_address(hosts),
    }
    common = without_launchers(os.environ._data)  # type: ignore[attr-defined]
    common.update((name.encode(), value.encode()) for name, value in said.items())

    def of(slot: Slot) -> dict[bytes, bytes]:
        rank, local_rank = b"%d" % slot.rank, b"%d" % slot.local_rank
        place = {b"SLURM_PROCID": rank, b"SLURM_LOCALID": local_rank, b"SLURM_NODEID": b"%d" % hosts.index(slot.host)}
        return common | place | {b"SLURMD_NODENAME": node_name(slot.host).encode()}

    return of
