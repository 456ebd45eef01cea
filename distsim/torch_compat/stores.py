"""Stores: the one that the default group was made with, and those of a rendezvous."""

from __future__ import annotations

from distsim.torch_compat.names import FEATURE, Name

__all__: list[str] = []

DEFAULT_STORE = Name(
    "torch.distributed.distributed_c10d._get_default_store", "the monitors of several hosts, and strict ranks, meet"
)
CREATE_STORE = Name(
    "torch.distributed.rendezvous._create_c10d_store", "a rendezvous beside that of the launcher", FEATURE
)
