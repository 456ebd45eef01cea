"""PyTorch's own gloo tests (`torch_tests.py`), plain and under guard: results that differ, and false alarms.

The guard's arms are level `check` and level `strict`. TORCH_TESTS_WORLD
sets the number of ranks: 3 runs tests of groups that are part of the world, which 2 skips.

A process that has torch loaded forks one process per test, which forks the test's ranks; the guard is that of
`python -m distsim.debug`. With --fresh every test is `distsim run --on gloo` and every rank a new interpreter, as in
the simulator's arm: ten times as slow.

Peer: the same tests on plain gloo. Aim: no result differs, no alarm.

    python -m tools.benchmarks.torch_suite --arm check [--tests PATTERN] [--fresh] [--out FILE]
    python -m tools.benchmarks.torch_suite --arm sim --only FILE   # those that passed plain, from an earlier --out
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fnmatch
import gc
import json
import os
import posix
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.benchmarks.arguments import Arguments

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "torch_tests.py"
SKIPPED = 77
LIMIT_S = 150.0
MONITOR_S = 25.0
"""A monitor whose job never made a ring waits this long for one."""

LEVELS = {"check": "check", "strict": "strict"}
"""Level of the guard on each of its arms."""


@dataclass
class Outcome:
    """How one test went on one arm."""

    test: str
    arm: str
    code: int
    """Of the process that ran the test; -9: it had to be killed."""
    seconds: float
    alarms: list[str] = field(default_factory=list)
    """Kinds of the diagnoses, warnings included."""
    said: str = ""
    """The end of what it printed, where that is of interest."""

    @property
    def passed(self) -> bool:
        return self.code == 0


def environment(arm: str, rings: Path) -> dict[str, str]:
    """What a test is run with; the guard's settings are empty on the plain arm."""
    said = {"OMP_NUM_THREADS": "1", "TORCH_TESTS_START": "fork", "TEMP_DIR": str(rings.parent / "temp")}
    if arm != "plain":
        said.update(DISTSIM_LEVEL=LEVELS[arm], DISTSIM_ON_HANG="abort", DISTSIM_DIR=str(rings))
    return said


# Forked: many tests, torch imported once -----------------------------------------------------------


def serve() -> int:
    """Forks a process per line of stdin, `{"test", "arm", "folder"}`; answers its exit code."""
    sys.path.insert(0, str(HERE))
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch_tests  # noqa: F401  (torch's own tests, imported for the children)

    import distsim.debug.__main__
    import distsim.realexec.install
    import distsim.realexec.strict.strict  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = become(job)
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            posix._exit(code)  # an interpreter with all of torch's tests in it takes a second to go down
        deadline = time.monotonic() + LIMIT_S
        code = None
        while code is None and time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
            time.sleep(0.02)
        if code is None:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            code = -9
        print(json.dumps(code), flush=True)
    return 0


def become(job: dict[str, Any]) -> int:
    """In the forked process: run the program as its launcher would."""
    os.setsid()
    sys.stdin.close()
    out = os.open(Path(job["folder"]) / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(environment(job["arm"], Path(job["folder"]) / "rings"))
    for name in ("torch_tests", "__mp_main__"):
        sys.modules.pop(name, None)
    from distsim.debug import __main__ as door

    try:
        if job["arm"] == "plain":
            sys.argv[:] = [str(PROGRAM), job["test"]]
            door._run_script(str(PROGRAM))
        else:
            door.main([str(PROGRAM), job["test"]])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


class Server:
    """The forking process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "torch_suite.py"), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ, PYTHONPATH=str(HERE.parents[1])),
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def run(self, test: str, arm: str) -> Outcome:
        """One test."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with scratch() as folder:
            began = time.monotonic()
            self._process.stdin.write(json.dumps({"test": test, "arm": arm, "folder": str(folder)}) + "\n")
            self._process.stdin.flush()
            code = json.loads(self._process.stdout.readline())
            seconds = time.monotonic() - began
            alarms = [] if arm == "plain" else alarms_of(folder / "rings")
            said = (folder / "out").read_text(errors="replace")
        return Outcome(test, arm, code, round(seconds, 2), alarms, said[-6000:])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


# A new interpreter for everything ---------------------------------------------------------------------


def fresh(test: str, arm: str, on: str) -> Outcome:
    """One test by `python`, `distsim run --on gloo`, or `distsim run --on CLUSTER`."""
    with scratch() as folder:
        words = [str(PROGRAM), test]
        if arm == "sim":
            report = ["--report", str(folder / "report.json"), "--quiet"]
            words = ["-m", "distsim", "run", "--on", on, *report, *words]
        elif arm != "plain":
            words = [
                *("-m", "distsim", "run", "--on", "gloo", "--level", LEVELS[arm], "--rings", str(folder / "rings")),
                *("--max-restarts", "0", "--master-port", "0", *words),
            ]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("DISTSIM_")}
        environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(HERE.parents[1]), TEMP_DIR=str(folder / "temp"))
        began = time.monotonic()
        with (folder / "out").open("w") as out:
            process = subprocess.Popen(
                [sys.executable, *words], env=environ, stdout=out, stderr=out, start_new_session=True
            )
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
        seconds = time.monotonic() - began
        alarms = verdict(folder / "report.json") if arm == "sim" else alarms_of(folder / "rings", wait=False)
        said = (folder / "out").read_text(errors="replace")
    if "OK (skipped=" in said:
        code = SKIPPED
    return Outcome(test, arm, code, round(seconds, 2), alarms, said[-6000:])


