"""Groups whose members change (torch 2.14), simulated and on gloo under the guard."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.debug.records.kinds import Kind
from distsim.sim.faults.fault import CallPoint, When
from distsim.sim.faults.rank_faults import Crash
from distsim.sim.world.conditions import Conditions
from tests.jobs import ENVIRON, free_port

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has no _reconfigure (2.14)")
Handles = Callable[[str, list[int]], list[str]]


def begun(timeout_s: float = 30.0) -> tuple[int, Handles]:
    """Begin a reconfigurable job; the rank, and a function that exchanges handles under a name."""
    me = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s), enable_reconfigure=True)
    store = dist.distributed_c10d._get_default_store()

    def handles(name: str, ranks: list[int]) -> list[str]:
        store.set(f"{name}/{me}", dist._get_reconfigure_handle())
        return [store.get(f"{name}/{rank}").decode() for rank in ranks]

    return me, handles


def summed() -> float:
    """The sum over the group of each rank's present rank plus one."""
    x = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return float(x[0])


def run(body: Callable[[], Any], nproc: int = 3, **crash: Any) -> Any:
    conditions = Conditions(rules=[Crash(**crash)]) if crash else None
    return distsim.simulate(body, on="ethernet-cpu:1", nproc_per_node=nproc, conditions=conditions, check=False)


def answers(body: Callable[[], Any], nproc: int = 3) -> list[Any]:
    outcome = run(body, nproc)
    assert (outcome.exit_code, outcome.diagnoses) == (0, []), outcome
    return list(outcome.results)


def test_nothing_is_connected_before() -> None:
    """A call before the first reconfigure raises torch's error, and one after it counts all."""

    def body() -> Any:
        _, handles = begun()
        with pytest.raises(RuntimeError, match=r"Call reconfigure\(\) before issuing collectives"):
            dist.all_reduce(torch.ones(1))
        dist._reconfigure(1, handles("a", [0, 1, 2])).wait()
        return dist._supports_reconfigure(), summed()

    assert answers(body) == [(True, 6.0)] * 3


@pytest.mark.parametrize("gone", [1, 2])
def test_a_group_shrinks_and_grows(gone: int) -> None:
    """Without a rank in the middle or at the end the others are numbered anew; then all are members again, by a set."""

    def body() -> Any:
        me, handles = begun()
        dist._reconfigure(1, handles("a", [0, 1, 2])).wait()
        left = [rank for rank in range(3) if rank != gone]
        if me != gone:
            dist._reconfigure(2, handles("b", left)).wait()
        small = (dist.get_rank(), dist.get_world_size(), summed()) if me != gone else None
        dist._reconfigure(3, set(handles("c", [0, 1, 2]))).wait()
        return small, dist.get_world_size(), summed()

    first, second = ((0, 2, 3.0), 3, 6.0), ((1, 2, 3.0), 3, 6.0)
    expected = [first, second]
    expected.insert(gone, (None, 3, 6.0))
    assert answers(body) == expected


def test_each_alone_and_ddp() -> None:
    """Groups of one rank do not wait for each other, and DDP divides by the number of present members."""

    def body() -> Any:
        me, handles = begun()
        dist._reconfigure(10 + me, [dist._get_reconfigure_handle()]).wait()
        alone = dist.get_world_size()
        dist._reconfigure(2, handles("a", [1, 0])).wait()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.full((1, 2), float(me))).sum().backward()
        return alone, dist.get_rank(), model.module.weight.grad.tolist()

    assert answers(body, 2) == [(1, 1, [[0.5, 0.5]]), (1, 0, [[0.5, 0.5]])]


def test_what_torch_refuses_is_refused() -> None:
    """A number used twice, no handle, handles that are equal or unknown, a group without the rank itself."""

    def body() -> Any:
        me, _ = begun()
        own = [dist._get_reconfigure_handle()]
        dist._reconfigure(10 + me, own).wait()
        errors = []
        for uuid, handles in (
            (10 + me, [dist._get_reconfigure_handle()]),
            (20, []),
            (21, own * 2),
            (22, ["x"]),
            (23, own),
        ):
            with pytest.raises(RuntimeError) as raised:
                dist._reconfigure(uuid, handles)
            errors.append(str(raised.value))
        return errors

    for errors in answers(body, 2):
        for words, error in zip(("already used", "at least one", "unique", "Invalid", "not part"), errors, strict=True):
            assert words in error


