"""Names of one collective in several releases: what CommDebugMode counts, and under which name a call is recorded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import distsim

CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "all_gather_into_tensor": ("all_gather_into_tensor", lambda f: f(torch.empty(4), torch.ones(2))),
    "all_gather_single": ("all_gather_into_tensor", lambda f: f(torch.empty(4), torch.ones(2))),
    "_all_gather_base": ("all_gather_into_tensor", lambda f: f(torch.empty(4), torch.ones(2))),
    "reduce_scatter_tensor": ("reduce_scatter_tensor", lambda f: f(torch.empty(2), torch.ones(4))),
    "reduce_scatter_single": ("reduce_scatter_tensor", lambda f: f(torch.empty(2), torch.ones(4))),
    "_reduce_scatter_base": ("reduce_scatter_tensor", lambda f: f(torch.empty(2), torch.ones(4))),
    "all_to_all_single": ("all_to_all_single", lambda f: f(torch.empty(2), torch.ones(2))),
}
"""For each name: that of the record, and a call on two ranks."""


def counts(name: str) -> dict[str, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with CommDebugMode() as mode:
            CALLS[name][1](getattr(dist, name))
    return {str(operator): count for operator, count in mode.get_comm_counts().items()}


@pytest.fixture(scope="module")
def torchs_own() -> dict[str, dict[str, int]]:
    """What torch's own groups make CommDebugMode count; its backend `fake` moves nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        return {name: counts(name) for name in CALLS if hasattr(dist, name)}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", CALLS)
def test_each_name_is_counted_and_recorded_alike(name: str, torchs_own: dict[str, dict[str, int]]) -> None:
    """The simulated group dispatches the operator that torch's does, and the record has one name for all releases."""
    if name not in torchs_own:
        pytest.skip(f"torch has no {name}")

    def body() -> dict[str, int]:
        dist.init_process_group("gloo")
        return counts(name)

    outcome = distsim.simulate(body, on="ethernet-cpu:1", nproc_per_node=2)
    assert outcome.results == [torchs_own[name]] * 2
    assert sum(torchs_own[name].values()) == 1
    assert [record.op for record in outcome.records[0]][-1] == CALLS[name][0]
