"""`distsim run --on mpi`: start mpirun, or be one of the ranks that it has started."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException

from distsim.debug.settings import Settings
from distsim.errors import UsageError
from distsim.mpi import library
from distsim.realexec.process.worlds import Started

OURS = frozenset({"nproc_per_node", "nnodes", "module", "no_python", "training_script", "training_script_args"})
"""Flags of torchrun that are passed on to mpirun; `standalone` is always true."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def check() -> None:
    """Raise UsageError if neither torch nor mpi4py has MPI."""
    if not dist.is_mpi_available() and not library.is_installed():
        raise UsageError(f"--on mpi: torch has no MPI, as all wheels have none, nor is mpi4py here: {library.REMEDY}")


def become_rank(args: argparse.Namespace, started: Started, settings: Settings) -> int:
    """Run the script under the guard in this process, which mpirun started. Does not return."""
    given = args.nproc_per_node
    if given not in (None, "1", 1) and str(given) != str(started.local_world_size):
        if started.rank:
            return 2  # the first rank says it
        raise UsageError(
            f"--nproc-per-node {given}: mpirun has started {started.local_world_size} ranks on this host; leave it out"
        )
    os.environ.update(settings.environment())
    sys.stdout.flush()
    sys.stderr.flush()
    words = _command(args)
    os.execvp(words[0], words)


def run_mpirun(args: argparse.Namespace, ranks: list[Any]) -> int:
    """Start the ranks of one host with mpirun, and wait for them.

    Return 0 if they finished, 1 if a rank failed, 128 + n for signal n. *ranks* receives mpirun's process.
    """
    number = _number_of_ranks(args)
    _say_what_has_no_meaning(args)
    environment = dict(os.environ)
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    environment.setdefault("MASTER_PORT", str(_free_port()))
    if number > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: the ranks share the cores
    command = [*_mpirun(), "-n", str(number), *_command(args)]
    with _signals_raise():
        process = subprocess.Popen(command, env=environment)
        ranks.append(process)
        try:
            return 1 if process.wait() else 0
        except (SignalException, KeyboardInterrupt) as error:
            sent = signal.SIGINT if isinstance(error, KeyboardInterrupt) else error.sigval
            process.send_signal(signal.SIGTERM)
            process.wait()
            return 128 + int(sent)


def _command(args: argparse.Namespace) -> list[str]:
    if not getattr(args, "use_env", True):
        raise UsageError(
            "--no-use-env: mpirun gives all ranks the same arguments; read LOCAL_RANK from the environment"
        )
    script = [args.training_script, *args.training_script_args]
    if args.no_python:
        return script
    return [sys.executable, "-u", "-m", "distsim.mpi.rank", *(["-m"] if args.module else []), *script]


def _mpirun() -> list[str]:
    program = shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        raise UsageError("--on mpi: no mpirun or mpiexec in PATH; install an MPI (Debian: apt install openmpi-bin)")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in version.stdout + version.stderr:
        return [program]
    # Open MPI counts cores, binds ranks to them, and will not run as root, unless told otherwise.
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [program, *root, "--oversubscribe", "--bind-to", "none"]


def _number_of_ranks(args: argparse.Namespace) -> int:
    if str(args.nnodes or "1") not in ("1", "1:1"):
        raise UsageError(
            f"--nnodes {args.nnodes}: --on mpi starts the ranks of this host; for several hosts run "
            f"mpirun -n RANKS --hostfile HOSTS distsim run --on mpi {args.training_script}"
        )
    given = str(args.nproc_per_node or 1)
    if given in ("auto", "cpu"):
        return os.cpu_count() or 1
    if not given.isdigit() or int(given) < 1:
        raise UsageError(f"--nproc-per-node: expected the number of ranks, 1 or more, got {given}")
    return int(given)


def _say_what_has_no_meaning(args: argparse.Namespace) -> None:
    defaults = getattr(args, "torchrun_defaults", {})
    others = [
        f"--{name.replace('_', '-')}"
        for name, default in sorted(defaults.items())
        if name not in OURS and name != "standalone" and getattr(args, name, default) != default
    ]
    if others:
        print(f"distsim: ignored, because they have no meaning for mpirun: {', '.join(others)}", file=sys.stderr)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _signals_raise() -> Iterator[None]:
    def handler(number: int, frame: Any) -> None:
        raise SignalException(f"got signal {number}", sigval=signal.Signals(number))

    before: Sequence[Any] = [signal.signal(number, handler) for number in SIGNALS]
    try:
        yield
    finally:
        for number, old in zip(SIGNALS, before, strict=True):
            signal.signal(number, old)
