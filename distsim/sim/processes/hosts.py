"""Names and addresses of the simulated machines, and the environment that a launcher sets on them."""

from __future__ import annotations

import functools
import ipaddress
import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distsim.cluster import Slot
from distsim.debug.records import Finding
from distsim.debug.records.kinds import Kind
from distsim.sim.isolation.environ import TORCHRUN, without_launchers
from distsim.sim.isolation.for_ranks import patch_for_ranks
from distsim.sim.isolation.process import RankTask, SimProcess, current_process
from distsim.text.ranks import of_ranks

if TYPE_CHECKING:
    from distsim.sim.kernel.port import RankPort

# -- Names and addresses of the simulated machines, and which machine a name means where it is used.
#
# A loopback name means the machine of whoever says it: on machines, too, `MASTER_ADDR=127.0.0.1` on two nodes lets
# no rank of the second one find the store.

_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback", ""})


def machine_of(process: SimProcess) -> int:
    """Return the machine of a process: that of a rank's slot, or, for a child, its parent's."""
    while process.family.parent is not None:
        process = process.family.parent
    return process.slot.host


def node_name(machine: int) -> str:
    """Return the name of the node as in reports."""
    return f"node{machine}"


def _address(machine: int) -> str:
    high, low = divmod(machine, 250)
    return f"10.{high // 250}.{high % 250}.{low + 1}"


def master_address(machines: list[int]) -> str:
    """Return the MASTER_ADDR that distsim sets, which is valid on every machine of the job."""
    return "127.0.0.1" if len(set(machines)) == 1 else node_name(machines[0])


@functools.lru_cache(64)
def _is_loopback(name: str) -> bool:
    if name.lower() in _LOOPBACK_NAMES:
        return True
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def meant(name: str, process: SimProcess) -> int | None:
    """Return the machine that *name* means on the machine of *process*; None if nothing has that name."""
    if _is_loopback(name):
        return machine_of(process)
    port: RankPort = process.port
    machine = _named_so(port, name)
    if machine is not None:
        return machine
    machines = sorted({slot.host for slot in port.facts.slots})
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        known = node_name(machines[0]) + (f" to {node_name(machines[-1])}" if len(machines) > 1 else "")
        port.note(f"no simulated machine has the name {name!r}: they are {known}, and MASTER_ADDR names the first")
        return None
    port.note(f"the address {name} belongs to no simulated machine: it is treated as {node_name(machines[0])}")
    return machines[0]


def _named_so(port: RankPort, name: str) -> int | None:
    """Return the simulated machine with this name or address; None if there is none."""
    for slot in port.facts.slots:  # the first one's machine nearly always
        if name in (node_name(slot.host), _address(slot.host)):
            return slot.host
    return None


def lost_clients(job: RankPort) -> list[Finding]:
    """Return ranks that look for a store on one machine while it is on another, such as with MASTER_ADDR=127.0.0.1."""
    lost: dict[tuple[str, int, int], list[SimProcess]] = {}
    for process in job.rank_processes.values():
        name, port = process.groups.connecting or ("", 0)
        if not name or not process.alive:
            continue
        elsewhere = [key[1][0] for key in job.shared.stores if key[0] == "tcp" and key[1][1] == port]
        if elsewhere and meant(name, process) not in (None, *elsewhere):
            lost.setdefault((name, port, elsewhere[0]), []).append(process)
    result = []
    for (name, port, machine), processes in lost.items():
        ranks = tuple(sorted(process.rank for process in processes))
        who = of_ranks(ranks)
        own = ", ".join(dict.fromkeys(node_name(machine_of(process)) for process in processes[:4]))
        looks = f"{who} on {own} look{'s' if len(ranks) == 1 else ''} for the store at {name}:{port}"
        loopback = _is_loopback(name)
        why = ", an address by which every machine means itself" if loopback else ""
        remedy = "; 127.0.0.1 and localhost only work if all ranks are on one machine" if loopback else ""
        result.append(
            Finding(
                Kind.NEVER_JOINED,
                ranks,
                f"{looks}{why}; the store is on {node_name(machine)}",
                site=processes[0].last_site,
                suggestion=f"Set MASTER_ADDR to a name of {node_name(machine)} that every machine knows{remedy}.",
            )
        )
    return result


def _own_name(task: RankTask) -> str:
    return node_name(machine_of(task.process))


