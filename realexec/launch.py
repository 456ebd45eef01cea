"""`distsim run --on gloo|nccl|mpi`: torch elastic with every rank guarded and a monitor beside it.

The ranks' rings are in a folder of the run, which is kept for a while. The last line that is printed, after all
output of the ranks, says what to do next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from distsim.debug.diagnosis.silent.facts import check_patterns
from distsim.debug.evidence.processes import launcher_of, own_process
from distsim.debug.monitor.start import VERDICT_WAIT_S, ask, gone_text, start_monitor
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.report.console import piped_width
from distsim.debug.report.news import COMMAND_S
from distsim.debug.report.rank_states import MARKER
from distsim.debug.report.render import render_diagnoses
from distsim.debug.rings.files import default_bases, default_directory, private_folder, room_note, write_private
from distsim.debug.rings.reader import RingReader
from distsim.debug.settings import LAUNCHED, OTLP, Level, OnHang, OnSlow, Settings, Silent, warn_of_unknown_variables
from distsim.errors import UsageError
from distsim.realexec.process.worlds import started_by_mpirun
from distsim.shelves import shelf
from distsim.text.untrusted_input import read_json
from distsim.torch_compat import groups
from distsim.torch_compat.names import GUARD
from distsim.torch_compat.releases import guard_refusal, remarks

SEARCH_S = 120.0
"""Seconds that the monitor may search for silent faults after the ranks have ended."""
SILENT_FAULT = 5
"""Exit code of a job that ended well with an error found by `--silent strict`."""
SLOW_RANK = 5
"""Exit code of a job that ended well with a slow rank, with `--on-slow fail`."""
KEPT_RUNS = 32
"""Number of failed runs whose folders are kept for `distsim diagnose`. A rank's ring takes 2 MiB of /dev/shm."""


def launch(args: argparse.Namespace) -> int:
    """Run a script under torch elastic.

    Return 0 if it finished, 1 if a rank failed, 3 for a hang, 4 for inconsistent collectives, 5 for a silent error or a
    slow rank.
    """
    _check_backend(args.on)
    warn_of_unknown_variables()
    leave_outer_job()
    started = started_by_mpirun(os.environ) if args.on == "mpi" else None
    if started is not None:
        return int(shelf("mpi launcher").become_rank(args, started, Settings.read(_given(args))))
    settings, directory, own = _settings(args)
    _check_silent(args, settings)
    monitor: subprocess.Popen[bytes] | None = None
    over = threading.Event()
    refusal = guard_refusal() if settings.level is not Level.OFF else ""
    if refusal:
        print(f"distsim: the job runs without a guard: {refusal}", file=sys.stderr)
    elif settings.level is not Level.OFF:
        for line in remarks(GUARD):
            print(f"distsim: note: {line}", file=sys.stderr)
        try:
            write_private(directory / "launcher.json", json.dumps(own_process()))
            monitor = start_monitor(directory, settings, job="")
        except OSError as error:
            print(
                f"distsim: the job runs without a guard: no flight records in {directory} ({error.strerror}); "
                "choose another place with --rings DIR",
                file=sys.stderr,
            )
        else:
            os.environ.update(Settings.environment(settings), DISTSIM_MONITOR="0", **{LAUNCHED: settings.directory})
    if monitor is not None:
        # Daemonic: it only waits. A monitor that ends by itself has said why.
        threading.Thread(target=say_if_killed, args=(monitor, over), name="distsim-monitor", daemon=True).start()
    kept = _Folder(directory, monitor, settings)
    try:
        return _to_the_end(args, kept, own, over)
    except (SignalException, KeyboardInterrupt) as error:  # a second one, or the first after the ranks have ended
        over.set()
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else error.sigval
        for other in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(other, signal.SIG_IGN)
        kept.kill_all()
        name = signal.Signals(number).name
        print(
            f"distsim: {name} before the monitor's verdict: the ranks have ended, and there is no diagnosis",
            file=sys.stderr,
        )
        return 128 + int(number)


