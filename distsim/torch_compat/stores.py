"""Stores: the one that the default group was made with, and those of a rendezvous."""

from __future__ import annotations

from typing import Any

from distsim.torch_compat.names import FEATURE, TorchName

__all__ = ["of_default_group"]

DEFAULT_STORE = TorchName(
    "torch.distributed.distributed_c10d._get_default_store", "the monitors of several hosts, and strict ranks, meet"
)
CREATE_STORE = TorchName(
    "torch.distributed.rendezvous._create_c10d_store", "a rendezvous beside that of the launcher", FEATURE
)


def of_default_group() -> Any:
    """The store that the default group was made with, without the prefixes around it.

    Raises:
        RuntimeError, ValueError: there is no default group, or this torch does not say which store it has.
    """
    ask = DEFAULT_STORE.get(None)
    if ask is None:
        raise RuntimeError("this torch does not say which store its default group has")
    store = ask()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
