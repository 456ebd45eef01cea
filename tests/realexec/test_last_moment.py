"""A rank whose interpreter goes down: while a monitor still asks for its stack, and while threads of the guard run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.debug.records import Group
from distsim.realexec.guard.recorder import GroupLog
from distsim.realexec.process.session import STACK_SIGNAL
from distsim.realexec.strict.queue import Queue
from distsim.realexec.strict.strict import Strict

ASKS = """\
import os, sys, time
print("ready", flush=True)
try:
    while True:
        os.kill(int(sys.argv[1]), int(sys.argv[2]))
        time.sleep(0.001)
except ProcessLookupError:
    pass
"""
ENDS = """\
import os, subprocess, sys

words = [sys.executable, "asks.py", str(os.getpid()), sys.argv[1]]
subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.readline()
sys.exit(3)
"""


@pytest.mark.slow
def test_a_rank_that_ends_is_not_killed_by_the_question_where_it_is(tmp_path: Path) -> None:
    """faulthandler is gone before the process is: what comes later is ignored, and the exit code is the program's."""
    (tmp_path / "asks.py").write_text(ASKS)
    (tmp_path / "ends.py").write_text(ENDS)
    words = [sys.executable, "-m", "distsim.debug", "ends.py", str(int(STACK_SIGNAL))]
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "DISTSIM_DIR": str(tmp_path / "rings")}
    job = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert job.returncode == 3, job.stderr


IN_CPP = """\
import datetime, os, threading

import torch.distributed as dist

from distsim.realexec.guard.handle import run_apart
from distsim.realexec.install import current_session

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
inside = threading.Event()


class Work:
    def is_completed(self):
        inside.set()
        try:
            dist.HashStore().wait(["never"], datetime.timedelta(seconds=0.5))  # in C++, without the interpreter
        except dist.DistStoreError:
            pass
        return True


if {callback}:
    run_apart(Work().is_completed)
else:
    current_session().recorder.watch(0, Work(), False)
inside.wait()
"""


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("callback", [False, True])
def test_a_thread_of_the_guard_inside_torch_does_not_abort_the_rank(callback: bool, tmp_path: Path) -> None:
    """Python 3.11 kills threads that come back to it when it ends, and C++ calls that SIGABRT: the heartbeat and the
    callbacks of held calls have ended before."""
    (tmp_path / "ends.py").write_text(IN_CPP.format(callback=callback))
    words = [sys.executable, "-m", "distsim.debug", "ends.py"]
    environ = {**os.environ, "DISTSIM_LEVEL": "strict", "DISTSIM_DIR": str(tmp_path / "rings"), "DISTSIM_MONITOR": "0"}
    job = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (job.returncode, job.stderr) == (0, "")


GLOO_LAGS = """\
import ctypes, hashlib, threading

import torch.distributed as dist


def frees():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")
    runs.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)  # without the interpreter
    print("freed", flush=True)


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
runs = threading.Event()
threading.Thread(target=frees, daemon=True).start()
runs.wait()
"""


@pytest.mark.slow
def test_the_end_waits_for_a_thread_of_gloo_that_runs(tmp_path: Path) -> None:
    """On a busy machine gloo's thread frees the last call's tensors late: it needs the interpreter for it, and aborts
    the process if that has shut down."""
    (tmp_path / "ends.py").write_text(GLOO_LAGS)
    words = [sys.executable, "-m", "distsim.debug", "ends.py"]
    environ = {**os.environ, "DISTSIM_DIR": str(tmp_path / "rings"), "DISTSIM_MONITOR": "0"}
    job = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (job.returncode, job.stdout, job.stderr) == (0, "freed\n", "")


class Pending:
    """A call that strict holds for a member that does not come."""

    out = False

    def went_out(self) -> None:
        self.out = True


def test_calls_that_strict_still_holds_go_out_at_the_end() -> None:
    """As without a guard: torch waits for them when it takes the group down, and the other ranks need them."""
    ring: Any = SimpleNamespace(rank=0)
    strict = Strict(SimpleNamespace(ring=ring), None)  # type: ignore[arg-type]
    log = GroupLog("0", (0, 1), 0)
    queue = strict._queues[id(log)] = Queue(log, None, [], Group("0", "", (0, 1)), 0, None)  # type: ignore[arg-type]
    calls = [Pending(), Pending()]
    queue.waiting.extend(calls)  # type: ignore[arg-type]
    strict.stop()
    assert [call.out for call in calls] == [True, True]
    assert not queue.waiting
    late: Any = strict.hold(SimpleNamespace(group_log=log), _all_reduce(), 1, 1, 0, True, lambda: None)
    assert late is None


def _all_reduce() -> Any:
    return SimpleNamespace(key=("all_reduce",))
