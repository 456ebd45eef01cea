"""scenarios/training: what the programs refuse, how large their models are, that cutting changes no number."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distsim.scenario import find_scenarios, load_scenario, run_scenario
from distsim.sim import RunRequest, run_program

FOLDER = Path(__file__).parents[2] / "scenarios" / "training"
PROGRAMS = ("context_parallel", "ddp", "dlrm", "fsdp1", "fsdp2", "moe", "schedules", "tp_pp", "trainer", "zero1")
ELSEWHERE = {"fsdp2", "tp_pp", "zero1"}
"""Programs that other tests of the suite train."""
FILES = find_scenarios([FOLDER])
MODULES = ("float8", "gpt", "llama", "log", "options", "optimizer", "pipeline", "stages")

pytestmark = pytest.mark.filterwarnings("ignore")  # a program's warnings are its own


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules beside the programs, as a program that is run imports them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import float8  # type: ignore[import-not-found]
    import gpt  # type: ignore[import-not-found]
    import llama  # type: ignore[import-not-found]
    import options  # type: ignore[import-not-found]
    import stages  # type: ignore[import-not-found]

    yield SimpleNamespace(float8=float8, gpt=gpt, llama=llama, options=options, stages=stages)
    for name in MODULES:
        sys.modules.pop(name, None)


def flags(training: Any, model: str, *argv: str, does: tuple[str, ...] = ("tp", "pp", "vpp", "ep")) -> Any:
    """The flags of a program whose shape is *model* where none is given."""
    dtypes = ("bf16", "fp16", "fp32")
    return training.options.options("", getattr(training.options, model), does=does, dtypes=dtypes, argv=list(argv))


@pytest.mark.parametrize(
    ("argv", "does", "told"),
    [
        (["--tp", "3"], ("tp",), "--tp 3 * --pp 1 * --cp 1 = 3 does not divide 8 ranks"),
        (["--tp", "2", "--dp", "2"], ("tp",), "= 4 ranks, but 8 are running"),
        (["--tp", "2"], (), "--tp 2: "),
        (["--cp", "2"], ("tp",), "has no such parallelism; try context_parallel.py"),
        (["--pp", "8", "--layers", "7"], ("pp",), "--layers 7 must be --pp 8 * --vpp 1 or more"),
        (["--pp", "8", "--vpp", "5"], ("pp", "vpp"), "--layers 36 must be --pp 8 * --vpp 5 or more"),
        (["--pp", "2", "--vpp", "3", "--accum", "3"], ("pp", "vpp"), "--accum 3 must be a multiple of --pp 2"),
        (["--vpp", "2"], ("vpp",), "--vpp 2 is of a pipeline"),
        (["--tp", "8", "--heads", "12", "--hidden", "96"], ("tp",), "--tp 8 does not divide --heads 12"),
        (["--heads", "7"], (), "--heads 7 does not divide --hidden 4096"),
        (["--ep", "3"], ("ep",), "--ep 3 does not divide --dp 8"),
        (["--kv-heads", "8", "--arch", "gpt"], (), "try --arch llama"),
        (["--mbs", "0"], (), "--mbs: expected a whole number, 1 or more, got 0"),
        (["--layers", "x"], (), "--layers: expected a whole number, 1 or more, got x"),
        (["--ckpt", "some"], (), "--ckpt: invalid choice"),
    ],
)
def test_what_does_not_fit_is_one_line(
    argv: list[str],
    does: tuple[str, ...],
    told: str,
    training: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 0 says what is wrong with the flags and the others nothing; all leave with exit code 2."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank in ("0", "5"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as left:
            flags(training, "GPT_7B", *argv, does=does)
        assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert told in said


def test_a_type_that_a_program_has_not_is_refused(
    training: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other names of a type are understood; FSDP2 here has no loss scaling, so float16 is no option."""
    args = training.options.options("", training.options.LLAMA_3_8B, argv=["--dtype", "amp_bf16"])
    assert args.torch_dtype == torch.bfloat16
    with pytest.raises(SystemExit):
        training.options.options("", training.options.LLAMA_3_8B, argv=["--dtype", "float16"])
    assert "--dtype fp16: " in capsys.readouterr().err


