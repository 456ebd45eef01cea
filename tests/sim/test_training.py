"""What the report says of training steps on simulated GPUs."""

from __future__ import annotations

import io
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.fsdp import fully_shard

from distsim.collectives.uncertainty import LAUNCH_BOUND, step_error
from distsim.debug.records import CallRecord, Group
from distsim.kernels import Gpu
from distsim.report import Summary, print_summary, report_document
from distsim.sim import Outcome, simulate
from distsim.sim.device.allocator.claims import family
from distsim.sim.device.timeline import Kernel, Mark, Timeline
from distsim.sim.device.timeline.steps import Counted, Steps
from distsim.sim.kernel.limits import Limits
from distsim.sim.observe.metrics import RateRange
from distsim.sim.observe.totals import step_interval
from distsim.sim.world.conditions import Conditions

pytestmark = pytest.mark.smoke

TOKENS, WIDTH, WORDS = 2048, 1024, 4096


class Model(torch.nn.Module):
    """An embedding, a layer, a head: two matrix products in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layer(self.words(words)))
        return out


def train(steps: int) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(Model().cuda().bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        words = torch.randint(0, WORDS, (TOKENS,), device="cuda")
        torch.nn.functional.cross_entropy(model(words), words).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def ran(fn: Any, *args: Any, nproc: int = 2, **request: Any) -> tuple[Outcome, dict[str, Any]]:
    """*fn* on simulated H100s: the outcome and the section `training` of its report."""
    outcome = simulate(fn, "dgx-h100:1", args, nproc_per_node=nproc, **request)
    section: dict[str, Any] = report_document(outcome)["training"]
    return outcome, section


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """Five steps of DDP on two GPUs."""
    return ran(train, 5)[1]


def test_steps_are_counted_and_the_steady_ones_timed(trained: dict[str, Any]) -> None:
    """Five steps have four ends after the first; the median of steps 3 to 5 is the step's time."""
    assert (trained["steps"], trained["first_counted"]) == (5, 3)
    assert len(trained["step_times_s"]) == 4
    assert trained["step_time_s"] == sorted(trained["step_times_s"][1:])[1]


def test_groups_of_parameters_updated_one_after_the_other_are_one_step(trained: dict[str, Any]) -> None:
    """DeepSpeed's ZeRO calls `step` once for each group, with the other groups taken out."""

    def by_group() -> None:
        model = Model().cuda().bfloat16()
        weights = [{"params": [weight]} for weight in model.parameters()]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        for _ in range(5):
            words = torch.randint(0, WORDS, (TOKENS,), device="cuda")
            torch.nn.functional.cross_entropy(model(words), words).backward()
            groups = optimizer.param_groups
            for group in groups:
                optimizer.param_groups = [group]
                optimizer.step()
            optimizer.param_groups = groups
            optimizer.zero_grad()

    section = ran(by_group, nproc=1)[1]
    assert section["steps"] == 5
    assert section["model_flops"] * 2 == trained["model_flops"]  # of one GPU and of two


def test_flops_and_tokens_are_the_models(trained: dict[str, Any]) -> None:
    """Six flops a weight and token of all that is multiplied; nothing is computed twice."""
    weights = WIDTH * WIDTH + WIDTH * WORDS
    assert trained["tokens_per_step"] == 2 * TOKENS
    assert trained["model_flops"] == 6 * weights * 2 * TOKENS == trained["hardware_flops"]
    assert trained["mfu"] == pytest.approx(
        trained["model_flops"] / trained["step_time_s"] / 2 / trained["peak_flops_per_s"]
    )
    assert trained["peak_dtype"] == "bf16"


@pytest.mark.parametrize(
    ("layer", "allowed", "peak"), [("conv", False, "tf32"), ("linear", False, "fp32"), ("linear", True, "tf32")]
)
def test_the_peak_is_of_the_precision_that_the_program_allows(layer: str, allowed: bool, peak: str) -> None:
    """Convolutions of fp32 are computed in tf32 by default, products where the rank allows it."""

    def step() -> None:
        torch.backends.cuda.matmul.allow_tf32 = allowed
        model = torch.nn.Conv2d(64, 64, 3) if layer == "conv" else torch.nn.Linear(64, 64)
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.randn(8, 64, 64, 64, device="cuda")).sum().backward()
        optimizer.step()

    assert ran(step, nproc=1)[1]["peak_dtype"] == peak


