"""`distsim.debug.install()` and `remove()`: the guard in this process, on and off."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from distsim.debug.evidence.watched_source import report_to, watch_imports
from distsim.debug.rings.world import World
from distsim.debug.settings import Attach, Level, Settings, Silent, say_once_a_job, warn_of_unknown_variables
from distsim.deprecated import in_torch
from distsim.deprecated.ranks import Meeting
from distsim.realexec.mpi.launch import started_by_mpirun
from distsim.realexec.process.session import EndHooks, Session
from distsim.realexec.process.worlds import count_in, launched
from distsim.torch_compat.names import GUARD
from distsim.torch_compat.releases import compared, guard_refusal, remarks

__all__ = ["DroppedHook", "current_session", "install", "install_started", "installed", "remove", "run_started"]

_session: Session | None = None
_settings: Settings | None = None
_hooks: list[Any] = []
_started = False
"""Another process under guard started this one: the variables of its own launcher say nothing of this rank."""
_agent_port = ""
"""Where the launcher of this process, or of the one that started it, has its store; empty: no launcher has one."""
_by_hooks = False
"""Torch's own groups are guarded by their hooks."""
_refused = False
"""There was no place for the ring: said once, the process goes on without a guard."""


def current_session() -> Session | None:
    """The session of this process; None before its rank is known, and when nothing is installed."""
    return _session


def installed() -> bool:
    """Whether groups of this process are put under guard."""
    return _settings is not None


def install(
    level: str | None = None,
    on_hang: str | None = None,
    dir: str | os.PathLike[str] | None = None,
    *,
    hang_after_s: float | None = None,
    report: str | None = None,
    nan: bool | None = None,
    checksum: bool | None = None,
    silent: str | None = None,
) -> None:
    """Put every process group of this process under guard, those that exist and those made later. (What the program
    calls on a group object that it has got before goes on, unrecorded.)

    *level* is `record`, `check` (default), `strict` or `off`; *on_hang* is `report` (default), `abort`
    or `wait`; *silent* is `off` (default), `watch` or `strict`. What is not given comes from the environment
    (`DISTSIM_LEVEL`, `DISTSIM_ON_HANG`, `DISTSIM_DIR`, ...). Call it in every rank, best before `init_process_group`.
    """
    global _settings, _agent_port, _by_hooks
    given = {
        "level": level,
        "on_hang": on_hang,
        "directory": None if dir is None else os.path.abspath(dir),
        "hang_after_s": hang_after_s,
        "report": report,
        "nan": nan,
        "checksum": checksum,
        "silent": silent,
    }
    settings = Settings.read(given)
    if not _started:
        warn_of_unknown_variables()
    if _settings is not None:
        remove()
    if dist.is_available() and started_by_mpirun(os.environ) is not None:
        # Elsewhere a guard is none that makes `is_mpi_available()` say something else. And before anything of ours is
        # registered for the end of the process: MPI ends after all of it.
        from distsim.realexec.mpi.group import enable

        enable(_may_meet)
    if settings.level is Level.OFF:
        if settings.silent is not Silent.OFF:
            say_once_a_job("silent faults: not searched at level off")
        return
    _settings = settings
    if not _agent_port and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _agent_port = os.environ.get("MASTER_PORT", "")
    _by_hooks = dist.is_available() and comes_by_hooks(settings)
    refusal = guard_refusal(_by_hooks) if dist.is_available() else "this torch was built without torch.distributed"
    if refusal:
        return _go_on_without(refusal)
    try:
        _install_hooks(settings, given)
    except Exception as error:
        if not compared(torch.__version__, GUARD):
            raise  # a tested torch: a defect of ours
        return _go_on_without(f"torch {torch.__version__} is not tested, and {type(error).__name__}: {error}")
    if not _started:
        for line in remarks(GUARD):
            say_once_a_job(f"note: {line}")


def _go_on_without(why: str) -> None:
    """The user's job needs no guard: it runs, and one line says that it has none."""
    remove()
    if not _started:
        say_once_a_job(f"the job runs without a guard: {' '.join(why.split())}")


def _install_hooks(settings: Settings, given: Mapping[str, Any]) -> None:
    from distsim.realexec.guard.api_wrappers import Shortcuts
    from distsim.realexec.process.children import PopenHook, SpawnHook
    from distsim.realexec.process.ddp import DdpHook
    from distsim.realexec.process.hooks import Hooks
    from distsim.realexec.process.session import leave_uncompiled

    hooks = Hooks(_open, current_session, _leave_agent, _by_hooks)
    hooks.install()
    dropped = DroppedHook(hooks.begin_init)
    dropped.install()
    ends = EndHooks(current_session)
    ends.install()
    ddp = DdpHook()
    ddp.install()
    passed_on = {"dir" if key == "directory" else key: value for key, value in given.items()}
    spawn = SpawnHook(run_started, {**passed_on, "agent_port": _agent_port}, _is_rank)
    spawn.install()
    popen = PopenHook(settings.environment())
    popen.install()
    shortcuts = Shortcuts()
    if not _by_hooks:
        shortcuts.install()
    leave_uncompiled()
    if settings.silent is not Silent.OFF:
        from distsim.realexec.process.silent import SilentHook

        _hooks.append(silent := SilentHook())
        silent.install()
    handlers = HandlerHook()
    handlers.install()
    _hooks[:0] = [hooks, dropped, ends, ddp, spawn, popen, shortcuts, handlers]
    if dist.rpc.is_available():
        from distsim.realexec.rpc.hooks import RpcHooks

        remote = RpcHooks(_open, current_session)
        remote.install()
        _hooks.append(remote)
    os.register_at_fork(after_in_child=_forget)
    if dist.is_initialized():
        hooks.late()
    elif not _started and (count_in(os.environ, "WORLD_SIZE") or 1) > 1:
        # The ring exists from here on: who dies before init_process_group is seen, too. A world of one
        # may be a launcher of ranks itself: whether it is one, init_process_group tells.
        _open(None, "")