def test_what_is_left_out_follows(training: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """dp from the ranks; heads, kv-heads and ffn from a new width; the kind of model from the shape."""
    monkeypatch.setenv("WORLD_SIZE", "32")
    args = flags(training, "LLAMA_3_8B", "--hidden", "1024", "--tp", "4")
    assert (args.dp, args.heads, args.kv_heads, args.ffn, args.arch) == (8, 8, 8, 4096, "llama")
    assert flags(training, "GPT_2").arch == "gpt"
    assert flags(training, "GPT_2", "--kv-heads", "4").arch == "llama"
    assert flags(training, "GPT_2", "--ffn", "2048").arch == "llama"
    assert flags(training, "GPT_7B", "--ckpt", "full").dtype == "fp16"


@pytest.mark.slow
def test_models_have_the_published_sizes(training: SimpleNamespace) -> None:
    """Llama-3-8B, GPT-2, MPT-7b and 13b, nanotron's 1B and 8B, Megatron-LM's 1.7B, 7.5B and 22B."""

    def size(model: Any) -> int:
        return sum(p.numel() for p in model.parameters())

    def cut(model: str, *argv: str) -> int:
        args = flags(training, model, *argv)
        return size(training.stages.Stage(args, 0, 1, training.stages.ALONE, torch.device("meta")))

    mpt = ("--vocab", "50368", "--seq", "2048")
    with torch.device("meta"):
        assert size(training.llama.Llama(flags(training, "LLAMA_3_8B"))) == 8_030_261_248
        assert size(training.gpt.GPT(flags(training, "GPT_2"))) == 124_373_760
        args = flags(training, "GPT_2", "--layers", "32", "--hidden", "4096", *mpt)
        assert size(training.gpt.GPT(args, bias=True)) == 6_658_859_008
        args = flags(training, "GPT_2", "--layers", "40", "--hidden", "5120", *mpt)
        assert size(training.gpt.GPT(args, bias=True)) == 12_853_954_560
        assert round(cut("LLAMA_1B") / 1e9, 2) == 1.34
        eight = ("--layers", "32", "--hidden", "4096", "--heads", "32", "--ffn", "14336")
        assert round(cut("LLAMA_1B", *eight) / 1e9, 2) == 8.86
        assert round(cut("GPT_7B") / 1e9, 1) == 7.5
        assert round(cut("GPT_7B", "--layers", "24", "--hidden", "2304", "--heads", "24") / 1e9, 1) == 1.7
        assert round(cut("GPT_7B", "--layers", "48", "--hidden", "6144", "--heads", "64") / 1e9) == 22


def test_programs_know_nothing_of_distsim() -> None:
    """A user of torch.distributed would write them so; each says what it teaches, has a scenario, is in the index."""
    index = (FOLDER.parent / "README.md").read_text()
    for path in FOLDER.glob("*.py"):
        assert "distsim" not in path.read_text(), path.name
    for name in PROGRAMS:
        assert (FOLDER / f"{name}.py").read_text().startswith('"""Teaches: ')
        assert (FOLDER / f"{name}.toml").is_file()
        assert f"](training/{name}.py) |" in index


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=() if p.stem in set(PROGRAMS) - ELSEWHERE else pytest.mark.soak) for p in FILES],
)
@pytest.mark.slow
def test_a_tiny_shape_trains(path: Path) -> None:
    """Every program ends well on CPU tensors, and prints a line a step."""
    result = run_scenario(load_scenario(path))
    if not result.passed:
        pytest.fail(f"{path.name}:\n{result.text}", pytrace=False)
    assert "step:  1  loss: " in result.output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_tensor_parallelism_changes_no_number(kind: str, tmp_path: Path) -> None:
    """Loss and gradients of two ranks with half the model each are those of the whole model."""
    ran = run_program(
        RunRequest(program=_program(tmp_path, TENSOR), args=(kind,), on="ethernet-cpu:1", nproc_per_node=2)
    )
    assert ran.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("chunks", ["1", "2"])
def test_a_pipeline_changes_no_number(chunks: str, tmp_path: Path) -> None:
    """Loss and gradients of 1F1B and of interleaved stages are those of the whole model, tied embedding included."""
    ran = run_program(
        RunRequest(program=_program(tmp_path, PIPELINE), args=(chunks,), on="ethernet-cpu:1", nproc_per_node=2)
    )
    assert ran.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("on", ["dgx-h100:1", pytest.param("dgx-b200:1", marks=pytest.mark.soak)])