def test_a_step_is_the_sum_of_what_it_was(trained: dict[str, Any]) -> None:
    """compute + exposed + bubble + host is the rank's step, and the gradients' all_reduce is what was exposed."""
    for rank in trained["ranks"]:
        parts = [rank[f"{part}_s"] for part in ("compute", "exposed", "bubble", "host")]
        assert sum(parts) == pytest.approx(rank["step_s"])
        assert rank["exposed_s"] > 0
        assert rank["waits"][0]["op"] == "all_reduce"
        assert sum(w["moving_s"] + w["late_s"] for w in rank["waits"]) == pytest.approx(rank["exposed_s"])


def test_without_an_optimizer_there_is_memory_only() -> None:
    """GPUs were used, no step was made: peaks are there, what is a step's is null."""

    def allocate() -> None:
        torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    section = ran(allocate, nproc=1)[1]
    assert (section["steps"], section["step_time_s"], section["mfu"]) == (0, None, None)
    assert section["peak_memory_bytes"] == 1 << 28


def test_without_gpus_there_is_no_section() -> None:
    """A run on CPU tensors has no key `training`."""
    outcome = simulate(lambda: float(torch.ones(3).sum()), "dgx-h100:1", nproc_per_node=1)
    assert "training" not in report_document(outcome)


def test_what_an_optimizer_reduces_says_nothing_of_tokens() -> None:
    """A second optimizer that shares its work out (Muon) reduces its updates after the first one's step."""

    def train() -> None:
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        embedding, head = torch.nn.Embedding(64, 256).cuda(), torch.nn.Linear(256, 64).cuda()
        first, second = (torch.optim.SGD(module.parameters()) for module in (embedding, head))
        for _ in range(2):
            head(embedding(torch.zeros(8, 16, dtype=torch.int64, device="cuda"))).sum().backward()
            first.step()
            dist.all_reduce(torch.zeros(1 << 20, device="cuda"))
            second.step()

    assert ran(train, nproc=2)[1]["tokens_per_step"] == 2 * 8 * 16


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter_tensor_coalesced"])
def test_tokens_are_counted_once_a_tensor_parallel_group(op: str) -> None:
    """Ranks that reduce activations in forward have seen the same tokens, also by a functional collective."""
    steps = Steps()
    steps.count(Counted(table=(10, 4), tokens=3))
    group = Group("1", "mesh_tp", (0, 1))
    steps.called(CallRecord(0, group, 0, op, nbytes=1 << 20))
    assert steps.same_tokens == {(0, 1): "mesh_tp"}


def test_ids_of_several_tables_are_counted_once() -> None:
    """Value embeddings are looked up with the ids of the tokens' own; a batch that comes again counts again, as does
    another batch in the same buffer."""

    def body() -> None:
        tables = torch.nn.ModuleList([torch.nn.Embedding(64, 8) for _ in range(3)]).cuda()
        optimizer = torch.optim.SGD(tables.parameters(), lr=0.1)
        ids = torch.empty(4, 16, dtype=torch.long, device="cuda")
        for _ in range(4):
            for _ in range(2):  # micro-batches
                ids.random_(0, 64)
                sum(table(ids) for table in tables).sum().backward()
            tables[0](ids), tables[0](ids)
            optimizer.step()

    assert ran(body, nproc=1)[1]["tokens_per_step"] == (2 + 2) * 4 * 16


def test_tokens_of_a_reference_model_are_not_trained() -> None:
    """A model that runs without gradients beside the trained one (DPO) adds no tokens, with ids of its own or not."""

    def body() -> None:
        policy, reference = (torch.nn.Embedding(64, 8).cuda() for _ in range(2))
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        for step in range(4):
            ids = torch.randint(0, 64, (4, 16), device="cuda")
            with torch.no_grad():
                reference(ids if step % 2 else ids.clone())
                reference(torch.randint(0, 64, (4, 16), device="cuda"))
            policy(ids).sum().backward()
            optimizer.step()

    assert ran(body, nproc=1)[1]["tokens_per_step"] == 4 * 16