def goes_on(steps: int = 8) -> Any:
    """A job of some steps whose ranks go on without one that fails: the ranks at the end, and the last sum."""
    _, handles = begun()
    dist._reconfigure(1, handles("a", [0, 1, 2])).wait()
    number, total = 1, 0.0
    while steps:
        try:
            total = summed()
            steps -= 1
        except RuntimeError:
            number += 1
            dist._reconfigure(number, handles(f"{number}", [0, 2])).wait()
    return dist.get_world_size(), total


@pytest.mark.parametrize("when", ["all_reduce #3", "0.5"])
def test_a_dead_rank_is_no_fault_of_a_job_that_goes_on(when: str) -> None:
    """Killed in a call: the verdict is healthy, and a note has the lost call and the time until the others went on."""
    at = When(call=CallPoint.parse(when)) if "#" in when else When(call=CallPoint.parse("#4"), after_s=1e-5)
    outcome = run(goes_on, ranks=(1,), when=at)
    assert (outcome.exit_code, outcome.diagnoses) == (0, []), outcome
    assert outcome.results[0] == outcome.results[2] == (2, 3.0)
    (note,) = [note for note in outcome.notes if "went on without" in note]
    assert re.search(r"ranks 0,2 went on without rank 1 by reconfigure at .*, [\d.]+ .s after rank 1 ended", note)
    assert re.search(r"all_reduce #\d at recovery/test_reconfigure.py:\d+ was lost", note)


def test_a_dead_rank_that_others_wait_for_is_the_fault() -> None:
    """Those that are left take the dead one's handle for the next group, and wait."""

    def body() -> None:
        me, handles = begun()
        every = handles("a", [0, 1, 2])
        dist._reconfigure(1, every).wait()
        every = handles("b", [0, 1, 2])
        dist.barrier()
        if me == 1:
            os.kill(os.getpid(), 9)
        dist._reconfigure(2, every).wait()

    outcome = run(body)
    assert (outcome.diagnoses[0].kind, outcome.diagnoses[0].culprits) == (Kind.RANK_KILLED, (1,))
    assert outcome.diagnoses[0].victims == (0, 2)
    assert "reconfigure" in outcome.diagnoses[0].explanation


def test_a_rank_that_was_started_again_returns() -> None:
    """The note says when it was back, and the verdict is healthy."""
    call = When(call=CallPoint.parse("all_reduce #9"))
    namespace: dict[str, Any] = {}
    exec(compile((HERE / "rejoins.py").read_text(), str(HERE / "rejoins.py"), "exec"), namespace)
    outcome = run(namespace["main"], ranks=(1,), restart_after_s=0.002, when=call)
    assert (outcome.exit_code, outcome.diagnoses, outcome.results) == (0, [], [40] * 3), outcome
    (note,) = [note for note in outcome.notes if "went on without" in note]
    assert re.search(r"; rank 1 was back [\d.]+ ms later$", note)


def test_nccl_revokes_a_group_after_its_timeout() -> None:
    """A call with a dead rank fails after the group's 20 s, no process is taken down, and the others go on."""

    def body() -> Any:
        me = int(os.environ["RANK"])
        torch.cuda.set_device(me)
        dist.init_process_group("nccl2", timeout=timedelta(seconds=20), enable_reconfigure=True)
        store = dist.distributed_c10d._get_default_store()

        def members(number: int, ranks: list[int]) -> None:
            store.set(f"{number}/{me}", dist._get_reconfigure_handle())
            dist._reconfigure(number, [store.get(f"{number}/{rank}").decode() for rank in ranks]).wait()

        members(1, [0, 1, 2])
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        if me == 1:
            os.kill(os.getpid(), 9)
        error = ""
        while not error:
            try:
                dist.all_reduce(x)
                torch.cuda.synchronize()
            except RuntimeError as raised:
                error = str(raised)
        assert "aborted" in error
        members(2, [0, 2])
        y = torch.ones(4, device="cuda")
        dist.all_reduce(y)
        torch.cuda.synchronize()
        return dist.get_rank(), y.tolist()

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=3, check=False)
    assert (outcome.exit_code, outcome.diagnoses) == (0, []), outcome
    assert [outcome.results[0], outcome.results[2]] == [(0, [2.0] * 4), (1, [2.0] * 4)]
    assert 20.0 < outcome.virtual_time_s < 20.1
    (note,) = [note for note in outcome.notes if "went on without" in note]
    assert "20 s after rank 1 ended; all_reduce #2 at" in note


