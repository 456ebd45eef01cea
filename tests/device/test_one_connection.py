"""CUDA_DEVICE_MAX_CONNECTIONS=1: work of all streams begins in the order of its launch."""

from __future__ import annotations

import os

import pytest
import torch

import distsim


@pytest.mark.parametrize(("connections", "waits"), [("1", True), ("8", False)])
def test_work_waits_for_what_was_launched_before_it_on_other_streams(connections: str, waits: bool) -> None:
    """A kernel behind another stream's wait for a long kernel begins after that one only with a single connection."""

    def body() -> float:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
        x = torch.ones(64, device="cuda")
        long, behind, free = (torch.cuda.Stream() for _ in range(3))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        with torch.cuda.stream(long):
            torch.cuda._sleep(20_000_000)
        behind.wait_stream(long)
        with torch.cuda.stream(behind):
            x * 2.0
        with torch.cuda.stream(free):
            x * 3.0
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    milliseconds = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1).results[0]
    assert (milliseconds > 5.0) == waits