def test_a_device_accounts_for_all_its_time() -> None:
    """Idle before the launch, then busy; a mark's account is that of its moment, whenever somebody looks."""
    import simpy

    env = simpy.Environment()
    timeline = Timeline(env)
    stream = timeline.stream("default")
    timeline.put(stream, Kernel(2.0, 1.0, name="mm"))
    seen = []
    timeline.put(stream, Mark(1.0, on_reach=lambda mark: seen.append((mark.reached_s, timeline.account.snapshot()))))
    timeline.put(stream, Kernel(4.0, 1.0, name="add"))
    timeline.close()
    ((at_s, then),) = seen
    assert (at_s, then.host_s, then.compute_s) == (3.0, 1.0, 2.0)
    assert timeline.account.since(then).operators == {"add": [1, 4.0]}


def remembered(steps: int) -> list[int]:
    """Bytes in use after each step of a DDP model."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(Model().cuda().bfloat16())
    used = []
    for _ in range(steps):
        model(torch.randint(0, WORDS, (TOKENS,), device="cuda")).sum().backward()
        model.zero_grad()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    return used


def test_what_is_kept_for_the_trace_holds_no_memory() -> None:
    """DDP makes its buckets anew in the second step: the first ones' memory is free, though their calls are told of."""
    outcome, _ = ran(remembered, 3)
    first, second, third = outcome.results[0]
    assert first == second == third


def test_memory_is_told_by_module(trained: dict[str, Any]) -> None:
    """Parameters, gradients and activations of a module are its own; the names are the model's, without wrappers."""
    rank = trained["ranks"][0]
    assert sum(rank["modules"].values()) == rank["peak_allocated_bytes"]
    assert rank["modules"]["words"] >= 2 * WIDTH * WORDS + 2 * WIDTH * TOKENS, "the table, and what was looked up"
    assert rank["modules"]["layer"] >= 2 * WIDTH * WIDTH + 2 * WIDTH * TOKENS
    assert family("module.model.layers.17._checkpoint_wrapped_module.mlp.up.proj") == "model.layers.*.mlp"
    assert family("DistributedDataParallel") == "DistributedDataParallel"


def test_memory_is_told_by_what_it_is_for(trained: dict[str, Any]) -> None:
    """The parts make up the peak; parameters are the model's, in bfloat16, and SGD keeps nothing."""
    rank = trained["ranks"][0]
    weights = 2 * (WIDTH * WIDTH + 2 * WIDTH * WORDS)
    assert sum(rank["memory"].values()) == rank["peak_allocated_bytes"]
    assert rank["memory"]["parameters"] == weights
    assert rank["memory"]["communication"] >= weights, "DDP's buckets"
    assert rank["memory"]["activations"] > 0


