"""Finds the Python program that a launcher's command starts, its ranks, and the variables that the launcher sets.

Launchers may be nested: `srun torchrun train.py`. The innermost one that gives the number of ranks wins.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from distsim.errors import UsageError
from distsim.text.untrusted_input import open_regular, read_text

SHELL_VARIABLE = "DISTSIM_SHELL"
"""Set for all that runs under `distsim shell`."""


@dataclass
class Launched:
    """A Python program, and how its launchers would start it."""

    program: str
    arguments: list[str]
    module: bool = False
    nnodes: str | None = None
    """Number of nodes like torchrun's `--nnodes`; None if the launcher does not give it."""
    nproc_per_node: str | None = None
    ntasks: int | None = None
    """Number of all ranks, if the launcher does not give the number per node."""
    use_env: bool = True
    """Whether the program gets its local rank from the environment only."""
    environ: dict[str, str] = field(default_factory=dict)
    """Environment variables of each rank."""
    launchers: list[str] = field(default_factory=list)
    """Their names, the outermost one first."""


def program_of(program: str, arguments: Sequence[str], module: bool) -> Launched:
    """Return what `program arguments`, or `-m program arguments` with *module*, starts.

    Raises:
        UsageError: the command starts no Python program, or a flag of its launcher is not known.
    """
    command = Launched(program, list(arguments), module)
    while True:
        name = _launcher(command)
        if name is None:
            _find_console_script(command)
            return command
        command.launchers.append(name)
        LAUNCHERS[name](command)


def _launcher(command: Launched) -> str | None:
    """Return the launcher that *command* begins with; None: it is the program."""
    if command.module:
        return _MODULES.get(command.program)
    name = os.path.basename(command.program)
    if name.endswith(".py") or (os.path.exists(command.program) and not os.access(command.program, os.X_OK)):
        return None
    if re.fullmatch(r"python[\d.]*", name):
        return "python"
    if name in _REFUSED:
        raise UsageError(f"{name} starts no simulated ranks; give its Python program to distsim run")
    return name if name in LAUNCHERS else None


def _find_console_script(command: Launched) -> None:
    """Replace the name of a Python script on PATH, such as `litgpt`, by its path; it is started as by python."""
    name = command.program
    path = None if command.module or os.sep in name or os.path.isfile(name) else shutil.which(name)
    if path is None:
        return
    with open_regular(path) as file:
        if not re.match(rb"#!\S*(/env )?\S*python", file.readline(200)):
            return
    command.program = path
    command.launchers = command.launchers or ["python"]


