"""The processes that a program starts: `mp.spawn`, `multiprocessing.Process`, its own script again as a command.

These become simulated processes: multiprocessing's own code runs, and only its last step, the `Popen` that would fork,
is ours. A script whose first act is to start its ranks (as the tutorials do) is run once, as a launcher outside the
world; its children take the cluster's slots in order.
"""

from __future__ import annotations

import itertools
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.process
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed.launcher.api

from distsim.errors import UsageError
from distsim.sim.isolation.for_ranks import for_ranks, patch_for_ranks
from distsim.sim.isolation.process import RankTask, SimProcess, current_task, not_ordered, require_task
from distsim.sim.isolation.wraps import keep_failure
from distsim.sim.kernel.turns import name_of
from distsim.sim.processes.hosts import launcher_environ, place_environ
from distsim.sim.processes.ipc import Shared, crossing, pipe_patches
from distsim.sim.processes.lifetime import ChildProcess, Program, end_child, module_spec
from distsim.sim.processes.signals import pid_of
from distsim.text.untrusted_input import digits


def _start_no_rank() -> None:
    """Handle a process that is about to start others. If it is the only one so far, it is a launcher of ranks."""
    task = require_task()
    if task.process.is_rank and task.port.only_first_has_begun():
        task.port.become_launcher(task.process)
        launcher_environ(task.process)


def _new_child() -> SimProcess:
    """Return a simulated process, child of the running one. A launcher's children are the ranks."""
    _start_no_rank()
    task = require_task()
    parent, port = task.process, task.port
    task.flush()
    rank, slot = None, parent.slot
    if not parent.is_rank:
        held = {child.rank for child in parent.family.children if child.alive or not child.family.is_noticed}
        rank = next(number for number in itertools.count() if number not in held)
        slot = port.facts.slots[rank % len(port.facts.slots)]
    environ = dict(parent.interpreter.environ)
    if rank is not None and parent.interpreter.told_of_torchrun:
        environ |= place_environ(parent, rank)
    child: SimProcess = port.new_process(slot, environ, list(sys.argv), rank=rank)
    child.interpreter.changed_environ = dict(parent.interpreter.changed_environ)
    child.interpreter.sys_path = list(sys.path)
    child.program = parent.program
    if port.facts.turns is not None and port.rank_processes.get(child.rank) is not child:
        starter = name_of(task)
        child.family.label = f"p{starter.removeprefix('p')}#{port.facts.turns.number('process', starter)}"
    parent.family.children.append(child)
    child.family.parent = parent
    return child