@pytest.mark.parametrize("backend", ["nccl-legacy", "cpu:gloo,cuda:nccl2"])
def test_other_backends_are_refused_by_name(backend: str) -> None:
    """The older class of NCCL, and two backends."""
    with pytest.raises(distsim.RankFailure, match="enable_reconfigure"):
        distsim.simulate(
            lambda: dist.init_process_group(backend, enable_reconfigure=True), on="dgx-h100:1", nproc_per_node=2
        )


# -- The same on gloo, under the guard.

PROGRAM = """\
import os, sys, time
sys.path.insert(0, {folder!r})
from tests.recovery.test_reconfigure import begun, summed
import torch.distributed as dist

me, handles = begun()
dist._reconfigure(1, handles("a", [0, 1, 2])).wait()
every = handles("b", [0, 1, 2])
summed()
if me == 1:
    os.kill(os.getpid(), 9)
try:
    while True:
        summed()
except RuntimeError:
    pass
{rest}
print("sum", summed(), flush=True)
"""


def job_environ(tmp_path: Path, **more: str) -> dict[str, str]:
    """The environment of a guarded job of three ranks, without the rank of each, and `more`."""
    return {
        **ENVIRON,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "3",
        "DISTSIM_DIR": str(tmp_path / "rings"),
        **more,
    }


def guarded(tmp_path: Path, rest: str) -> tuple[list[str], str]:
    """Output of the ranks that are left, and what the guard said."""
    (tmp_path / "job.py").write_text(PROGRAM.format(folder=str(HERE.parent.parent), rest=rest))
    environ = job_environ(tmp_path, DISTSIM_HANG_AFTER="10", DISTSIM_ON_HANG="abort")
    command = [sys.executable, "-m", "distsim.debug", "job.py"]
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    ranks[1].wait(timeout=120)  # until a launcher has waited for it, a dead process counts as one that is there
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    return outputs, "".join(outputs)


@pytest.mark.slow
def test_the_guard_lets_a_job_go_on(tmp_path: Path) -> None:
    """Two of three ranks go on, no verdict is printed, and a line says how."""
    outputs, text = guarded(tmp_path, 'dist._reconfigure(2, handles("c", [0, 2])).wait()')
    assert all("sum 3.0" in output for output in (outputs[0], outputs[2]))
    assert not re.search(r"^(HANG|ERROR)", text, re.MULTILINE), text
    assert "ranks 0,2 went on without rank 1 by reconfigure at job.py:" in text


@pytest.mark.slow
def test_the_guard_lets_a_rank_return(tmp_path: Path) -> None:
    """A rank that its launcher starts again meets the others, and no verdict is printed."""
    environ = job_environ(tmp_path, KILL_AT="5", UNTIL_BACK="1")

    def start(rank: int, count: int = 0) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "distsim.debug", str(HERE / "rejoins.py")],
            cwd=tmp_path,
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(count)},
            stdout=subprocess.DEVNULL if rank == 1 and not count else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    first = [start(rank) for rank in range(3)]
    assert first[1].wait(timeout=120) == -9
    ranks = [first[0], start(1, count=1), first[2]]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert all(re.search(r"^steps \d+$", output, re.MULTILINE) for output in outputs), outputs
    assert not re.search(r"^(HANG|ERROR|MISMATCH)", "".join(outputs), re.MULTILINE), outputs


@pytest.mark.slow
def test_the_guard_names_a_dead_rank_that_others_wait_for(tmp_path: Path) -> None:
    """With the dead rank's handle the next group never forms."""
    rest = 'mixed = handles("c", [0, 2])\ndist._reconfigure(2, [mixed[0], every[1], mixed[1]]).wait()'
    _, text = guarded(tmp_path, rest)
    assert re.search(r"^HANG +rank (killed|exited) +rank 1 ", text, re.MULTILINE), text
