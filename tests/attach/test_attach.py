"""`distsim attach` on jobs that plain torchrun has started: found, sampled and named."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distsim.cli.dispatch import main
from tests.documents import checked

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("attach")]

PROGRAM = """\
import os, sys, threading, time
import torch
import torch.distributed as dist

def say():
    open(os.path.join(sys.argv[1], f"ready{dist.get_rank()}"), "w")

def work(tensor):
    for step in range(6):
        dist.all_reduce(tensor)
        if step == 3 and dist.get_rank() == 1:
            say()
            STUCK
        elif step == 3:
            say()

dist.init_process_group("gloo")
work(torch.ones(4))
"""


def free_port() -> str:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return str(any_port.getsockname()[1])


def looked(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Look until the hang is seen: on a busy machine ranks are still on their way to it at the first look."""
    for _ in range(6):
        code = main(arguments)
        told = capsys.readouterr()
        if code == 3:
            break
    return code, told.err + told.out


# Before the tests of a job, which runs beside them under this very process.
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["999999999"], "expected the number of a running process, got 999999999: there is no such process"),
        ([str(os.getpid())], "no rank among process"),
        (["--pattern", "("], "--pattern: expected a regular expression, got '('"),
        (["--pattern", "no such command line"], "no rank among the processes whose command line matches"),
        (["--hosts", "/nowhere"], "--hosts /nowhere: expected a file with a host name in each line"),
        (["--hosts", os.devnull], "expected a file with a host name in each line (not a regular file)"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What was expected, what came; no traceback."""
    assert main(["attach", *arguments]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("distsim: error: ")
    assert line in said


@contextlib.contextmanager
def started(folder: Path, stuck: str) -> Iterator[int]:
    """Three ranks that hang as the text says: the launcher's process, once they are there."""
    program = folder / "train.py"
    program.write_text(PROGRAM.replace("STUCK", stuck))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", free_port()]
    with subprocess.Popen(
        [*command, str(program), str(folder)],
        env={name: value for name, value in os.environ.items() if not name.startswith("DISTSIM")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as job:
        try:
            while not all((folder / f"ready{rank}").exists() for rank in range(3)):
                assert job.poll() is None, "the job has ended"
                os.sched_yield()
            yield job.pid
        finally:
            job.terminate()


IN_ANOTHER_CALL = "dist.irecv(tensor, src=0).wait()"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A job that hangs as long as tests look at it, and its folder."""
    folder = tmp_path_factory.mktemp("job")
    with started(folder, IN_ANOTHER_CALL) as launcher:
        yield launcher, folder


def test_the_rank_is_named(job: tuple[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its number, with its line, the others' line, and what the statement rests on."""
    is_named(job[0], IN_ANOTHER_CALL, "missing_rank", tmp_path, capsys)


@pytest.mark.soak
def test_a_rank_stuck_on_its_host_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is in no call of torch.distributed, likewise."""
    stuck = "threading.Lock().acquire() and threading.Event().wait()"
    with started(tmp_path, stuck) as launcher:
        is_named(launcher, stuck, "host_stuck", tmp_path, capsys)


def is_named(launcher: int, stuck: str, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = looked(["attach", str(launcher), "--report", str(folder / "report.json")], capsys)
    (found,) = checked((folder / "report.json").read_text())["diagnoses"]
    assert (code, found["kind"], found["culprits"], found["victims"]) == (3, kind, [1], [0, 2]), text
    one_line = " ".join(text.split())
    assert stuck in one_line
    assert "dist.all_reduce(tensor)" in one_line
    assert "By stacks only" in one_line


def test_a_host_is_asked_through_ssh(
    job: tuple[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it prints is judged here; a host that does not answer is one line."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ssh").write_text(
        f'#!/bin/sh\n[ "$3" = down ] && echo "ssh: cannot connect" >&2 && exit 255\n'
        f'shift 3\ndistsim() {{ "{sys.executable}" -m distsim "$@"; }}\neval "$@"\n'
    )
    (tools / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    (tmp_path / "hosts").write_text("here\ndown  # for repair\n")
    code, text = looked(["attach", "--hosts", str(tmp_path / "hosts"), "--pattern", str(job[1] / "train.py")], capsys)
    first, second = text.splitlines()[:2]
    assert (code, first) == (3, "distsim: down: ssh: cannot connect"), text
    assert "rank 1" in second


@pytest.mark.parametrize("command", ["diagnose", "watch"])
def test_who_gives_a_process_to_another_command_is_told(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They read records; the stacks of a running process are attach's."""
    assert main([command, str(os.getpid())]) == 2
    assert f"distsim attach {os.getpid()}" in capsys.readouterr().err


def test_a_job_is_watched_to_its_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It says what it watches, and that the ranks have ended."""
    with started(tmp_path, "time.sleep(6)") as launcher:
        assert main(["attach", str(launcher), "--watch", "--every", "1"]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("distsim: watches ranks 0-2 each 1 s; a rank 10% slower would be seen after ")
    assert lines[-1] == "distsim: all ranks have ended"
