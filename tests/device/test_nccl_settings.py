"""NCCL's settings that no simulated time follows are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

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
