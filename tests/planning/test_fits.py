"""`distsim fits`: what a script's first steps need, by line and operator, and the smallest change that fits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.cli.dispatch import main
from distsim.errors import Failure, UsageError
from distsim.planning.advice import LayoutChange, advise
from distsim.planning.memory import Fit, NothingOnGpu
from distsim.planning.points import Flag, role_of, script_flags, with_flag
from distsim.sim import RunRequest
from distsim.sim.observe.metrics import OutOfMemory, RankTraining, Training
from tests.documents import checked

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
GIB = 1 << 30
FLAGS = """\
import argparse
def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbs", type=int, default=8)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--ckpt", choices=("none", "full"), default="none")
    args, _ = parser.parse_known_args()
    return args
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
    document = checked(report.read_text())
    assert (document["steps"], document["fits"], document["num_gpus"]) == (2, False, 2)
    assert [(change["change"], change["fits"]) for change in document["changes"]] == [("--mbs=8 --accum=2", True)]
    assert document["advised"] == "--mbs=8 --accum=2"
    assert document["fits_from_nodes"] is None
    assert 8 <= document["largest"]["--mbs"] < 16
    logits = 16 * 8192 * 50_000 * 4
    named = {one["name"]: (one["nbytes"], one["where"].rpartition("/")[2]) for one in document["held"] if one["name"]}
    assert named["logits"] == (logits, "train.py:14")
    assert named["log-probabilities of the loss"] == (logits, "train.py:15")
    assert named["gradient of the logits"] == (logits, "train.py:16")
    assert document["kinds"]["optimizer"] >= 2 * (2 * 64 * 50_000) * 4
    assert sum(document["kinds"].values()) == document["needed"] == sum(one["nbytes"] for one in document["held"])
    assert document["out_of_memory"][0]["site"]["where"].endswith(("train.py:14", "train.py:15", "train.py:16"))


SHARDED = """\
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % 8)
with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Linear(16384, 16384, bias=False) for _ in range(192)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
model.to_empty(device="cuda")
optimizer = torch.optim.Adam(model.parameters(), fused=True)
for step in range(3):
    model(torch.ones(1, 16384, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def needs(gib: float, activations: float) -> Fit:
    """A run of 8 GPUs with 80 GiB each, on which *gib* are needed, *activations* of them."""
    kinds = {"activations": int(activations * GIB), "parameters": int((gib - activations) * GIB)}
    rank = RankTraining(0, (0,), *[0.0] * 8, int(gib * GIB), int(gib * GIB), kinds)
    short = OutOfMemory((0,), 1, 80 << 30, 0, 0, 0, {**kinds}, False, False)
    training = Training("h100", 8, 80 << 30, 0, steps=2, ranks=[rank])
    training.out_of_memory = [short] * (gib > 80)
    return Fit(SimpleNamespace(failures=[]), training, 80 << 30)  # type: ignore[arg-type]


MORE_FLAGS = """
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--seq", type=int, default=8192)
"""


def plain(script: Path, need: Callable[[dict[str, str], int], float]) -> tuple[Callable[..., Fit], list[str]]:
    """A simulation that needs as many GiB as *need* says of flags and nodes; 1e9: the program refuses its flags."""
    ran: list[str] = []

    def measured(request: RunRequest, with_lines: bool = True) -> Fit:
        given = dict(word.partition("=")[::2] for word in request.args)
        nodes = int(str(request.on).rpartition(":")[2])
        ran.append(" ".join([f"{nodes}:", *request.args]))
        gib = need({"--mbs": "8", "--seq": "8192", "--ckpt": "none", "--tp": "1"} | given, nodes)
        if gib >= 1e9:
            raise UsageError("no such parallelism")
        return needs(gib, 0.0)

    return measured, ran


@pytest.mark.parametrize("used_a_gpu", [True, False])
def test_an_exception_of_a_trial_is_whole(used_a_gpu: bool, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its ranks, whether it came after or before the program used a GPU."""
    raised = [Failure((0, 1), "Cut", "no\nparts", "Traceback:\nCut: no\nparts")]
    raised.append(Failure((2,), "KeyError", "'mlp'", "Traceback:\nKeyError: 'mlp'"))
    whole = needs(100.0, 50.0)

    def measured(request: RunRequest, with_lines: bool = True) -> Fit:
        fit = needs(100.0, 50.0)
        fit.outcome = SimpleNamespace(failures=raised, exit_code=1)  # type: ignore[assignment]
        if not used_a_gpu:
            raise NothingOnGpu(request, fit.outcome, "parts")
        return fit

    monkeypatch.setattr("distsim.planning.advice.measure", measured)
    request = RunRequest(str(script), args=["--mbs=8"], on="dgx-h100:1")
    advice = advise(request, whole, {1: LayoutChange("", whole.need)}, None, list[str]().append)
    text = "ranks 0,1:\nTraceback:\nCut: no\nparts\n\nrank 2:\nTraceback:\nKeyError: 'mlp'"
    assert {change.problem for change in advice.tried} == {text}