def comes_by_hooks(settings: Settings) -> bool:
    """Whether the guard comes by hooks on groups; where the program asks for them, a line says what they lack."""
    if settings.guard_attach is not Attach.HOOKS:
        return False
    from distsim.realexec.guard.hooked import attach_note, refusal

    if not _started:
        say_once_a_job(attach_note(settings))
    return not refusal(settings)


class HandlerHook:
    """Records the exceptions that the program's own files handle; a file that was imported before is not watched."""

    def __init__(self) -> None:
        self._installed = contextlib.ExitStack()

    def install(self) -> None:
        self._installed.enter_context(report_to(_handled))
        self._installed.enter_context(watch_imports())

    def remove(self) -> None:
        self._installed.close()

    def forget(self) -> None:
        """A forked child is no rank."""
        self.remove()


def _handled(error: BaseException, code: CodeType, line: int) -> None:
    if _session is not None:
        _session.recorder.handled(error, code, line)


def install_started(given: Mapping[str, Any]) -> None:
    """In a process that a process under guard has started, with its settings."""
    global _started, _agent_port
    _started = True
    settings = dict(given)
    _agent_port = settings.pop("agent_port", "")
    if not installed():  # a forked process has it already
        install(**settings)


def run_started(
    given: Mapping[str, Any], target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The *target* of a process that a process under guard has started, under guard with its settings."""
    install_started(given)
    try:
        return target(*args, **kwargs)
    except BaseException as error:
        if _session is not None:
            _session.raised(error)
        raise


def _leave_agent(port: int) -> None:
    """A store is about to be made at *port*. Where the launcher has its own elsewhere, this is a rendezvous of the
    program's own: torch would look for the elastic agent's store there, and hang."""
    if _agent_port and str(port) != _agent_port:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def _is_rank() -> bool:
    """A process that has only been given a number by a launcher may start the ranks itself."""
    return _session is not None and bool(_session.recorder.world.id)


def remove() -> None:
    """Take the guard off again: groups made under guard go on, unrecorded."""
    global _session, _settings, _refused
    _refused = False
    while _hooks:  # in reverse: some replace what others have replaced
        _hooks.pop().remove()
    session, _session, _settings = _session, None, None
    if session is not None:
        for guard in list(session.guards):
            guard.detach()
        session.close()


def _open(given: World | None, where: str) -> Session | None:
    """The session of this process, made where there is none; *given*: rank and world size by the program's word."""
    global _session, _refused
    if _settings is None or _refused:
        return None
    if _session is None:
        if given is None and not launched(os.environ):
            return None
        _session = Session.open(_settings, given, where, local=not _started)
        _refused = _session is None
        silent = next((hook for hook in _hooks if hasattr(hook, "write_beside")), None)
        if _session is not None and silent is not None:
            _session.silent = silent
            silent.write_beside(_session.ring.path)
        if _session is not None:
            _session.by_hooks = _by_hooks
            _session.use_ddp(next((hook for hook in _hooks if hasattr(hook, "explain")), None))
        if _session is not None and _settings.monitor:
            _start_monitor(_session)
    return _session


def _start_monitor(session: Session) -> None:
    from distsim.debug.monitor.start import start_monitor

    try:
        session.heartbeat.monitor = start_monitor(session.directory, session.settings, session.ring.job)
    except OSError as error:
        print(f"distsim: no monitor ({error}); distsim diagnose {session.directory} works", file=sys.stderr)


def _may_meet() -> bool:
    """MPI's end is a meeting of all ranks. One that has failed stays away: mpirun ends the others then, but not before
    the monitor has looked at them."""
    if _session is None:
        return True
    if not _session.over():
        from distsim.debug.monitor.start import ask

        ask(_session.directory, _session.ring.job if _session.settings.monitor else "")
        return False
    return True


def _forget() -> None:
    """In a forked child (a data loader's worker): it is no rank, and the groups of its parent do not work in it."""
    global _session, _settings
    if _session is None:
        return  # the parent was no rank itself; its child may become one
    from distsim.realexec.process.children import InheritedGroup

    for guard in list(_session.guards):
        guard.forked(partial(InheritedGroup, ring=_session.ring.path))
    for hook in _hooks:
        if hasattr(hook, "forget"):
            hook.forget()
    _session = _settings = None


class DroppedHook:
    """`begins(rank, world_size, where)` is told of a process that was given its rank."""

    def __init__(self, begins: Callable[[int, int, str], None]) -> None:
        self._begins = begins
        self._undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        if self._undo:
            return
        for holder, name, value in [*in_torch.torch_patches(), (in_torch, "begins", self._joins)]:
            before = vars(holder).get(name, _ABSENT) if hasattr(holder, "__dict__") else getattr(holder, name)
            self._undo.append((holder, name, before))
            setattr(holder, name, value)

    def remove(self) -> None:
        while self._undo:
            holder, name, before = self._undo.pop()
            if before is _ABSENT:
                delattr(holder, name)
            else:
                setattr(holder, name, before)

    def _joins(self, meeting: Meeting, rank: int) -> None:
        if not dist.is_initialized():
            self._begins(rank, meeting.world_size, meeting.name)


_ABSENT = object()