def _to_the_end(args: argparse.Namespace, kept: _Folder, own: bool, over: threading.Event) -> int:
    failed: list[str] = []
    try:
        with _exits_recorded(kept):
            if args.on == "mpi":
                code = shelf("mpi launcher").run_mpirun(args, kept.mpirun)
            else:
                code = _run(args, kept.monitor is not None, failed)
    finally:
        over.set()
    verdict = _last_word(kept)
    try:
        return _exit_code(args, kept, own, code, verdict, failed)
    finally:
        print(verdict_line(verdict), end="", file=sys.stderr)  # far up there by now, behind what the ranks have said


def _exit_code(
    args: argparse.Namespace, kept: _Folder, own: bool, code: int, verdict: dict[str, Any], failed: list[str]
) -> int:
    """Return the launcher's exit code, from the ranks' and the monitor's, and print where the rings are kept."""
    directory, monitor = kept.directory, kept.monitor
    if verdict.get("killed_after_end"):
        code = 0  # the programs of all ranks have ended well
    elif not verdict.get("exit_code"):
        print("".join(failed), end="", file=sys.stderr)
    if code and verdict.get("exit_code"):
        code = int(verdict["exit_code"])
    elif code == 0 and (verdict.get("exit_code") == 4 or _left_others(verdict)):
        code = int(verdict["exit_code"])  # it ended, and computed something else than it says, or not all of it
    elif (
        code == 0
        and kept.silent is Silent.STRICT
        and any(finding.get("level") == "error" for finding in verdict.get("silent") or ())
    ):
        code = SILENT_FAULT
    elif code == 0 and kept.on_slow is OnSlow.FAIL and any("pace" in one for one in verdict.get("diagnoses", ())):
        code = SLOW_RANK
    interrupted, without_rings = code > 128, verdict.get("world_size") == 0
    if without_rings and not code and not args.no_python:
        print(
            f"distsim: {args.training_script} made no process group under guard; ranks that it starts with subprocess "
            "are watched where they run as python -m distsim.debug SCRIPT",
            file=sys.stderr,
        )
    if kept.restored or (monitor is not None and not directory.exists()):
        shutil.rmtree(directory, ignore_errors=True)
        if not verdict.get("inconclusive"):
            print(
                "distsim: the flight records were removed while the job ran; nothing is left to diagnose",
                file=sys.stderr,
            )
    elif verdict.get("inconclusive"):
        return code  # the monitor has said where the rings are
    elif own and (monitor is None or not code or without_rings):
        shutil.rmtree(directory, ignore_errors=True)
    elif code and verdict.get("diagnoses") and own and not interrupted:
        print(f"distsim: to see this report again: distsim diagnose {directory}", file=sys.stderr)
    elif code and monitor is not None and not without_rings:
        print(f"distsim: the flight records are in {directory}; distsim diagnose {directory}", file=sys.stderr)
    return code


