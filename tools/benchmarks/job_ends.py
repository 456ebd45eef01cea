"""Hung jobs that are ended from outside at a random moment: the cause is the hang, and not its end.

    python -m tools.benchmarks.job_ends [PATTERN] [--ends torchrun,srun] [--seed 0] [--report]

Each program hangs under the guard's defaults (`DISTSIM_ON_HANG=report`), and is ended some seconds later: by SIGTERM to
`torchrun` or to `distsim run`, as scancel ends a job step (SIGTERM to every process, then SIGKILL), by Ctrl-C, or by
SIGKILL to every process, the monitor included. Prints for each what the job and `distsim diagnose` say of it.

Peer: none; a launcher prints the signal. Aim: kind and ranks of the hang in all, as the case declares them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import RingReader
from distsim.errors import UsageError
from tests.cases.corpus import FAULTS, Case
from tools.benchmarks.arguments import Arguments, at_least, known, several

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (
    "circles/async_cycle",
    "circles/group_mismatch",
    "circles/keys_of_three",
    "circles/p2p_cycle",
    "hangs/spins",
    "hangs/three_groups_crossed",
    "hangs/waits_for_a_key",
    "hangs/waits_for_a_lock",
    "host/all_wait",
    "host/holds_gil",
    "host/loader_worker",
    "host/polled_message",
    "messages/pipe_middle",
    "missing/command_loop",
    "missing/future",
    "missing/pending_then_other_group",
    "missing/resumed",
    "order/new_group_order",
    "uneven/early_stop",
    "uneven/swallowed_oom",
)
"""Programs of tests/cases whose processes all live on once they hang (gloo may abort where sizes differ)."""
OUTSIDE_CALLS = {"host_stuck", "missing_rank"}
"""The same fault of a rank outside of any call, before and after others have waited for it until `--hang-after`."""
BEGINS_S = 60.0
STILL_S = 2.5
LATEST_S = 8.0
"""A job is ended up to this long after nothing has moved in it for `STILL_S`."""
GRACE_S = 2.0
"""Time between the SIGTERM and the SIGKILL of a scheduler."""
MODULE = [sys.executable, "-m"]


class Job:
    """One program under one launcher, in a folder of its own."""

    def __init__(self, case: Case, folder: Path, launcher: Callable[[Case], list[list[str]]]) -> None:
        self.ranks = case.ranks
        self.rings = folder / "rings"
        self.output = folder / "output"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        own = {"DISTSIM_DIR": str(self.rings), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DISTSIM_ON_HANG": "report"}
        self.started = []
        with self.output.open("wb") as output:
            for number, command in enumerate(launcher(case)):
                rank = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(case.ranks)}
                self.started.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env=os.environ | own | (rank if launcher is tasks else {}),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def hangs(self) -> bool:
        """Wait until all have met and no rank has made a call for `STILL_S`; False if the job has ended before."""
        begun, last, since = time.monotonic(), None, time.monotonic()
        while time.monotonic() - since < STILL_S or not last:
            if any(process.poll() is not None for process in self.started) or time.monotonic() - begun > BEGINS_S:
                return False
            counts = {}
            for path in self.rings.glob("*.ring"):
                with contextlib.suppress(UsageError, OSError):
                    reader = RingReader(path)
                    if reader.word(rings.W_JOINED):
                        counts[path.name] = reader.word(rings.W_COUNT)
            if counts != last or len(counts) < self.ranks:
                last, since = counts, time.monotonic()
            time.sleep(0.1)
        return True

    def everyone(self) -> list[int]:
        """Return the processes of the job: those with its folder in their environment."""
        mark = f"DISTSIM_DIR={self.rings}".encode()
        pids = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes():
                    pids.append(int(path.parent.name))
        return pids

    def wait(self, limit_s: float) -> None:
        """Wait until all processes have ended, at most so long."""
        deadline = time.monotonic() + limit_s
        while self.everyone() and time.monotonic() < deadline:
            for process in self.started:
                process.poll()
            time.sleep(0.1)

    def signal(self, number: int) -> None:
        """Send a signal to every process of the job."""
        for pid in self.everyone():
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End what is left."""
        self.signal(signal.SIGKILL)
        for process in self.started:
            process.wait()


def torchrun(case: Case) -> list[list[str]]:
    """Return the command of plain torchrun, with the guard as a module."""
    elastic = ["torch.distributed.run", "--nproc-per-node", str(case.ranks), "--rdzv-backend", "c10d"]
    elastic += ["--rdzv-endpoint", "127.0.0.1:0"]
    return [[*MODULE, *elastic, "-m", "distsim.debug", str(case.path), *case.args]]


