"""`distsim fits`: what a script's first steps need, by line and operator, and the smallest change that fits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from distsim.cli.dispatch import main
from distsim.errors import UsageError
from distsim.planning.memory import Fit, search_change
from distsim.planning.points import Flag, role_of, script_flags, with_flag
from distsim.sim import RunRequest
from distsim.sim.observe.metrics import OutOfMemory, RankTraining, Training

TRAIN = """\
import torch, torch.distributed as dist
from torch.nn import functional as F
from flags import parse
args = parse()
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
embed = torch.nn.Embedding(args.vocab, 64, device="cuda")
head = torch.nn.Linear(64, args.vocab, device="cuda")
parameters = [*embed.parameters(), *head.parameters()]
optimizer, total = torch.optim.Adam(parameters), torch.zeros((), device="cuda")
for step in range(args.steps):
    for _ in range(args.accum):
        words = torch.randint(args.vocab, (args.mbs, 8192), device="cuda")
        logits = head(embed(words))
        loss = F.cross_entropy(logits.flatten(0, 1), words.flatten())
        loss.backward(); total.add_(loss.detach())
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
if args.steps == 3:
    raise RuntimeError("the run should have ended in step 2")
"""
FLAGS = """\
import argparse
def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbs", type=int, default=8)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--ckpt", choices=("none", "full"), default="none")
    return parser.parse_args()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "flags.py").write_text(FLAGS)
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_a_change_that_fits_is_found_and_run(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """16 sequences need too much; half of them, accumulated twice, fit, as a second run shows. The
    logits, their gradient and the optimizer's state are named, at the second step, which is the last one."""
    report = script.with_suffix(".json")
    assert main(["fits", "--nproc-per-node", "2", "--report", str(report), str(script), "--mbs", "16"]) == 5
    printed = capsys.readouterr().out
    assert printed.startswith("DOES NOT FIT  it needs ")
    assert "smallest change that fits  --mbs=8 --accum=2  fits: " in printed
    document = json.loads(report.read_text())
    assert (document["steps"], document["fits"], document["num_gpus"]) == (2, False, 2)
    assert [(change["change"], change["fits"]) for change in document["changes"]] == [("--mbs=8 --accum=2", True)]
    logits = 16 * 8192 * 50_000 * 4
    named = {one["name"]: (one["nbytes"], one["where"].rpartition("/")[2]) for one in document["held"] if one["name"]}
    assert named["logits"] == (logits, "train.py:14")
    assert named["log-probabilities of the loss"] == (logits, "train.py:15")
    assert named["gradient of the logits"] == (logits, "train.py:16")
    assert document["kinds"]["optimizer"] >= 2 * (2 * 64 * 50_000) * 4
    assert sum(document["kinds"].values()) == document["needed"] == sum(one["nbytes"] for one in document["held"])
    assert document["out_of_memory"][0]["site"]["where"].endswith(("train.py:14", "train.py:15", "train.py:16"))


def needs(gib: int, activations: int) -> Fit:
    """A run of 8 GPUs with 80 GiB each, on which *gib* are needed, *activations* of them."""
    kinds = {"activations": activations << 30, "parameters": (gib - activations) << 30}
    rank = RankTraining(0, (0,), *[0.0] * 8, gib << 30, gib << 30, kinds)
    short = OutOfMemory((0,), 1, 80 << 30, 0, 0, 0, {**kinds}, False, False)
    training = Training("h100", 8, 80 << 30, 0, steps=2, ranks=[rank])
    training.out_of_memory = [short] * (gib > 80)
    return Fit(SimpleNamespace(failures=[]), training, 80 << 30)  # type: ignore[arg-type]


def test_changes_are_joined_where_none_alone_is_enough(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that spares most stays and another comes on top; what the script refuses is not tried again."""
    (script.parent / "flags.py").write_text(FLAGS + '    parser.add_argument("--tp", default=1)\n')

    def measured(request: RunRequest, with_lines: bool = True) -> Fit:
        if "--tp=2" in request.args:
            raise UsageError("no such parallelism")
        whole = 160 if "--ckpt=full" not in request.args else 60
        if "--mbs=4" in request.args:
            whole //= 2
        return needs(40 + whole, whole)

    monkeypatch.setattr("distsim.planning.memory.measure", measured)
    request = RunRequest(str(script), args=["--mbs=8"])
    tried: list[str] = []
    changes = search_change(request, measured(request), tried.append)
    assert tried == ["--mbs=2 --accum=4", "--mbs=1 --accum=8", "--ckpt=full", "--tp=2", "--ckpt=full --mbs=4 --accum=2"]
    assert [change.problem for change in changes] == ["", "", "", "no such parallelism", ""]
    last = changes[-1].fit
    assert last is not None
    assert last.fits


def test_what_fits_is_exit_code_0(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what is left, and one JSON document where that is asked for."""
    assert main(["fits", "--nproc-per-node", "2", str(script)]) == 0
    assert capsys.readouterr().out.startswith("FITS  ")
    assert main(["fits", "--nproc-per-node", "2", "--json", str(script), "--mbs=1"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits"]
    assert document["changes"] == []
    assert document["ranks"][0]["ranks"] == [0, 1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere.py"], "no script nowhere.py: no such file"),
        (["--nnodes", "0", "host.py"], "--nnodes: expected a number of nodes, or MIN:MAX, got '0'"),
        (["host.py"], "host.py on dgx-h100:1: no rank put anything on a GPU (exit code 0; last line: on the host)"),
        (["--on", "dgx-h1000:1", "host.py"], "dgx-h1000"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what was expected and what came, or what the program did instead of using a GPU."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "host.py").write_text("print('on the host')\n")
    assert main(["fits", *words]) == 2
    assert line in capsys.readouterr().err.splitlines()[-1]


def test_a_hang_before_a_gpu_is_used_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its verdict, as of any other run, and not that nothing is on a GPU."""
    path = tmp_path / "hangs.py"
    path.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() != 1:\n"
        "    dist.all_reduce(torch.ones(1))\n"
    )
    assert main(["fits", "--nproc-per-node", "2", str(path)]) == 3
    assert "Rank 1 never called all_reduce #1" in capsys.readouterr().out


def test_flags_are_read_from_the_scripts_source(script: Path) -> None:
    """With those of a module beside it, and the values of the command line."""
    flags = {flag.name: flag for flag in script_flags(script, ["--mbs", "4", "--ckpt=full", "--compile"])}
    assert flags["--mbs"].value == "4"
    assert flags["--accum"].value == "1"
    assert (flags["--ckpt"].value, flags["--ckpt"].choices) == ("full", ("none", "full"))
    assert flags["--compile"] == Flag("--compile", "True", (), True)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("--mbs", "micro_batch"),
        ("--per_device_train_batch_size", "micro_batch"),
        ("--training.local_batch_size", "micro_batch"),
        ("--global-batch-size", None),
        ("--gradient_accumulation_steps", "accumulation"),
        ("--gradient-checkpointing", "recomputation"),
        ("--tensor-model-parallel-size", "tensor_parallel"),
        ("--pp", "pipeline"),
        ("--lr", None),
    ],
)
def test_a_flags_role_is_told_by_its_name(name: str, role: str | None) -> None:
    """As Megatron, Hugging Face, torchtitan and small scripts spell them."""
    assert role_of(Flag(name, None)) == role


def test_a_flag_is_replaced_in_either_spelling() -> None:
    """In one word or in two; a switch is added once."""
    assert with_flag(["--mbs", "4", "--lr", "1"], "--mbs", "2") == ["--lr", "1", "--mbs=2"]
    assert with_flag(["--mbs=4"], "--mbs", "2") == ["--mbs=2"]
    assert with_flag(["--x"], "--recompute", None) == ["--x", "--recompute"]


def test_kernels_can_be_priced_one_by_one(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--no-fuse` reaches the runs, as it does for `distsim run`."""
    asked: list[bool] = []

    def measure(request: RunRequest) -> Fit:
        asked.append(request.fuse)
        raise UsageError("enough")

    monkeypatch.setattr("distsim.planning.memory.measure", measure)
    assert [main(["fits", *flags, str(script)]) for flags in ([], ["--no-fuse"])] == [2, 2]
    assert asked == [True, False]