class _Folder:
    """Folder of the rings, in which launcher and monitor also exchange notes."""

    def __init__(self, directory: Path, monitor: subprocess.Popen[bytes] | None, settings: Settings) -> None:
        self.directory = directory
        self.monitor = monitor
        self.silent, self.on_slow = settings.silent, settings.on_slow
        self.wait_s = VERDICT_WAIT_S + (2 if self.silent is Silent.OFF else SEARCH_S)
        """Seconds that the monitor may take after the ranks have ended."""
        if settings.on_verdict:
            self.wait_s += COMMAND_S
        self.restored = False
        """Whether another program deleted the folder, with the rings, during the job."""
        self.contexts: list[Any] = []
        """Processes that torch elastic started: the ranks of each attempt."""
        self.mpirun: list[subprocess.Popen[bytes]] = []
        """mpirun's processes, if they started the ranks instead; the ranks end with them."""

    def restore(self) -> None:
        """Create the folder again if it was deleted: the monitor, which has the rings mapped, still reads notes from
        it.
        """
        if self.monitor is None or (self.directory / "launcher.json").exists():
            return
        self.restored = True
        with contextlib.suppress(OSError):
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            write_private(self.directory / "launcher.json", json.dumps(own_process()))
            write_private(self.directory / "monitor..lock", str(self.monitor.pid))

    def kill_all(self) -> None:
        """Kill every rank, the processes that it started, and the monitor."""
        for context in self.contexts:
            over = _codes(context)
            for pid in (pid for local_rank, pid in context.pids().items() if local_rank not in over):
                with contextlib.suppress(OSError):
                    (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
        for process in self.mpirun:
            process.kill()
        if self.monitor is not None:
            self.monitor.kill()
            self.monitor.wait()


def _left_others(verdict: Mapping[str, Any]) -> bool:
    """Return whether the verdict is that a rank left while others made calls: they may have failed in exit handlers,
    whose exceptions Python prints and forgets.
    """
    return bool(verdict.get("exit_code")) and verdict["diagnoses"][0]["kind"] == "rank_exited"


def _check_silent(args: argparse.Namespace, settings: Settings) -> None:
    """Raise UsageError for a search for silent faults that cannot take place."""
    if settings.silent is Silent.OFF:
        return
    check_patterns(settings.silent_patterns)
    if settings.level is Level.OFF:
        raise UsageError(
            f"--silent {settings.silent}: the guard looks for silent faults, and --level off turns the guard off"
        )
    if str(args.nnodes or "1") not in ("1", "1:1"):
        raise UsageError(f"--silent {settings.silent}: jobs of several hosts are not searched for silent faults yet")


def _check_backend(on: str) -> None:
    if on == "nccl":
        if not dist.is_nccl_available():
            raise UsageError(
                f"--on nccl: this torch ({torch.__version__}) was built without NCCL; install a CUDA build of torch, "
                "or use --on gloo"
            )
        if not torch.cuda.is_available():
            raise UsageError("--on nccl: no GPU here; use --on gloo, or simulate with --on dgx-h100:1")
    if on == "mpi":
        shelf("mpi launcher").check()
    if on == "gloo" and not dist.is_gloo_available():
        raise UsageError(
            f"--on gloo: this torch ({torch.__version__}) was built without gloo; install a standard wheel"
        )


def leave_outer_job() -> None:
    """Remove the outer job's settings from the environment of a rank that launches a job of its own.

    The level applies to both, but the rings, the report and the monitor belong to the outer job.
    """
    outer = os.environ.pop(LAUNCHED, None)
    if outer is None:
        return
    if os.environ.get("DISTSIM_DIR") == outer:
        del os.environ["DISTSIM_DIR"]
    for name in ("DISTSIM_REPORT", "DISTSIM_MONITOR", "DISTSIM_EVENTS", "DISTSIM_ON_VERDICT"):
        os.environ.pop(name, None)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "level": getattr(args, "level", None),
        "on_hang": getattr(args, "on_hang", None) or os.environ.get("DISTSIM_ON_HANG") or OnHang.ABORT,
        "hang_after_s": getattr(args, "hang_after", None),
        "report": _whole_path(getattr(args, "report", None)),
        "events": _whole_path(getattr(args, "events", None)),
        "on_verdict": getattr(args, "on_verdict", None),
        "verbose": getattr(args, "verbose", False) or None,
        "directory": getattr(args, "rings", None),
        "nan": getattr(args, "nan", False) or None,
        "checksum": getattr(args, "checksum", False) or None,
        "on_slow": getattr(args, "on_slow", None),
        "silent": getattr(args, "silent", None),
        "silent_allow": ",".join(getattr(args, "silent_allow", ())) or None,
    }


def _whole_path(path: str | None) -> str | None:
    return path if path in (None, "", "-", OTLP) else os.path.abspath(path)


def _settings(args: argparse.Namespace) -> tuple[Settings, Path, bool]:
    given = _given(args)
    settings = Settings.read(given)
    own = not settings.directory
    try:
        if own:
            ranks = _local_ranks(args)
            for base in default_bases():
                forget_old_runs(base)
            base = default_directory("x", ranks).parent
            private_folder(base)
            directory = Path(tempfile.mkdtemp(prefix="run-", dir=base))
            if note := room_note(directory, ranks):
                print(f"distsim: {note}", file=sys.stderr)
        else:
            private_folder(Path(settings.directory), chosen=True)
            directory = Path(settings.directory).resolve()
            refuse_company(directory)
            clear(directory)
    except OSError as error:
        where = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise UsageError(f"cannot write flight records ({where}); choose another folder with --rings DIR") from None
    given["directory"] = str(directory)
    return Settings.read(given), directory, own