def host_patches() -> list[tuple[Any, str, Any]]:
    """Return patches of everything that returns or resolves a machine's name."""
    real_fqdn, real_info, real_uname = socket.getfqdn, socket.getaddrinfo, os.uname
    real_by_name = socket.gethostbyname

    def getfqdn(task: RankTask, name: str = "") -> str:
        machine = meant(name, task.process)
        return real_fqdn(name) if machine is None else node_name(machine)

    def getaddrinfo(task: RankTask, host: Any, *args: Any, **kwargs: Any) -> Any:
        """Resolve *host* as the simulating machine, which reaches all simulated machines at itself."""
        is_simulated = isinstance(host, str) and _named_so(task.port, host) is not None
        return real_info("127.0.0.1" if is_simulated else host, *args, **kwargs)

    def gethostbyname(task: RankTask, host: str, /) -> str:
        machine = None if _is_loopback(host) else _named_so(task.port, host)
        return real_by_name(host) if machine is None else _address(machine)

    def uname(task: RankTask) -> Any:
        result = real_uname()
        return os.uname_result((result[0], _own_name(task), *result[2:]))

    kind: Any = type(os.environ)
    real_getitem = kind.__getitem__

    def getitem(self: Any, key: Any) -> Any:
        try:
            return real_getitem(self, key)
        except KeyError:
            # `get`, `in` and `pop` come from collections.abc: they ask whether there is one, and torchrun sets none.
            if key not in SLURM or sys._getframe(1).f_globals.get("__name__") == "collections.abc":
                raise
            if not _give_slurm(self):
                raise
            return real_getitem(self, key)

    return [
        (kind, "__getitem__", getitem),
        patch_for_ranks(socket, "gethostname", _own_name),
        patch_for_ranks(platform, "node", _own_name),
        patch_for_ranks(socket, "getfqdn", getfqdn),
        patch_for_ranks(socket, "getaddrinfo", getaddrinfo),
        patch_for_ranks(socket, "gethostbyname", gethostbyname),
        patch_for_ranks(os, "uname", uname),
    ]


# -- What a launcher says to the ranks it starts: torchrun's names where the program starts its ranks itself, srun's.


def launcher_environ(process: SimProcess) -> None:
    """Remove torchrun's variables from *process*, which starts its ranks itself.

    It keeps the variables that it set itself and those that the shell has. A process that asked whether torchrun
    started it has relied on the answer (Lightning's `ddp_spawn`), and keeps all of them.
    """
    state = process.interpreter
    if state.told_of_torchrun:
        process.port.note(
            "the program asked whether torchrun started it, and then started its own ranks, which inherit "
            f"torchrun's variables (WORLD_SIZE={state.environ.get(b'WORLD_SIZE', b'').decode()}); "
            "simulate as many ranks as it starts"
        )
        return
    shell = without_launchers(process.interpreter.host.environ)
    for key in [*map(os.fsencode, TORCHRUN), *(k for k in state.environ if k.startswith(b"TORCHELASTIC_"))]:
        if key in state.changed_environ or key in shell:
            continue
        state.environ.pop(key, None)
        if key in state.environ_defaults:
            os.environb[key] = state.environ_defaults[key]


def place_environ(parent: SimProcess, rank: int) -> dict[bytes, bytes]:
    """Return torchrun's variables for a child of launcher *parent* at *rank*, except those that the launcher set."""
    slots = parent.port.facts.slots
    environ = parent.port.shared.environ_of(slots[rank % len(slots)])
    keys = [key for key in map(os.fsencode, TORCHRUN) if key not in parent.interpreter.changed_environ]
    return {key: environ[key] for key in keys if key in environ}


SLURM = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES"),
    *("SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
)
"""Variables of srun from which a program determines its rank."""


def _give_slurm(environ: Any) -> bool:
    """Give the running rank srun's variables besides torchrun's, and return whether it has them now."""
    process = current_process()
    if process is None or environ is not os.environ or not process.is_rank:
        return False
    facts = process.port.facts
    nodes = len({slot.host for slot in facts.slots})
    variables = sruns_environ(facts.slots, facts.cpu.ranks_per_node, nodes)(process.slot)
    process.interpreter.environ.update((name, value) for name, value in variables.items() if name.startswith(b"SLURM"))
    process.port.note(
        "the program reads variables of srun (SLURM_PROCID, ...): its ranks have them in addition to torchrun's; "
        "under distsim run -- srun ... they have only srun's"
    )
    return True


def sruns_environ(slots: Sequence[Slot], per_node: int, nodes: int) -> Callable[[Slot], dict[bytes, bytes]]:
    """Return the variables that srun sets for the task on a slot (slurm.schedmd.com/srun.html)."""
    hosts = sorted({slot.host for slot in slots})
    variables = {
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
    common.update((name.encode(), value.encode()) for name, value in variables.items())

    def of(slot: Slot) -> dict[bytes, bytes]:
        rank, local_rank = b"%d" % slot.rank, b"%d" % slot.local_rank
        rank_variables = {
            b"SLURM_PROCID": rank,
            b"SLURM_LOCALID": local_rank,
            b"SLURM_NODEID": b"%d" % hosts.index(slot.host),
        }
        return common | rank_variables | {b"SLURMD_NODENAME": node_name(slot.host).encode()}

    return of


def environ_of_mpirun(slots: Sequence[Slot], per_node: int) -> Callable[[Slot], dict[bytes, bytes]]:
    """Return the variables that Open MPI's mpirun sets for the process on a slot."""
    common = without_launchers(os.environ._data)  # type: ignore[attr-defined]
    size, local_size = b"%d" % len(slots), b"%d" % per_node
    common |= {b"OMPI_COMM_WORLD_SIZE": size, b"OMPI_UNIVERSE_SIZE": size, b"OMPI_COMM_WORLD_LOCAL_SIZE": local_size}

    def of(slot: Slot) -> dict[bytes, bytes]:
        rank, local_rank = b"%d" % slot.rank, b"%d" % slot.local_rank
        own = {b"OMPI_COMM_WORLD_RANK": rank, b"OMPI_COMM_WORLD_LOCAL_RANK": local_rank}
        return common | own | {b"OMPI_COMM_WORLD_NODE_RANK": local_rank, b"HOSTNAME": node_name(slot.host).encode()}

    return of