def test_a_llama_of_two_chunks_a_rank_trains(on: str) -> None:
    """As nanotron (before Blackwell) and as Megatron-LM: a backward pass has gradients of one chunk alone."""
    shape = ("--layers", "4", "--hidden", "64", "--heads", "4", "--vocab", "128", "--seq", "16", "--steps", "1")
    layout = ("--arch", "llama", "--pp", "2", "--vpp", "2", "--accum", "4")
    program = str(FOLDER / "tp_pp.py")
    assert run_program(RunRequest(program=program, args=(*shape, *layout), on=on, nproc_per_node=2)).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "more", "less"),
    [
        ("fsdp2.py", (), ("--fused-norm",)),
        pytest.param("zero1.py", ("--tp", "2", "--sequence-parallel", "off"), ("--tp", "2"), marks=pytest.mark.soak),
        ("tp_pp.py", ("--tp", "2", "--sequence-parallel", "off"), ("--tp", "2")),
    ],
)
def test_what_a_flag_saves_of_memory(program: str, more: tuple[str, ...], less: tuple[str, ...]) -> None:
    """A norm in one kernel keeps no float32 copy; activations that are whole on each rank of TP take more."""
    shape = ("--arch", "llama", "--layers", "2", "--hidden", "256", "--heads", "4", "--vocab", "256", "--seq", "8192")
    peaks = []
    for flags_of in (more, less):
        request = RunRequest(
            program=str(FOLDER / program), args=(*shape, "--steps", "2", *flags_of), on="dgx-h100:1", nproc_per_node=2
        )
        ran = run_program(request)
        assert ran.exit_code == 0
        assert ran.training is not None
        peaks.append(ran.training.peak_allocated_bytes)
    assert peaks[1] < 0.9 * peaks[0]


@pytest.mark.slow
def test_ways_to_sum_and_to_cut_change_no_weight(tmp_path: Path) -> None:
    """Gradients added at once or after the backward pass, summed in buckets or whole, state cut over ranks or not."""
    ran = run_program(RunRequest(program=_program(tmp_path, OPTIMIZERS), on="ethernet-cpu:1", nproc_per_node=2))
    assert ran.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gpt", "llama"])
def test_a_ring_of_keys_is_attention(arch: str, tmp_path: Path) -> None:
    """Parts of a sequence on two ranks attend as the whole does, forward and backward; so does a whole model."""
    flags_of = ("--arch", arch, *(("--kv-heads", "2") if arch == "llama" else ()))
    program = _program(tmp_path, RING)
    ran = run_program(RunRequest(program=program, args=flags_of, on="ethernet-cpu:1", nproc_per_node=2))
    assert ran.exit_code == 0


