"""`distsim shell`: run a command whose launchers, python and nvidia-smi are simulated.

A temporary folder holds one small program for each of these names. It calls `tool`, which becomes `distsim run` or the
real program. The command's processes become children of this one when their parents end, so that none is left behind.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.metadata
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

from distsim.cli.dispatch import REAL_BACKENDS, main
from distsim.cli.inputs import launchers
from distsim.cli.inputs.launchers import SHELL_VARIABLE, python_start
from distsim.errors import UsageError
from distsim.text.untrusted_input import read_text

LAUNCHERS = tuple(name for name in launchers.LAUNCHERS if name not in ("python", "torch.distributed.launch"))
STARTS = {"accelerate": "launch", "fabric": "run", "lightning": "run", "tune": "run"}
"""First word of the command that starts ranks; the launcher's other commands run for real."""
REAL_STARTS = frozenset(
    {"", "--help", "-h", "--version", "convert", "cp", "download", "env", "ls", "validate", "version"}
)
"""First words of commands of packages that prepare or list something; they run for real."""
LAUNCHER_MODULES = re.compile(r"torch\.distributed\.(run|launch)|accelerate(\.commands.+)?|deepspeed(\.launcher.+)?")
PYTHONS = ("python", "python3", f"python3.{sys.version_info.minor}")
INSIDE = "simulation"
"""Value of the variable in a simulated rank and in the real programs that it starts."""
GRACE_S = 3.0
"""Time in seconds between SIGTERM and SIGKILL for processes that the command left behind."""

DESCRIPTION = """\
Run a command, such as a repository's own start script, on a simulated cluster.

  distsim shell --on dgx-h100:1 -- bash run_train.sh
  distsim shell --on dgx-h100:2                        an interactive bash

torchrun, accelerate launch, deepspeed, fabric run, tune run, srun, mpirun and nvidia-smi are simulated. python is
simulated as one process if the script, or a module of its own that it imports, imports torch or a package that requires
torch; else it runs for real, and so does setup.py. Commands of installed packages that require torch, such as litgpt,
are simulated as one process, too, except download, convert, ls and the like. All other programs run for real. The exit
code is the command's.
"""


def add_parser(subparsers: Any) -> None:
    """Add `shell` to the command line."""
    from distsim.cli.run import add_own_flags

    parser = subparsers.add_parser(
        "shell",
        description=DESCRIPTION,
        usage="distsim shell [--on CLUSTER] [flags] [--] [command ...]",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the command and its arguments (default: an interactive bash)"
    )
    parser.add_argument(
        "--real",
        action="append",
        default=[],
        metavar="PATTERN",
        help="run python scripts, modules and commands of this name for real although they need torch, such as "
        "prepare_*.py; "
        "may be given several times",
    )
    add_own_flags(parser)
    parser.set_defaults(func=shell)


