"""Every run ends with a report: a process watches, and tells what the one that simulates cannot tell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import pytest

from distsim.watchdog import process
from distsim.watchdog.process import Watch
from distsim.watchdog.shared_state import ProcessOutcome, SharedState

WATCHED = """\
import os, signal, sys, time
from distsim.watchdog import process, shared_state
from distsim.watchdog.process import fork_watched

def explain(fate):
    line = fate.stack[0][1] if fate.stack else 0
    print(f"rank={fate.rank} signal={fate.signal_name} function={fate.stack[0][2] if fate.stack else None}", flush=True)
    return 1 if fate.signal_name else 3

process.LEAST_AVAILABLE, process.LEAST_OWN = 1.0, (1 << 27) / process.machine_memory()[0]
fork_watched(explain)
page = shared_state.here()
page.describe(0.2, program="made", world_size=4)
page.listen()

def inside():
    import threading
    page.give(2, threading.get_native_id(), 0.0, 7)
    %s
    page.take()

inside()
print("went on", flush=True)
%s
"""


def watched(inside: str, after: str = "sys.exit(0)") -> subprocess.CompletedProcess[str]:
    """A process that forks a watched child, which lets rank 2 run and does *inside* in its turn."""
    env = {**os.environ, "PYTHONFAULTHANDLER": ""}
    return subprocess.run(
        [sys.executable, "-c", WATCHED % (inside, after)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env,
    )


HELD = "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inside", "said", "code"),
    [
        (HELD, "rank=2 signal=None function=match", 3),
        ("import ctypes; ctypes.string_at(0)", "rank=2 signal=SIGSEGV function=string_at", 1),
        ("os.abort()", "rank=2 signal=SIGABRT function=inside", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank=2 signal=SIGKILL function=None", 1),
        ("held = bytearray(1 << 28); time.sleep(60)", "rank=2 signal=SIGKILL function=inside", 1),
    ],
)
def test_what_cannot_tell_of_itself_is_told(inside: str, said: str, code: int) -> None:
    """A regular expression that holds the interpreter for good, a crash in C, an abort, the out-of-memory killer, and
    a process that has more of the memory than it may (here: 128 MiB)."""
    done = watched(inside)
    assert (done.returncode, done.stdout.strip()) == (code, said), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 4, 130])
def test_an_exit_code_is_the_childs(code: int) -> None:
    """Where nothing is wrong, nobody notices that there are two processes."""
    done = watched("pass", f"sys.exit({code})")
    assert (done.returncode, done.stdout, done.stderr) == (code, "went on\n", "")


@pytest.mark.slow
def test_a_signal_that_is_no_crash_ends_both_alike() -> None:
    """Whoever sends SIGTERM to the process that the shell knows means the simulation."""
    code = WATCHED % ("pass", "time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "went on\n"
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
        assert process.stdout.read() == ""  # the child held this pipe, and is gone


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_simulation_that_is_asked_to_end_says_where_its_ranks_were(number: signal.Signals, tmp_path: Path) -> None:
    """`kill`, `timeout` and a scheduler's time limit leave the report of Ctrl-C, with the exit code of their signal."""
    (tmp_path / "train.py").write_text("print('begun', flush=True)\nwhile True: pass\n")
    command = [sys.executable, "-m", "distsim", "run", "--nproc-per-node", "1", "--report", "r.json", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "begun" in process.stdout.readline()
        process.send_signal(number)
        assert "INTERRUPTED\n  Rank 0 is at train.py:2\n" in process.stdout.read()
    report = json.loads((tmp_path / "r.json").read_text())
    assert process.returncode == report["exit_code"] == 128 + number
    assert (report["interrupted"], report["diagnoses"]) == (True, [])


WAITS = """\
import os, signal, sys
from distsim.watchdog.process import next_signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
child = os.fork()
if child == 0:
    os._exit(bool(sys.stdin.readline() == ""))
print("ready", flush=True)
while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
    if came := next_signal({signal.SIGTERM}, child, 0.2):
        print(came, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_was_stopped_receives_no_signal_that_nobody_sent() -> None:
    """Ctrl-Z and `fg`: Python's own wait for signals then returns what was in memory, such as the number of SIGHUP."""
    with subprocess.Popen([sys.executable, "-c", WAITS], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.send_signal(signal.SIGCONT)
        assert process.communicate("\n", 30)[0] == ""


@pytest.mark.slow
def test_a_parent_that_is_killed_takes_its_child_along() -> None:
    """`subprocess.run(timeout=...)` kills only the process it knows, and then waits for the pipe."""
    code = WATCHED % ("pass", "time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "went on\n"
        process.kill()
        assert process.stdout.read() == ""


@pytest.fixture
def page() -> Iterator[SharedState]:
    shared_state = SharedState()
    yield shared_state
    for number in (shared_state.page_fd, shared_state.stack_fd):
        os.close(number)


def stuck(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, seconds: float, looks: int = 100, read: Sequence[int] = ()
) -> bool:
    """Whether it says so at the end of *seconds* that pass in steps, of which each has *read* bytes from the disk."""
    brought = iter([*read, *[max(read, default=0)] * looks])
    now = time.monotonic()
    clock = iter(now + seconds * (look + 1) / looks for look in range(looks))
    watch._looked_s = now
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr("distsim.watchdog.process._runnable", lambda pid, thread: False)
    monkeypatch.setattr("distsim.watchdog.process._read_bytes", lambda pid: b"%d" % next(brought))
    found = [watch.stuck() for _ in range(looks)]
    monkeypatch.undo()
    return found[-1]


def test_time_counts_only_while_a_rank_runs_and_nothing_moves(
    page: SharedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler may think for as long as it wants; a beat shows that the interpreter is free."""
    page.describe(2.0)
    watch = Watch(page, os.getpid())
    assert not stuck(watch, monkeypatch, 20.0), "no rank has the baton"
    page.give(1, 0, 0.0, 0)
    assert not stuck(watch, monkeypatch, 2.5)
    page.beat()
    assert not stuck(watch, monkeypatch, 2.5)
    assert stuck(watch, monkeypatch, 4.0)
    page.take()
    assert not stuck(watch, monkeypatch, 20.0)


def test_a_watcher_that_was_stopped_itself_does_not_count_that_time(
    page: SharedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z stops both: one look after an hour is no hour of looks."""
    page.describe(2.0)
    page.give(1, 0, 0.0, 0)
    assert not stuck(Watch(page, os.getpid()), monkeypatch, 3_600.0, looks=1)


def test_a_process_that_gets_no_core_is_not_stuck(page: SharedState, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine a turn may take long: of a thread that wants to run the seconds count that it ran."""
    page.describe(2.0)
    page.give(1, 0, 0.0, 0)
    monkeypatch.setattr("distsim.watchdog.process._runnable", lambda pid, thread: True)
    used = {"s": 0.0, "each": 0.01}

    def use(pid: int) -> float:
        used["s"] += used["each"]
        return used["s"]

    monkeypatch.setattr("distsim.watchdog.process._used", use)
    now = time.monotonic()
    watch = Watch(page, os.getpid())
    clock = iter(now + 0.2 * look for look in range(1, 500))
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert not any(watch.stuck() for _ in range(100)), "20 s, of which it ran one"
    used["each"] = 0.2
    assert any(watch.stuck() for _ in range(100))


def test_a_process_that_the_disk_serves_slowly_is_not_stuck(page: SharedState, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import on a machine that reads its pages again and again: each byte that comes shows that it goes on."""
    page.describe(2.0)
    page.give(1, 0, 0.0, 0)
    watch = Watch(page, os.getpid())
    assert not stuck(watch, monkeypatch, 20.0, read=[look // 10 for look in range(100)]), "a page every two seconds"
    assert stuck(watch, monkeypatch, 4.0), "nothing more comes"


def test_after_a_simulation_its_process_is_not_watched(page: SharedState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it ended in the middle of a rank's turn: what the process does then may take as long as it wants."""
    import distsim
    from distsim.sim.world import World

    def in_the_middle(world: World) -> None:
        assert world.shared_state is page
        page.give(0, 0, 0.0, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr("distsim.watchdog.shared_state.here", lambda: page)
    monkeypatch.setattr(World, "run", in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        distsim.simulate(lambda: None, on="ethernet-cpu:1", nproc_per_node=1)
    assert (page.rank, page.limit_s) == (None, 0.0)


def test_a_process_that_is_stopped_or_traced_is_not_stuck(page: SharedState, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP, or a debugger that holds it: not its fault."""
    page.describe(2.0)
    page.give(1, 0, 0.0, 0)
    monkeypatch.setattr("distsim.watchdog.process._held", lambda pid: True)
    now = time.monotonic()
    watch = Watch(page, os.getpid())
    clock = iter(now + look for look in range(1, 50))
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert not any(watch.stuck() for _ in range(20))


@pytest.mark.parametrize(
    ("available", "own", "runs", "ends"),
    [(2, 80, True, True), (4, 80, True, False), (2, 20, True, False), (2, 80, False, False)],
    ids=["used up", "enough left", "by another process", "no simulation"],
)
def test_memory_that_a_simulation_uses_up(
    available: int, own: int, runs: bool, ends: bool, page: SharedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is ended before the machine stands still, if it is the one that has most; the end says why."""
    if runs:
        page.describe(30.0)
    monkeypatch.setattr(process, "machine_memory", lambda: (100e9, available * 1e9))
    monkeypatch.setattr(process, "resident_bytes", lambda pid: own * 1e9)
    watch = Watch(page, os.getpid())
    assert watch.exhausts_memory() == ends
    reason = "its process was using up this machine's memory (80.0 of 100.0 GB)"
    assert watch.reason == (reason if ends else "")


def test_memory_is_that_of_the_machine_and_of_a_process() -> None:
    """As the system reports it."""
    total, available = process.machine_memory()
    before = process.resident_bytes(os.getpid())
    held = bytearray(1 << 28)
    assert 0 < available < total
    assert process.resident_bytes(os.getpid()) - before > len(held) // 2


@pytest.mark.parametrize(
    ("groups", "folders", "found"),
    [
        ("0::/job", {"job": (100, 80, 5)}, {(100, 25)}),
        ("0::/", {"": (100, 80, 0)}, {(100, 20)}),
        ("0::/job", {"job": ("max", 80, 0)}, set()),
        ("0::/job/step/task", {"job": (9, 8, 1)}, {(9, 2)}),
        ("4:memory:/slurm/job\n0::/", {"memory/slurm/job": (7, 6, 1), "memory": (8, 6, 0)}, {(7, 2), (8, 2)}),
        ("", {}, set()),
    ],
    ids=["v2", "v2 of a container", "no limit", "of a job above the task", "v1", "none"],
)
def test_a_control_group_limits_the_memory(
    groups: str, folders: dict[str, tuple[int | str, int, int]], found: set[tuple[int, int]], tmp_path: Path
) -> None:
    """A container has less than its machine; what the kernel only caches for it does not count as used."""
    (tmp_path / "cgroup").write_text(groups)
    for name, (limit, used, cached) in folders.items():
        is_v1 = name.startswith("memory")
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(f"{limit}\n")
        (tmp_path / name / ("memory.usage_in_bytes" if is_v1 else "memory.current")).write_text(f"{used}\n")
        key = "total_inactive_file" if is_v1 else "inactive_file"
        (tmp_path / name / "memory.stat").write_text(f"file 9\n{key} {cached}\n")
    assert set(process.group_memory(str(tmp_path / "cgroup"), str(tmp_path))) == found


def test_the_least_of_all_limits_is_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine's and of all groups'; a group without a real limit changes nothing."""
    whole = process.machine_memory()
    monkeypatch.setattr(process, "group_memory", lambda: iter([(1 << 62, 1 << 62)]))
    assert process.machine_memory()[0] == whole[0]
    monkeypatch.setattr(process, "group_memory", lambda: iter([(4096, 512), (2048, 1024)]))
    assert process.machine_memory() == (2048, 512)


def test_what_was_described_comes_out_again(page: SharedState) -> None:
    """Facts, time and events of the run, through the shared page."""
    page.describe(30.0, program="train.py", world_size=8)
    page.give(5, 77, 1.5, 99)
    seen = SharedState(page.page_fd, page.stack_fd)
    assert (seen.rank, seen.thread, seen.now_s, seen.events, seen.limit_s) == (5, 77, 1.5, 99, 30.0)
    assert seen.facts["program"] == "train.py"
    page.describe(30.0, program="x" * 100_000)
    assert seen.facts == {}


def fate(**changes: object) -> ProcessOutcome:
    facts = {"program": "train.py", "world_size": 4}
    known: dict[str, object] = {
        "rank": 2, "stack": (("/home/me/train.py", 7, "step"),), "signal_name": None, "stuck_s": 31.0, "now_s": 0.5,
        "events": 12, "wall_s": 40.0, "facts": facts,
    }  # fmt: skip
    return ProcessOutcome(**{**known, **changes})  # type: ignore[arg-type]


def test_the_report_names_rank_line_and_reason() -> None:
    """Stuck: exit 3 and the GIL; crashed: exit 1 and the signal; too deep: the recursion."""
    from distsim.report.fate import fatal_outcome, fatal_text

    outcome = fatal_outcome(fate())
    assert (outcome.exit_code, outcome.world_size) == (3, 4)
    (held,) = outcome.diagnoses
    assert (held.kind.value, held.culprits, held.sites[2].line) == ("host_stuck", (2,), 7)
    assert "none of its Python threads has run for 31.0 s: one call holds the GIL" in held.explanation
    crashed = fatal_outcome(fate(signal_name="SIGSEGV"))
    assert crashed.exit_code == 1
    assert crashed.diagnoses[0].kind.value == "rank_killed"
    deep = fatal_text(fate(signal_name="SIGSEGV", stack=(("/home/me/train.py", 7, "f"),) * 100))
    assert "it recurses without end" in deep
    assert fatal_outcome(fate(rank=None, stack=(), signal_name="SIGKILL")).diagnoses == []


def test_the_report_of_memory_names_rank_line_and_remedy() -> None:
    """One error with the rank that ran and its line; without a rank, a note. Nothing sends to the kernel's log."""
    from distsim.report.fate import fatal_outcome

    reason = "its process was using up this machine's memory (22.0 of 24.0 GB)"
    outcome = fatal_outcome(fate(signal_name="SIGKILL", reason=reason))
    (diagnosis,) = outcome.diagnoses
    assert (outcome.exit_code, diagnosis.culprits, diagnosis.sites[2].line) == (1, (2,), 7)
    assert f"Rank 2 was killed by SIGKILL; {reason}." in diagnosis.explanation
    assert diagnosis.suggestion.startswith("Tensors on the CPU are real, and each rank has its own: make a model on")
    assert outcome.notes == [f"the simulating process was ended: {reason}"]
    alone = fatal_outcome(fate(rank=None, stack=(), signal_name="SIGKILL", reason=reason))
    assert alone.notes[1].startswith("Tensors on the CPU are real")


PROGRAM = """\
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    sum(range(10**12))
dist.barrier()
"""


@pytest.mark.slow
def test_distsim_run_ends_with_a_report_and_its_json(tmp_path: Path) -> None:
    """A rank in a C loop: exit code 3, its line on the terminal and in the file."""
    (tmp_path / "held.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "distsim", "run", "--nproc-per-node", "2", "--host-timeout", "1", "--report", "r.json",
         "held.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "host stuck  rank 1" in done.stdout
    assert "host stuck  rank 1  held.py:4\n" in done.stdout  # relative to the working folder, as in every report
    assert '"kind": "host_stuck"' in (tmp_path / "r.json").read_text()


@pytest.mark.soak
@pytest.mark.slow
def test_a_scenario_that_holds_the_interpreter_fails_alone(tmp_path: Path) -> None:
    """The others run, and the count is right."""
    (tmp_path / "held.py").write_text(PROGRAM)
    (tmp_path / "well.py").write_text(PROGRAM.replace("10**12", "10"))
    for name in ("held", "well"):
        rest = "nproc_per_node = 2\n[limits]\nhost_timeout_s = 1\n[expect]\n"
        (tmp_path / f"{name}.toml").write_text(f'program = "{name}.py"\n{rest}')
    done = subprocess.run(
        [sys.executable, "-m", "distsim", "scenario", "run", "."],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert "limits.host_timeout_s: a rank holds the interpreter" in done.stdout
    assert "1 passed, 1 failed" in done.stdout


@pytest.mark.soak
@pytest.mark.slow
def test_a_script_that_simulates_is_watched_too(tmp_path: Path) -> None:
    """`distsim.simulate` in somebody's own process: the report, and exit code 3."""
    code = (
        "import distsim, torch.distributed as dist\n"
        "def body():\n"
        "    dist.init_process_group('gloo')\n"
        "    if dist.get_rank() == 1:\n"
        "        sum(range(10**12))\n"
        "    dist.barrier()\n"
        "distsim.simulate(body, nproc_per_node=2, host_timeout_s=5)\n"
    )
    (tmp_path / "own.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "host stuck  rank 1" in done.stderr
    assert "own.py:5" in done.stderr


@pytest.mark.soak
@pytest.mark.slow
def test_a_script_that_simulates_has_no_child_that_it_did_not_start(tmp_path: Path) -> None:
    """Who waits for all of its children (`os.wait`) would wait for the watcher, and that for it."""
    code = (
        "import os, distsim\n"
        "distsim.simulate(print, nproc_per_node=1)\n"
        "if (child := os.fork()) == 0:\n"
        "    os._exit(0)\n"
        "assert os.wait()[0] == child\n"
        "try:\n"
        "    os.wait()\n"
        "except ChildProcessError:\n"
        "    print('no more')\n"
    )
    (tmp_path / "own.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.endswith("no more\n"), done.stderr
