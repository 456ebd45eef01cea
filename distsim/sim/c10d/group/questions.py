"""What torch asks of a group beside its calls: its name and number, its backends and timeout."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distsim.debug.records import Group
from distsim.debug.records.arguments import Call
from distsim.errors import NotSimulated
from distsim.sim.c10d.group.newer import CallHooks

__all__ = ["Questions", "own_timeout"]


class Questions(dist.ProcessGroup):
    """The answers of *group*'s member at *group_rank*. *backends*: device type -> the backend the user asked for."""

    def __init__(
        self,
        group: Group,
        group_rank: int,
        backends: dict[str, str],
        timeout: timedelta,
        explicit_timeout: bool,
        store: Any,
    ) -> None:
        super().__init__(group_rank, len(group.ranks))
        self._place, self._members = group_rank, len(group.ranks)  # past C++, which every call would ask
        self._group = group
        self._backends = backends
        host, gpu = backends.get("cpu"), backends.get("cuda")
        self.has_two_backends = host is not None and gpu is not None and host != gpu
        self.on_host: Questions | None = None
        """The backend of tensors on the CPU, where they have one of their own; made when first used."""
        self._timeout = timeout
        self._explicit = explicit_timeout
        self._store = store
        self._numbers = {"collective": 0, "p2p": 0}
        self.hooks: CallHooks | None = None
        """None until the program registers one."""

    def getBackendName(self) -> str:
        """What C++ asks. Not `gloo`: DDP's logger would take the group for a C++ ProcessGroupGloo."""
        return "sim"

    def name(self) -> str:
        return next(iter(self._backends.values()), "sim")

    _get_backend_name = name

    def backend_config(self) -> str:
        """`nccl`, or `cpu:gloo,cuda:nccl` where they differ by device."""
        if len(set(self._backends.values())) < 2:
            return self.name()
        return ",".join(f"{device}:{backend}" for device, backend in self._backends.items())

    @property
    def group_name(self) -> str:
        return self._group.name

    @property
    def group_desc(self) -> str:
        return self._group.description

    def _set_group_name(self, name: str) -> None:
        """Known since the group was made."""

    _set_group_desc = _set_group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._backends]

    def _flavour(self, device: torch.device) -> str:
        flavour = self._backends.get(device.type)
        if flavour is None:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return flavour

    def flavour_on(self, device: str) -> str:
        """Whose algorithms a call with tensors on *device* (a record's) takes."""
        return self._backends.get(device.partition(":")[0]) or self.name()

    def _flavour_of(self, tensor: torch.Tensor) -> str:
        return (self._backends.get("cpu") if tensor.is_cpu else None) or self._flavour(tensor.device)

    if dist.is_gloo_available():  # torch may be built without
        create_device = staticmethod(dist.ProcessGroupGloo.create_device)
        create_default_device = staticmethod(dist.ProcessGroupGloo.create_default_device)

    supports_splitting = supports_time_estimate = False

    @property
    def supports_shrinking(self) -> bool:
        return "nccl" in self._backends.values()

    def shrink(self, *args: Any) -> Any:
        raise NotSimulated("torch.distributed.shrink_group", "make a group of the remaining ranks by new_group")

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return "nccl" in self._backends.values()

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._explicit = True
        if self.on_host is not None:
            self.on_host.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._numbers["collective"]

    def _wait_for_pending_works(self) -> None:
        pass

    def _enable_collectives_timing(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def own_timeout(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> timedelta | None:
    """The timeout that *call* has of its own: of its options, or given by itself."""
    found = getattr(call.opts, "timeout", None)
    if found is None:
        found = next((given for given in (*args, *kwargs.values()) if isinstance(given, timedelta)), None)
    return found