class SimPopen(ChildProcess):
    """Replacement for multiprocessing's `Popen`: one started child."""

    def __init__(self, process: Any, method: str) -> None:
        parent = require_task().process
        data, shared = self._pickled(process, must=method != "fork" and parent.program is not None)
        child = _new_child()
        super().__init__(child)
        child.family.is_forked = method == "fork"
        for item in shared:
            item.arrived(child)
        for pipe in parent.notes.pipes if method == "fork" else ():
            pipe.inherited(parent, child)
        name, identity, config = process.name, process._identity, process._config
        as_forked = multiprocessing.process.BaseProcess.__new__(type(process))
        as_forked.__dict__.update(process.__dict__)  # `start` takes the target from the original
        own = multiprocessing.process.current_process()
        parent_name, parent_pid = own.name, pid_of(parent)

        def program() -> None:
            current = multiprocessing.process.BaseProcess.__new__(type(process))
            current.__dict__.update(_name=name, _identity=identity, _config=dict(config), _popen=None, _closed=False)
            current.__dict__.update(_parent_pid=parent_pid, _parent_name=parent_name)
            multiprocessing.process._current_process = current  # type: ignore[attr-defined]
            multiprocessing.process._parent_process = multiprocessing.process._ParentProcess(  # type: ignore[attr-defined]
                parent_name, parent_pid, None
            )
            has_main = child.program is None or self._run_main(child, parent, method == "fork")
            started = as_forked if data is None or not has_main else pickle.loads(data)
            multiprocessing.process._current_process = started  # type: ignore[attr-defined]
            started.run()

        child.family.daemonic = bool(process.daemon)
        child.port.start_process(child, program)

    def _pickled(self, process: Any, must: bool) -> tuple[Any, list[Shared]]:
        """Return the pickled data for the child; None if a forked child has the parent's objects."""
        try:
            return crossing(process)
        except Exception:
            if must:
                raise
            return None, []

    def _run_main(self, child: SimProcess, parent: SimProcess, fork: bool) -> bool:
        """Run the main script in the child, as spawned children do.

        A forked child does not print, and takes over its parent's plain values and shared objects. Return False if a
        forked child must use its parent's objects, because the script initializes its process group without a guard
        against reruns.
        """
        streams = [s for s in (child.stdout, child.stderr) if s is not None] if fork else []
        for stream in streams:
            stream.muted = True
        try:
            main = child.program.run_in(child, "__mp_main__")
        except Exception:
            if not fork or parent.groups.c10d is None or parent.groups.c10d.default_pg is None:
                raise
            return False
        finally:
            for stream in streams:
                stream.muted = False
        if fork and parent.interpreter.main is not None:
            for name, value in parent.interpreter.main.__dict__.items():
                plain = isinstance(value, bool | int | float | str | bytes)
                taken = plain or isinstance(value, Shared) or name not in main.__dict__
                if not name.startswith("__") and taken:
                    main.__dict__[name] = value
        return True

    # -- the interface of multiprocessing's Popen

    def poll(self, flag: int = 0) -> int | None:
        asked_by = sys._getframe(1)
        is_question = asked_by.f_code.co_name != "_cleanup"  # multiprocessing's own, before each start
        code = self.poll_quietly(flag) if is_question or self._child.port.facts.turns is None else self.returncode
        if code is not None and is_question:
            self._child.family.is_noticed = True
            reader = asked_by.f_back if asked_by.f_code.co_name == "exitcode" else None
            if reader is not None and reader.f_globals.get("__name__") != "torch.multiprocessing.spawn":
                self._child.family.is_code_read = True  # by the program: torch's spawn raises for any that is not 0
        return code

    def wait(self, timeout: float | None = None) -> int | None:
        if timeout == 0:
            return self.poll()
        self.wait_for_end(timeout)
        return self.poll(1)

    def terminate(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if not self._child.ended.triggered:
            end_child(self._child, number)

    def close(self) -> None:
        """Do nothing: no resource is open."""


def _popen(kind: Any, _: RankTask, process: Any) -> SimPopen:
    return SimPopen(process, kind._start_method or multiprocessing.get_start_method())


# -- Ranks that a program starts as a command: Lightning runs its own script again with another LOCAL_RANK.


LAUNCHER_MODULES = re.compile(r"torch\.distributed\.(run|launch)|deepspeed\.launcher\.(launch|runner)")
"""Modules that start ranks as commands. A program may start them itself, as gpt-neox does."""
LAUNCHER_COMMANDS = {"torchrun": "torch.distributed.run", "deepspeed": "deepspeed.launcher.runner"}
"""The same by the names of their commands, as LLaMA-Factory starts torchrun."""
_RANK_ARGUMENT = re.compile(r"--(?:local[-_])?rank(?:=(\d+))?")
"""Argument by which a launcher written by hand numbers its ranks, as multiproc.py of NVIDIA's tacotron2 does."""


def start_rank(popen: Any, command: Any, environ: Mapping[str, str], cwd: Any) -> bool:
    """Simulate *command* for *popen* if it is a Python script with a rank of its own, or a launcher of ranks.

    Args:
        popen: The `subprocess.Popen` that starts it.
        command: The words of the command.
        environ: The environment that the command is given.
        cwd: The folder in which the command starts; None for the present one.

    Returns:
        Whether it was started.
    """
    task = require_task()
    parent, rank = task.process, _given_rank(environ)
    if parent.program is None:
        return False
    port = parent.port
    is_launcher = not parent.is_rank or port.only_first_has_begun()
    if rank is None and is_launcher and _rank_in(command) == (0 if parent.is_rank else len(port.rank_processes)):
        rank = _rank_in(command)
    program, arguments = _launcher_program(command)
    if program is not None and is_launcher:
        rank = None
        _start_no_rank()
    elif rank is None or rank == _given_rank(os.environ):
        return False
    else:
        program, arguments = _python_program(command, parent.program)
        if program is None:
            return False
        if rank == 0 or not parent.is_rank:
            _start_no_rank()
        if rank in port.rank_processes:
            return False
        port.widen(rank + 1)
    task.flush()
    not_ordered("starts commands")
    given = {os.fsencode(name): os.fsencode(value) for name, value in environ.items()}
    child: SimProcess = port.new_process(port.facts.slots[rank or 0], given, [program.path, *arguments], rank=rank)
    changed = (name for name, value in given.items() if os.environb.get(name) != value)
    child.interpreter.changed_environ = dict(parent.interpreter.changed_environ) | dict.fromkeys(changed)
    folder = sys.path[0] if program is parent.program or rank is None else os.path.dirname(program.path)
    child.program, child.interpreter.sys_path, child.family.parent = program, [folder, *sys.path[1:]], parent

    def run() -> None:
        if cwd is not None:
            os.chdir(cwd)
        program.run_in(child, "__main__")

    port.note("the program starts other ranks as commands: they are simulated, and their output is not redirected")
    if child.index == 1:
        port.prefix_lines(parent)
    popen.ranks_process = ChildProcess(child)
    popen.pid = popen.ranks_process.pid
    port.start_process(child, run)
    return True


def _given_rank(environ: Mapping[str, str]) -> int | None:
    """Return the rank in *environ*; that on the node where the launcher knows no other."""
    return digits(environ.get("RANK", environ.get("LOCAL_RANK", "")))


def _rank_in(command: Any) -> int | None:
    """Return the rank that the arguments of *command* name."""
    words = [] if isinstance(command, str | bytes | os.PathLike) else [*map(os.fsdecode, command)]
    matches = ((_RANK_ARGUMENT.fullmatch(word), after) for word, after in itertools.pairwise([*words, ""]))
    return next((digits(match[1] or after) for match, after in matches if match), None)


def _launcher_program(command: Any) -> tuple[Program | None, list[str]]:
    """Return the launcher of ranks that *command* runs as a module of Python, and its arguments."""
    if isinstance(command, str | bytes | os.PathLike):
        return None, []
    name, *words = map(os.fsdecode, command)
    module = LAUNCHER_COMMANDS.get(os.path.basename(name))
    if module is not None and _given_rank(os.environ) is None:
        name, words = sys.executable, ["-m", module, *words]
    while words and re.fullmatch("-[bBdEiIOPqsSuvx]+", words[0]):
        del words[0]
    is_python = re.fullmatch(r"python[\d.]*", os.path.basename(name)) is not None
    if not is_python or words[:1] != ["-m"] or not LAUNCHER_MODULES.fullmatch(words[1]):
        return None, []
    spec = module_spec(words[1])
    return (None if spec is None else Program(spec.origin or words[1], words[1], spec)), words[2:]


def _python_program(command: Any, own: Program) -> tuple[Program | None, list[str]]:
    """Return the script that *command* runs by Python, the parent's program *own* or another, and its arguments."""
    if isinstance(command, str | bytes | os.PathLike):
        return None, []
    name, *words = map(os.fsdecode, command)
    if words[:1] == ["-u"]:
        del words[0]
    if not words or not re.fullmatch(r"python[\d.]*", os.path.basename(name)):
        return None, []
    if words[:2] == ["-m", own.module]:
        return own, words[2:]
    path = os.path.abspath(words[0])
    if path == own.path and own.module is None:
        return own, words[1:]
    return (Program(path) if path.endswith(".py") and os.path.isfile(path) else None), words[1:]


def _subprocess_patches() -> list[tuple[Any, str, Any]]:
    """Return patches that let `subprocess.Popen` manage ranks which `start_rank` has started."""
    real_poll, real_wait = subprocess.Popen._internal_poll, subprocess.Popen._wait  # type: ignore[attr-defined]

    def poll(self: Any, *args: Any, **kwargs: Any) -> int | None:
        child: ChildProcess | None = self.__dict__.get("ranks_process")
        if child is None:
            code: int | None = real_poll(self, *args, **kwargs)
            return code
        if current_task() is not None:
            self.returncode = child.poll_quietly()
        return child.returncode

    def wait(self: Any, timeout: float | None) -> int:
        child: ChildProcess | None = self.__dict__.get("ranks_process")
        if child is None:
            return int(real_wait(self, timeout))
        child.wait_for_end(timeout)
        self.returncode = child.poll_quietly(1)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return int(self.returncode)

    return [(subprocess.Popen, "_internal_poll", poll), (subprocess.Popen, "_wait", wait)]


def _wrap(task: RankTask, fn: Callable[..., Any], i: int, args: tuple[Any, ...], error_file: str) -> None:
    """Run torch's own body of a spawned process, and keep its exception for the report."""
    try:
        fn(i, *args)
    except KeyboardInterrupt:
        pass
    except UsageError:
        raise
    except Exception as exc:
        keep_failure(task.process, exc)
        with open(error_file, "wb") as file:
            pickle.dump(task.process.ending.traceback_text, file)
        sys.exit(1)


def spawn_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for everything that starts processes or waits for them."""
    context, launch_agent = multiprocessing.context, torch.distributed.launcher.api.launch_agent

    def launch(_: RankTask, *args: Any, **kwargs: Any) -> Any:
        """Run torchrun's launcher as a function (accelerate's `notebook_launcher`); its ranks connect later."""
        _start_no_rank()
        return launch_agent(*args, **kwargs)

    patches: list[tuple[Any, str, Any]] = [
        *pipe_patches(),
        *_subprocess_patches(),
        patch_for_ranks(sys.modules["torch.multiprocessing.spawn"], "_wrap", _wrap),
        patch_for_ranks(torch.distributed.launcher.api, "launch_agent", launch),
    ]
    for kind in (context.ForkProcess, context.SpawnProcess, context.ForkServerProcess, context.Process):
        patches.append((kind, "_Popen", staticmethod(for_ranks(kind._Popen, partial(_popen, kind)))))
    return patches
