"""What the report says of training steps on simulated GPUs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distsim.report import report_document
from distsim.sim import Outcome, simulate
from distsim.sim.device.timeline import Kernel, Mark, Timeline
from distsim.sim.device.timeline.account import Account

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


def test_flops_and_tokens_are_the_models(trained: dict[str, Any]) -> None:
    """Six flops a weight and token of all that is multiplied; nothing is computed twice."""
    weights = WIDTH * WIDTH + WIDTH * WORDS
    assert trained["tokens_per_step"] == 2 * TOKENS
    assert trained["model_flops"] == 6 * weights * 2 * TOKENS == trained["hardware_flops"]
    assert trained["mfu"] == pytest.approx(
        trained["model_flops"] / trained["step_time_s"] / 2 / trained["peak_flops_per_s"]
    )
    assert trained["peak_dtype"] == "bf16"


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


def test_an_account_splits_late_and_moving() -> None:
    """A snapshot keeps what was, and what came since is the difference."""
    account = Account()
    account.overlapped(2.0, used=0.75)
    before = account.snapshot()
    account.overlapped(1.0, used=0.5)
    account.ran("mm", 1.0)
    gone = account.since(before)
    assert (gone.overlapped_s, gone.slowed_s, gone.operators) == (1.0, 0.5, {"mm": [1, 1.0]})
    assert before.operators == {}


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