def distsim_run(case: Case) -> list[list[str]]:
    """Return the command of distsim's own launcher."""
    words = ["distsim", "run", "--on", "gloo", "--nproc-per-node", str(case.ranks)]
    return [[*MODULE, *words, str(case.path), *case.args]]


def tasks(case: Case) -> list[list[str]]:
    """Return a command for each rank, as srun starts them."""
    return [[*MODULE, "distsim.debug", str(case.path), *case.args]] * case.ranks


def terminate(job: Job) -> None:
    """Ask the launcher to end."""
    job.started[0].terminate()


def cancel(job: Job) -> None:
    """End a job step as scancel does: every process is asked, and killed after a grace period."""
    job.signal(signal.SIGTERM)
    job.wait(GRACE_S)
    job.signal(signal.SIGKILL)


def interrupt(job: Job) -> None:
    """Press Ctrl-C: the launcher's process group is in the foreground."""
    os.killpg(job.started[0].pid, signal.SIGINT)


def shoot(job: Job) -> None:
    """End every process at once."""
    job.signal(signal.SIGKILL)


ENDS: dict[str, tuple[Callable[[Case], list[list[str]]], Callable[[Job], None]]] = {
    "torchrun": (torchrun, terminate),
    "distsim": (distsim_run, terminate),
    "srun": (tasks, cancel),
    "ctrl-c": (distsim_run, interrupt),
    "sigkill": (torchrun, shoot),
}


def _verdict(report: Path) -> tuple[str, list[int]]:
    """Return kind and culprits of the first diagnosis of a report in JSON."""
    try:
        document: dict[str, Any] = json.loads(report.read_text())
    except (OSError, ValueError):
        return "no report", []
    first = next(iter(document.get("diagnoses", ())), None)
    if first is None:
        return ("interrupted" if document.get("interrupted") else "nothing"), []
    return first["kind"], first["culprits"]


def end(case: Case, name: str, moment: random.Random, show: bool) -> tuple[bool, str] | None:
    """Run *case* and end it; return whether the hang is the verdict, and a line. None: it does not hang."""
    launcher, strike = ENDS[name]
    with tempfile.TemporaryDirectory(prefix="job-ends-") as temporary:
        folder = Path(temporary)
        job = Job(case, folder, launcher)
        try:
            if not job.hangs():
                if show:
                    print(job.output.read_text(errors="replace"))
                return None
            after_s = moment.uniform(0.0, LATEST_S)
            time.sleep(after_s)
            strike(job)
            job.wait(45.0)
        finally:
            job.kill()
        command = [*MODULE, "distsim", "diagnose", str(job.rings), "--report", str(folder / "again.json")]
        again = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        if show:
            print(f"{job.output.read_text(errors='replace')}\n--- distsim diagnose\n{again.stdout}{again.stderr}")
        expected = list(case.culprits or ())
        verdicts = [_verdict(job.rings / "verdict.json"), _verdict(folder / "again.json")]
        kinds = {*case.kinds, *(OUTSIDE_CALLS if OUTSIDE_CALLS & {*case.kinds} else ())}
        right = [kind in kinds and culprits == expected for kind, culprits in verdicts]
        if name == "sigkill":
            right[0] = True  # nobody was left to say it
        texts = [
            f"{kind} {culprits}{'' if is_right else ' (!)'}"
            for (kind, culprits), is_right in zip(verdicts, right, strict=True)
        ]
        line = f"{name:9} {case.name:28} after {after_s:4.1f} s  live: {texts[0]}  diagnose: {texts[1]}"
        return all(right), f"{line}  expected {'|'.join(case.kinds)} {expected}" * (not all(right)) or line


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each job, and answer the exit code."""
    parser = Arguments(__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="programs whose name it matches (default: all)")
    parser.add_argument("--ends", type=several(known(ENDS)), default="torchrun", help=f"of {', '.join(ENDS)}")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the moments")
    parser.add_argument("--report", action="store_true", help="print what the jobs have printed")
    args = parser.parse_args(argv)
    moment = random.Random(args.seed)
    chosen = [case for case in FAULTS if case.name.rpartition("-")[0] in PROGRAMS or case.name in PROGRAMS]
    failed = False
    for name in args.ends:
        right = run = 0
        for case in chosen:
            if not re.search(args.pattern, case.name):
                continue
            result = end(case, name, moment, args.report)
            if result is None:
                print(f"{name:9} {case.name:28} does not hang", flush=True)
                continue
            run += 1
            right += result[0]
            print(result[1], flush=True)
        print(f"{name}: the hang is the cause of {right} of {run}", flush=True)
        failed |= right < run
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
