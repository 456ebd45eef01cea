"""`distsim run` with another launcher's command: its program, its ranks, what it tells them."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from distsim.cli import main
from distsim.cli.inputs.launchers import program_of
from distsim.errors import UsageError


def launched(command: str) -> tuple[object, ...]:
    """(program, its arguments, nnodes, nproc_per_node, whether the environment alone tells the local rank)."""
    words = shlex.split(command)
    module = words[0] == "-m"
    answer = program_of(words[module], words[module + 1 :], module)
    program = f"-m {answer.program}" if answer.module else answer.program
    return program, answer.arguments, answer.nnodes, answer.nproc_per_node, answer.use_env


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train.py --lr 1", ("train.py", ["--lr", "1"], None, None, True)),
        ("torchrun --nproc-per-node 8 --nnodes=4 train.py -x", ("train.py", ["-x"], "4", "8", True)),
        ("/opt/bin/torchrun --standalone -m pkg.train", ("-m pkg.train", [], "1", "1", True)),
        ("-m torch.distributed.run --nproc_per_node gpu train.py", ("train.py", [], "1:1", "gpu", True)),
        ("python3.11 -u -m torch.distributed.launch --nproc-per-node=2 t.py", ("t.py", [], "1", "2", False)),
        ("python -m torch.distributed.launch --use-env t.py", ("t.py", [], "1", "1", True)),
        ("deepspeed --num_gpus 4 t.py --deepspeed", ("t.py", ["--deepspeed"], None, "4", False)),
        ("deepspeed --include a:0,1@b:0,1 --no_local_rank t.py", ("t.py", [], "2", "2", True)),
        ("srun -N 2 --ntasks-per-node=8 --gres=gpu:8 python -u t.py -x", ("t.py", ["-x"], "2", "8", True)),
        ("srun -n 16 --nodes 2 python t.py", ("t.py", [], "2", "8", True)),
        ("srun -N 2 torchrun --nnodes 2 --nproc-per-node 8 t.py", ("t.py", [], "2", "8", True)),
        ("mpirun -np 16 -N 8 -x A=1 --mca btl tcp python t.py -x", ("t.py", ["-x"], "2", "8", True)),
        ("mpiexec -n 2 -genv A 1 python t.py", ("t.py", [], None, None, True)),
        ("fabric run --devices 4 --num_nodes 2 t.py -x", ("t.py", ["-x"], "2", "4", True)),
        ("fabric run --devices 0,1 --strategy ddp t.py", ("t.py", [], "1", "2", True)),
        ("fabric run t.py -x 1 --devices=4 --accelerator gpu", ("t.py", ["-x", "1"], "1", "4", True)),
        ("lightning run model --devices=auto --accelerator=cuda t.py", ("t.py", [], "1", None, True)),
        (
            "tune run --nproc_per_node 2 full_finetune_distributed --config llama3_1/8B_full",
            (
                "-m torchtune._cli.tune",
                shlex.split("run full_finetune_distributed --config llama3_1/8B_full"),
                "1",
                "2",
                True,
            ),
        ),
        ("python -Bm pkg.train", ("-m pkg.train", [], None, None, True)),
        ("python -X faulthandler -O t.py", ("t.py", [], None, None, True)),
    ],
)
def test_the_program_of_a_command(command: str, expected: tuple[object, ...]) -> None:
    """The innermost program, the ranks of the innermost launcher that says how many."""
    found = launched(command)
    assert (*found[:2], str(found[2] or "None").removesuffix(":1"), *found[3:]) == (
        *expected[:2],
        str(expected[2] or "None").removesuffix(":1"),
        *expected[3:],
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("torchrun --frobnicate 3 t.py", "torchrun: unrecognized arguments: --frobnicate"),
        ("srun --frobnicate 3 t.py", "srun: unrecognized arguments: --frobnicate"),
        ("deepspeed --num_gpus 2", "deepspeed: expected a program"),
        ("python -c pass", "python -c: expected a script"),
        ("mpirun -np 2 python t.py : -np 2 python u.py", "several programs cannot be simulated as one job"),
        ("mpirun --frobnicate -np 2 python t.py", "mpirun: its flag --frobnicate is not known|unrecognized arguments"),
        ("mpirun -np two python t.py", "mpirun: expected numbers of processes, got -np two"),
        ("fabric consolidate checkpoint", "fabric consolidate: only fabric run starts a program"),
        ("tune ls", "tune ls: only tune run starts a program"),
        ("deepspeed --hostfile /nowhere t.py", "--hostfile /nowhere: cannot be read"),
    ],
)
def test_a_command_that_is_not_understood(command: str, words: str) -> None:
    """One line names the launcher and the flag."""
    with pytest.raises(UsageError, match=words):
        launched(command)


def test_a_console_script_is_found_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is a Python script on PATH is that script, started as by python; another program is not.

    A folder of that name, such as the package in its own repository, does not hide it.
    """
    monkeypatch.chdir(tmp_path.parent)
    Path("trainer").mkdir(exist_ok=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, line in (("trainer", f"#!{sys.executable}"), ("tool", "#!/bin/sh")):
        (tmp_path / name).write_text(f"{line}\n")
        (tmp_path / name).chmod(0o755)
    script, tool = (program_of(name, ["-x"], False) for name in ("trainer", "tool"))
    assert (script.program, script.launchers) == (str(tmp_path / "trainer"), ["python"])
    assert (tool.program, tool.launchers) == ("tool", [])


def test_accelerate_reads_its_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parser, its configuration file and its environment; the number of ranks is that of all machines."""
    import argparse

    def parser() -> argparse.ArgumentParser:
        made = argparse.ArgumentParser()
        for flag in ("--num_processes", "--num_machines", "--config_file"):
            made.add_argument(flag)
        made.add_argument("--module", "-m", action="store_true")
        made.add_argument("--use_deepspeed", action="store_true")
        made.add_argument("training_script")
        made.add_argument("training_script_args", nargs=argparse.REMAINDER)
        return made

    launch = SimpleNamespace(launch_command_parser=parser, _validate_launch_command=lambda args: (args, None, False))
    modules: dict[str, Any] = {f"accelerate{name}": ModuleType(name) for name in ("", ".commands", ".utils")}
    modules["accelerate.commands.launch"] = launch
    told = ModuleType("accelerate.utils.launch")
    told.prepare_multi_gpu_env = lambda args: {"ACCELERATE_MIXED_PRECISION": "bf16"}  # type: ignore[attr-defined]
    told.prepare_deepspeed_cmd_env = told.prepare_multi_gpu_env  # type: ignore[attr-defined]
    for name, module in {**modules, told.__name__: told}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for command in (["launch"], None):
        words = ["--num_processes", "16", "--num_machines", "2", "t.py", "--lr", "1"]
        program, module = ("accelerate", False) if command else ("accelerate.commands.launch", True)
        answer = program_of(program, [*(command or []), *words], module)
        assert (answer.program, answer.arguments) == ("t.py", ["--lr", "1"])
        assert (answer.nnodes, answer.nproc_per_node) == ("2", "8")
        assert answer.environ == {"ACCELERATE_MIXED_PRECISION": "bf16"}


def test_packages_of_a_launcher_are_not_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate keeps its state in a class: each rank imports anew what distsim has imported to read its flags."""
    from distsim.sim.isolation.modules.modules import forget_packages

    (tmp_path / "keeps_state").mkdir()
    (tmp_path / "keeps_state/__init__.py").write_text("from . import state")
    (tmp_path / "keeps_state/state.py").write_text("import wave")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    before = set(sys.modules)
    importlib.import_module("keeps_state")
    forget_packages(before)
    assert set(sys.modules) - before == {"wave"}


def test_the_number_of_ranks_is_given_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """distsim run stands for the launcher: two numbers are refused; so is a shell script, with what to give."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "train.sh").write_text("torchrun train.py")
    script = str(tmp_path / "train.py")
    command = ["--nproc-per-node", "1", "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    assert main(["run", *command]) == 2
    assert "--nproc-per-node 1 for distsim run and 2 for torchrun" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "train.sh")]) == 2
    assert "got the shell script" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_of_a_launcher_are_simulated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun inside distsim run starts no process; under srun the ranks have its variables."""
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    body = "import os\nprint(*(os.environ.get(n) for n in ('RANK', 'SLURM_PROCID', 'SLURM_NODEID', 'SLURM_NTASKS')))\n"
    path = str(tmp_path / "train.py")
    Path(path).write_text(body)
    assert main(["run", "--on", "dgx-h100:2", "--quiet", "--", "torchrun", "--nproc-per-node", "2", path]) == 0
    assert capfd.readouterr().out.splitlines() == ["[0] 0 None None None", "[1] 1 None None None"]
    assert main(["run", "--on", "dgx-h100:2", "--quiet", "srun", "-N2", "--ntasks-per-node", "1", "python", path]) == 0
    assert capfd.readouterr().out.splitlines() == ["[0] None 0 0 2", "[1] None 1 1 2"]
    names = "'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK', 'OMPI_COMM_WORLD_SIZE', 'RANK', 'A'"
    Path(path).write_text(f"import os\nprint(*(os.environ.get(n) for n in ({names})))\n")
    assert main(["run", "--on", "dgx-h100:2", "--quiet", "mpirun", "-np", "10", "-x", "A=3", "python", path]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{r}] {r} {r % 5} 10 None 3" for r in range(10)]
    assert main(["run", "--on", "dgx-h100:2", "mpirun", "-np", "9", "python", path]) == 2
    assert "9 ranks do not fill 2 nodes of dgx-h100:2 evenly" in capfd.readouterr().err


@pytest.mark.slow
def test_one_process_is_started_as_by_python(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It has no variables of torchrun and no rank before its lines; what it spawns are the ranks."""
    path = tmp_path / "train.py"
    path.write_text(
        "import os, torch, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def work(rank, size):\n"
        "    dist.init_process_group('nccl', init_method='tcp://127.0.0.1:2999', rank=rank, world_size=size)\n"
        "    dist.all_reduce(torch.ones(1, device=f'cuda:{rank}'))\n"
        "    print(rank, dist.get_world_size())\n"
        "if __name__ == '__main__':\n"
        "    print('main', 'RANK' in os.environ)\n"
        "    mp.spawn(work, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())\n"
    )
    assert main(["run", "--on", "dgx-h100:1", "--one-process", str(path)]) == 0
    output, error = capfd.readouterr()
    assert output.splitlines()[0] == "main False"
    assert sorted(output.splitlines()[1:]) == [f"[{rank}] {rank} 8" for rank in range(8)]
    assert "8 ranks, backend nccl" in error


def test_python_starts_one_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`distsim run -- python train.py` is one process on one GPU, as without distsim, unless a flag says more."""
    path = tmp_path / "train.py"
    path.write_text("import os, torch\nprint(os.environ.get('RANK'), torch.ones(1, device='cuda').device)\n")
    assert main(["run", "--on", "dgx-h100:1", "--", "python", str(path)]) == 0
    output = capfd.readouterr().out
    assert output.splitlines()[0] == "None cuda:0"
    assert "1 rank," in output
    assert main(["run", "--on", "dgx-h100:1", "--quiet", "--nproc-per-node", "2", "--", "python", str(path)]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0 cuda:0", "[1] 1 cuda:0"]


def test_a_rank_that_needs_sruns_variables_has_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked whether there are any, torchrun has set none; who needs one gets all, and a note says so."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_JOB_NODELIST")
    path = tmp_path / "train.py"
    path.write_text(
        "import os\nassert 'SLURM_PROCID' not in os.environ and os.environ.pop('SLURM_NTASKS', None) is None\n"
        f"print(*(os.environ[name] for name in {names}))\nassert 'SLURM_PROCID' in os.environ\n"
        "try: os.environ['SLURM_NO_SUCH']\nexcept KeyError: pass\n"
    )
    assert main(["run", "--on", "dgx-h100:2", "--nproc-per-node", "2", str(path)]) == 0
    said = capfd.readouterr()
    lines = [f"[{rank}] {rank} {rank % 2} 4 {rank // 2} node0,node1" for rank in range(4)]
    assert sorted(line for line in said.out.splitlines() if line.startswith("[")) == lines
    assert "the program reads variables of srun (SLURM_PROCID, ...)" in " ".join((said.out + said.err).split())
