"""A program's own TorchDispatchModes see the calls of simulated groups, as torch's dispatcher shows them: CommDebugMode
counts them, DebugMode prints them.

torch leads a call of a real group through an operator `c10d::...`. A simulated group is called by Python and carries
the call out itself; only where somebody looks is each mode handed that operator, above the rank's own mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distsim.debug.records.arguments import Call
from distsim.torch_compat.device import POP_MODE_TEMPORARILY
from distsim.torch_compat.works import DISPATCH_MODES

__all__ = ["OPERATORS", "are_watched", "through_modes"]

OPERATORS = {
    "all_reduce": "allreduce_",
    "all_reduce_coalesced": "allreduce_coalesced_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "all_gather": "allgather_",
    "all_gather_coalesced": "allgather_coalesced_",
    "all_gather_into_tensor": "_allgather_base_",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced_",
    "gather": "gather_",
    "scatter": "scatter_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "all_to_all": "alltoall_",
    "all_to_all_single": "alltoall_base_",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier_",
    "send": "send",
    "recv": "recv_",
}
"""The operator `c10d::...` through which torch's dispatcher leads each call (torch/csrc/distributed/c10d/Ops.cpp)."""

_stack_size: Callable[[], int] = DISPATCH_MODES.get()
_pop_mode_temporarily = POP_MODE_TEMPORARILY.get()


def are_watched() -> bool:
    """Whether this thread has a mode beside the rank's own one."""
    return _stack_size() > 1


def through_modes(group: Any, call: Call, carry_out: Callable[[], Any]) -> Any:
    """What *carry_out* returns, called below all modes of the program."""
    packet = getattr(torch.ops.c10d, OPERATORS[call.key[0]])
    in_place = call.outputs is call.inputs or not call.outputs or not call.inputs
    tensors = (call.inputs or call.outputs,) if in_place else (call.outputs, call.inputs)
    real = getattr(packet, packet.overloads()[0])
    also_tensors = len(real._schema.returns) > 1

    def below(*_: Any, **__: Any) -> Any:
        with _pop_mode_temporarily() as mode:
            if not (mode.is_infra_mode() or _is_ours(mode)):
                return mode.__torch_dispatch__(operator, (), (*tensors, group), {})
        work = carry_out()
        return (tensors[0], work) if also_tensors else work

    operator = _Carried(real, below)
    result = below()
    return result[-1] if also_tensors else result


def _is_ours(mode: Any) -> bool:
    return type(mode).__module__.startswith("distsim.")


class _Carried:
    """torch's operator *real* to all who ask; to call it is the next mode's turn, or carries the call out."""

    def __init__(self, real: Any, call: Callable[..., Any]) -> None:
        self._real = real
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._real == other)

    def __hash__(self) -> int:
        return hash(self._real)

    def __str__(self) -> str:
        return str(self._real)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._real)
