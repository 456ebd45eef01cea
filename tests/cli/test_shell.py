"""`distsim shell`: scripts of five lines whose launchers, python and nvidia-smi are simulated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distsim.cli import main
from distsim.cli.inputs.shell import uses_torch

START = [sys.executable, "-m", "distsim", "shell", "--on", "dgx-h100:1"]
TRAIN = "import os, torch\nprint('rank', os.environ.get('RANK'), torch.cuda.device_count())\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a training script, in which no launcher of this machine is heard."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def shell(script: str, *flags: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run *script* in bash."""
    Path("run.sh").write_text(script)
    return subprocess.run([*START, *flags, "--", "bash", "run.sh"], capture_output=True, text=True, check=False, **how)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn as nn", True),
        ("def f():\n    from torch import cuda", True),
        ("import model", True),
        ("from package.sub import inner", True),
        ("from package import sub", True),
        ("from package import plain", False),
        ("import json, numpy", False),
        ("import tomllib; from packaging import version", False),
        ("from transformers import Trainer", True),
        ("print 'Python 2'", False),
    ],
)
def test_which_programs_need_torch(source: str, expected: bool, folder: Path) -> None:
    """The imports of a program and of its own modules decide, without running it."""
    (folder / "model.py").write_text("from package.sub import inner")
    (folder / "package" / "sub").mkdir(parents=True)
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "plain.py").write_text("import model_that_is_missing")
    (folder / "package" / "sub" / "__init__.py").write_text("from .inner import x")
    (folder / "package" / "sub" / "inner.py").write_text("from ..deep import y")
    (folder / "package" / "deep.py").write_text("import torch")
    assert uses_torch(source, folder) is expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "nowhere:1", "--", "ls"], "nowhere"),
        (["--on", "gloo", "--", "ls"], "--on gloo: distsim shell only simulates"),
        (["--", "bash", "missing.sh"], "no script missing.sh"),
        (["train.py"], "distsim shell -- python train.py"),
        (["./note.txt"], "is not executable: distsim shell -- bash ./note.txt"),
        (["--", "no-such-program"], "no program no-such-program"),
        (["--report", "no/folder/r.json", "--", "ls"], "--report no/folder/r.json"),
        (["--frobnicate", "--", "ls"], "does not know --frobnicate"),
    ],
)
def test_what_cannot_start_is_one_line(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cluster, a script, a program or a flag that is wrong is refused before anything runs."""
    (folder / "note.txt").write_text("")
    assert main(["shell", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_shell_in_a_shell_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both inside another shell and inside a simulated rank."""
    for value, where in (("/tmp/x", "distsim shell"), ("simulation", "a simulated rank")):
        monkeypatch.setenv("DISTSIM_SHELL", value)
        assert main(["shell", "ls"]) == 2
        assert f"started inside {where}: run its command" in capsys.readouterr().err


@pytest.mark.slow
def test_a_start_script_runs_as_it_is(folder: Path) -> None:
    """What needs torch is simulated, what does not is real, each run has its report, and the exit code passes."""
    (folder / "prepare.py").write_text("import sys\nprint('prepared by', sys.prefix)\n")
    done = shell(
        "python prepare.py\n"
        'GPUS=$(python -c "import torch; print(torch.cuda.device_count())")\n'
        "nvidia-smi -L | grep -c H100\n"
        "nvidia-smi -L | true\n"
        "torchrun --nproc-per-node $GPUS train.py\n"
        "CUDA_VISIBLE_DEVICES=0,1 python3 -um train\n"
        "mpirun -np 2 -x A=1 python -c pass || exit 7\n",
        "--report",
        "r.json",
        "--trace=t.json",
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"prepared by {sys.prefix}", "8"], done.stderr
    assert [line for line in lines if "rank" in line and "8" in line][:8] == [f"[{r}] rank {r} 8" for r in range(8)]
    assert "rank None 2" in lines
    assert "mpirun" not in done.stdout
    assert "python -c: expected a script" in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert done.returncode == 7
    sizes = [json.loads(Path(f"r.{number}.json").read_text())["world_size"] for number in (1, 2)]
    assert sizes == [8, 1]
    assert Path("t.2.json").exists()


@pytest.mark.slow
def test_commands_of_packages_that_require_torch_are_simulated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that train; what downloads, and what --real names, runs for real."""
    site, bin = folder / "site", folder / "bin"
    info = site / "trainer-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trainer\nVersion: 1.0\nRequires-Dist: torch\n")
    (info / "entry_points.txt").write_text("[console_scripts]\ntrain-it = trainer:main\n")
    (site / "trainer.py").write_text(
        "import sys, torch\ndef main():\n    print(sys.argv[1:], torch.cuda.device_count())\n"
    )
    bin.mkdir()
    command = bin / "train-it"
    command.write_text(f"#!{sys.executable}\nfrom trainer import main\nmain()\n")
    command.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setenv("PATH", f"{bin}{os.pathsep}{os.environ['PATH']}")
    done = shell("train-it fit --lr 1\ntrain-it download x\n")
    assert done.stdout.splitlines() == ["['fit', '--lr', '1'] 8", "['download', 'x'] 0"], done.stderr
    done = shell("train-it fit\n", "--real", "train-*")
    assert done.stdout.splitlines() == ["['fit'] 0"], done.stderr


@pytest.mark.slow
def test_real_names_scripts_that_are_not_simulated(folder: Path) -> None:
    """A script that imports torch runs for real where --real names it; a launcher in a rank is refused."""
    (folder / "prepare.py").write_text("import torch\nprint(torch.cuda.device_count())\n")
    (folder / "nested.py").write_text("import subprocess, torch\nprint(subprocess.call(['torchrun', 'x.py']))\n")
    done = shell("python prepare.py\ntorchrun --nproc-per-node 2 nested.py\n", "--real", "prep*.py")
    assert [line for line in done.stdout.splitlines() if line in ("0", "[0] 2", "[1] 2")] == ["0", "[0] 2", "[1] 2"]
    assert "torchrun was started by a simulated rank" in done.stderr
    assert done.returncode == 0


@pytest.mark.slow
def test_a_module_on_pythonpath_is_simulated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m` of a package of the program that is not below the working folder; torchrun that it starts as well
    (LLaMA-Factory)."""
    package = folder / "src" / "factory"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cli.py").write_text("def main():\n    from . import launcher\n    launcher.launch()\nmain()\n")
    (package / "train.py").write_text("import os, torch\nprint(os.environ['RANK'], torch.cuda.device_count())\n")
    start = "subprocess.run(['torchrun', '--nproc-per-node', '2', os.path.join(os.path.dirname(__file__), 'train.py')])"
    (package / "launcher.py").write_text(f"import os, subprocess, torch\ndef launch():\n    {start}\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'src'}{os.pathsep}{os.environ['PYTHONPATH']}")
    (folder / "elsewhere").mkdir()
    done = shell("cd elsewhere && python -m factory.cli\n")
    assert sorted(done.stdout.splitlines()) == ["[0] 0 8", "[1] 1 8"], done.stderr


@pytest.mark.slow
def test_nothing_outlives_the_command(folder: Path) -> None:
    """Neither a background process of the script nor, after Ctrl-C, a simulation."""
    done = shell('sleep 1234 &\nuntil [ "$(cat /proc/$!/comm)" = sleep ]; do :; done\necho $! >pid\nexit 3')
    assert done.returncode == 3
    assert "ended the processes that the command left running: sleep" in done.stderr
    assert not Path(f"/proc/{Path('pid').read_text().strip()}").exists()
    (folder / "train.py").write_text("import os, torch\nprint('busy', flush=True)\nwhile True: torch.ones(3).sum()\n")
    Path("run.sh").write_text("torchrun --nproc-per-node 1 train.py\n")
    job = subprocess.Popen(
        [*START, "--", "bash", "run.sh"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert job.stdout is not None
    assert "busy" in job.stdout.readline()
    group = os.getpgid(job.pid)
    os.killpg(group, signal.SIGINT)
    job.communicate(timeout=60)
    assert job.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


@pytest.mark.slow
def test_sigterm_ends_the_command(folder: Path) -> None:
    """Sent to the whole group, as by timeout(1), it reaches the command before it is passed on."""
    job = subprocess.Popen(
        [*START, "--", "bash", "-c", "echo begun; sleep 1234; :"], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "begun\n"
    os.killpg(job.pid, signal.SIGTERM)
    assert job.wait(timeout=60) == 128 + signal.SIGTERM
    job.stdout.close()
