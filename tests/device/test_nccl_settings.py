"""NCCL's settings that no simulated time follows are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _time_estimator

import distsim
from distsim.cluster import load_cluster


def work() -> None:
    torch.ones(8, device="cuda")


@pytest.mark.parametrize("setting", ["NCCL_IB_QPS_PER_CONNECTION=4", "NCCL_NTHREADS=256"])
def test_a_setting_in_the_environment_without_effect_is_named(setting: str) -> None:
    """A program that sets queue pairs or threads is told that its times do not follow."""

    def body() -> None:
        name, _, value = setting.partition("=")
        os.environ[name] = value
        work()

    notes = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1).notes
    assert [note for note in notes if f"{setting} in the environment has no effect on simulated times" in note]


def test_a_setting_that_cluster_files_have_is_pointed_there() -> None:
    """NCCL_ALGO changes times where the cluster file says it."""

    def body() -> None:
        os.environ["NCCL_ALGO"] = "Ring"
        os.environ["NCCL_DEBUG"] = "INFO"
        work()

    notes = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1).notes
    assert [note for note in notes if note.endswith("write it under [nccl.settings] of the cluster file")]
    assert not [note for note in notes if "NCCL_DEBUG" in note]


def test_a_setting_of_the_cluster_file_without_effect_is_marked(tmp_path: Path) -> None:
    """The line of what was assumed does not claim what no time follows."""
    path = tmp_path / "own.toml"
    path.write_text('base = "dgx-h100"\nname = "own"\n[nccl.settings]\nNCCL_IB_QPS_PER_CONNECTION = "4"\n')
    software = load_cluster(str(path)).nccl.software
    assert "NCCL_IB_QPS_PER_CONNECTION=4 (no effect on simulated times)" in software


def test_the_time_estimator_answers_without_running_a_collective() -> None:
    """In microseconds, as NCCL does; torch offers it for NCCL alone."""

    def body() -> tuple[float, float, float]:
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        x = torch.full((1 << 22,), float(rank), device="cuda")
        with _time_estimator(device=torch.device("cuda")) as once:
            dist.all_reduce(x)
        with _time_estimator(device=torch.device("cuda")) as twice:
            for _ in range(2):
                dist.all_reduce(x)
        with _time_estimator(device=torch.device("cuda")) as uneven:  # a rank knows its own splits alone
            dist.all_to_all_single(torch.empty(16, device="cuda"), x[:16], [2] * 8, [9, *[1] * 7])
        assert uneven.estimated_time
        with _time_estimator(device=torch.device("cuda")):
            work = dist.all_reduce(x, async_op=True)
        assert work is not None
        assert work.get_future().wait()[0] is x
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        dist.all_reduce(x)
        end.record()
        torch.cuda.synchronize()
        return once.estimated_time or 0.0, twice.estimated_time or 0.0, 1000 * begin.elapsed_time(end)

    outcome = distsim.simulate(body, "dgx-h100:1", nproc_per_node=8)
    once, twice, took = outcome.results[0]
    assert outcome.results == [outcome.results[0]] * 8
    assert twice == pytest.approx(2 * once)
    assert once == pytest.approx(took, rel=0.5)
    assert sum(total.count for total in outcome.collectives) == 1
