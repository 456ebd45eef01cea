"""Guard of one process: its ring, its hooks into torch.distributed, its heartbeat.

The heartbeat thread shows that the process lives, that its GIL is free, and where its main thread is.

It removes its own frames from the user's tracebacks, and keeps its code out of what torch.compile traces. For this
it registers each of its code objects with torch.compile's frame evaluator, which is always loaded, instead of
importing torch.compile's Python part, which takes a second or two.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch.distributed as dist
from msgspec.structs import replace

from distsim.debug.monitor.start import gone_text
from distsim.debug.records import Group, MainPosition, RankThread, Site
from distsim.debug.records.circumstances import note_handlers
from distsim.debug.records.frames import frame_of, is_ours, outward, program_frames, raised_at, shown, steps
from distsim.debug.report.news import report_files
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import (
    LIGHTHOUSE,
    RecordedWorld,
    create_private,
    default_directory,
    job_name,
    private_folder,
    ring_path,
    room_note,
    stack_path,
)
from distsim.debug.rings.reader import ranks_here
from distsim.debug.rings.writer import RingWriter
from distsim.debug.settings import LAUNCHED, Level, Settings, say_once_a_job
from distsim.realexec.guard.handle import drain
from distsim.realexec.guard.recorder import GroupLog, Recorder
from distsim.realexec.process.sampling import PositionSampler
from distsim.realexec.process.worlds import Worlds, count_in, launcher_world
from distsim.text import original_print
from distsim.torch_compat import compiler

BEAT_S = 0.1
"""Seconds between heartbeats. One costs about 20 us of the interpreter, so 0.01 to 0.02 percent."""
MOST_FRAMES = 4
"""Frames of a thread beside the main one that are recorded."""
AT_EXIT = ("_shutdown", "_exit_function", "_python_exit")
"""Python's functions that wait for threads and child processes after the script."""
LEAVE_S = 2.0
"""Seconds that the process waits at its end for a heartbeat that is being written."""