def test_the_least_combination_is_found(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no single change may be enough, the strongest of each kind are added until they fit, a weaker one where the
    program refuses it, and what turns out not to be needed is left out again, by a run."""
    with (script.parent / "flags.py").open("a") as file:
        file.write(MORE_FLAGS)

    def need(flags: dict[str, str], nodes: int) -> float:
        tp = int(flags["--tp"])
        if tp == 8:
            return 1e9
        return 310.0 / nodes / tp + int(flags["--mbs"]) / 2 * (1 if flags["--ckpt"] == "none" else 0.125)

    measured, _ = plain(script, need)
    monkeypatch.setattr("distsim.planning.advice.measure", measured)
    request = RunRequest(str(script), args=["--mbs=8"], on="dgx-h100:1")
    fit, said = measured(request), list[str]()
    advice = advise(request, fit, {1: LayoutChange("", fit.need)}, None, said.append)
    assert [change.text for change in advice.tried] == [
        "--tp=4", "--tp=8", "--mbs=1 --accum=8", "--mbs=1 --accum=8 --ckpt=full",
        "--mbs=1 --accum=8 --ckpt=full --tp=8",
        "--mbs=1 --accum=8 --ckpt=full --tp=4", "--ckpt=full --tp=4",
    ]  # fmt: skip
    assert [change.problem for change in advice.tried].count("no such parallelism") == 2
    assert advice.change is not None
    assert (advice.change.text, advice.change.fits) == ("--ckpt=full --tp=4", True)
    assert advice.fewest == 5, "310 / 5 + 4 GiB"
    assert not advice.nodes[4].fits
    assert advice.largest == {"--mbs": None, "--seq": None}
    assert said == list(dict.fromkeys(said)), "nothing runs twice"


@pytest.mark.parametrize(
    ("needed", "nodes", "fits", "fewest", "largest", "runs"),
    [
        (
            lambda flags, nodes: 40 / nodes + int(flags["--mbs"]) * int(flags["--seq"]) / 8192,
            1,
            True,
            1,
            (40, 40_960),
            8,
        ),
        (
            lambda flags, nodes: 40 / nodes + int(flags["--mbs"]) * int(flags["--seq"]) / 8192,
            8,
            True,
            1,
            (75, 76_800),
            12,
        ),
        (
            lambda flags, nodes: 700 / nodes + int(flags["--mbs"]) * int(flags["--seq"]) / 8192,
            2,
            False,
            10,
            (None, None),
            12,
        ),
        (lambda flags, nodes: 100 + 0 * nodes, 1, False, None, (None, None), 20),
        (lambda flags, nodes: 90.0 if nodes < 40 else 70.0, 1, False, None, (None, None), 20),
    ],
)
def test_sizes_are_found_by_interpolation(
    needed: Any, nodes: int, fits: bool, fewest: int | None, largest: Any, runs: int, script: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The fewest nodes, with one that is too few beside it, and the largest micro-batch and sequence, in few runs.
    Where more nodes do not save memory, that ends the search."""
    with (script.parent / "flags.py").open("a") as file:
        file.write(MORE_FLAGS.replace("--tp", "--other"))
    measured, ran = plain(script, needed)
    monkeypatch.setattr("distsim.planning.advice.measure", measured)
    request = RunRequest(str(script), args=["--mbs=8", "--seq=8192"], on=f"dgx-h100:{nodes}")
    fit = measured(request)
    assert fit.fits is fits
    advice = advise(request, fit, {nodes: LayoutChange("", fit.need)}, None, lambda text: None)
    assert advice.fewest == fewest
    assert tuple(advice.largest.values()) == largest
    assert len(ran) == len(set(ran)) <= runs


@pytest.mark.parametrize(("length", "largest"), [(8192, {"--mbs": 40, "--seq": 40_960}), (4096, {"--mbs": 40})])
def test_a_length_is_known_if_it_needs_the_same_memory(
    length: int, largest: dict[str, int], script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither the command nor a default says it: a rank may look up a part of a sequence."""
    with (script.parent / "flags.py").open("a") as file:
        file.write('    parser.add_argument("--seq", type=int)\n')
    measured, _ = plain(script, lambda flags, nodes: 40 + int(flags["--mbs"]) * int(flags["--seq"]) / 8192)
    monkeypatch.setattr("distsim.planning.advice.measure", measured)
    request = RunRequest(str(script), args=["--mbs=8"], on="dgx-h100:1")
    fit = measured(request)
    fit.training.micro_batch, fit.training.sequence_length = length, 8  # sequences in the second dimension
    advice = advise(request, fit, {1: LayoutChange("", fit.need)}, None, lambda text: None)
    assert advice.largest == largest


def test_what_the_script_does_is_not_advised(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what recomputes all, nor more tensor parallelism than there are GPUs in a node."""
    with (script.parent / "flags.py").open("a") as file:
        file.write(MORE_FLAGS)
    measured, _ = plain(script, lambda flags, nodes: 200.0)
    monkeypatch.setattr("distsim.planning.advice.measure", measured)
    request = RunRequest(str(script), args=["--mbs=1", "--ckpt=full", "--tp=8"], on="dgx-h100:1")
    fit = measured(request)
    advice = advise(request, fit, {1: LayoutChange("", fit.need)}, None, lambda text: None)
    assert (advice.tried, advice.change, advice.fewest) == ([], None, None)


@pytest.mark.slow
def test_nodes_are_searched_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report is about the fewest that fit; the JSON has all that were tried."""
    path = tmp_path / "sharded.py"
    path.write_text(SHARDED)
    assert main(["fits", "--on", "dgx-h100", "--nodes", "1..8", "--json", str(path)]) == 0
    document = checked(capsys.readouterr().out)
    assert (document["fits_from_nodes"], document["cluster"], document["fits"]) == (2, "dgx-h100:2", True)
    assert [(one["nodes"], one["fits"]) for one in document["nodes"]] == [(1, False), (2, True)]
    assert main(["fits", "--on", "dgx-h100:1", str(path)]) == 5
    printed = " ".join(capsys.readouterr().out.split())
    assert "the script has no flag for a change on dgx-h100:1" in printed
    assert "fits from 2 nodes of dgx-h100 (16 GPUs): " in printed
    assert "checkpoint" not in printed


@pytest.mark.parametrize(
    ("nodes", "code", "words"),
    [("1..2", 0, "FITS  "), ("1..1", 2, "no GPU 'n1/gpu5' in dgx-h100: it has n0/gpu0 to n0/gpu7")],
)
def test_a_fault_strikes_where_its_node_is(
    nodes: str, code: int, words: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On fewer nodes it is left out, and one that is on no number of nodes is refused."""
    flags = ["--on", "dgx-h100", "--nproc-per-node", "1", "--nodes", nodes, "--fault", "gpu_slow n1/gpu5 0.8"]
    assert main(["fits", *flags, str(script), "--mbs=1"]) == code
    said = capsys.readouterr()
    assert words in (said.err if code else said.out)
    assert code or "fits from  1 node of dgx-h100" in said.out


@pytest.mark.slow
def test_two_workers_find_what_one_finds(script: Path) -> None:
    """The searches run side by side, each trial in a process of its own."""
    reports = []
    for workers in ("1", "2"):
        words = ["fits", "-n", workers, "--nproc-per-node", "2", "--json", str(script), "--mbs", "16"]
        ended = subprocess.run([sys.executable, "-m", "distsim", *words], capture_output=True, text=True, check=False)
        assert ended.returncode == 5, ended.stderr
        assert "with --mbs=8 --accum=2 ..." in ended.stderr
        reports.append(checked(ended.stdout))
    assert reports[0] == reports[1]
    assert reports[0]["advised"] == "--mbs=8 --accum=2"


def test_what_fits_is_exit_code_0(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what is left, and one JSON document where that is asked for."""
    assert main(["fits", "--nproc-per-node", "2", str(script)]) == 0
    assert capsys.readouterr().out.startswith("FITS  ")
    assert main(["fits", "--nproc-per-node", "2", "--json", str(script), "--mbs=1"]) == 0
    document = checked(capsys.readouterr().out)
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
        (["--pool", "dask:h:1", "host.py"], "--pool dask:h:1: "),
        (["--fault", "gpu_slw n0/gpu5 0.8", "host.py"], "--fault 'gpu_slw n0/gpu5 0.8': expected a fault such as"),
        (["--routing", "zipf", "host.py"], "--routing: expected uniform, zipf:1.2, measured:FILE or worst, got 'zipf'"),
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
        ("--expert-parallel-size", "expert_parallel"),
        ("--seq-len", "sequence"),
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


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {"fuse": True, "routing": "uniform", "lengths": None, "conditions": None}),
        (["--no-fuse"], {"fuse": False}),
        (
            ["--routing", "zipf:1.2", "--lengths", "lognormal:700:1"],
            {"routing": "zipf:1.2", "lengths": "lognormal:700:1"},
        ),
    ],
)
def test_options_of_a_run_reach_the_simulation(
    flags: list[str], options: dict[str, Any], script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They mean what they mean for `distsim run`."""
    asked: list[RunRequest] = []

    def measure(request: RunRequest) -> Fit:
        asked.append(request)
        raise UsageError("enough")

    monkeypatch.setattr("distsim.planning.memory.measure", measure)
    assert main(["fits", *flags, str(script)]) == 2
    assert {name: getattr(asked[0], name) for name in options} == options
    assert main(["fits", "--fault", "gpu_slow n0/gpu5 0.8", str(script)]) == 2
    assert asked[1].conditions is not None
    assert [str(rule) for rule in asked[1].conditions.rules] == ["n0/gpu5 at 0.8 of its speed"]
