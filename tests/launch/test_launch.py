"""`distsim run --on gloo`, torchrun and mp.spawn: real launchers, real processes, exit codes and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs import ENVIRON, HERE, distsim_run, free_port, run

from distsim.cli import main
from distsim.debug.evidence.processes import own_process
from distsim.realexec.launch import forget_old_runs

HANGS = HERE.parent / "scenarios" / "hangs"

pytestmark = pytest.mark.slow


DATA_PARALLEL = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(2)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_healthy_run_ends_with_zero(tmp_path: Path) -> None:
    """A healthy program ends with 0, an empty report, DDP's DETAIL logs, and without its rings."""
    (tmp_path / "train.py").write_text(DATA_PARALLEL)
    told = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "INFO"}
    done = distsim_run("--nproc-per-node", "1", "--report", "report.json", "train.py", cwd=tmp_path, **told)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["diagnoses"] == []
    assert "DDP Initialized with" in done.stderr


def test_hang_ends_with_three_and_is_diagnosed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing rank ends the job with 3; `distsim diagnose` says the same of the rings that stay. The verdict is the
    last line once more, and torchrun's warning of OMP_NUM_THREADS is not the first."""
    report, rings = tmp_path / "report.json", tmp_path / "rings"
    words = ("--report", str(report), "--rings", str(rings), str(HANGS / "crossed_recvs.py"))
    monkeypatch.delitem(ENVIRON, "OMP_NUM_THREADS")
    done = distsim_run(*words, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("HANG  deadlock")
    assert lines.count(lines[-1]) == 2
    assert "OMP_NUM_THREADS" not in done.stderr
    said = json.loads(report.read_text())["diagnoses"][0]
    assert said["kind"] == "deadlock_cycle"
    assert "deadlock" in done.stderr.lower()
    assert main(["diagnose", str(rings)]) == 3
    assert "deadlock" in capsys.readouterr().out.lower()
    assert main(["watch", str(rings)]) == 0
    assert "default_pg" in capsys.readouterr().out


@pytest.mark.soak
def test_what_the_ranks_have_started_ends_with_them(tmp_path: Path) -> None:
    """A process that a hung rank has started does not outlive it: it would hold this very pipe open for ten minutes."""
    script = tmp_path / "downloads.py"
    script.write_text(
        "import subprocess, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 0:\n"
        "    subprocess.run(['sleep', '600'])\n"
        "dist.barrier()\n"
    )
    done = distsim_run("--hang-after", "8", str(script), cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "downloads.py:4" in done.stderr


@pytest.mark.soak
def test_restart_is_judged_by_its_last_attempt(tmp_path: Path) -> None:
    """With --max-restarts, an attempt that hangs is ended and the next one may finish: exit code 0."""
    script = tmp_path / "flaky.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "t = torch.ones(2)\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "if not (first and dist.get_rank() == 1):\n"
        "    dist.all_reduce(t)\n"
        "elif first:\n"
        "    dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    done = distsim_run("--max-restarts", "1", str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "barrier" in done.stderr


def test_usage_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--on nccl and --on mpi on a machine that has neither are refused by name, with the remedy."""
    monkeypatch.setattr("distsim.mpi.library.is_installed", lambda: False)
    script = tmp_path / "x.py"
    script.write_text("")
    for on in ("nccl", "mpi"):
        assert main(["run", "--on", on, str(script)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(f"distsim: error: --on {on}:")


@pytest.mark.soak
def test_module_under_torchrun_starts_its_own_monitor(tmp_path: Path) -> None:
    """Under torchrun, `python -m distsim.debug train.py` starts a monitor, which aborts the hang."""
    done = run(
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--no-python",
        sys.executable,
        "-m",
        "distsim.debug",
        str(HANGS / "wrong_tag.py"),
        cwd=tmp_path,
        DISTSIM_ON_HANG="abort",
        DISTSIM_DIR=str(tmp_path / "rings"),
    )
    assert done.returncode != 0
    assert json.loads((tmp_path / "rings" / "verdict.json").read_text())["diagnoses"][0]["kind"] == "p2p_unmatched"


SPAWNED = """
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    t = torch.ones(2)
    early = dist.new_group([0, 1])
    dist.all_reduce(t)
    import distsim.debug

    distsim.debug.install(dir=sys.argv[2], on_hang="report")
    dist.all_reduce(t)
    dist.all_reduce(t, group=early)
    late = dist.new_group([0, 1], group_desc="late")
    dist.all_reduce(t, group=late)
    distsim.debug.remove()
    dist.all_reduce(t, group=late)
    dist.all_reduce(t)
    assert t[0] == 64, t
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(main, args=(2,), nprocs=2, start_method="fork")
"""


@pytest.mark.soak
def test_install_and_remove_in_the_middle_of_a_job(tmp_path: Path) -> None:
    """install() takes in groups that exist, remove() lets all go on: what happens in between is recorded."""
    from distsim.debug.rings.reader import RingReader

    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    rings = tmp_path / "rings"
    done = run(str(script), str(free_port()), str(rings), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for path in sorted(rings.glob("*.ring")):
        reader = RingReader(path)
        calls = [reader.decode(record, 0) for record in reader.since(0)[0]]
        made = [(call.group.label, call.op) for call in calls]
        assert made.count(("default_pg", "all_reduce")) == 1, made
        assert ("late", "all_reduce") in made, made
    assert len(list(rings.glob("*.ring"))) == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["missing.py"], "missing.py: cannot be read (No such file or directory)"),
        (["."], ".: cannot be read (Is a directory)"),
        (["-m", "nothere"], "no module nothere: not in {}, and not installed"),
        (["-m", ".nothere"], "no module .nothere: not in {}, and not installed"),
    ],
)
def test_a_script_that_is_missing_is_a_line_and_no_rank(words: list[str], line: str, tmp_path: Path) -> None:
    """Under another launcher each rank says so once, as Python does: no traceback and no verdict, because the guard has
    not begun."""
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "DISTSIM_DIR": str(tmp_path / "rings")}
    done = run("-m", "distsim.debug", *words, cwd=tmp_path, **environ)
    assert (done.returncode, done.stderr) == (2, f"distsim: error: {line.format(tmp_path)}\n")
    assert not (tmp_path / "rings").exists()


def test_a_script_with_a_syntax_error_has_no_frame_of_ours(tmp_path: Path) -> None:
    """The traceback is Python's own."""
    (tmp_path / "train.py").write_text("def f(:\n    pass\n")
    done = run("-m", "distsim.debug", "train.py", cwd=tmp_path, DISTSIM_MONITOR="0")
    plain = run("train.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, plain.stderr.replace(f"{tmp_path}/", ""))


AT_ITS_END = """
import os
import sys
import time

import torch
import torch.distributed as dist


class Bomb:
    abort = os.abort

    def __del__(self):
        self.abort()


dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
dist.barrier()
if dist.get_rank() == 1:
    sys.bomb = Bomb()  # goes off after everything else, as torch's own threads sometimes do
dist.destroy_process_group()
if len(sys.argv) > 1 and os.environ["RANK"] == "0":
    time.sleep(float(sys.argv[1]))  # rank 0 still writes its checkpoint
    print("written")
"""


@pytest.mark.parametrize(("writes_s", "code"), [("1", 0), pytest.param("60", 1, marks=pytest.mark.soak)])
def test_an_abort_after_the_end_is_a_line(writes_s: str, code: int, tmp_path: Path) -> None:
    """A rank that dies of SIGABRT while its interpreter goes down has finished its program: exit code 0, unless its
    launcher ended a rank for it that had not."""
    (tmp_path / "train.py").write_text(AT_ITS_END)
    done = distsim_run("--report", "report.json", "train.py", writes_s, cwd=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (done.returncode, report["diagnoses"], report["exit_code"]) == (code, [], 0), done.stderr
    line = "distsim: rank 1 was killed by SIGABRT, after its program and all its calls had ended: only the exit code"
    assert line in done.stderr
    assert ("written" in done.stdout) is ("failed first" not in done.stderr) is (code == 0)
    assert "report again" not in done.stderr


def test_the_last_failed_runs_stay_and_what_still_runs(tmp_path: Path) -> None:
    """Of many folders that launchers left, the newest are kept, and that of a launcher that lives."""
    for age in range(5):
        folder = tmp_path / f"run-{age}"
        folder.mkdir()
        if age == 4:
            (folder / "launcher.json").write_text(json.dumps(own_process()))
        os.utime(folder, (1_000_000 - age, 1_000_000 - age))
    forget_old_runs(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-0", "run-1", "run-4"]


@pytest.mark.parametrize("own", [False, True])
def test_a_nested_run_leaves_the_outer_jobs_folder_alone(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may launch a job of its own: the outer one's folder, report and monitor are not for it, a folder that the
    rank itself chose is."""
    from distsim.realexec import launch

    for name, value in {"LAUNCHED": "/outer", "REPORT": "/r.json", "MONITOR": "0", "LEVEL": "strict"}.items():
        monkeypatch.setenv(f"DISTSIM_{name}", value)
    monkeypatch.setenv("DISTSIM_DIR", "/mine" if own else "/outer")
    monkeypatch.delenv("DISTSIM_TRACEBACK", raising=False)  # of these tests
    launch.leave_outer_job()
    left = {name: value for name, value in os.environ.items() if name.startswith("DISTSIM_")}
    assert left == {"DISTSIM_LEVEL": "strict", **({"DISTSIM_DIR": "/mine"} if own else {})}
    assert launch.LAUNCHED == "DISTSIM_LAUNCHED"


REMOVED = """
import os, shutil, signal, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, t = dist.get_rank(), torch.ones(2)
for _ in range(3):
    dist.all_reduce(t)
    time.sleep(0.3)
if rank == 0:
    shutil.rmtree(os.environ["DISTSIM_DIR"])
dist.all_reduce(t)
"""


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("", 0, ()),
        ("if rank: os._exit(7)\ntime.sleep(60)", 1, ("rank exited  rank 1",)),
        ("dist.barrier() if rank else dist.recv(t, 1)", 3, ("unmatched send / recv  rank 1",)),
    ],
    ids=["healthy", "exit", "hang"],
)
def test_a_job_whose_folder_is_removed_ends_as_any_other(
    end: str, code: int, told: tuple[str, ...], tmp_path: Path
) -> None:
    """Its exit code and its verdict stay; one line says that nothing is left, and nobody blames the rank that the
    launcher ended."""
    (tmp_path / "train.py").write_text(REMOVED + end)
    command = [sys.executable, "-m", "distsim", "run", "--on", "gloo", "--nproc-per-node", "2", "train.py"]
    job = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert job.returncode == code, job.stderr
    ours = [line for line in job.stderr.splitlines() if line.startswith("distsim:")]
    assert ours == ["distsim: the flight records were removed while the job ran; nothing is left to diagnose"]
    assert all(one in job.stderr for one in told), job.stderr
    assert "rank killed" not in job.stderr
    assert "no report" not in job.stderr


@pytest.mark.parametrize("over", [False, True])
def test_a_killed_monitor_is_told_while_the_job_runs(over: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """One line says that the guard is gone; not after the job."""
    import threading

    from distsim.realexec import launch

    ended = threading.Event()
    if over:
        ended.set()
    launch.say_if_killed(subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]), ended)
    assert ("was killed by SIGKILL: the job continues without the guard" in capfd.readouterr().err) is not over


def test_a_torch_built_without_gloo_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, before a process starts."""
    from distsim.cli import main

    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert main(["run", "--on", "gloo", "--nproc-per-node", "2", str(Path(__file__))]) == 2
    refusal = f"--on gloo: this torch ({torch.__version__}) was built without gloo; install a standard wheel"
    assert capfd.readouterr().err.splitlines() == [f"distsim: error: {refusal}"]