MIXTURE = ("--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "128", "--seq", "16", "--steps", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--ep", "1"), "; 8 experts a layer, "),
        (("--ep", "2"), "; 8 experts a layer, "),
        (("--ep", "2", "--experts", "6"), "; 6 experts a layer, "),
    ],
)
def test_a_mixture_is_the_same_model_however_it_is_spread(
    flags: tuple[str, ...], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The number of experts is that of the model, not of --ep, and a line says it."""
    program = str(FOLDER / "moe.py")
    ran = run_program(RunRequest(program=program, args=(*MIXTURE, *flags), on="ethernet-cpu:1", nproc_per_node=2))
    assert ran.exit_code == 0
    assert says in capfd.readouterr().out


def _program(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\n{text}")
    return str(path)


TENSOR = """
import torch
import torch.distributed as dist
from stages import ALONE, Stage, Tensor
from options import GPT_2, options

argv = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 64 --seq 16 --tp 2 --dtype fp32".split()
args = options("", GPT_2, does=("tp",), argv=argv)
dist.init_process_group("gloo")
rank = dist.get_rank()
cpu = torch.device("cpu")
torch.manual_seed(0)
whole = Stage(args, 0, 1, ALONE, cpu)
half = Stage(args, 0, 1, Tensor(dist.group.WORLD, 2, rank, sequence=sys.argv[1] == "sequence"), cpu)

def mine(name, t):
    if name.endswith("qkv.weight"):
        return torch.cat([part.chunk(2)[rank] for part in t.split([32, 16, 16])])
    if name.endswith("up.weight"):
        return torch.cat([part.chunk(2)[rank] for part in t.chunk(2)])
    if name.endswith(("embedding.weight", "output.weight")):
        return t.chunk(2)[rank]
    if name.endswith(("proj.weight", "down.weight")):
        return t.chunk(2, dim=1)[rank]
    return t

params = dict(whole.named_parameters())
with torch.no_grad():
    for name, p in half.named_parameters():
        p.copy_(mine(name, params[name]))
text = torch.randint(64, (2, 17))
losses = [stage(text[:, :-1], text[:, 1:]) for stage in (whole, half)]
torch.testing.assert_close(*losses)
for loss in losses:
    loss.backward()
for name, p in half.named_parameters():
    grad = p.grad
    if getattr(p, "cut_sequence", False):
        dist.all_reduce(grad)
    torch.testing.assert_close(grad, mine(name, params[name].grad), msg=lambda m: f"{name}: {m}")
"""

PIPELINE = """
import torch
import torch.distributed as dist
from log import tokens
from stages import ALONE, Stage
from optimizer import Optimizer
from options import GPT_2, options
from pipeline import Pipeline

chunks = sys.argv[1]
argv = f"--layers 4 --hidden 32 --heads 4 --vocab 64 --seq 16 --pp 2 --vpp {chunks} --accum 6 --dtype fp32".split()
args = options("", GPT_2, does=("pp", "vpp"), argv=argv)
dist.init_process_group("gloo")
rank = dist.get_rank()
cpu = torch.device("cpu")
alone = [dist.new_group([r]) for r in range(2)][rank]
torch.manual_seed(0)
whole = Stage(args, 0, 1, ALONE, cpu)
params = dict(whole.named_parameters())
pipeline = Pipeline(args, dist.group.WORLD, ALONE, cpu, lambda number, stages: Stage(args, number, stages, ALONE, cpu))

def names():
    for place, chunk in enumerate(pipeline.chunks):
        first = (place * 2 + rank) * len(chunk.layers)
        for name, p in chunk.named_parameters():
            if name.startswith("layers."):
                _, layer, rest = name.split(".", 2)
                name = f"layers.{int(layer) + first}.{rest}"
            yield name if name in params else "embedding.weight", p

with torch.no_grad():
    for name, p in names():
        p.copy_(params[name])
optimizer = Optimizer([(pipeline.parameters(), alone)], share=False, overlap=False)
torch.manual_seed(1)
loss = pipeline.step(optimizer)
torch.manual_seed(1)
expected = 0.0
for _ in range(6):
    x, y = tokens(64, 16, 1, cpu)
    one = whole(x, y) / 6
    one.backward()
    expected += one.detach()
if rank == 1:
    torch.testing.assert_close(loss, expected)
for name, p in names():
    torch.testing.assert_close(p.main_grad, params[name].grad, msg=lambda m: f"{name}: {m}")
"""

OPTIMIZERS = """
import copy
import torch
import torch.distributed as dist
from optimizer import Optimizer
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
start = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7)).bfloat16()  # of no size that two ranks share evenly

def trained(**how):
    model = copy.deepcopy(start)
    optimizer = Optimizer([(list(model.parameters()), dist.group.WORLD)], lr=0.1, **how)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            if micro:
                optimizer.expect_last()
            (model(torch.randn(4, 5).bfloat16()).float().square().mean() / 2).backward()
            assert not how.get("late") or all(p.grad is not None for p in model.parameters())
            optimizer.after_backward()
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

expected = trained(share=False, overlap=False)
assert not torch.equal(expected, torch.cat([p.detach().flatten() for p in start.parameters()]))
for how in (
    {"share": True, "overlap": True},
    {"share": False, "overlap": False, "late": True},
    {"share": True, "overlap": False, "late": True},
    {"share": False, "overlap": True, "ddp": True, "late": True},
):
    torch.testing.assert_close(trained(**how), expected, msg=lambda m: f"{how}: {m}")
