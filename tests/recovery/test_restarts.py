"""Ranks that are killed and started again: all together as by torchrun, and one alone; and groups that shrink."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError
from distsim.scenario.real.real import run_for_real
from distsim.sim.faults.fault import CallPoint, When
from distsim.sim.faults.rank_faults import Crash
from distsim.sim.world.conditions import Conditions
from tests.scenario.made import made


def simulated(body: Any, nproc: int = 3, on: str = "ethernet-cpu:1", **crash: Any) -> Any:
    """The outcome of *body* on some ranks, of which the fault kills some."""
    conditions = Conditions(rules=[Crash(**crash)]) if crash else None
    return distsim.simulate(body, on=on, nproc_per_node=nproc, conditions=conditions, check=False)


def from_checkpoint(path: Path) -> Any:
    """A program of ten steps that saves its step after each third."""

    def body() -> tuple[str, int, int]:
        dist.init_process_group("gloo")
        first = step = int(path.read_text()) if path.exists() else 0
        while step < 10:
            dist.all_reduce(torch.ones(4))
            step += 1
            if step % 3 == 0 and dist.get_rank() == 0:
                path.write_text(str(step))
            dist.barrier()
        return os.environ["TORCHELASTIC_RESTART_COUNT"], first, step

    return body


def test_a_job_that_is_started_again_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """All ranks die in the eighth step and start 5 s later from that of the sixth, as torchrun has them."""
    outcome = simulated(from_checkpoint(tmp_path / "step"), ranks=(0, 1, 2), restart_after_s=5.0, when=When(at_s=0.002))
    assert (outcome.exit_code, outcome.diagnoses) == (0, [])
    assert outcome.results == [("1", 6, 10)] * 3
    assert 5.0 < outcome.virtual_time_s < 5.1
    assert any("killed and started again is not in this report" in note for note in outcome.notes)


def test_one_rank_alone_cannot_return_to_a_plain_job(tmp_path: Path) -> None:
    """The others still wait for the rank that died, and the verdict names it, not the one that waits in init. It says
    that the death was injected, and advises for that, not for a death on a host."""
    call = When(call=CallPoint.parse("all_reduce #5"))
    outcome = simulated(from_checkpoint(tmp_path / "step"), ranks=(1,), restart_after_s=5.0, when=call)
    assert (outcome.diagnoses[0].kind, outcome.diagnoses[0].culprits) == (Kind.RANK_KILLED, (1,))
    assert outcome.diagnoses[0].victims == (0, 2)
    words = outcome.diagnoses[0].explanation, outcome.diagnoses[0].suggestion
    assert "killed by SIGKILL; the fault was injected, and the rank started again without the others. Ranks" in words[0]
    plain = simulated(from_checkpoint(tmp_path / "other"), ranks=(1,), when=call).diagnoses[0]
    assert "A job survives such a fault if all its ranks are started again" in plain.suggestion == words[1]
    assert plain.explanation.startswith("Rank 1 was killed by SIGKILL; the fault was injected. Ranks 0,2 wait")


def test_a_call_kills_a_rank_once(tmp_path: Path) -> None:
    """A rank that is started again makes the call that killed it."""
    ranks = (0, 1, 2)
    outcome = simulated(
        from_checkpoint(tmp_path / "step"), ranks=ranks, restart_after_s=1.0, when=When(call=CallPoint.parse("#2"))
    )
    assert (outcome.exit_code, outcome.results) == (0, [("1", 0, 10)] * 3)


def test_a_group_shrinks_without_a_dead_rank() -> None:
    """A timeout that the program set ends the call, shrink_group aborts it, and two of three ranks go on."""

    def body() -> Any:
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        if rank == 1:
            os.kill(os.getpid(), 9)
        try:
            dist.all_reduce(x, async_op=True).wait(dist.distributed_c10d.timedelta(seconds=5))
        except (dist.DistBackendError, RuntimeError) as error:
            words = str(error)
        group = dist.shrink_group([1], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
        y = torch.ones(4, device="cuda")
        dist.all_reduce(y, group=group)
        return dist.get_world_size(), y.tolist(), "timed out" in words or "aborted" in words

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=3, check=False)
    assert (outcome.exit_code, outcome.diagnoses) == (0, []), outcome
    assert outcome.results[0] == outcome.results[2] == (2, [2.0] * 4, True)
    (note,) = [note for note in outcome.notes if "went on without" in note]
    assert "ranks 0,2 went on without rank 1 by shrink_group at" in note
    assert "all_reduce #2" in note


def test_real_ranks_are_not_started_again(tmp_path: Path) -> None:
    """On gloo the launcher starts ranks again; the fault says so in a line."""
    rule = "[[faults]]\nwhat = 'crash'\nranks = [1]\ncall = 2\nrestart_after_s = 1\n"
    with pytest.raises(UsageError, match="restart_after_s is simulated only"):
        run_for_real(made(tmp_path, f"{rule}[expect]\nkind = 'healthy'\n"))
