"""Environment variables of a simulated process, as Python, C code and programs it starts see them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from distsim.cluster import Slot
from distsim.errors import NotSimulated
from distsim.sim.kernel.task import current_process, current_task

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


def _refuse_driver_tools(command: Any) -> None:
    """They would tell of the GPU of the machine that simulates."""
    first = command if isinstance(command, str | bytes | os.PathLike) else next(iter(command), "")
    words = os.fsdecode(first).split()
    if words and os.path.basename(words[0]) == "nvidia-smi":
        raise NotSimulated("nvidia-smi", "ask torch.cuda.get_device_properties() and torch.cuda.mem_get_info()")


def environ_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of what changes or passes on the environment."""
    kind: Any = type(os.environ)
    real_setdefault = kind.setdefault
    real_system, real_execute = os.system, subprocess.Popen._execute_child  # type: ignore[attr-defined]

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

    start = _on_all_cores(real_execute)

    def execute(self: Any, *args: Any) -> None:
        process = current_process()
        if process is not None and process.accelerators is not None:
            _refuse_driver_tools(args[0])
        if current_task() is not None and args[6] is None:  # env: C's environment lacks RANK and its like
            args = (*args[:6], dict(os.environ), *args[7:])
        start(self, *args)

    def system(command: str | bytes) -> int:
        if current_task() is None:
            return real_system(command)
        code = subprocess.call(command, shell=True)
        return code << 8 if code >= 0 else -code

    patches: list[tuple[Any, str, Any]] = [
        (kind, "setdefault", setdefault),
        (dist, "is_torchelastic_launched", is_torchelastic_launched),
        (dist.distributed_c10d, "is_torchelastic_launched", is_torchelastic_launched),
        (os, "putenv", putenv),
        (os, "unsetenv", unsetenv),
        (os, "system", system),
        (subprocess.Popen, "_execute_child", execute),
    ]
    patches += [(os, name, _on_all_cores(getattr(os, name))) for name in ("posix_spawn", "posix_spawnp")]
    for name in ("execv", "execve"):
        patches.append((os, name, _refused_in_rank(name, getattr(os, name))))
    return patches


def _on_all_cores(real: Any) -> Any:
    """*real* starts a program, which has no part in the turns of the ranks."""

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        process = current_process()
        with contextlib.nullcontext() if process is None else process.world.core.left():
            return real(*args, **kwargs)

    return call


def _refused_in_rank(name: str, real: Any) -> Any:
    def call(*args: Any) -> Any:
        if current_task() is None:
            return real(*args)
        raise NotSimulated(f"os.{name}", "it would replace all ranks at once; use subprocess.run")

    return call


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
