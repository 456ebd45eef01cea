"""No effect leaves a rank after a mismatch or a hang: on machines it would be dead or stuck."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import TextIO

import pytest
from sim.running import HEAD, Scripts

from distsim.debug.records.frames import absolute, shown

ATTEMPTS = {
    "a file": 'open(f"made{rank}", "w").write("x")',
    "torch.save over a checkpoint": 'torch.save(t, "good.pt")',
    "a file that is open": "log.write('after'); log.flush()",
    "what is still buffered": "log.write('after')",
    "remove": 'os.remove("good.pt")',
    "rename": 'os.rename("good.pt", f"made{rank}")',
    "mkdir": 'os.makedirs(f"made{rank}/deep")',
    "copy": 'shutil.copy("good.pt", f"made{rank}")',
    "a process": 'subprocess.run(["touch", f"made{rank}"])',
    "a shell": 'os.system(f"touch made{rank}")',
    "stdout": 'print("after", flush=True); os.write(1, b"after")',
    "at exit": 'atexit.register(lambda: open(f"made{rank}", "w")); sys.exit(0)',
    "caught": """
try:
    open(f"made{rank}", "w")
except BaseException:
    open(f"made{rank}", "w")
""",
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files left open
@pytest.mark.parametrize(
    ("attempt", "stop"),
    [
        pytest.param(attempt, stop, id=f"{name}-{stop}", marks=pytest.mark.soak if (n + m) % 2 else [])
        for n, (name, attempt) in enumerate(ATTEMPTS.items())
        for m, stop in enumerate(("mismatch", "hang"))
    ],
)
def test_nothing_leaves_a_rank_that_is_over(
    script: Scripts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    stop: str,
    attempt: str,
) -> None:
    """Files, processes, output, buffers, exit handlers: right after the call that does not fit, and in a
    `finally` block around a call that hangs."""
    monkeypatch.chdir(tmp_path)
    text = HEAD + "import atexit, shutil, subprocess\nt = torch.ones(2 + rank)\n"
    text += 'log = open(f"log{rank}", "w")\nlog.write("before")\nlog.flush()\nif rank == 0: torch.save(t, "good.pt")\n'
    call = "dist.all_reduce(t)" if stop == "mismatch" else "dist.all_reduce(t) if rank else dist.recv(t, 1)"
    body = "\n".join("    " + line for line in attempt.splitlines())
    if stop == "mismatch":
        text += f"{call}\nif True:\n{body}\n"
    else:
        text += f"try:\n    {call}\nfinally:\n{body}\n"
    ran = script(text)
    assert ran.outcome.exit_code == (4 if stop == "mismatch" else 3)
    gc.collect()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"program.py", "good.pt", "log0", "log1"}
    assert [(tmp_path / f"log{rank}").read_text() for rank in (0, 1)] == ["before", "before"]
    assert (tmp_path / "good.pt").stat().st_size > 500
    assert "after" not in ran.out + ran.err + capfd.readouterr().out


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files left open
@pytest.mark.parametrize("stop", ["mismatch", "hang"])
def test_threads_beside_a_simulation_keep_what_they_write(
    script: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    """A thread of the surrounding program has opened its file and its descriptor while the ranks ran."""
    monkeypatch.chdir(tmp_path)
    kept: list[tuple[TextIO, int]] = []

    def beside() -> None:
        while not Path("begun").exists():
            time.sleep(0.001)
        log = Path("host.log").open("w")  # noqa: SIM115
        log.write("early, ")
        kept.append((log, os.open("host.raw", os.O_WRONLY | os.O_CREAT)))
        Path("opened").touch()

    thread = threading.Thread(target=beside, daemon=True)
    thread.start()
    text = HEAD + 'log = open(f"log{rank}", "w")\nlog.write("after")\nopen("begun", "w").close()\n'
    text += 'while not os.path.exists("opened"): pass\n'
    text += "dist.all_reduce(torch.ones(2 + rank))\n" if stop == "mismatch" else "dist.recv(torch.ones(1), 1 - rank)\n"
    ran = script(text)
    thread.join()
    ((log, number),) = kept
    assert ran.outcome.exit_code == (4 if stop == "mismatch" else 3)
    log.write("late")
    log.close()
    os.write(number, b"raw")
    os.close(number)
    assert (tmp_path / "host.log").read_text() == "early, late"
    assert (tmp_path / "host.raw").read_text() == "raw"
    gc.collect()
    assert [(tmp_path / f"log{rank}").read_text() for rank in (0, 1)] == ["", ""]


def test_a_simulation_elsewhere_leaves_the_names_of_files_as_they_were(
    script: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever watches a job in this process reads the job's source, also after simulating in another folder."""
    before = absolute("train.py"), shown(str(tmp_path / "train.py"))
    monkeypatch.chdir(tmp_path)
    script(HEAD)
    assert (absolute("train.py"), shown(str(tmp_path / "train.py"))) == before