class Heartbeat:
    """Thread that writes heartbeats into the ring.

    It also records the end of asynchronous calls, and the position of a main thread that does not move.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.main_thread().ident or 0
        self._last = (0, 0, 0)
        """Id of the main thread's frame, its position and the number of calls at the last heartbeat. A reference to the
        frame would keep its tensors and groups alive.
        """
        self._sampler = PositionSampler(recorder.ring, self._main)
        self._count = -1
        self._looked = False
        self._stands = MainPosition()
        self._placed = threading.RLock()
        """Lock held while a position is written. It is reentrant, because a signal handler may end the process in
        between.
        """
        self._kept = self._left = False
        self.makes_unwatched_calls = False
        """Whether the program has constructed a process group itself, whose calls are not recorded."""
        self.has_replicas = False
        """Whether torchft's groups are watched, which a program uses without a default group."""
        self.look: Callable[[], None] | None = None
        """Called once each time the main thread stops moving."""
        self.monitor: subprocess.Popen[bytes] | None = None
        """Monitor that this process has started; None if it has not."""

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="distsim-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it.

        If the interpreter shuts down while a thread is inside torch's C++ (polling works, dropping them), Python
        3.11 aborts the process (SIGABRT).
        """
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(LEAVE_S)

    def keep_position(self) -> None:
        """Continue the heartbeat without updating the position, because the process is ending."""
        with self._placed:
            self._kept = True

    def outlived(self) -> None:
        """Record that the script has ended, so that its process waits for child processes from here on."""
        self._recorder.ring.position(replace(self._stands, through=True))

    def _run(self) -> None:
        words = self._recorder.ring.words
        base = rings.WORDS_AT // 8
        while not self._stop.wait(BEAT_S):
            try:
                words[base + rings.W_BEAT] = time.monotonic_ns()
                self._recorder.sweep()
                self._membership()
                self._look_after_monitor()
                self._sampler.step()
                with self._placed:
                    if not self._kept:
                        self._position()
            except (ValueError, TypeError):  # the ring was closed, or the interpreter goes down
                return

    def _membership(self) -> None:
        """Record whether further calls are expected: not after the default group was destroyed, or if a group is not
        watched.
        """
        words, base = self._recorder.ring.words, rings.WORDS_AT // 8
        joined = bool(words[base + rings.W_JOINED]) and not self.has_replicas
        left = self.makes_unwatched_calls or (joined and not dist.is_initialized())
        if left != self._left:
            self._left = left
            words[base + rings.W_LEFT] = left

    def _look_after_monitor(self) -> None:
        """Report once if the monitor was killed. A monitor that ends by itself reports why."""
        if self.monitor is None or self.monitor.poll() is None:
            return
        monitor, self.monitor = self.monitor, None
        if monitor.returncode < 0:
            original_print(gone_text(monitor.pid, monitor.returncode), file=sys.stderr, flush=True)

    def _position(self) -> None:
        """Record the position of the main thread if it has made no call since the last heartbeat."""
        count = self._recorder.ring.words[rings.WORDS_AT // 8 + rings.W_COUNT]
        if count != self._count:
            self._count = count
            return
        frame = frame_of(self._main)
        if frame is None:
            return
        here = (id(frame), frame.f_lasti, count)
        if here != self._last:
            self._last = here
            self._looked = False
            # The frame below the user's own, too: "in DataLoader.__next__" says more than a line.
            keys: list[str] = []
            if frame.f_code.co_name == "distsim_store_wait":
                local_keys = frame.f_locals.get("keys", ())
                keys = [local_keys] if isinstance(local_keys, str) else [str(key) for key in local_keys]
            inner = Site(shown(frame.f_code.co_filename), frame.f_lineno or 0, frame.f_code.co_qualname)
            self._stands = MainPosition(inner, program_frames(steps(frame)), tuple(keys))
            self._recorder.ring.position(self._stands)
        elif not self._looked:
            self._looked = True
            threads, through = _threads(frame)
            if threads or through:
                self._recorder.ring.position(replace(self._stands, threads=threads, through=through))
            if self.look is not None:
                self.look()


def _threads(main: FrameType) -> tuple[tuple[RankThread, ...], bool]:
    """Return the other threads of the program (name, whether it is a daemon, user frames), and whether the script has
    ended, so that the frame *main* waits for them or for child processes.
    """
    *_, outermost = outward(main)
    stacks: list[RankThread] = []
    for thread in threading.enumerate():
        if thread.name.startswith("distsim-"):
            continue  # this one, too, whose frame would hold itself
        frame = frame_of(thread.ident)
        if frame is None or frame is main:
            continue
        stack = program_frames(steps(frame), depth=MOST_FRAMES)
        if stack or not thread.daemon:
            pool = None if stack else _pool_of(frame)
            stacks.append(RankThread(thread.name[:100], thread.daemon, stack, pool=pool))
    return tuple(stacks), outermost.f_code.co_name in AT_EXIT and not is_ours(outermost.f_code.co_filename)


def _pool_of(frame: FrameType | None) -> Site | None:
    """Return the line that made the executor of which *frame* is a worker, or None."""
    for one in outward(frame):
        if one.f_code.co_name == "_worker" and "executor_reference" in one.f_code.co_varnames:
            return getattr(one.f_locals["executor_reference"](), "distsim_made_at", None)
    return None


STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else 0
"""Signal on which faulthandler writes all stacks. SIGUSR1 and SIGUSR2 are left to Slurm and users. 0 where there is
none (not Linux).
"""
OURS = ("distsim.realexec", "distsim.debug")


@dataclass
class Session:
    """Guard of this process, from the moment its rank is known until it ends or `remove()` is called."""

    settings: Settings
    directory: Path
    rank: int
    """Rank in the ring's `layout.HEADER`, like `world_size`. The default group's are in `recorder.world`."""
    world_size: int
    local_world: int
    """Number of ranks that the launcher started on this host; 0 if unknown."""
    ring: RingWriter
    recorder: Recorder
    worlds: Worlds
    heartbeat: Heartbeat
    strict: Any = None
    ddp: Any = None
    silent: Any = None
    """Recorder for the search for silent faults (`process.silent`), or None."""
    _stack_file: Any = None
    guards: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    @classmethod
    def open(
        cls, settings: Settings, given: RecordedWorld | None, where: str = "", *, local: bool = True
    ) -> Session | None:
        """Create the ring of this process; return None, with one line on stderr, if that fails.

        Args:
            settings: The guard's settings.
            given: World with the rank and size that the program passes to init_process_group, if it does.
            where: Position of that call, for messages.
            local: Whether the launcher's variables describe this process and not its parent.
        """
        environ = os.environ
        first, launched = launcher_world(environ if local else {}, given)
        rank, world_size = first.rank, first.size
        local_rank = count_in(environ, "LOCAL_RANK") if launched else -1
        local_world = count_in(environ, "LOCAL_WORLD_SIZE") or 0 if launched else 0
        job = job_name(environ, where)
        directory = Path(settings.directory) if settings.directory else default_directory(job, local_world or 1)
        if not settings.directory and (note := room_note(directory, local_world or 1)):
            say_once_a_job(note)
        # A replica of torchft is started again alone: the others' records stay those of this attempt.
        attempt = 0 if environ.get(LIGHTHOUSE) else count_in(environ, "TORCHELASTIC_RESTART_COUNT") or 0
        try:
            if not settings.directory:
                private_folder(directory.parent)
            private_folder(directory, chosen=bool(settings.directory))
            ring = RingWriter(
                ring_path(directory, rank, attempt, job),
                rank=rank,
                world_size=world_size,
                local_rank=rank if local_rank is None else local_rank,
                job=job,
                attempt=attempt,
            )
        except OSError as error:
            original_print(
                f"distsim: rank {rank} runs unguarded: no ring in {directory} ({error.strerror}); "
                "choose another folder with DISTSIM_DIR",
                file=sys.stderr,
                flush=True,
            )
            return None
        ring.header(rings.W_LOCAL_WORLD, local_world)
        if settings.verbose:
            name = directory.name if LAUNCHED in environ else job
            places = report_files(settings.report, name) or [str(directory / "verdict.json")]
            original_print(
                f"distsim: rank {rank}: flight records in {directory}, report in {places[-1]}", file=sys.stderr
            )
        recorder = Recorder(ring)
        worlds, beat = Worlds(recorder), Heartbeat(recorder)
        session = cls(settings, directory, rank, world_size, local_world, ring, recorder, worlds, beat)
        session._catch_stacks()
        if settings.level is Level.STRICT:
            from distsim.realexec.strict.peers import Peers
            from distsim.realexec.strict.strict import Strict

            leave_uncompiled()

            session.strict = Strict(recorder, Peers(directory, ring, attempt))
        session.heartbeat.start()
        return session

    def _catch_stacks(self) -> None:
        try:
            path = stack_path(self.ring.path)
            file = open(create_private(path), "w")  # noqa: SIM115  (faulthandler keeps it)
            with contextlib.suppress(ValueError):  # in a thread
                # faulthandler puts this back when the interpreter goes down; the default would kill the process then.
                signal.signal(STACK_SIGNAL, signal.SIG_IGN)
            faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
            if not faulthandler.is_enabled():
                faulthandler.enable(file=file)
        except (OSError, RuntimeError, ValueError):
            return
        self._stack_file = file
        self.ring.header(rings.W_STACK_SIGNAL, int(STACK_SIGNAL))

    def log_of(self, pg: Any, ranks: tuple[int, ...], world: RecordedWorld | None = None) -> GroupLog:
        """Return a new log of torch's group *pg*; *ranks* are its ranks in *world*, by default the default group's."""
        return self.recorder.group_log(str(pg.group_name), str(pg.group_desc), ranks, world)

    def guard(self, pg: Any, log: GroupLog, held: bool = False) -> Any:
        """Guard *pg*, and return the group or recorder that records its calls.

        Args:
            pg: torch's group. If it is guarded already, it is returned.
            log: Its new log.
            held: Whether the program may already hold a reference to the group.
        """
        from distsim.realexec.guard.group import GuardedGroup, HeldGroup

        known = isinstance(pg, GuardedGroup)
        inner = pg.inner if known else pg
        kind: Any = HeldGroup if held else GuardedGroup
        guard = self._guard(pg if known else None, inner, log, kind)
        guards = [guard]
        if guard.has_two_backends():
            host = Group(log.name, str(pg.group_desc), log.ranks).beside("cpu")
            host_log = self.recorder.group_log(host.name, host.description, host.ranks, log.world)
            guard.on_host = self._guard(None, inner, host_log, GuardedGroup)
            guards.append(guard.on_host)
        for one in guards:
            one.decide_way()
            self.guards.add(one)
        return guard

    def _guard(self, guard: Any, inner: Any, log: GroupLog, kind: Any) -> Any:
        from distsim.realexec.guard.tensor_checks import Checksums

        if guard is None:
            guard = kind(inner, log, self.recorder)
        else:
            guard.group_log, guard.recorder = log, self.recorder
        guard.strict = self.strict
        guard.nan = self.settings.nan
        guard.silent = None if self.silent is None else self.silent.collector
        guard.checksums = Checksums(self.recorder) if self.settings.checksum else None
        return guard

    def joined(self) -> None:
        """Record that init_process_group has returned."""
        import time

        self.ring.header(rings.W_JOINED, time.monotonic_ns())
        self.ring.header(rings.W_LIFE, rings.LIFE_JOINED)
        world = self.recorder.world
        here = ranks_here(self.directory, self.ring.job, world)
        if len(here) < world.size:
            from distsim.realexec.process.introduce_monitors import introduce_monitors

            introduce_monitors(self.directory, world.rank, first=world.rank == min(here, default=world.rank))

    def raised(self, error: BaseException) -> None:
        """Record that the program ends with this exception."""
        hide_own_frames(error)
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            self.ring.header(rings.W_EXIT_CODE, rings.EXIT_CODE_0 + code)
            note_handlers()
            self.stands_at(raised_at(error.__traceback__))
            return
        explained = self.ddp.explain(error) if self.ddp is not None else None
        if explained is not None:
            self.find("ddp_unused_parameter", explained)
        self.ring.header(rings.W_EXCEPTION, self.recorder.exception(error))
        self.ring.header(rings.W_LIFE, rings.LIFE_RAISED)

    def stands_at(self, frames: Sequence[Site]) -> None:
        """Record the position at which the main thread leaves the program."""
        if frames:
            self.heartbeat.keep_position()
            self.ring.position(MainPosition(frames[0], tuple(frames)))

    def use_ddp(self, ddp: Any) -> None:
        """Set the object that explains DDP's models when the rank does not progress or raises."""
        self.ddp = ddp
        if ddp is None:
            return

        def look() -> None:
            text = ddp.without_gradient()
            if text is not None:
                self.find("ddp_unused_parameter?", text)
            count = self.ring.words[rings.WORDS_AT // 8 + rings.W_COUNT]
            self.ring.header(rings.W_GUESSED, 0 if text is None else count + 1)

        self.heartbeat.look = look

    def find(self, kind: str, text: str) -> None:
        """Record a finding for the diagnosis."""
        finding = {"kind": kind, "text": text}
        self.ring.header(rings.W_FINDING, self.ring.entry(rings.TABLE_TEXT, (kind, text), finding))

    def exits(self, code: int | None = None, life: int = rings.LIFE_EXITING) -> None:
        """Record that the process ends by itself, with exit code *code* if it is known."""
        if code is not None:
            self.ring.header(rings.W_EXIT_CODE, rings.EXIT_CODE_0 + code)
        self.recorder.sweep()
        if self.silent is not None:
            self.silent.end()
        if self.ring.words[rings.WORDS_AT // 8 + rings.W_LIFE] != rings.LIFE_RAISED:
            self.ring.header(rings.W_LIFE, life)

    def over(self) -> bool:
        """Record that the exit handlers have run; return whether the process has not failed and may still run a
        library's exit code.
        """
        words = self.ring.words
        life, code = (int(words[rings.WORDS_AT // 8 + which]) for which in (rings.W_LIFE, rings.W_EXIT_CODE))
        if life == rings.LIFE_RAISED or code not in (0, rings.EXIT_CODE_0):
            return False
        self.ring.header(rings.W_LIFE, rings.LIFE_OVER)
        return True

    def end_threads(self) -> None:
        """Stop all threads of the guard (see `Heartbeat.stop`)."""
        if self._stack_file is not None:
            # Who is asked while threads end reads what they free: only the thread that is asked shows its stack now.
            with contextlib.suppress(Exception):
                faulthandler.register(STACK_SIGNAL, file=self._stack_file, all_threads=False, chain=False)
        self.heartbeat.stop()
        if self.strict is not None:
            self.strict.stop()
            drain()

    def close(self) -> None:
        """Stop the heartbeat and unmap the ring, whose file remains."""
        self.end_threads()
        with contextlib.suppress(Exception):
            faulthandler.unregister(STACK_SIGNAL)
        self.ring.header(rings.W_STACK_SIGNAL, 0)
        self.exits()


def hide_own_frames(error: BaseException) -> None:
    """Remove the guard's frames from the tracebacks of *error* and its causes, unless the error looks like a fault of
    the guard."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        todo += [one.__cause__, one.__context__]
        steps = _steps(one.__traceback__)
        user_steps = [step for step in steps if not _ours(step)]
        if user_steps and (user_steps[-1] is steps[-1] or isinstance(one, (RuntimeError, ValueError))):
            for step, following in zip(user_steps, [*user_steps[1:], None], strict=True):
                step.tb_next = following
            one.__traceback__ = user_steps[0]


def _steps(trace: TracebackType | None) -> list[TracebackType]:
    steps = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    return steps


def _ours(step: TracebackType) -> bool:
    return is_ours(step.tb_frame.f_code.co_filename)


def leave_uncompiled() -> None:
    """Register all loaded functions of the guard with torch.compile's frame evaluator, so that it skips them."""
    leave = compiler.leaves_code()
    if leave is None:
        return  # another torch
    for name, module in sys.modules.copy().items():
        if name.startswith(OURS) and isinstance(module, ModuleType):
            for code in _codes(module):
                leave(code)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    held = list(vars(module).values())
    held += [member for one in held if isinstance(one, type) for member in vars(one).values()]
    for one in held:
        function = getattr(one, "fget", None) or getattr(one, "__func__", one)
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