"""

RING = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from options import GPT_2, options
from ring import layout
from stages import ALONE, Stage

dist.init_process_group("gloo")
cpu = torch.device("cpu")

def flags(cp):
    argv = "--layers 2 --hidden 32 --heads 4 --vocab 64 --seq 16 --dtype fp32 --cp " + str(cp)
    return options("", GPT_2, does=("cp",), argv=[*argv.split(), *sys.argv[1:]])

args, alone = flags(2), flags(1)
layout(args, cpu)
ring = args.ring
torch.manual_seed(0)
whole = torch.randn(3, 2, 4, 16, 8, dtype=torch.float64).requires_grad_()
weight = torch.randn(2, 4, 16, 8, dtype=torch.float64)
expected = F.scaled_dot_product_attention(*whole.unbind(0), is_causal=True)
(expected * weight).sum().backward()

def mine(x):
    return ring.part(x.movedim(-2, 0)).movedim(0, -2)

part = mine(whole.detach()).clone().requires_grad_()
result = ring.attend(*part.unbind(0))
(result * mine(weight)).sum().backward()
torch.testing.assert_close(result, mine(expected), rtol=1e-5, atol=1e-5)
torch.testing.assert_close(part.grad, mine(whole.grad), rtol=1e-5, atol=1e-5)

models = []
for given in (alone, args):
    torch.manual_seed(1)
    models.append(Stage(given, 0, 1, ALONE, cpu))
text = torch.randint(64, (2, 17))
loss = models[0](text[:, :-1], text[:, 1:])
loss.backward()
x, y = (mine(each[..., None])[..., 0] for each in (text[:, :-1], text[:, 1:]))
half = models[1](x, y) / 2
half.backward()
dist.all_reduce(half.detach())
torch.testing.assert_close(half.detach(), loss.detach())
for (name, p), other in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
    dist.all_reduce(p.grad)
    torch.testing.assert_close(p.grad, other.grad, rtol=1e-4, atol=1e-6, msg=lambda m: f"{name}: {m}")
"""


def test_layers_of_stages_as_nanotron_shares_them_out(training: SimpleNamespace) -> None:
    """The output layer counts as the layers whose products it has; the stage that crosses its share keeps the layer
    that does, and one that meets it exactly takes no more; where blocks are too few for that, every stage has its
    part."""

    def shares(layers: int, hidden: int, ffn: int, stages: int) -> list[int]:
        args = SimpleNamespace(layers=layers, hidden=hidden, ffn=ffn, vocab=131072)
        return [len(part) for part in training.stages.balanced(args, stages)]

    assert shares(16, 2048, 8192, 1) == [16]
    assert shares(16, 2048, 8192, 2) == [10, 6]
    assert shares(16, 2048, 8192, 4) == [5, 5, 5, 1]
    assert shares(32, 4096, 14336, 4) == [9, 9, 8, 6]
    assert shares(28, 3072, 8192, 8) == [4, 4, 4, 4, 4, 4, 4, 0]
    assert shares(4, 64, 128, 4) == [1, 1, 1, 1]


def test_a_fused_swiglu_has_the_numbers_of_its_parts(training: SimpleNamespace) -> None:
    """Forward, and the gradient of what it is cut from."""
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(training.stages._SwiGLU.apply(x), torch.nn.functional.silu(gate) * up)
    assert torch.autograd.gradcheck(training.stages._SwiGLU.apply, (x,))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_in_eight_bits_are_near_those_in_sixteen(recipe: str, training: SimpleNamespace) -> None:
    """Forward and both gradients, as far as three bits of a mantissa go."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
    eight = torch.nn.Sequential(copy.deepcopy(plain))
    training.float8.convert(eight, recipe)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    results = []
    for model in (plain, eight):
        given = x.clone().requires_grad_()
        y = model(given)
        y.float().square().sum().backward()
        results.append((y.detach(), given.grad, next(model.parameters()).grad))
    for expected, got in zip(*results, strict=True):
        assert (got - expected).float().norm() < 0.08 * expected.float().norm()


def test_scales_of_groups_lie_as_tensor_cores_read_them(training: SimpleNamespace) -> None:
    """A power of two for each 32 elements; those of row 1 come 16 bytes behind row 0's, those of row 32 four."""
    x = torch.ones(128, 128)
    x[1], x[32] = 2.0, 4.0
    values, scales = training.float8.scaled(x, "mxfp8")
    assert values.float().unique().tolist() == [256.0]
    assert scales.float()[[0, 16, 4]].tolist() == [2.0**-8, 2.0**-7, 2.0**-6]