def grow() -> None:
    with torch.device("cuda"):
        model = torch.nn.Linear(1 << 16, 1 << 16, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in (1 << 10, 1 << 19):
        model(torch.empty(batch, 1 << 16, device="cuda", dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_out_of_memory_says_what_would_have_fitted() -> None:
    """64 GiB of input lie beside 8 GiB of parameters: a sixteenth of the batch would fit, and that is said."""
    outcome, section = ran(grow, nproc=1, check=False)
    assert outcome.failures[0].type == "OutOfMemoryError"
    (short,) = section["out_of_memory"]
    assert short["ranks"] == [0]
    assert short["held"]["parameters"] == 1 << 33
    assert short["asked"] == 1 << 36
    assert any("micro-batch of at most" in remedy for remedy in short["remedies"])
    text = io.StringIO()
    print_summary(outcome, text)
    assert "out of memory: rank 0" in text.getvalue()


def too_large() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    with torch.device("cuda"):
        model = torch.nn.Linear(1 << 17, 1 << 17, bias=False, dtype=torch.bfloat16)
    torch.nn.parallel.DistributedDataParallel(model)  # its buckets are as large again
    torch.empty(1 << 36, device="cuda", dtype=torch.uint8)


def test_out_of_memory_before_the_first_batch_blames_no_batch() -> None:
    """Ranks that run out alike are one failure, whatever the number of their GPU; and no micro-batch is at fault."""
    outcome, section = ran(too_large, check=False)
    assert [d.culprits for d in outcome.diagnoses] == [(0, 1)]
    (short,) = section["out_of_memory"]
    assert short["remedies"]
    assert not any("micro-batch" in remedy or "checkpoint" in remedy for remedy in short["remedies"])


def shards_too_large() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    layer = torch.nn.Linear(1 << 12, 1 << 12, bias=False, device="cuda")
    fully_shard(layer)
    optimizer = torch.optim.Adam(layer.parameters(), foreach=False)
    layer(torch.empty(4, 1 << 12, device="cuda")).sum().backward()
    torch.empty(1 << 40, device="cuda", dtype=torch.uint8)
    optimizer.step()


def test_out_of_memory_knows_shards_and_what_an_optimizer_still_makes() -> None:
    """A DTensor is a parameter, too; Adam without a step has two numbers a parameter to make, and the advice below the
    diagnosis is not contradicted by it."""
    outcome, section = ran(shards_too_large, check=False)
    (short,) = section["out_of_memory"]
    assert short["sharded"]
    assert short["coming_gradients"] == 0
    assert short["coming_optimizer"] == 2 * 4 * (1 << 24) // 2
    assert "micro-batch" not in outcome.diagnoses[0].suggestion


def test_cuda_on_a_cluster_without_gpus_says_which_has_some() -> None:
    """Such a mistake is one of the command line, so the advice names a cluster."""
    outcome = simulate(torch.cuda.set_device, "ethernet-cpu:1", (0,), nproc_per_node=1, check=False)
    assert "--on dgx-h100:1" in outcome.diagnoses[0].suggestion


def test_a_host_that_waits_for_its_kernels_is_not_stuck() -> None:
    """A run that is cut short while GPUs compute accuses nobody."""

    def compute() -> None:
        x = torch.empty(1 << 14, 1 << 14, device="cuda", dtype=torch.bfloat16)
        for _ in range(1_000):
            x = x @ x
        torch.cuda.synchronize()

    limits = Limits(virtual_time_s=0.1)
    outcome, _ = ran(compute, conditions=Conditions(limits=limits))
    assert limits.reached is not None
    assert [str(d.kind) for d in outcome.diagnoses] == []


def test_the_summary_tells_of_the_step() -> None:
    """Step time, shares, gains and memory are on the terminal, in 80 columns, too."""
    outcome, section = ran(train, 4)
    text = io.StringIO()
    Console(file=text, width=80).print(Summary(outcome))
    shown = text.getvalue()
    for part in ("training on 2 GPUs", "where a step goes", "memory at its peak", "what would help most", "MFU"):
        assert part in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
    gains = {gain["name"]: gain["step_s"] for gain in section["gains"]}
    assert gains["ideal network"] < section["step_time_s"]


def broadcast_and_drop() -> tuple[int, int]:
    """Bytes in use before, and after a collective whose tensor was waited for and dropped."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    before = torch.cuda.memory_allocated()
    large = torch.empty(1 << 28, device="cuda")
    work = dist.broadcast(large, 0, async_op=True)
    assert work is not None
    work.wait()
    result = work.result()
    assert result[0] is large
    del large, result, work
    return before, torch.cuda.memory_allocated()


WIDE = 512
FORWARD = 2 * WIDE**3
"""Flops of one product."""


def three_layers(how: str) -> None:
    """A step of three products forward, the first of an input without gradient."""
    layers = torch.nn.ModuleList(torch.nn.Linear(WIDE, WIDE, bias=False, device="cuda") for _ in range(3))
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    for layer in layers[:2]:
        layer.requires_grad_(how != "frozen")
    x = torch.randn(WIDE, WIDE, device="cuda", requires_grad=how == "penalty")
    if how == "evaluated":
        with torch.no_grad():
            for layer in layers:
                x = layer(x)
    y = x
    for layer in layers:
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False) if how == "recomputed" else layer(y)
    if how == "penalty":
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        gradient.square().sum().backward()
    else:
        y.sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("how", "model", "again"),
    [("plain", 3 + 5, 0), ("frozen", 3 + 1, 0), ("evaluated", 6 + 5, 0), ("recomputed", 3 + 5, 3), ("penalty", 11, 0)],
)
def test_model_flops_are_what_the_step_needs(how: str, model: int, again: int) -> None:
    """Not three times the forward: frozen weights (LoRA) have no gradients, an evaluation no backward. Only what a
    checkpoint computes again is left out; a backward that keeps its graph computes nothing again."""
    training = simulate(three_layers, "dgx-h100:1", (how,), nproc_per_node=1).training
    assert training is not None
    assert training.hardware_flops is not None
    assert training.hardware_flops / FORWARD == model + again
    assert training.model_flops is not None
    assert training.model_flops / FORWARD == model
    assert training.recomputes == (again > 0)


def test_attention_computes_its_scores_again_in_its_own_kernel() -> None:
    """HFU has them; a script that recomputes nothing is not said to."""

    def attends() -> None:
        qkv = torch.randn(3, 1, 4, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        optimizer = torch.optim.SGD([qkv], 0.1)
        torch.nn.functional.scaled_dot_product_attention(*qkv).sum().backward()
        optimizer.step()

    outcome = simulate(attends, "dgx-h100:1", nproc_per_node=1)
    training = outcome.training
    assert training is not None
    assert training.model_flops is not None
    assert training.hardware_flops is not None
    assert training.hardware_flops * 6 == training.model_flops * 7
    shown = io.StringIO()
    Console(file=shown, width=80).print(Summary(outcome))
    assert "MFU" in shown.getvalue()
    assert "HFU" not in shown.getvalue()


def test_a_collective_holds_no_memory_once_it_was_waited_for() -> None:
    """The host is ahead of the GPU: the kernel has not run, the tensor's memory is free for what comes after it."""
    outcome, _ = ran(broadcast_and_drop)
    assert [before == after for before, after in outcome.results] == [True, True]


def test_a_gpu_that_was_only_asked_about_does_not_train() -> None:
    """Libraries look at all GPUs of a node (free memory, peers); tokens and FLOP/s are shared by those that worked."""

    def body() -> None:
        for index in range(torch.cuda.device_count()):
            torch.cuda.mem_get_info(index)
            torch.cuda.synchronize(index)
        train(3)

    assert ran(body)[1]["num_gpus"] == 2


def test_a_steps_time_carries_the_errors_of_what_is_exposed(tmp_path: Path) -> None:
    """On a cluster whose collectives measured 0.5 to 2 times what was simulated: the exposed part of them, beside what
    published steps err; the same in the report's list of collectives; nothing of either on an ideal network."""
    sizes = ("< 64 KiB", "64 KiB - 16 MiB", "> 16 MiB")
    errors = "\n".join(f'"1 node, {size}" = {{ low = 0.5, high = 2.0 }}' for size in sizes)
    path = tmp_path / "measured.toml"
    path.write_text(f'base = "dgx-h100"\nname = "measured"\n[errors]\n{errors}\n')
    outcome = simulate(train, str(path), (4,), nproc_per_node=2)
    training = outcome.training
    assert training is not None
    assert training.pacing is not None
    moving_s = sum(wait.moving_s for wait in training.pacing.waits)
    assert training.step_time_s is not None
    assert moving_s > 0
    assert training.step_regime is not None
    known = step_error(training.step_regime, 2)
    below_s, above_s = training.step_time_s * (1.0 - known.low), training.step_time_s * (known.high - 1.0)
    known_times = Gpu.named("h100").spec.times("fp32")
    assert {rate.kind: (rate.shortest, rate.longest, rate.sources) for rate in training.rates} == known_times
    assert sum(rate.share for rate in training.rates) > 0.0
    quicker = [(1.0 - rate.shortest) * rate.share * training.step_time_s for rate in training.rates]
    slower = [(rate.longest - 1.0) * rate.share * training.step_time_s for rate in training.rates]
    assert training.step_low_s == pytest.approx(training.step_time_s - math.hypot(0.5 * moving_s, below_s, *quicker))
    assert training.step_high_s == pytest.approx(training.step_time_s + math.hypot(moving_s, above_s, *slower))
    unsure = replace(training, rates=[RateRange("products", 0.5, 1.0, 2.0, 1)])
    wider = step_interval(unsure, outcome.collectives)
    assert wider is not None, "a GPU whose products may take twice as long"
    assert wider[1] == pytest.approx(training.step_time_s + math.hypot(moving_s, above_s, 0.5 * training.step_time_s))
    document = report_document(outcome)
    assert document["training"]["step_high_s"] == training.step_high_s
    total = next(total for total in document["collectives"] if total["op"] == "all_reduce")
    assert (total["low_s"], total["high_s"]) == pytest.approx((0.5 * total["time_s"], 2 * total["time_s"]))
    out = io.StringIO()
    print_summary(outcome, out)
    told = " ".join(out.getvalue().split())
    assert f"in 8 cases of 10, by {known.rows} published steps of {known.frameworks} frameworks" in told
    assert ("to launch its work" in told) == (training.step_regime == LAUNCH_BOUND)
    unknown = simulate(train, str(path), (2,), nproc_per_node=2, nccl_version="ideal")
    assert unknown.training is not None
    assert (unknown.training.step_low_s, unknown.training.step_high_s) == (None, None)
    assert all(total.low_s is None for total in unknown.collectives)