class _Flags(argparse.ArgumentParser):
    """A launcher's flags, then its program and the program's arguments."""

    def __init__(self, name: str) -> None:
        super().__init__(prog=name, add_help=False, allow_abbrev=False)

    def values(self, names: str) -> _Flags:
        for name in names.split():
            self.add_argument(*name.split("|"), default=None)
        return self

    def switches(self, names: str) -> _Flags:
        for name in names.split():
            self.add_argument(*name.split("|"), action="store_true")
        return self

    def of(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the values of the flags in *words*; `rest` contains the words after the flags."""
        self.add_argument("rest", nargs=argparse.REMAINDER)
        flags = self.parse_args(words)
        if flags.rest[:1] == ["--"]:
            del flags.rest[0]
        if not flags.rest or flags.rest[0].startswith("-"):
            self.error(f"its flag {flags.rest[0]} is not known" if flags.rest else "expected a program")
        return flags

    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"{self.prog}: {message}; give the Python program itself to distsim run, with --nnodes and --nproc-per-node"
        )


def _go_on(command: Launched, words: Sequence[str], module: bool = False) -> None:
    command.program, command.arguments, command.module = words[0], list(words[1:]), module


def python_start(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return what starts under `python *words*`: the flag that names it, and the words from it on.

    The flag is `-m` (a module), `-c` (code), `-` (standard input), empty (a script), or one that starts no program.
    """
    left = list(words)
    while left and re.match("-.", left[0]):
        flag = left.pop(0)
        if left and re.fullmatch(r"-[bBdEiIOPqsSuvx]*[mc]", flag):
            return f"-{flag[-1]}", left
        if left and flag in ("-W", "-X"):
            left.pop(0)
        elif not re.fullmatch(r"-[bBdEiIOPqsSuvx]+|-[WX].+", flag):
            return flag, left
    return ("", left) if left and left[0] != "-" else ("-", left[1:])


def _python(command: Launched) -> None:
    flag, words = python_start(command.arguments)
    if flag not in ("", "-m"):
        raise UsageError(f"python {flag}: expected a script or -m MODULE")
    _go_on(command, words, module=flag == "-m")


def _torchrun(command: Launched) -> None:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.error = _Flags("torchrun").error
    namespace = parser.parse_args(command.arguments)
    if namespace.no_python:
        raise UsageError(f"torchrun --no-python {namespace.training_script}: only Python can be simulated")
    command.nnodes, command.nproc_per_node = str(namespace.nnodes), str(namespace.nproc_per_node)
    _go_on(command, [namespace.training_script, *namespace.training_script_args], namespace.module)


def _torch_launch(command: Launched) -> None:
    """Parse torch.distributed.launch: torchrun with an argument for the local rank."""
    switches = [word for word in command.arguments if word in ("--use-env", "--use_env")]
    command.use_env = bool(switches)
    command.arguments = [word for word in command.arguments if word not in switches]
    _torchrun(command)


def _accelerate(command: Launched) -> None:
    """Parse the command with accelerate's own parser and environment, because it has a hundred flags and a
    configuration file."""
    if command.arguments[:1] != ["launch"]:
        raise UsageError(f"accelerate {' '.join(command.arguments[:1])}: only accelerate launch starts a program")
    command.arguments.pop(0)
    _accelerate_launch(command)


def _accelerate_launch(command: Launched) -> None:
    from distsim.sim.isolation.modules.modules import forget_packages

    imported_before = frozenset(sys.modules)
    try:
        launch: Any = importlib.import_module("accelerate.commands.launch")
        environs: Any = importlib.import_module("accelerate.utils.launch")
    except ImportError:
        raise UsageError(
            "accelerate launch: accelerate is not installed, which reads its flags; give the program to distsim run"
        ) from None
    parser = launch.launch_command_parser()
    parser.error = _Flags("accelerate launch").error
    flags = parser.parse_args(command.arguments)
    given = flags.num_processes
    environ: dict[str, Any] = dict(os.environ)
    try:
        flags, *_ = launch._validate_launch_command(flags)
        processes = given or (flags.num_processes if flags.config_file else None)
        machines = int(flags.num_machines or 1)
        flags.num_processes, flags.num_machines, flags.main_process_port = processes or 2, 1, 0
        exported = (
            environs.prepare_deepspeed_cmd_env(flags)[1]
            if flags.use_deepspeed
            else environs.prepare_multi_gpu_env(flags)
        )
    except (ValueError, RuntimeError, OSError, AttributeError, TypeError) as error:
        raise UsageError(f"accelerate launch: {error}") from error
    finally:
        forget_packages(imported_before)  # a rank's accelerate is its own
    command.environ.update({name: value for name, value in exported.items() if environ.get(name) != value})
    command.nnodes = str(machines)
    if processes:
        command.nproc_per_node = str(max(1, int(processes) // machines))
    _go_on(command, [flags.training_script, *flags.training_script_args], flags.module)


def _deepspeed(command: Launched) -> None:
    """Read the flags of DeepSpeed's launcher (deepspeed/launcher/runner.py)."""
    flags = _Flags("deepspeed").values(
        "-H|--hostfile -i|--include -e|--exclude --num_nodes|--num-nodes --min_elastic_nodes --max_elastic_nodes "
        "--num_gpus|--num-gpus --master_port --master_addr --node_rank --launcher --launcher_args --ssh_port "
        "--enable_each_rank_log --bind_core_list --venv_script --autotuning --log_level"
    )
    flags.switches(
        "--module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid --elastic_training "
        "--bind_cores_to_rank --use_local_rank"
    )
    namespace = flags.of(command.arguments)
    if namespace.no_python:
        raise UsageError(f"deepspeed --no_python {namespace.rest[0]}: only Python can be simulated")
    command.use_env = namespace.no_local_rank
    command.nnodes, command.nproc_per_node = namespace.num_nodes, namespace.num_gpus
    if namespace.include:  # node1:0,1@node2:0,1
        hosts = namespace.include.split("@")
        command.nnodes, (_, _, chosen) = str(len(hosts)), hosts[0].partition(":")
        command.nproc_per_node = str(len(chosen.split(","))) if chosen else namespace.num_gpus
    elif namespace.hostfile and namespace.num_nodes is None:
        command.nnodes = str(len(_hosts(namespace.hostfile)))
    _go_on(command, namespace.rest, namespace.module)


def _hosts(path: str) -> list[str]:
    try:
        lines = read_text(path).splitlines()
    except OSError as error:
        raise UsageError(f"deepspeed --hostfile {path}: cannot be read ({error.strerror})") from None
    return [line for line in lines if line.partition("#")[0].strip()]


_OF_FABRIC = (
    "--accelerator --strategy --devices --num-nodes|--num_nodes --node-rank|--node_rank "
    "--main-address|--main_address --main-port|--main_port --precision"
)


def _flags_first(words: Sequence[str], names: str) -> list[str]:
    """Return *words* with the flags *names* before the program, which click's parser takes wherever they stand."""
    known, flags, rest = set(names.replace("|", " ").split()), list[str](), list[str]()
    left = list(words)
    while left and left[0] != "--":
        word = left.pop(0)
        is_flag = word.partition("=")[0] in known
        (flags if is_flag else rest).append(word)
        if is_flag and "=" not in word:
            flags += left[:1]
            del left[:1]
    return [*flags, *rest, *left]


def _fabric(command: Launched) -> None:
    """Parse `fabric run` (lightning/fabric/cli.py), which was `lightning run model` up to release 2.3."""
    name = os.path.basename(command.program)
    words = ["run", "model"] if name == "lightning" and command.arguments[1:2] == ["model"] else ["run"]
    if command.arguments[: len(words)] != words:
        raise UsageError(f"{name} {' '.join(command.arguments[:1])}: only {name} {' '.join(words)} starts a program")
    flags = _Flags(f"{name} {' '.join(words)}").values(_OF_FABRIC)
    given_words = command.arguments[len(words) :]
    namespace = flags.of(_flags_first(given_words, _OF_FABRIC) if name == "fabric" else given_words)
    devices = namespace.devices or "1"
    given = {
        "CLI_USED": "1", "ACCELERATOR": namespace.accelerator, "STRATEGY": namespace.strategy, "DEVICES": devices,
        "NUM_NODES": namespace.num_nodes or "1", "PRECISION": namespace.precision,
    }  # fmt: skip
    command.environ |= {f"LT_{key}": value for key, value in given.items() if value is not None}
    command.nnodes = given["NUM_NODES"]
    if devices not in ("auto", "-1"):
        command.nproc_per_node = str(len(devices.strip(",").split(","))) if "," in devices else devices
    _go_on(command, namespace.rest)


def _tune(command: Launched) -> None:
    """Parse `tune run` of torchtune: torchrun, whose program is a recipe by name; each rank runs `tune run RECIPE`."""
    if command.arguments[:1] != ["run"]:
        raise UsageError(f"tune {' '.join(command.arguments[:1])}: only tune run starts a program")
    command.arguments.pop(0)
    _torchrun(command)
    _go_on(command, ["torchtune._cli.tune", "run", command.program, *command.arguments], module=True)


def _srun(command: Launched) -> None:
    """Read the flags of srun (slurm.schedmd.com/srun.html): those that set the number of ranks, and those with a
    value that jobs commonly use.
    """
    flags = _Flags("srun").values(
        "-n|--ntasks -N|--nodes --ntasks-per-node --gres -G|--gpus --gpus-per-node --gpus-per-task -c|--cpus-per-task "
        "-p|--partition -A|--account -t|--time -J|--job-name -o|--output -e|--error -w|--nodelist -x|--exclude "
        "-q|--qos -D|--chdir -C|--constraint --mem --mem-per-cpu --mem-per-gpu --export --mpi --cpu-bind --gpu-bind "
        "--jobid --container-image --container-mounts --container-workdir --container-name --distribution --signal "
        "--network --kill-on-bad-exit --wait"
    )
    flags.switches("-l|--label -u|--unbuffered --exclusive --overlap --no-container-mount-home -v|--verbose --pty -K")
    namespace = flags.of(command.arguments)
    nodes = (namespace.nodes or "").partition("-")[2] or namespace.nodes
    per_node = namespace.ntasks_per_node
    try:
        if namespace.ntasks is not None and per_node is None:
            command.ntasks = None if nodes else int(namespace.ntasks)
            per_node = nodes and str(max(1, int(namespace.ntasks) // int(nodes)))
        command.nnodes, command.nproc_per_node = nodes, per_node and str(int(per_node))
    except ValueError:
        raise UsageError(f"srun: expected numbers, got --nodes {namespace.nodes} --ntasks {namespace.ntasks}") from None
    _go_on(command, namespace.rest)


def _mpirun(command: Launched) -> None:
    """Open MPI's mpirun, and the flags of MPICH's for the number of processes and for variables."""
    flags = _Flags("mpirun").values(
        "--np|-np|-n|-c|--n --npernode|-N|-npernode|-ppn|-perhost -H|-host|--host|-hosts --hostfile|-hostfile|"
        "-machinefile|--machinefile|-f --bind-to|-bind-to --map-by|-map-by --rank-by --prefix|-prefix -wdir|--wdir "
        "--output-filename --timeout"
    )
    flags.switches(
        "--oversubscribe|-oversubscribe --allow-run-as-root|-allow-run-as-root --tag-output|-tag-output "
        "--report-bindings --use-hwthread-cpus -q|--quiet -v|--verbose"
    )
    flags.add_argument("-x", action="append", default=[])
    flags.add_argument("-genv", "-env", nargs=2, action="append", default=[])
    flags.add_argument("-mca", "--mca", nargs=2, action="append")
    namespace = flags.of(command.arguments)
    if ":" in namespace.rest:
        raise UsageError("mpirun A : B: several programs cannot be simulated as one job; start one")
    command.environ |= dict(word.split("=", 1) for word in namespace.x if "=" in word) | dict(namespace.genv)
    try:
        command.ntasks = namespace.np and int(namespace.np)
        command.nproc_per_node = namespace.npernode and str(int(namespace.npernode))
    except ValueError:
        raise UsageError(
            f"mpirun: expected numbers of processes, got -np {namespace.np} -N {namespace.npernode}"
        ) from None
    if command.ntasks and command.nproc_per_node:
        command.nnodes, command.ntasks = str(-(-command.ntasks // int(namespace.npernode))), None
    _go_on(command, namespace.rest)


LAUNCHERS: dict[str, Callable[[Launched], None]] = {
    "python": _python,
    "torchrun": _torchrun,
    "torch.distributed.launch": _torch_launch,
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate_launch,
    "deepspeed": _deepspeed,
    "ds": _deepspeed,
    "fabric": _fabric,
    "lightning": _fabric,
    "tune": _tune,
    "srun": _srun,
    "mpirun": _mpirun,
    "mpiexec": _mpirun,
}
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate-launch",
    "accelerate": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
}
"""Modules that start ranks, by the launcher that they are."""
_REFUSED = ("bash", "sh", "horovodrun", "composer", "ray", "env", "nohup")
