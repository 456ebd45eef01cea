"""From flight records to the smallest scenario with the same diagnosis."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.postmortem import Found
from distsim.debug.records import Phase
from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError
from distsim.scenario import find_scenarios, load_scenario, run_scenario
from distsim.scenario.reproduce import reproduce as reproduce_module
from distsim.scenario.reproduce.calls import calls_of
from distsim.scenario.reproduce.write_program import looped
from distsim.scenario.run import simulate_scenario
from tests.kin import one_in
from tests.scenario.made import made

HANGS = Path(__file__).parents[2] / "scenarios" / "hangs"
REPRODUCED = (
    "skipped_at_the_end",
    "skipped_in_the_middle",
    "shape_mismatch",
    "dtype_mismatch",
    "reduce_op_mismatch",
    "root_mismatch",
    "op_mismatch",
    "crossed_recvs",
    "crossed_sends",
    "ring_of_sends",
    "two_groups_crossed",
    "three_groups_crossed",
    "unmatched_recv",
    "unmatched_send",
    "p2p_size_mismatch",
    "wrong_tag",
    "uneven_iterations",
    "raises",
    "os_exit",
    "new_group_order",
    "never_joins",
)


@pytest.mark.parametrize("name", one_in(5, REPRODUCED))
def test_a_hang_is_reproduced_from_its_records(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written scenario has the same diagnosis, of no more ranks and calls, and passes."""
    outcome, _, _ = simulate_scenario(load_scenario(HANGS / f"{name}.toml"))
    assert outcome.evidence is not None
    found = Found(outcome.diagnoses or diagnose(outcome.evidence), outcome.evidence)
    monkeypatch.setattr(reproduce_module, "examine", lambda directory: found)
    lines = list(reproduce_module.reproduce(tmp_path, tmp_path / "again.toml"))
    assert lines[-1].startswith("run it: distsim scenario run ")
    again = load_scenario(tmp_path / "again.toml")
    assert again.spec.expect.kind == found.diagnoses[0].kind.value
    assert again.world_size <= outcome.world_size
    result = run_scenario(again)
    assert result.wrong == []


def test_few_candidates_spin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs seconds of CPU, so records that no program gives are refused before they have cost a minute."""
    outcome, _, _ = simulate_scenario(load_scenario(HANGS / "skipped_at_the_end.toml"))
    assert outcome.evidence is not None
    wrong = replace(outcome.diagnoses[0], kind=Kind.NAN)
    states = {rank: replace(state, phase=Phase.HOST_STUCK) for rank, state in outcome.evidence.ranks.items()}
    found = Found([wrong], replace(outcome.evidence, ranks=states))
    spun = []

    def simulated(scenario: Any) -> tuple[Any, None, None]:
        text = (scenario.path.parent / scenario.spec.program).read_text()
        spun.extend([scenario] if "while True" in text else [])
        return SimpleNamespace(diagnoses=[]), None, None

    monkeypatch.setattr(reproduce_module, "examine", lambda directory: found)
    monkeypatch.setattr(reproduce_module, "simulate_scenario", simulated)
    with pytest.raises(UsageError, match="not in its calls alone"):
        list(reproduce_module.reproduce(tmp_path, tmp_path / "again.toml"))
    assert 0 < len(spun) <= 5


def test_every_rank_and_call_that_is_left_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped call among many: two ranks and a handful of calls are left."""
    outcome, _, _ = simulate_scenario(load_scenario(HANGS / "skipped_at_the_end.toml"))
    assert outcome.evidence is not None
    found = Found(outcome.diagnoses, outcome.evidence)
    monkeypatch.setattr(reproduce_module, "examine", lambda directory: found)
    list(reproduce_module.reproduce(tmp_path, tmp_path / "again.toml"))
    again = load_scenario(tmp_path / "again.toml")
    assert again.world_size == 2
    assert (tmp_path / "again.py").read_text().count("dist.") <= 4
    whole = calls_of(outcome.evidence)
    assert sum(map(len, whole.calls.values())) > 4


LEFT_OUT_IN_A_LOOP = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(4)
for step in range(5):
    dist.all_reduce(t)
    if step == 2 and dist.get_rank() == 1:
        continue
    dist.broadcast(t, src=0)
