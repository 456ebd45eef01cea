"""Environment variables of a simulated process, as Python, C code and programs it starts see them."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from distsim.cluster import Slot
from distsim.sim.kernel.task import current_process

__all__ = [
    "TORCHRUN",
    "enter_environ",
    "environ_patches",
    "leave_environ",
    "torchruns_environ",
    "without_launchers",
]

MASTER_PORT = 29_500
TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""What torchrun says to a worker about its place; what else it sets begins with TORCHELASTIC_."""
_PER_PROCESS = re.compile(
    rb"TORCHELASTIC_|OMPI_COMM_WORLD_|PMI_|PMIX_|MV2_COMM_WORLD_|HYDRA|SLURM_(PROCID|LOCALID|NODEID|STEP_|NTASKS|TASK_PID)"
)
"""What torchrun, mpirun and srun tell one process about itself: untrue for a simulated rank."""

_is_per_process = functools.lru_cache(1_024)(_PER_PROCESS.match)
_real_putenv, _real_unsetenv = os.putenv, os.unsetenv


def enter_environ(data: dict[bytes, bytes], changed: dict[bytes, None]) -> None:
    """Put a process's environment into `os.environ` and, what it *changed* itself, into C's."""
    os.environ._data = os.environb._data = data  # type: ignore[attr-defined]
    for key in changed:
        _put(key, data.get(key))


def leave_environ(host: dict[bytes, bytes], changed: dict[bytes, None]) -> None:
    """Back to the *host*'s own."""
    os.environ._data = os.environb._data = host  # type: ignore[attr-defined]
    for key in changed:
        _put(key, host.get(key))


def without_launchers(environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """*environ*, as `os.environb` has it, without what a launcher around this simulation said to its own worker. With
    torchrun's TORCHELASTIC_USE_AGENT_STORE a rank would wait for a store of an agent that no simulated node has."""
    kept = {name: value for name, value in environ.items() if not _is_per_process(name)}
    if b"TORCHELASTIC_RUN_ID" in environ:
        for name in TORCHRUN:
            kept.pop(name.encode(), None)
    return kept


def _put(key: bytes, value: bytes | None) -> None:
    if value is None:
        _real_unsetenv(key)
    else:
        _real_putenv(key, value)


def environ_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of what changes or passes on the environment."""
    kind: Any = type(os.environ)
    real_setdefault = kind.setdefault

    def putenv(key: bytes, value: bytes) -> None:
        process = current_process()
        if process is not None:
            process.changed_environ[os.fsencode(key)] = None
        _real_putenv(key, value)

    def unsetenv(key: bytes) -> None:
        process = current_process()
        if process is not None:
            process.changed_environ[os.fsencode(key)] = None
        _real_unsetenv(key)

    @functools.wraps(real_setdefault)
    def setdefault(self: Any, key: Any, value: Any) -> Any:
        process = current_process()
        if process is not None:  # would have been set, had torchrun not been there: see launched_environ.py
            process.notes.environ_defaults.setdefault(self.encodekey(key), self.encodevalue(value))
        return real_setdefault(self, key, value)

    asked = dist.is_torchelastic_launched

    @functools.wraps(asked)
    def is_torchelastic_launched() -> bool:
        process, answer = current_process(), bool(asked())
        if process is not None and answer:
            process.notes.told_of_torchrun = True
        return answer

    return [
        (kind, "setdefault", setdefault),
        (dist, "is_torchelastic_launched", is_torchelastic_launched),
        (dist.distributed_c10d, "is_torchelastic_launched", is_torchelastic_launched),
        (os, "putenv", putenv),
        (os, "unsetenv", unsetenv),
    ]


def torchruns_environ(
    slots: Sequence[Slot], per_node: int, nodes: int, address: str
) -> Callable[[Slot], dict[bytes, bytes]]:
    """What torchrun puts into the environment of the worker on a slot."""
    said = {
        "WORLD_SIZE": str(len(slots)),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(len(slots)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(MASTER_PORT),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_ERROR_FILE": "",
    }
    # As Python keeps them: to decode all for each run, and encode them for each rank, is most of a small test's start.
    common = without_launchers(os.environ._data)  # type: ignore[attr-defined]
    common.update((name.encode(), value.encode()) for name, value in said.items())

    def of(slot: Slot) -> dict[bytes, bytes]:
        rank, local_rank, host = b"%d" % slot.rank, b"%d" % slot.local_rank, b"%d" % slot.host
        return common | {b"RANK": rank, b"LOCAL_RANK": local_rank, b"GROUP_RANK": host, b"ROLE_RANK": rank}

    return of
