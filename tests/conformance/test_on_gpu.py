"""The bodies of this folder on `cuda` and nccl in the simulator: they find what they find on the CPU and gloo."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Body
from conformance.plain import differences, plain
from conformance.test_collectives import CALLS, every_dtype

import distsim

HERE = Path(__file__).parent

GLOO = "monitored_barrier is gloo's"
HOST = "the body names the CPU: its mesh, its generator or the device of its objects"
SPARSE = "sparse tensors on CUDA are not simulated"
ANY = "NCCL receives from a rank that is named"
LIMIT = "the host does not wait for a GPU, so no timeout strikes in it"
KERNEL = "a work's answers before its kernel has run"
ALIAS = "NCCL refuses lists and buffers that lie in each other"

OBSERVED = "what observers see has the names of the backend and of its works"

EXCLUDED = {
    "aliases.input_is_output": ALIAS,
    "aliases.one_tensor": ALIAS,
    "collectives.complex_refusals": "NCCL has other words for what it does not reduce",
    "collectives.mistakes": "a barrier is given the GPU of one rank",
    "collectives.premul": "NCCL has PREMUL_SUM",
    "collectives.sparse": SPARSE,
    "collectives.uneven_all_gather": "of tensors that differ in size NCCL makes messages: refused by name",
    "debug.all_missing_are_named": GLOO,
    "debug.no_time_at_all": GLOO,
    "debug.one_is_missing": GLOO,
    "dropped.devices": KERNEL,
    "init.questions": HOST,
    "names.questions": "NCCL carries out shrink_group",
    "objects.broadcast": HOST,
    "observers.debug_mode": OBSERVED,
    "observers.execution_trace": OBSERVED,
    "observers.hooks_of_works": "NCCL has completion hooks, which are refused by name",
    "observers.time_estimator": "it estimates for NCCL alone",
    "p2p.dtypes": "NCCL has no 16-bit integers",
    "p2p.in_groups": ANY,
    "p2p.mistakes": SPARSE,
    "p2p.timeout": LIMIT,
    "p2p.wait_with_timeout": LIMIT,
    "parallel.dtensor": HOST,
    "parallel.fsdp": HOST,
    "parallel.fsdp_options": HOST,
    "parallel.tensor_parallel": HOST,
    "profiler.collectives": SPARSE,
    "profiler.data_parallel": "events are nccl's, not gloo's",
    "work.bytes_and_elements": "NCCL wants rows that divide",
    "work.group_timeout": LIMIT,
    "work.kept_for_the_handle": "NCCL has no 16-bit integers",
    "work.methods": KERNEL,
    "work.scattered": "NCCL's has a future",
    "work.timeouts": LIMIT,
    "wrappers.ddp_hooks": HOST,
    "wrappers.ddp_join": HOST,
    "wrappers.zero_redundancy": HOST,
}
"""Bodies that are not run, and why."""

OTHERWISE = {
    r".*\.backend": "the backend is nccl",
    r"torch\.int16 .*|short": "NCCL has no 16-bit integers, and says so by a TypeError",
    r"(gather )?columns.*|recv into columns|send of columns": "NCCL refuses what is not contiguous",
    r"(gather|scatter) stacked.*|scalars.*": "NCCL compares numbers of elements, not shapes",
    r"torch\.complex\d+ .*": "NCCL gathers complex numbers as pairs",
    r"works": "a batch is one work",
    r"late|completed(\[\d\])?|(gather|scatter) completed": "whether a kernel has run by the time that the host asks",
}
"""Answers that differ, by their names, and why."""


def bodies() -> dict[str, Body]:
    """`module.name` -> the body, of those that need nothing but their rank and the world's size."""
    found = {}
    for path in sorted(HERE.glob("test_*.py")):
        if path != Path(__file__):
            module = importlib.import_module(f"conformance.{path.stem}")
            for name, one in inspect.getmembers(module, inspect.isfunction):
                takes = [*inspect.signature(one).parameters]
                if one.__module__ == module.__name__ and takes == ["rank", "world_size"]:
                    found[f"{path.stem.removeprefix('test_')}.{name}"] = one
    return found | {f"collectives.{call}": partial(every_dtype, call=call) for call in CALLS}


def on(device: str, body: Body) -> Any:
    """What every rank does: tensors that say nothing of a device are on *device*."""
    torch.manual_seed(0)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    dist.init_process_group({"cpu": "gloo", "cuda": "nccl"}[device])
    answer = plain(body(rank, world_size))
    dist.destroy_process_group()
    return answer


def answers(device: str, body: Body) -> list[Any]:
    with warnings.catch_warnings(), tempfile.TemporaryDirectory():
        warnings.simplefilter("ignore")
        outcome = distsim.simulate(on, "dgx-h100:1", (device, body), nproc_per_node=4, data="real")
    told = "; ".join(f"{found.kind}: {found.explanation}" for found in outcome.diagnoses)
    assert outcome.exit_code == 0, told
    return list(outcome.results)


def test_the_bodies_are_known() -> None:
    """Who is left out has a name and a reason; nobody is left out who is not there."""
    assert set(EXCLUDED) <= set(bodies())


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(bodies()) - set(EXCLUDED)))
def test_a_body_on_gpus(name: str) -> None:
    """What a body finds on simulated GPUs with nccl is what it finds on simulated CPUs with gloo."""
    body = bodies()[name]
    for rank, (one, other) in enumerate(zip(answers("cpu", body), answers("cuda", body), strict=True)):
        for line in differences(one, other):
            field = line.partition(":")[0]
            assert any(re.fullmatch(known, field) for known in OTHERWISE), f"rank {rank}: {line}"
