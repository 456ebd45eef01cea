"""Real runs that do not end by themselves: ended at once, whole, with where each rank stood."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distsim.debug.evidence.processes import look
from distsim.scenario.real.real import descendants, end
from tests.scenario.made import ran

ONE_IS_ELSEWHERE = """\
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

here = Path(sys.argv[1])


def say():
    (here / f"there.{dist.get_rank()}").write_text(str(os.getpid()))


def load():
    while len(list(here.glob("there.*"))) < 1:
        time.sleep(0.01)
    threading.Timer(2, say).start()  # the others are in their call by then, and the guard has seen the next line
    time.sleep(1000)


dist.init_process_group("gloo")
if dist.get_rank() == 1:
    load()
say()
dist.all_reduce(torch.ones(4))
"""


def has_ended(pid: int) -> bool:
    """Gone, or reached by the signal: then it may still be on its way down."""
    process = look(pid)
    return process is None or process.state in "ZX" or process.wait_status == signal.SIGKILL


@pytest.mark.soak
@pytest.mark.slow
def test_a_real_run_is_ended_by_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is named, not what came of ending it; who waits where, who is elsewhere; nothing lives on."""

    def now_s() -> float:
        return 1e9 * (len(list(tmp_path.glob("there.*"))) == 2)

    monkeypatch.setattr("distsim.scenario.real.real.monotonic", now_s)
    result = ran(
        tmp_path,
        f"on = 'ethernet-cpu:1'\nnproc_per_node = 2\nbackend = 'gloo'\nargs = ['{tmp_path}']\n[expect]",
        ONE_IS_ELSEWHERE,
    )
    assert result.wrong == ["limits.wall_time_s: the program still ran after 60 s of wall time"]
    assert result.verdict == "ended by limits.wall_time_s"
    first, second = result.report.splitlines()
    assert first.startswith("Rank 0 waits in all_reduce #1 on group default_pg (ranks 0,1), at ")
    assert first.endswith("made.py:28")
    assert second.startswith("Rank 1 is at ")
    assert second.endswith("in load")
    for path in tmp_path.glob("there.*"):
        assert has_ended(int(path.read_text()))


def test_what_a_process_has_started_ends_with_it() -> None:
    """Children in sessions of their own, and their children, which no signal to a group would reach."""
    start = "import subprocess, sys; p = subprocess.Popen({}, start_new_session=True)"
    start += "; print(p.pid, flush=True); p.wait()"
    inner = start.format("['sleep', '1000']")
    words = [sys.executable, "-c", start.format(f"[sys.executable, '-c', {inner!r}]")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as root:
        assert root.stdout is not None
        pids = [root.pid, int(root.stdout.readline()), int(root.stdout.readline())]
        assert descendants([root.pid]) == pids
        end([root.pid])
        assert root.stdout.read() == ""  # nobody has it open any more
        assert root.wait() == -9
    assert all(has_ended(pid) for pid in pids)