def _local_ranks(args: argparse.Namespace) -> int:
    """Return the number of ranks of this host; 1 if only torchrun knows it."""
    from torch.distributed.run import determine_local_world_size

    try:
        return int(determine_local_world_size(str(args.nproc_per_node)))
    except (AttributeError, ValueError):
        return 1


def _run(args: argparse.Namespace, guarded: bool, failed: list[str]) -> int:
    from torch.distributed import run as torchrun

    original = torchrun.config_from_args

    def config_from_args(parsed: Any) -> Any:
        if torchrun.determine_local_world_size(parsed.nproc_per_node) > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would, with ten lines of warning
        config, command, words = original(parsed)
        flag = getattr(parsed, "local_rank_flag", None) or "--local-rank"  # what torch says
        words = [word.replace("--local-rank=${", f"{flag}=${{", 1) for word in words]
        return (config, *_guarded(parsed, command, words)) if guarded else (config, command, words)

    torchrun.config_from_args = config_from_args
    try:
        torchrun.run(args)
    except ChildFailedError as error:
        failed.append(failure_line(error))
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    except (ValueError, AssertionError) as error:  # torchrun's own complaints about its flags
        raise UsageError(str(error)) from None
    finally:
        torchrun.config_from_args = original
    return 0


def _guarded(args: argparse.Namespace, command: Any, words: list[str]) -> tuple[Any, list[str]]:
    """Return the worker's command, with the guard installed before the script."""
    if callable(command):  # --run-path
        return run_guarded_path, words
    if args.no_python:
        print(
            f"distsim: --no-python: {args.training_script} is watched only if it calls distsim.debug.install()",
            file=sys.stderr,
        )
        return command, words
    at = 1 if words and words[0] == "-u" else 0
    return command, [*words[:at], "-m", "distsim.debug", *words[at:]]


def run_guarded_path(script: str, *words: str) -> None:
    """Run a script under the guard as torchrun's `--run-path` does."""
    from distsim.debug.__main__ import main

    main([script, *words])


