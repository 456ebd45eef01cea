"""Implementation of `distsim.debug.install()` and `remove()`."""

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

from distsim.debug.evidence.watched_source import report_to, watch_imports, watch_suppress, watch_tasks, watch_threads
from distsim.debug.rings.files import RecordedWorld
from distsim.debug.settings import Level, Settings, Silent, say_once_a_job, warn_of_unknown_variables
from distsim.realexec.process.end_hooks import EndHooks
from distsim.realexec.process.session import Session
from distsim.realexec.process.worlds import count_in, launched, started_by_mpirun
from distsim.shelves import shelf
from distsim.torch_compat import rpc
from distsim.torch_compat.names import GUARD, Patches, TorchName
from distsim.torch_compat.releases import compared, guard_refusal, remarks

_session: Session | None = None
_settings: Settings | None = None
_hooks: list[Any] = []
_started = False
"""Whether a watched process started this one, so that its launcher's variables do not describe this rank."""
_agent_port = ""
"""Port of the launcher's store; empty if no launcher has one."""
_refused = False
"""Whether the ring could not be created, so that the process continues without a guard."""


def current_session() -> Session | None:
    """Return the session of this process, or None before its rank is known or if nothing is installed."""
    return _session


def installed() -> bool:
    """Return whether groups of this process are watched."""
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
    """Watch every process group of this process; see `distsim.debug.install` for the arguments."""
    global _settings, _agent_port
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
        shelf("mpi groups").enable(_may_meet)
    if settings.level is Level.OFF:
        if settings.silent is not Silent.OFF:
            say_once_a_job("silent faults: not searched at level off")
        return
    _settings = settings
    if not _agent_port and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _agent_port = os.environ.get("MASTER_PORT", "")
    refusal = guard_refusal() if dist.is_available() else "this torch was built without torch.distributed"
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
    """Let the job run without a guard, and print one line about it."""
    remove()
    if not _started:
        say_once_a_job(f"the job runs without a guard: {' '.join(why.split())}")


def _install_hooks(settings: Settings, given: Mapping[str, Any]) -> None:
    from distsim.realexec.guard.api_wrappers import Shortcuts
    from distsim.realexec.process.children import PopenHook, SpawnHook
    from distsim.realexec.process.ddp import DdpHook
    from distsim.realexec.process.hooks import Hooks
    from distsim.realexec.process.session import leave_uncompiled

    hooks = Hooks(_open, current_session, _leave_agent)
    passed_on = {"dir" if key == "directory" else key: value for key, value in given.items()}
    in_order: list[Any] = [
        hooks,
        shelf("dropped names, guarded").DroppedHook(hooks.begin_init),
        EndHooks(current_session),
        DdpHook(),
        SpawnHook(run_started, {**passed_on, "agent_port": _agent_port}, _is_rank),
        PopenHook(settings.environment()),
        Shortcuts(),
    ]
    if settings.silent is not Silent.OFF:
        from distsim.realexec.process.silent import SilentHook

        in_order.append(SilentHook())
    in_order.append(HandlerHook())
    if dist.rpc.is_available():
        in_order.append(RpcDoor())
    for hook in in_order:
        _hooks.append(hook)
        hook.install()
    leave_uncompiled()
    os.register_at_fork(after_in_child=_forget)
    if dist.is_initialized():
        hooks.late()
    elif not _started and (count_in(os.environ, "WORLD_SIZE") or 1) > 1:
        # The ring exists from here on: who dies before init_process_group is seen, too. A world of one
        # may be a launcher of ranks itself: whether it is one, init_process_group tells.
        _open(None, "")


class HandlerHook:
    """Records exceptions that end a thread, or that the program handles in files that are imported after it."""

    def __init__(self) -> None:
        self._installed = contextlib.ExitStack()

    def install(self) -> None:
        """Watch imports from now on."""
        self._installed.enter_context(report_to(_handled))
        self._installed.enter_context(watch_imports())
        self._installed.enter_context(watch_threads())
        self._installed.enter_context(watch_suppress())
        self._installed.enter_context(watch_tasks())

    def remove(self) -> None:
        """Stop watching."""
        self._installed.close()

    def forget(self) -> None:
        """Stop watching in a forked child, which is not a rank."""
        self.remove()


def _handled(error: BaseException, code: CodeType, line: int, thread: str = "") -> None:
    if _session is not None:
        _session.recorder.handled(error, code, line, thread)


def install_started(given: Mapping[str, Any]) -> None:
    """Install the guard in a process that a watched process started, with that process's settings."""
    global _started, _agent_port
    _started = True
    settings = dict(given)
    _agent_port = settings.pop("agent_port", "")
    if not installed():  # a forked process has it already
        install(**settings)


def run_started(
    given: Mapping[str, Any], target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the *target* of a process that a watched process started, with the guard installed."""
    install_started(given)
    try:
        return target(*args, **kwargs)
    except BaseException as error:
        if _session is not None:
            _session.raised(error)
        raise


def _leave_agent(port: int) -> None:
    """Unset torch's variable for the elastic agent's store if the program makes a store at another *port*.

    torch would otherwise look for the agent's store at the program's address, and hang.
    """
    if _agent_port and str(port) != _agent_port:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def _is_rank() -> bool:
    """Return whether this process is a rank. A process with a launcher's rank may only be the parent of ranks."""
    return _session is not None and bool(_session.recorder.world.id)


def remove() -> None:
    """Stop watching. Existing groups continue to work and are no longer recorded."""
    global _session, _settings, _refused
    _refused = False
    while _hooks:  # in reverse: some replace what others have replaced
        _hooks.pop().remove()
    session, _session, _settings = _session, None, None
    if session is not None:
        for guard in list(session.guards):
            guard.detach()
        session.close()


def _open(given: RecordedWorld | None, where: str) -> Session | None:
    """Return the session of this process, opened if needed; *given* is the program's rank and world size."""
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
    """Return whether this rank may take part in MPI_Finalize, in which all ranks meet.

    A failed rank stays away, so that mpirun ends the others after the monitor has examined them.
    """
    if _session is None:
        return True
    if not _session.over():
        from distsim.debug.monitor.start import ask

        ask(_session.directory, _session.ring.job if _session.settings.monitor else "")
        return False
    return True


def _forget() -> None:
    """Detach a forked child such as a data loader's worker, which is not a rank and cannot use its parent's groups."""
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


class RpcDoor:
    """Watches remote calls from the first init_rpc on: few programs make one, and a call before it fails in torch."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._hooks: Any = None

    def install(self) -> None:
        """Wait for init_rpc, or for the part of it that a program reaches that imported it before the guard came."""
        for name in (rpc.INIT, rpc.INIT_BACKEND):
            self._patches.wrap(name, partial(self._enter, name))

    def _enter(self, name: TorchName, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._hooks is not None:
            return original(*args, **kwargs)
        self._hooks = shelf("guarded rpc").RpcHooks(_open, current_session)
        self._hooks.install()
        return name.get()(*args, **kwargs)

    def remove(self) -> None:
        """Undo the patches."""
        if self._hooks is not None:
            self._hooks.remove()
        self._patches.remove()

    def forget(self) -> None:
        """Drop the state in a forked child."""
        if self._hooks is not None:
            self._hooks.forget()