def shell(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    from distsim.cluster import load_cluster
    from distsim.options import default_of

    if SHELL_VARIABLE in os.environ or "DISTSIM_GPUS" in os.environ:
        where = "a simulated rank" if os.environ.get(SHELL_VARIABLE, INSIDE) == INSIDE else "distsim shell"
        raise UsageError(f"distsim shell was started inside {where}: run its command without distsim shell")
    if not sys.platform.startswith("linux"):
        raise UsageError("distsim shell needs Linux; give one launcher's command to distsim run -- torchrun ...")
    on = args.on or default_of("on")
    if on in REAL_BACKENDS:
        raise UsageError(
            f"--on {on}: distsim shell only simulates; to watch real ranks, use torchrun -m distsim.debug in the script"
        )
    load_cluster(on)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    _check_command(command)
    words = args.argv[1 : len(args.argv) - len(args.command)]
    folder = Path(tempfile.mkdtemp(prefix="distsim-shell-"))
    try:
        flags = [*_without_real(words), "--on", on]
        _write_tools(folder, flags, args.real)
        if not command:
            (folder / "bashrc").write_text(
                f'[ -f ~/.bashrc ] && . ~/.bashrc\nPATH={shlex.quote(str(folder))}:$PATH\nPS1="(distsim) $PS1"\n'
            )
            command = ["bash", "--rcfile", str(folder / "bashrc")]
        environ = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
        environ[SHELL_VARIABLE] = str(folder)
        if (devices := environ.pop("CUDA_VISIBLE_DEVICES", None)) is not None:
            print(
                f"distsim: CUDA_VISIBLE_DEVICES={devices} describes this machine and is ignored; to hide simulated "
                "GPUs, set it in the command: distsim shell -- env CUDA_VISIBLE_DEVICES=0,1 ...",
                file=sys.stderr,
            )
        return _run(command, environ)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_command(command: Sequence[str]) -> None:
    """Refuse a command that cannot be executed, before anything runs."""
    if not command:
        return
    name = command[0]
    if shutil.which(name) is None and name not in (*LAUNCHERS, *PYTHONS, "nvidia-smi"):
        if name.endswith(".py"):
            raise UsageError(f"expected a command, got the Python script {name}: distsim shell -- python {name}")
        if os.path.isfile(name):
            raise UsageError(f"{name} is not executable: distsim shell -- bash {name}")
        raise UsageError(f"no program {name}: expected a file, or a name on PATH (looked in {Path.cwd()})")
    if (
        name in ("bash", "sh")
        and len(command) > 1
        and not command[1].startswith("-")
        and not os.path.exists(command[1])
    ):
        raise UsageError(f"no script {command[1]}: no such file (looked in {Path.cwd()})")


def _without_real(words: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--real", action="append")
    parser.add_argument("--on")
    return parser.parse_known_args(words)[1]


def _write_tools(folder: Path, flags: Sequence[str], real: Sequence[str]) -> None:
    """Write a small program for each command that distsim replaces, such as torchrun, with the settings that it
    needs.
    """
    house = str(Path(__file__).parents[3])
    code = (
        f"import sys; sys.path[:1] == [''] and sys.path.pop(0); sys.path.append({house!r}); "
        f"from distsim.cli.inputs.shell import tool; tool({str(folder)!r}, {list(flags)!r}, {list(real)!r})"
    )
    for name in (*LAUNCHERS, *PYTHONS, "nvidia-smi", *_package_commands()):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} {name} "$@"\n')
        path.chmod(0o755)


def _package_commands() -> list[str]:
    """Return the names of commands on PATH of installed packages that require torch."""
    result = set()
    for entry in importlib.metadata.entry_points(group="console_scripts"):
        package = "" if entry.dist is None else entry.dist.name
        if package not in ("torch", "torch-distsim") and shutil.which(entry.name) and _requires_torch(package):
            result.add(entry.name)
    return sorted(result - {*LAUNCHERS, *PYTHONS})


# -- The command's processes


def _run(command: Sequence[str], environ: dict[str, str]) -> int:
    from distsim.watchdog.process import POLL_S, die_with, next_signal

    _adopt_orphans()
    watched = {signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    us = os.getpid()

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        die_with(us)

    child = subprocess.Popen(command, env=environ, preexec_fn=begin)
    try:
        while (code := _reaped(child.pid)) is None:
            came = next_signal(watched, child.pid, POLL_S)
            if came is not None and came.si_code <= 0:  # not the terminal's
                os.kill(child.pid, came.si_signo)  # Popen.send_signal would collect its exit code
        child.returncode = code
    finally:
        _end_descendants()
        while signal.sigtimedwait(watched, 0) is not None:
            pass  # what ended the command as well, and would end this process before it has said its exit code
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return code if code >= 0 else 128 - code


def _adopt_orphans() -> None:
    """Let this process become the parent of descendants whose own parent has ended."""
    import ctypes

    set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER, linux/prctl.h
    ctypes.CDLL(None).prctl(set_child_subreaper, 1)


def _reaped(pid: int) -> int | None:
    """Collect all children that have ended, and return the exit code of *pid* if it is one of them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _end_descendants() -> None:
    """End all processes that the command has left running, first with SIGTERM, then with SIGKILL."""
    _reaped(0)
    left = _descendants(os.getpid())
    if not left:
        return
    names = ", ".join(sorted({name for _, name in left}))
    print(f"distsim: ended the processes that the command left running: {names}", file=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGKILL):
        until_s = time.monotonic() + GRACE_S
        for pid, _ in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        while left and time.monotonic() < until_s:
            time.sleep(0.02)
            _reaped(0)
            left = _descendants(os.getpid())


def _descendants(pid: int) -> list[tuple[int, str]]:
    """Return the number and the name of each process below *pid*."""
    result: list[tuple[int, str]] = []
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            name = Path(f"/proc/{child}/comm").read_text().strip()
            result += [(child, name), *_descendants(child)]
    return result


# -- What a name on PATH does


def tool(folder: str, flags: Sequence[str], real: Sequence[str]) -> NoReturn:
    """Do what the program of this name does: simulate, or become the real one.

    Args:
        folder: Folder of the tools.
        flags: Flags of `distsim run` for each simulation.
        real: Patterns of scripts that run for real.
    """
    name, words = sys.argv[1], sys.argv[2:]
    try:
        if name == "nvidia-smi":
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `nvidia-smi | head` ends as the real one does
            sys.exit(_nvidia_smi(words, flags))
        start = _simulated(name, words, Path(folder), real)
    except UsageError as error:
        print(f"distsim: error: {error}", file=sys.stderr)
        sys.exit(2)
    if start is None:
        _become_real(name, words, folder)
    os.environ[SHELL_VARIABLE] = INSIDE
    sys.argv[:] = ["distsim", "run", *_numbered(flags, Path(folder), "--quiet" in start), *start]
    sys.exit(main())


def _nvidia_smi(words: Sequence[str], flags: Sequence[str]) -> int:
    from distsim.cluster import load_cluster
    from distsim.kernels import Gpu
    from distsim.sim.device import nvidia_smi
    from distsim.sim.device.gpu import described

    cluster = load_cluster(flags[-1])
    node = cluster.node
    if node.gpu is None:
        raise UsageError(f"nvidia-smi: the cluster {flags[-1]} has no GPUs")
    return nvidia_smi.main(words, described(cluster, Gpu.of(node.gpu), [(0, 0)] * node.num_gpus))


def _simulated(name: str, words: Sequence[str], folder: Path, real: Sequence[str]) -> list[str] | None:
    """Return what follows the flags of `distsim run` for a command; None: it runs for real."""
    is_inside = os.environ.get(SHELL_VARIABLE) == INSIDE
    if name not in (*LAUNCHERS, *PYTHONS):
        is_real = " ".join(words[:1]) in REAL_STARTS or any(fnmatch(name, one) for one in real)
        path = _next_on_path(name, str(folder))
        return None if is_inside or is_real or path is None else ["--one-process", "--", path, *words]
    if name not in PYTHONS:
        if name in STARTS and words[:1] != [STARTS[name]]:
            return None
        if is_inside:
            raise UsageError(f"{name} was started by a simulated rank: only the command of distsim shell starts ranks")
        return ["--", name, *words]
    flag, program = python_start(words)
    if is_inside:
        return None
    if flag == "-m" and LAUNCHER_MODULES.fullmatch(program[0]):
        return None if program[:2] == ["accelerate", "env"] else ["--", "python", *words]
    script = _program_of(flag, program, folder, real)
    if script is None:
        return None
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise UsageError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} in the environment of python: its ranks would be simulated one by "
            "one and wait for each other; start them all by torchrun"
        )
    quiet = ["--quiet"] if flag == "-c" else []
    return ["--one-process", *quiet, "--", *script]


def _program_of(flag: str, program: Sequence[str], folder: Path, real: Sequence[str]) -> list[str] | None:
    """Return the arguments of `distsim run` for a Python program, or None if the program runs for real."""
    here = Path.cwd()
    if flag == "":
        path = Path(program[0])
        is_real = path.name == "setup.py" or any(fnmatch(path.name, one) or fnmatch(program[0], one) for one in real)
        return None if is_real or not uses_torch(_text(path), path.parent) else list(program)
    if flag == "-m":
        folders = [here, *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
        spec = next(filter(None, (_own_module(program[0], folder) for folder in folders)), None)
        is_ours = program[0].partition(".")[0] in ("distsim", "torch")
        if spec is None or is_ours or any(fnmatch(program[0], one) for one in real):
            return None
        depth = program[0].count(".") + (spec.name == "__main__.py")
        if not uses_torch(_text(spec), spec.parents[depth], spec.parent):
            return None
        return ["python", "-m", *program]
    if flag == "-c":
        source, arguments = program[0], program[1:]
    elif flag == "-" and not sys.stdin.isatty():
        source, arguments = sys.stdin.read(), program
        _give_back(source)
    else:
        return None
    if not uses_torch(source, here):
        return None
    script = Path(tempfile.mkdtemp(dir=folder)) / ("command.py" if flag == "-c" else "stdin.py")
    script.write_text(source)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, str(here))
    return [str(script), *arguments]


def _give_back(source: str) -> None:
    """Make *source* the content of standard input again, after it was read."""
    with tempfile.TemporaryFile() as file:
        file.write(source.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)


def _own_module(name: str, folder: Path) -> Path | None:
    """Return the file that `-m name` runs if it is below *folder*, else None."""
    path = folder.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__main__.py") if file.is_file()), None)


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""


def uses_torch(source: str, folder: Path, parent: Path | None = None) -> bool:
    """Return whether a Python program needs torch, by the imports of its text and of its own modules.

    Args:
        source: Text of the program.
        folder: First folder of its `sys.path`.
        parent: Folder of the program below *folder*, from which its relative imports count; by default *folder*.
    """
    path = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    left, seen = [(source, parent or folder)], set[str]()
    while left:
        text, parent = left.pop()
        for name in _imports(text, parent, folder):
            if name in seen:
                continue
            seen.add(name)
            if "." not in name and _requires_torch(name):
                return True
            if (file := _own_file(name, path)) is not None:
                left.append((_text(file), file.parent))
    return False


def _imports(source: str, parent: Path, folder: Path) -> Iterator[str]:
    """Yield the full name of each module that *source*, a file in folder *parent*, may import, and of its packages."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return  # Python says so better
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                with contextlib.suppress(ValueError, IndexError):
                    base = [*[parent, *parent.parents][node.level - 1].relative_to(folder).parts, *base]
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            yield from itertools.accumulate(name.split("."), "{}.{}".format)


def _requires_torch(name: str) -> bool:
    """Return whether the package *name* is torch, is built on it or requires it."""
    if name in ("torch", "transformers"):
        return True
    try:
        requirements = importlib.metadata.requires(name) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
    return any(re.match(r"torch\b(?![-.])", one) and "extra ==" not in one for one in requirements)


def _own_file(name: str, path: Sequence[str]) -> Path | None:
    """Return the file of a module that is not installed from a registry and not Python's own."""
    parts, spec = name.split("."), None
    if parts[0] in sys.stdlib_module_names:
        return None
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None and depth == 1:
            with contextlib.suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(name.partition(".")[0])
        if spec is None or (spec.origin or "").startswith(sysconfig.get_path("purelib")):
            return None
        path = list(spec.submodule_search_locations or ())
    return None if spec is None or not (spec.origin or "").endswith(".py") else Path(spec.origin or "")


def _next_on_path(name: str, folder: str) -> str | None:
    """Return the program *name* on PATH without the *folder* of the tools."""
    others = os.pathsep.join(one for one in os.environ.get("PATH", "").split(os.pathsep) if one != folder)
    return shutil.which(name, path=others)


def _become_real(name: str, words: Sequence[str], folder: str) -> NoReturn:
    """Execute the program *name* that is next on PATH."""
    path = _next_on_path(name, folder) or (sys.executable if name in PYTHONS else None)
    if path is None:
        print(f"distsim: error: {name}: no such program on PATH", file=sys.stderr)
        sys.exit(127)
    os.execv(path, [path, *words])


def _numbered(flags: Sequence[str], folder: Path, is_question: bool) -> list[str]:
    """Return *flags* with the number of this simulation in the names of the files that it writes.

    `python -c` is a question of a script, and leaves no file.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names = ("--report", "--trace", "--html")
    for name in names:
        parser.add_argument(name)
    files, left = parser.parse_known_args(flags)
    if is_question or not any(vars(files).values()):
        return left
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            (folder / f"run.{number}").touch(exist_ok=False)
            break
    for name in names:
        if (value := getattr(files, name[2:])) is not None:
            path = Path(value)
            left += [name, f"{path.with_suffix('')}.{number}{path.suffix}{os.sep if value.endswith(os.sep) else ''}"]
    return left