"""


def test_a_call_left_out_in_a_loop_is_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records have no loops, but calls that come again make one: a round left out keeps its name, missing rank."""
    scenario = made(tmp_path, '[expect]\nkind = "missing_rank"\nculprits = [1]\n', LEFT_OUT_IN_A_LOOP)
    outcome, _, _ = simulate_scenario(scenario)
    assert outcome.evidence is not None
    # A real job's rings end where it hung; the simulator looked four calls further.
    real = {rank: [call for call in calls if call.seq <= 6] for rank, calls in outcome.evidence.records.items()}
    found = Found(outcome.diagnoses, replace(outcome.evidence, records=real))
    assert found.diagnoses[0].kind is Kind.MISSING_RANK
    monkeypatch.setattr(reproduce_module, "examine", lambda directory: found)
    list(reproduce_module.reproduce(tmp_path, tmp_path / "again.toml"))
    again = load_scenario(tmp_path / "again.toml")
    assert again.world_size == 2
    assert again.spec.expect.kind == Kind.MISSING_RANK.value
    assert run_scenario(again).wrong == []


TWO_PAIRS = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(4)
for step in range(4):
    dist.all_reduce(t)
    if rank % 2 == 0:
        dist.send(t, rank + 1)
    elif rank != 3 or step != 2:
        dist.recv(t, rank - 1)
"""
GATHERS_AND_SENDS = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(4)
for step in range(4):
    dist.all_gather_object([None] * dist.get_world_size(), {"step": step})
    if rank == 0 and step != 2:
        dist.send(t, 1)
    elif rank == 1:
        dist.recv(t, 0)
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("program", "culprits"), [pytest.param(TWO_PAIRS, (2, 3), marks=pytest.mark.soak), (GATHERS_AND_SENDS, (0, 1))]
)
def test_messages_in_a_loop_take_the_two_ranks_only(
    program: str, culprits: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round's message is not received, or not sent: other pairs go though their calls would fit into the loop,
    and sends that were over before the next call are written as ones that block."""
    outcome, _, _ = simulate_scenario(made(tmp_path, "[expect]", program))
    assert outcome.evidence is not None
    found = Found(outcome.diagnoses, outcome.evidence)
    assert (found.diagnoses[0].kind, found.diagnoses[0].culprits) == (Kind.DEADLOCK_CYCLE, culprits)
    monkeypatch.setattr(reproduce_module, "examine", lambda directory: found)
    list(reproduce_module.reproduce(tmp_path, tmp_path / "again.toml"))
    again = load_scenario(tmp_path / "again.toml")
    assert again.world_size == 2
    assert "works" not in (tmp_path / "again.py").read_text()
    assert run_scenario(again).wrong == []


FEWER_BATCHES = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 4))
for batch in range(6 - (dist.get_rank() == 1)):
    model(torch.ones(4, 8)).sum().backward()
dist.barrier()
"""
SKIPS_A_ROUND = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(4)
for step in range(6):
    dist.all_reduce(t)
    if dist.get_rank() == 1 and step == 3:
        continue
    dist.broadcast(t, src=0)
"""
STATE_OF_ONE = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 4))
for step in range(4):
    model(torch.ones(4, 8)).sum().backward()
    if step == 2 and dist.get_rank() == 0:
        dist.all_gather_object([None] * dist.get_world_size(), "state")
"""
LOGS_ON_ONE = """\
import torch
import torch.distributed as dist


def log(step, loss):
    if step == 3 and dist.get_rank() == 0:
        dist.all_reduce(loss)


dist.init_process_group("gloo")
for step in range(6):
    t = torch.ones(4)
    dist.all_reduce(t)
    log(step, t.sum().reshape(1))
    dist.broadcast(t, src=0)
