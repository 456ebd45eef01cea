"""Silent faults on simulated GPUs without values: equal origins mean equal values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from distsim.debug.diagnosis.silent.collect.sketch import WIDTH
from distsim.debug.diagnosis.silent.facts import Severity, SilentFinding
from distsim.sim.observe.origins import CONSTANT, Meeting, Origin, Parts, Received, first_difference, resolve, slice_of
from distsim.sim.run import RunRequest, run_program, simulate

PROGRAMS = Path(__file__).parent / "programs"
FAULTY = {
    "s01_skip_load": "replicas_differ_at_start",
    "s05_tp_batches": "replicate_is_not",
    "s07_sp_layernorm": "replicas_diverge",
    "s13_wrong_group": "replicas_differ_at_start",
    "s14_dropout_differs": "replicas_diverge",
    "s16_opt_state": "optimizer_state_differs",
    "s24_no_sync_always": "replicas_diverge",
    "s25_bypass_ddp": "replicas_diverge",
    "s43_buffers": "buffers_differ",
    "s51_frozen_on_one": "replicas_diverge",
    "s54_router_not_reduced": "replicas_diverge",
    "s67_shared_key_value": "replicas_diverge",
    "s73_reduction_dropped": "replicas_diverge",
    "s92_reduce": "replicas_diverge",
}
"""Programs whose fault is found without values, and its kind."""
QUICK = {"s05_tp_batches", "s07_sp_layernorm", "s14_dropout_differs", "s43_buffers", "h05_hsdp", "h12_powersgd"}
"""Programs of the suite; the soak runs all."""
NOT_ON_GPUS = {"s10_same_batch"}
"""Programs that draw from a generator of the CPU."""


def programs(pattern: str) -> list[Any]:
    """Return the programs as parameters of a test."""
    names = sorted(path.stem for path in PROGRAMS.glob(pattern) if path.stem not in NOT_ON_GPUS)
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in names]


def on_gpus(name: str, folder: Path) -> tuple[Path, int]:
    """Write the GPU version of a program, and return its path and number of ranks."""
    text = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
    text = (
        text.replace('"gloo"', '"nccl"')
        .replace('mesh("cpu"', 'mesh("cuda"')
        .replace("Generator()", 'Generator("cuda")')
    )
    line = re.compile(r'^(dist\.init_process_group\("nccl"\).*)$', re.MULTILINE)
    text, number = line.subn(
        r'\1\ntorch.cuda.set_device(dist.get_rank()); torch.set_default_device("cuda")', text, count=1
    )
    ranks = re.search(r"ranks: (\d+)", text)
    assert number == 1
    assert ranks is not None
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return path, int(ranks[1])


def findings(name: str, folder: Path, *arguments: str) -> list[SilentFinding]:
    """Silent findings of a program on simulated GPUs."""
    path, ranks = on_gpus(name, folder)
    outcome = run_program(
        RunRequest(str(path), args=list(arguments), on="dgx-h100:1", nproc_per_node=ranks, silent="watch")
    )
    assert outcome.exit_code == 0
    assert not [note for note in outcome.notes if "silent" in note]
    return outcome.silent


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@pytest.mark.parametrize("name", [one for one in programs("s*.py") if one.values[0] in FAULTY])
def test_a_faulty_program_is_warned_of_without_values(name: str, tmp_path: Path) -> None:
    """Never more than a warning: two ranks may compute one value in different ways."""
    (finding,) = findings(name, tmp_path)
    assert (finding.kind.value, finding.level) == (FAULTY[name], Severity.WARNING)
    assert "This compares how values are computed" in finding.explanation


@pytest.mark.slow
def test_a_mask_that_differs_is_named_with_its_line_and_remedy(tmp_path: Path) -> None:
    """The gradient differs only because the generators of the ranks do: a reduction would hide it."""
    (finding,) = findings("s14_dropout_differs", tmp_path)
    assert "The values begin to differ with native_dropout at " in finding.explanation
    assert re.search(
        r"Give ranks 0,1 the same generator state before \S+s14_dropout_differs\.py:\d+", finding.suggestion
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@pytest.mark.parametrize("name", programs("s*.py"))
def test_a_repaired_program_is_silent_without_values(name: str, tmp_path: Path) -> None:
    """Values that are computed alike on each rank, or come from one collective, are equal."""
    assert findings(name, tmp_path, "fixed") == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@pytest.mark.parametrize("name", programs("h*.py"))
def test_a_healthy_look_alike_is_silent_without_values(name: str, tmp_path: Path) -> None:
    """Shards, flat buffers and collectives of parts are followed byte by byte."""
    assert findings(name, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "kinds"), [(1.0, []), (0.5, ["replicas_diverge"])])
def test_a_number_of_an_operator_on_lists_counts(factor: float, kinds: list[str]) -> None:
    """One rank scales its reduced gradients by another number, all at once."""

    def body() -> None:
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda(), device_ids=[rank])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 4, device="cuda")).sum().backward()
            torch._foreach_mul_([p.grad for p in model.parameters()], factor if rank else 1.0)
            optimizer.step()

    outcome = simulate(body, "dgx-h100:1", nproc_per_node=2, silent="watch")
    assert [finding.kind.value for finding in outcome.silent] == kinds


def leaf(name: str, order: int = 0) -> Origin:
    """Return the origin of a value that has no sources."""
    return Origin(name, (), (), None, order)


def sketches(*origins: Origin) -> list[tuple[float, ...]]:
    """Return the sketches of *origins* after the run."""
    vectors = [(np.zeros(WIDTH, dtype=np.float32), origin) for origin in origins]
    resolve(vectors)
    return [tuple(vector.tolist()) for vector, _ in vectors]


def gathered(op: str, rank: int, *brought: Origin) -> Received:
    """Return the result of a collective of tensors of eight bytes, as *rank* receives it."""
    meeting = Meeting(0, op, 0, len(brought))
    meeting.inputs = {index: [[(0, 8, origin)]] for index, origin in enumerate(brought)}
    return Received(meeting, rank, (0, 0), (0, 8, 8), None, 0)


def test_a_result_of_an_all_reduce_is_equal_on_all_members() -> None:
    """It is another value than each input, and than the sum of other inputs."""
    one, other = leaf("one"), leaf("other")
    of_first, of_second = gathered("all_reduce", 0, one, other), gathered("all_reduce", 1, one, other)
    first, second, alone, third = sketches(of_first, of_second, one, gathered("all_reduce", 0, one, one))
    assert first == second
    assert len({first, alone, third}) == 3


def test_a_result_of_a_broadcast_is_the_value_of_its_root() -> None:
    """A copy is no new value."""
    one, other = leaf("one"), leaf("other")
    first, root = sketches(gathered("broadcast", 1, one, other), one)
    assert first == root


def test_what_a_missing_member_brought_is_unknown_but_equal_for_all() -> None:
    """A rank that another stands for brings nothing."""
    meeting = Meeting(0, "all_reduce", 0, 3)
    meeting.inputs = {0: [[(0, 8, leaf("one"))]]}
    results = [Received(meeting, rank, (0, 0), (0, 8, 8), None, 0) for rank in (0, 1)]
    assert len(set(sketches(*results))) == 1


def test_a_part_of_joined_values_is_the_value_that_was_joined() -> None:
    """Flattened gradients are their own again behind the bucket."""
    one, other = leaf("one"), leaf("other")
    joined = Parts(16, [(0, 8, one), (8, 16, other)], 1)
    assert slice_of(joined.pieces, 8, 16) is other
    across = slice_of(joined.pieces, 4, 12)
    again = slice_of([(0, 4, slice_of([(0, 8, one)], 4, 8)), (4, 8, slice_of([(0, 8, other)], 0, 4))], 0, 8)
    assert len(set(sketches(across, again))) == 1
    assert len(set(sketches(across, joined))) == 2


def test_each_part_of_a_constant_is_the_constant() -> None:
    """Memory of zeros is equal however it is cut."""
    zeros = Origin(CONSTANT, 0.0, (), None, 0)
    assert slice_of([(0, 4, zeros), (4, 8, zeros)], 1, 7) is zeros
    assert sketches(zeros) == [(0.0,) * WIDTH]


def test_the_first_operator_that_differs_is_named() -> None:
    """What only follows from a difference is not."""
    code = (test_the_first_operator_that_differs_is_named.__code__, 7)
    left, right = (Origin("dropout", seed, (leaf("x"),), code, 1) for seed in (1, 2))
    sums = [Origin("sum", (), (origin,), code, 2) for origin in (left, right)]
    difference = first_difference(*sums)
    assert difference is not None
    assert difference[0] == "dropout"
