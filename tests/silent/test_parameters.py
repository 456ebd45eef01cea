"""The walk over a model's parameters."""

from __future__ import annotations

import torch
from torch import nn

from distsim.debug.diagnosis.silent.collect.sketch import parameters_of


class CameByRpc(nn.Module):
    """As a RemoteModule that was unpickled: `Module.__init__` did not run."""

    def __init__(self) -> None:
        self.__dict__["on"] = "worker1"


def test_a_part_without_parameters_is_passed_over() -> None:
    """A RemoteModule that came by RPC has not even an empty table of them."""
    model = nn.ModuleDict({"head": nn.Linear(2, 1, bias=False)})
    model._modules["remote"] = CameByRpc()
    assert [(name, module) for name, _, module in parameters_of(model)] == [("head.weight", "head")]
    assert isinstance(next(parameters_of(model))[1], torch.nn.Parameter)