"""


TWO_A_STEP = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t, loss = torch.ones(4), torch.ones(1)
for step in range(5 - (dist.get_rank() == 2)):
    dist.all_reduce(t)
    dist.all_reduce(loss)
dist.barrier()
"""
TWO_GROUPS = """\
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
t = torch.ones(4)
for step in range(4 - (dist.get_rank() == 3)):
    dist.all_reduce(t, group=mesh.get_group("tp"))
    dist.all_reduce(t, group=mesh.get_group("dp"))
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "kind", "culprits"),
    [
        pytest.param(TWO_A_STEP, "uneven_iterations", (1,), marks=pytest.mark.soak),
        pytest.param(TWO_GROUPS, "uneven_iterations", (1,), marks=pytest.mark.soak),
        pytest.param(FEWER_BATCHES, "uneven_iterations", (1,), marks=pytest.mark.soak),
        pytest.param(SKIPS_A_ROUND, "missing_rank", (1,), marks=pytest.mark.soak),
        pytest.param(STATE_OF_ONE, "extra_collective", (0,), marks=pytest.mark.soak),
        pytest.param(LOGS_ON_ONE, "extra_collective", (0,), marks=pytest.mark.soak),
    ],
)
def test_a_real_hang_becomes_a_scenario(program: str, kind: str, culprits: tuple[int], tmp_path: Path) -> None:
    """Four ranks on gloo under guard hang; their rings become a program that hangs alike on sim."""
    (tmp_path / "job.py").write_text(program)
    flags = ["--on", "gloo", "--nproc-per-node", "4", "--on-hang", "abort", "--rings", "rings"]
    words = [sys.executable, "-m", "distsim", "run", *flags, "job.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert job.returncode in (3, 4), job.stdout + job.stderr
    lines = list(reproduce_module.reproduce(tmp_path / "rings", tmp_path / "again.toml"))
    assert not any(line.startswith("note: ") for line in lines), lines
    again = load_scenario(tmp_path / "again.toml")
    result = run_scenario(again)
    assert result.wrong == []
    assert (result.kind, result.culprits) == (kind, culprits)


A, B, C = "a  # train.py:4", "b  # train.py:6", "c  # train.py:9"
ALL = dict.fromkeys((A, B, C), (0, 1))


@pytest.mark.parametrize(
    ("texts", "stuck", "lines"),
    [
        ({0: [A, B, A, B], 1: [A, B, A, B]}, (0, 1), ["for _ in range(2):", f"    {A}", f"    {B}"]),
        ({0: [A, A, A], 1: [A, A]}, (0,), ["for _ in range(3, 2):", f"    {A}"]),
        (
            {0: [A, B, A, B], 1: [A, A, B]},
            (0, 1),
            ["for step in range(2):", f"    {A}", "    if rank != 1 or step != 0:", f"        {B}"],
        ),
        (
            {0: [A, A, B, A], 1: [A, A, A, A]},
            (0, 1),
            ["for step in range(4):", f"    {A}", "    if rank == 0 and step == 1:", f"        {B}"],
        ),
        ({0: [C, A, A], 1: [A, A]}, (0, 1), ["if [0]:", f"    {C}", "for _ in range(2):", f"    {A}"]),
        (
            {0: [A, C, A, B, C], 1: [A, C, A, B, C]},
            (0, 1),
            ["for step in range(2):", f"    {A}", "    if step == 1:", f"        {B}", f"    {C}"],
        ),
        ({0: [C, A, A], 1: [C, A]}, (0, 1), [C, "for _ in range(2):", f"    {A}"]),
        ({0: [A, B], 1: [B]}, (0, 1), None),
    ],
)
def test_calls_that_come_again_are_written_as_a_loop(
    texts: dict[int, list[str]], stuck: tuple[int, ...], lines: list[str] | None
) -> None:
    """Rounds, who leaves a call out of one, and who makes fewer; what a stuck rank would do next is open."""

    def count(counts: Mapping[int, int]) -> str:
        return ", ".join(str(n) for n in dict.fromkeys(counts.values()))

    assert looped(texts, stuck, ALL, {0: 0, 1: 1}, count, lambda who: f"if {list(who)}:") == lines


@pytest.mark.parametrize(
    ("texts", "members", "lines"),
    [
        ({0: [A, B, A, B], 1: [A, B, C]}, {}, ["for _ in range(2, 1):", f"    {A}", f"    {B}", C]),
        (
            {0: [A, B, A, B], 1: [A, B, C]},
            {C: (1,)},
            ["for _ in range(2, 1):", f"    {A}", f"    {B}", "if [1]:", f"    {C}"],
        ),
        (
            {0: [A, B, A, B], 1: [A, B, A, C]},
            {},
            ["for step in range(2):", f"    {A}", "    if rank != 1 or step != 1:", f"        {B}", C],
        ),
        ({0: [A, B, A], 1: [A, B, A]}, {}, None),
    ],
)
def test_what_comes_last_may_stand_behind_the_loop(
    texts: dict[int, list[str]], members: dict[str, tuple[int, ...]], lines: list[str] | None
) -> None:
    """Who left the loop and waits behind it; who is still in it would come there, if it is one of the group."""

    def count(counts: Mapping[int, int]) -> str:
        return ", ".join(str(n) for n in dict.fromkeys(counts.values()))

    found = looped(texts, (0, 1), ALL | members, {0: 0, 1: 1}, count, lambda who: f"if {list(who)}:", after=True)
    assert found == lines


def test_nothing_is_overwritten_and_nothing_made_up(tmp_path: Path) -> None:
    """A folder without records, a file that exists: one line each."""
    with pytest.raises(UsageError, match="neither rings"):
        list(reproduce_module.reproduce(tmp_path, tmp_path / "x.toml"))
    (tmp_path / "x.py").write_text("")
    with pytest.raises(UsageError, match="exists already"):
        list(reproduce_module.reproduce(tmp_path, tmp_path / "x.toml"))
    assert find_scenarios([HANGS])