@contextlib.contextmanager
def _exits_recorded(kept: _Folder) -> Iterator[None]:
    """Return a context in which ranks' exits are recorded, and the monitor judges them, before torch elastic ends
    the others.
    """
    patched = []
    directory = kept.directory
    for kind in (processes.SubprocessContext, processes.MultiprocessContext):
        original = kind.close

        def close(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            kept.restore()
            kept.contexts.append(self)
            ended_by = sys.exception()
            interrupted = isinstance(ended_by, SignalException)
            if isinstance(ended_by, SignalException):
                with contextlib.suppress(OSError):
                    write_private(directory / MARKER, json.dumps({"signal": signal.Signals(ended_by.sigval).name}))
            if (_note_exits(self, directory) or interrupted) and not getattr(self, "_distsim_asked", False):
                self._distsim_asked = True
                ask(directory)
            answer = _original(self, *args, **kwargs)
            _note_exits(self, directory)
            return answer

        kind.close = close
        patched.append((kind, original))
    try:
        yield
    finally:
        for kind, original in patched:
            kind.close = original


def _note_exits(context: Any, directory: Path) -> bool:
    """Write the known exit codes to the folder, and return whether one of them is a failure."""
    failed = False
    for local_rank, code in _codes(context).items():
        environ = context.envs[local_rank]
        if environ.get("WORLD_SIZE") == "1" and not _made_a_ring(directory, context.pids().get(local_rank)):
            failed = failed or code != 0
            continue  # it starts the ranks itself: its own end is none of theirs
        rank, attempt = int(environ["RANK"]), int(environ["TORCHELASTIC_RESTART_COUNT"])
        path = directory / f"exit.{rank:05d}.a{attempt}.json"
        failed = failed or code != 0
        if not path.exists():
            with contextlib.suppress(OSError):
                write_private(path, json.dumps({"rank": rank, "attempt": attempt, "code": code}))
    return failed


def _made_a_ring(directory: Path, pid: int | None) -> bool:
    for path in directory.glob("rank*.ring"):
        with contextlib.suppress(UsageError):
            if RingReader(path).header.pid == pid:
                return True
    return False


def _codes(context: Any) -> dict[int, int]:
    codes: dict[int, int] = {}
    handlers = getattr(context, "subprocess_handlers", None)
    if handlers is not None:
        for local_rank, handler in handlers.items():
            code = handler.proc.poll()
            if code is not None:
                codes[local_rank] = code
        return codes
    spawned = getattr(context, groups.PROCESSES, None)
    for local_rank, process in enumerate(getattr(spawned, "processes", ())):
        if process.exitcode is not None:
            codes[local_rank] = process.exitcode
    return codes


def _last_word(kept: _Folder) -> dict[str, Any]:
    directory, monitor = kept.directory, kept.monitor
    if monitor is None:
        return {}
    kept.restore()
    with contextlib.suppress(OSError):
        write_private(directory / "done.json", "{}")
    try:
        monitor.wait(kept.wait_s)
    except subprocess.TimeoutExpired:
        monitor.kill()
        monitor.wait()
        print("distsim: the monitor did not end by itself", file=sys.stderr)
    try:
        return dict(read_json(directory / "verdict.json"))
    except (OSError, ValueError, TypeError):  # the folder is gone, say: the monitor answers with its exit code, too
        return {"exit_code": monitor.returncode} if monitor.returncode in (1, 3, 4) else {}


def main(argv: Sequence[str]) -> int:
    """Run torchrun's flags and those of real runs; entry point for tests."""
    from torch.distributed.run import get_args_parser

    from distsim.debug.settings import add_real_flags

    parser = argparse.ArgumentParser(parents=[get_args_parser()], add_help=False, conflict_handler="resolve")
    parser.add_argument("--on", default="gloo")
    parser.add_argument("--report")
    add_real_flags(parser)
    return launch(parser.parse_args(argv))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as mistake:
        print(f"distsim: error: {mistake}", file=sys.stderr)
        sys.exit(2)


def verdict_line(verdict: Mapping[str, Any]) -> str:
    """Return the first line of the report that the monitor printed; empty if nothing was wrong."""
    diagnoses = [Diagnosis.from_json(diagnosis) for diagnosis in verdict.get("diagnoses", ())]
    if not diagnoses:
        return ""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else piped_width(120)
    return render_diagnoses(diagnoses[:1]).plain(width).partition("\n")[0] + "\n"


def failure_line(error: ChildFailedError) -> str:
    """Return which rank failed first, according to torch elastic."""
    rank, failure = error.get_first_failure()
    how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return f"distsim: rank {rank} failed first ({how}, pid {failure.pid})\n"


def say_if_killed(monitor: subprocess.Popen[bytes], over: threading.Event) -> None:
    """Wait for a monitor, and report immediately if it ends before the job is *over* without giving a reason."""
    monitor.wait()
    if monitor.returncode < 0 and not over.is_set():
        print(gone_text(monitor.pid, monitor.returncode), file=sys.stderr, flush=True)


def refuse_company(directory: Path) -> None:
    """Raise UsageError if another job uses the folder: the two would read each other's rings."""
    pid = _living_launcher(directory)
    if pid is not None and pid != os.getpid():
        raise UsageError(f"--rings {directory}: a job that still runs (pid {pid}) writes there; choose another")


def _living_launcher(directory: Path) -> int | None:
    """Return the pid of the launcher that wrote into the folder, if it still runs on this host."""
    launcher = launcher_of(directory)
    return launcher.pid if launcher is not None and launcher.is_here and launcher.is_alive else None


def forget_old_runs(base: Path, keep: int = KEPT_RUNS) -> None:
    """Remove the rings of all but the last *keep* failed runs from memory. Running jobs are not touched."""
    with contextlib.suppress(OSError):  # another launcher does the same
        runs = sorted(base.glob("run-*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for directory in runs[keep:]:
            if _living_launcher(directory) is None:
                shutil.rmtree(directory, ignore_errors=True)


def clear(directory: Path) -> None:
    """Remove the rings of an earlier run, which would otherwise count as ranks of this one."""
    for pattern in (
        "rank*.ring",
        "rank*.stacks",
        "rank*.silent",
        "exit.*.json",
        "forked.*.json",
        "monitor*",
        "verdict.*.json",
        "ask.*",
        "answer.*",
        "stacks.txt",
        "*.new",
    ):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)
    for name in ("done.json", "verdict.json", "aborted.json", "launcher.json", "lead.json", "follow.json", MARKER):
        (directory / name).unlink(missing_ok=True)
