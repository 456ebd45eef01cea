"""What the report says of a step where one of them took much longer than the others."""

from __future__ import annotations

import io
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from distsim.collectives.uncertainty import MANY_NODES
from distsim.report import Summary
from distsim.report.training import training_parts
from distsim.report.training.section import gains
from distsim.sim import Outcome, simulate
from distsim.sim.observe.metrics import Training


def evaluates_at_times() -> None:
    """Seven steps of some milliseconds, and one in which much is computed besides."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    layer = torch.nn.Linear(4096, 4096, device="cuda")
    model = torch.nn.parallel.DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4096, 4096, device="cuda")
    for step in range(8):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(20 if step == 5 else 0):
            x @ x


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return simulate(evaluates_at_times, "dgx-h100:1", nproc_per_node=2)


def test_flops_are_those_of_the_step_whose_time_it_is(outcome: Outcome) -> None:
    """The median step's, without a single step's evaluation."""
    assert outcome.training is not None
    products = 2  # the input needs no gradient
    assert outcome.training.model_flops == outcome.training.hardware_flops == products * 2 * 4096**3 * 2


def test_gains_are_of_the_mean_step(outcome: Outcome) -> None:
    """What would go is a mean, too: less than the median step, it gave longer steps than there were."""
    training = outcome.training
    assert training is not None
    assert training.pacing is not None
    assert training.step_time_s is not None
    mean_s = training.pacing.step_s
    assert mean_s > 1.2 * training.step_time_s
    found = gains(training)
    assert found
    assert all(gain.step_s <= mean_s for gain in found)
    text = io.StringIO()
    Console(file=text, width=120).print(Summary(outcome))
    told = text.getvalue()
    assert "the slowest rank's mean step, " in told
    assert "--" not in told[told.index("if   ") : told.index("time by rank")]


def test_a_share_above_the_peak_names_the_dtype_of_the_peak(outcome: Outcome) -> None:
    """More flops than the GPU can do in a step: the line says of which dtype the peak is."""
    assert outcome.training is not None
    assert outcome.training.model_flops is not None
    much = replace(outcome.training, model_flops=1e6 * outcome.training.model_flops)
    text = io.StringIO()
    console = Console(file=text, width=200)
    for _, body in training_parts(much):
        console.print(body)
    assert f"or part of the work is not in {much.peak_dtype}" in " ".join(text.getvalue().split())


def test_two_unlike_steps_are_no_mean() -> None:
    """Of an ordinary step and one with an evaluation the time is the ordinary one's: no step takes half of both."""

    def body() -> None:
        layer = torch.nn.Linear(4096, 4096, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = torch.ones(4096, 4096, device="cuda")
        for step in range(4):
            for _ in range(100 if step == 3 else 0):
                x @ x
            layer(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    training = simulate(body, "dgx-h100:1", nproc_per_node=1).training
    assert training is not None
    assert max(training.step_times_s[1:]) > 2 * min(training.step_times_s[1:])
    assert training.step_time_s == min(training.step_times_s[1:])
    assert training.model_flops == 2 * 2 * 4096**3


def test_updates_without_an_optimizer_are_steps() -> None:
    """One a backward pass, however many parameters it updates; what averages weights
    beside an optimizer is none, nor is a sum of losses.
    """

    def by_hand() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 2048)).cuda()
        for _ in range(4):
            model.zero_grad()
            model(torch.ones(64, 2048, device="cuda")).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.add_(parameter.grad, alpha=-0.1)

    def averaged() -> None:
        model, mean = torch.nn.Linear(2048, 2048, device="cuda"), torch.ones(2048, 2048, device="cuda")
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.ones(64, 2048, device="cuda")).sum().backward()
            optimizer.step()
            mean.mul_(0.9).add_(model.weight.detach(), alpha=0.1)

    def summed() -> None:
        model, total = torch.nn.Linear(2048, 2048, device="cuda"), torch.zeros((), device="cuda")
        for _ in range(3):
            loss = model(torch.ones(64, 2048, device="cuda")).sum()
            loss.backward()
            total.add_(loss.detach())

    for program, num_steps in ((by_hand, 4), (averaged, 3), (summed, 0)):
        training = simulate(program, "dgx-h100:1", nproc_per_node=1).training
        assert training is not None
        assert training.steps == num_steps


def test_tokens_are_counted_in_inference_mode() -> None:
    """Torch counts no versions of tensors that are made there."""

    def encodes() -> None:
        table = torch.nn.Embedding(100, 8).cuda()
        with torch.inference_mode():
            table(torch.ones(4, 16, dtype=torch.long).cuda())
            torch.save(table(torch.ones(4, 16, dtype=torch.long, device="cuda")).cpu(), io.BytesIO())

    assert simulate(encodes, "dgx-h100:1", nproc_per_node=1).exit_code == 0


@pytest.mark.parametrize(
    ("num_gpus", "interval", "claim"),
    [
        (512, (0.9, 1.2), "likely 900 ms to 1.2 s in 8 cases of 10, by "),
        (1024, (0.8, 1.9), "; no measurement at this size: the largest published step has 512 GPUs"),
    ],
)
def test_no_interval_claims_a_size_that_nobody_measured(
    num_gpus: int, interval: tuple[float | None, float | None], claim: str
) -> None:
    """The largest published step has 512 GPUs."""
    figures = {"steps": 4, "first_counted": 2, "step_times_s": [1.0] * 3, "step_time_s": 1.0}
    ends = {"step_low_s": interval[0], "step_high_s": interval[1], "step_regime": MANY_NODES}
    _, body = next(iter(training_parts(Training("h100", num_gpus, 80 << 30, 0, **figures, **ends))))
    console = Console(width=400)
    with console.capture() as capture:
        console.print(body)
    assert claim in " ".join(capture.get().split())
