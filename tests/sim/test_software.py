"""A run says whose collectives its times are of: NCCL's version, plugin, settings and the cluster's variant."""

from __future__ import annotations

import io
import os

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from distsim import simulate
from distsim.report import Summary
from distsim.report.document import report_document
from distsim.sim.outcome import Outcome


def reduced(backend: str) -> None:
    """One all_reduce on every rank."""
    dist.init_process_group(backend)
    device = "cpu" if backend == "gloo" else f"cuda:{os.environ['LOCAL_RANK']}"
    dist.all_reduce(torch.ones(4, device=device))
    dist.destroy_process_group()


def told(outcome: Outcome) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False, color_system=None)
    console.print(Summary(outcome, with_wall_time=False))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("on", "version", "software"),
    [
        ("polaris:setup1:2", None, "NCCL 2.21.5 (variant setup1)"),
        ("polaris:setup1:2", "2.18.6", "NCCL 2.18.6 (variant setup1)"),
        ("dgx-h100:1", None, "NCCL 2.27.3"),
    ],
)
def test_a_run_says_which_nccl_it_assumed(on: str, version: str | None, software: str) -> None:
    """In the report always, in the terminal where a cluster has more than one setup."""
    outcome = simulate(reduced, on, ("nccl",), nproc_per_node=2, nccl_version=version)
    assert report_document(outcome)["software"] == software
    assert (f"software assumed: {software}" in told(outcome)) == on.startswith("polaris")


def test_gloo_assumes_none() -> None:
    """gloo's collectives are not NCCL's, whatever the cluster names."""
    outcome = simulate(reduced, "polaris:2", ("gloo",), nproc_per_node=1)
    assert report_document(outcome)["software"] is None
    assert "software assumed" not in told(outcome)
