"""The environment of a simulated process, and real programs that a rank starts."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from distsim.cluster import Slot
from distsim.errors import NotSimulated
from distsim.sim.isolation.for_ranks import patch_around, patch_for_ranks
from distsim.sim.kernel.task import Task, current_process, current_task

# -- Environment variables of a simulated process, as Python, C code and programs it starts see them.

MASTER_PORT = 29_500
TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables with which torchrun describes a worker's position; its other variables begin with TORCHELASTIC_."""
_PER_PROCESS = re.compile(
    rb"TORCHELASTIC_|OMPI_COMM_WORLD_|PMI_|PMIX_|MV2_COMM_WORLD_|HYDRA|SLURM_(PROCID|LOCALID|NODEID|STEP_|NTASKS|TASK_PID)"
)
"""Variables of torchrun, mpirun and srun about one process, which do not apply to a simulated rank."""

_is_per_process = functools.lru_cache(1_024)(_PER_PROCESS.match)
_real_putenv, _real_unsetenv = os.putenv, os.unsetenv


def without_launchers(environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return *environ* (like `os.environb`) without the variables of a launcher that started this simulation, and
    without the caller's choice among this machine's GPUs, which programs compare with the simulated node's.

    With torchrun's TORCHELASTIC_USE_AGENT_STORE a rank would wait for the store of an agent that no simulated node
    has.
    """
    kept = {name: value for name, value in environ.items() if not _is_per_process(name)}
    if b"TORCHELASTIC_RUN_ID" in environ:
        for name in TORCHRUN:
            kept.pop(name.encode(), None)
    kept.pop(b"CUDA_VISIBLE_DEVICES", None)
    return kept


def environ_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for code that changes or passes on the environment."""
    kind: Any = type(os.environ)
    real_setdefault, is_launched = kind.setdefault, dist.is_torchelastic_launched

    def change(real: Callable[..., None], key: bytes, *value: bytes) -> None:
        process = current_process()
        if process is not None:
            process.interpreter.changed_environ[os.fsencode(key)] = None
        real(key, *value)

    def setdefault(task: Any, self: Any, key: Any, value: Any) -> Any:
        # would have been set, had torchrun not been there: see processes/hosts.py
        task.process.interpreter.environ_defaults.setdefault(self.encodekey(key), self.encodevalue(value))
        return real_setdefault(self, key, value)

    def is_torchelastic_launched() -> bool:
        process, answer = current_process(), bool(is_launched())
        if process is not None and answer:
            process.interpreter.told_of_torchrun = True
        return answer

    return [
        patch_for_ranks(kind, "setdefault", setdefault),
        (dist, "is_torchelastic_launched", is_torchelastic_launched),
        (dist.distributed_c10d, "is_torchelastic_launched", is_torchelastic_launched),
        *(patch_around(os, name, change) for name in ("putenv", "unsetenv")),
    ]


def torchruns_environ(
    slots: Sequence[Slot], per_node: int, nodes: int, address: str
) -> Callable[[Slot], dict[bytes, bytes]]:
    """Return the variables that torchrun sets for the worker on a slot."""
    variables = {
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
    common.update((name.encode(), value.encode()) for name, value in variables.items())

    def of(slot: Slot) -> dict[bytes, bytes]:
        rank, local_rank, host = b"%d" % slot.rank, b"%d" % slot.local_rank, b"%d" % slot.host
        return common | {b"RANK": rank, b"LOCAL_RANK": local_rank, b"GROUP_RANK": host, b"ROLE_RANK": rank}

    return of


# -- Real programs that a rank starts: their environment, their parent's pid and the wall time that they get.
#
# A simulated rank waits in virtual time, which passes at once; a real child runs in wall time. A rank that waits for
# its child, by `sleep` or in its asyncio loop, therefore lets wall time pass in which virtual time stands still.

WALL_S = 10.0
"""Wall time in seconds that a rank waits for its real children. It starts again whenever a child sends something."""
_STEP_S = 0.02
_real_sleep, _real_monotonic, _real_getpid, _real_open = time.sleep, time.monotonic, os.getpid, open


class RealChildren:
    """Real children of one simulated process."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[Any]] = []
        self._left_s = self._start_s = 0.0
        """Remaining wall time of the children, and the part for their start, in which `sleep` waits for them, too."""

    def add(self, child: subprocess.Popen[Any]) -> None:
        """Note that *child* was started."""
        self._children.append(child)
        self._left_s = self._start_s = WALL_S

    def answered(self) -> None:
        """Note that one of the children has sent something."""
        self._left_s, self._start_s = WALL_S, 0.0

    @property
    def wall_s(self) -> float:
        """Return the remaining wall time of the children in seconds; 0 if none is running."""
        if self._children:
            self._children = [child for child in self._children if child.poll() is None]
        return max(0.0, self._left_s) if self._children else 0.0

    def cpu_ticks(self) -> int:
        """Return the CPU time that running children and their own children have used, in clock ticks; Linux only."""
        return sum(_cpu_ticks(child.pid) for child in self._children if child.returncode is None)

    def sleep(self, seconds: float) -> None:
        """Let up to *seconds* of wall time pass while they start, until one of them ends."""
        if not self._children or self._start_s <= 0:
            return
        begun_s = _real_monotonic()
        until_s, living = begun_s + min(seconds, self._start_s), len(self._children)
        while (left_s := until_s - _real_monotonic()) > 0 and self.wall_s and len(self._children) == living:
            _real_sleep(min(_STEP_S, left_s))
        self._start_s -= _real_monotonic() - begun_s

    def wait(self, answer: Callable[[float], Any], is_only: bool) -> Any:
        """Call *answer* with a time limit in seconds, and return its result.

        If nothing else can happen (*is_only*), the limit is all of the remaining wall time; otherwise it is short, and
        half of the wall time is kept.
        """
        limit_s = self.wall_s if is_only else min(_STEP_S, self.wall_s - WALL_S / 2)
        if limit_s <= 0:
            return []
        begun_s = _real_monotonic()
        ready = answer(limit_s)
        self._left_s -= _real_monotonic() - begun_s
        return ready


def _cpu_ticks(pid: int) -> int:
    try:
        with _real_open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # from the third field of proc_pid_stat(5) on
        with _real_open(f"/proc/{pid}/task/{pid}/children") as file:
            children = file.read().split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15])) + sum(_cpu_ticks(int(child)) for child in children)


def _with_tools(command: Any, tools: str) -> Any:
    """Return *command* with the tool in folder *tools* if it names the driver's tool by its path."""
    if isinstance(command, str | bytes | os.PathLike) or not command:
        return command
    name = os.path.basename(os.fsdecode(command[0]))
    return [os.path.join(tools, name), *command[1:]] if name in os.listdir(tools) else command


def _with_real_pid(command: Any, pid: int) -> Any:
    """Return *command* with the real pid of this process in place of an argument that is its simulated *pid*.

    A service that ends with its parent (wandb-core) looks for that pid.
    """
    if isinstance(command, str | bytes | os.PathLike):
        return command
    own = re.compile(rf"(--?[\w-]+=)?{pid}")
    return [
        f"{match[1] or ''}{_real_getpid()}" if isinstance(word, str) and (match := own.fullmatch(word)) else word
        for word in command
    ]


def child_patches(start_rank: Callable[[Any, Any, Mapping[str, str], Any], bool]) -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for code that starts a program; *start_rank* simulates ranks."""
    start = _on_all_cores(subprocess.Popen._execute_child)  # type: ignore[attr-defined]

    def execute(self: Any, *args: Any) -> None:
        process = current_process()
        if current_task() is not None and args[6] is None:  # env: C's environment lacks RANK and its like
            args = (*args[:6], dict(os.environ), *args[7:])
        if process is None:
            start(self, *args)
            return
        if current_task() is not None and start_rank(self, args[0], args[6], args[5]):
            self._close_pipe_fds(*args[10:16])
            return
        command, gpus = _with_real_pid(args[0], os.getpid()), process.accelerators
        if gpus is not None:
            command, args = _with_tools(command, gpus.TOOLS), (*args[:6], {**args[6], **gpus.description()}, *args[7:])
        start(self, command, *args[1:])
        process.family.real_children.add(self)

    def system(_: Task, command: str | bytes) -> int:
        code = subprocess.call(command, shell=True)
        return code << 8 if code >= 0 else -code

    patches = [patch_for_ranks(os, "system", system), (subprocess.Popen, "_execute_child", execute)]
    patches += [(os, name, _on_all_cores(getattr(os, name))) for name in ("posix_spawn", "posix_spawnp")]
    patches += [patch_for_ranks(os, name, partial(_refused, name)) for name in ("execv", "execve")]
    return patches


def _on_all_cores(real: Any) -> Any:
    """Wrap *real*, which starts a program, so that the program may use all cores and not only the ranks' core."""

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        process = current_process()
        with contextlib.nullcontext() if process is None else process.port.core.left():
            return real(*args, **kwargs)

    return call


def _refused(name: str, *_: Any) -> NoReturn:
    raise NotSimulated(f"os.{name}", "it would replace all ranks at once; use subprocess.run")