# Both ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one test, in memory as rings are."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="torch-suite-", dir=base))
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / "temp" / name).mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def alarms_of(rings: Path, *, wait: bool = True) -> list[str]:
    """What the monitors of a test said, after their last word."""
    pids = []
    for lock in rings.glob("monitor.*.lock"):
        with contextlib.suppress(OSError, ValueError):
            pids.append(int(lock.read_text()))
    deadline = time.monotonic() + MONITOR_S
    while wait and any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    if any(rings.glob("verdict.*.json")):
        return [kind for path in sorted(rings.glob("verdict.*.json")) for kind in verdict(path)]
    return verdict(rings / "verdict.json")


def verdict(path: Path) -> list[str]:
    """The kinds of a report's diagnoses."""
    try:
        return [str(said["kind"]) for said in json.loads(path.read_text())["diagnoses"]]
    except (OSError, ValueError, KeyError):
        return []


def all_names() -> list[str]:
    """Every test of the program."""
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, check=True)
    return done.stdout.split()


def report(outcomes: Sequence[Outcome], plain: dict[str, int]) -> int:
    """What differs from the plain arm, and who cried wolf; 1 if there is any of it."""
    bad = 0
    for arm in dict.fromkeys(outcome.arm for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.arm == arm]
        counts = Counter({0: "passed", SKIPPED: "skipped", -9: "timed out"}.get(o.code, "failed") for o in mine)
        said = ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))
        base = [o for o in mine if plain.get(o.test) == 0]
        changed = [o for o in base if o.code != 0]
        alarmed = [o for o in base if o.alarms]
        print(f"{arm}: {said}; of {len(base)} that pass plain {len(changed)} differ, {len(alarmed)} have alarms")
        for outcome in mine:
            if outcome in changed or outcome in alarmed:
                print(f"  {outcome.test}: code {outcome.code}, {', '.join(outcome.alarms) or 'no alarm'}")
        bad += len(changed) + len(alarmed)
    return int(bad > 0)


def earlier(text: str) -> dict[str, int]:
    """Exit codes on the plain arm of an earlier --out."""
    try:
        said = [json.loads(line) for line in Path(text).read_text().splitlines()]
        plain = {row["test"]: row["code"] for row in said if row["arm"] == "plain"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no such lines"
        raise argparse.ArgumentTypeError(f"expected a file that --out has written, got {text!r}: {why}") from None
    if not plain:
        raise argparse.ArgumentTypeError(f"expected a file with tests of the plain arm, got {text!r}")
    return plain


def writable(text: str) -> Path:
    """A file to add lines to."""
    try:
        Path(text).open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"expected a file to write, got {text!r}: {error.strerror}") from None
    return Path(text)


def cluster(text: str) -> str:
    """What `distsim run --on` simulates."""
    from distsim.cluster import load_cluster
    from distsim.errors import DistsimError

    try:
        load_cluster(text)
    except DistsimError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main() -> int:
    parser = Arguments(__doc__)
    parser.add_argument("--arm", action="append", choices=["plain", *LEVELS, "sim"])
    parser.add_argument("--tests", default="*", help="a shell pattern over CLASS.test_name")
    parser.add_argument(
        "--only",
        type=earlier,
        default={},
        metavar="FILE",
        help="tests that passed on the plain arm of this earlier --out",
    )
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--on", type=cluster, default="ethernet-cpu:2", help="cluster of the simulator's arm")
    parser.add_argument("--out", type=writable, metavar="FILE", help="one JSON line per test and arm")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    plain: dict[str, int] = args.only
    names = [name for name in plain or all_names() if fnmatch.fnmatch(name, args.tests)]
    if not names:
        parser.error(f"argument --tests: expected a pattern that some test matches, got {args.tests!r}")
    arms = list(dict.fromkeys(args.arm or ["check", "strict"]))
    if not plain and "plain" not in arms:
        arms.insert(0, "plain")
    server = Server() if any(arm != "sim" and not args.fresh for arm in arms) else None
    outcomes = []
    for name in names:
        for arm in arms:
            if arm != "plain" and plain.get(name) != 0:
                continue  # it needs a GPU, more ranks, or fails by itself
            if server is not None and arm != "sim" and not args.fresh:
                outcome = server.run(name, arm)
            else:
                outcome = fresh(name, arm, args.on)
            if arm == "plain":
                plain[name] = outcome.code
            outcomes.append(outcome)
            print(f"{arm:6} {outcome.code:4} {outcome.seconds:6.1f} s  {name}  {' '.join(outcome.alarms)}", flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    if server is not None:
        server.close()
    return report(outcomes, plain)


if __name__ == "__main__":
    sys.exit(main())
