"""What each operator does on the device: one function for each kind, found by the operator's name.

Begin with `registry.py`; `price` looks an operator up there, `elementwise.py` has what holds for all others.
"""

from __future__ import annotations

from distsim.kernels.call import Call
from distsim.kernels.cost import NOTHING, Cost
from distsim.kernels.pricing import Pricing
from distsim.kernels.rules import attention, elementwise, extensions, index, matmul, move, norm, optimizer
from distsim.kernels.rules.elementwise import default
from distsim.kernels.rules.registry import RULES

__all__ = ["price"]

_IMPORTED_FOR_THEIR_RULES = (attention, elementwise, extensions, index, matmul, move, norm, optimizer)
_DEFAULT = ("aten", "prims", "rngprims", "fsdp")
"""Namespaces of which an operator without a rule is priced by its bytes."""


def price(pricing: Pricing, call: Call) -> Cost | None:
    """What the call costs; None for an operator of which nothing is known."""
    found = RULES.get(call.name)
    if found is not None:
        return found(pricing, call)
    if call.name.split("::")[0] in _DEFAULT:
        return default(pricing, call)
    return None if call.inputs or call.outputs else NOTHING  # profiler::_record_function_enter_new and its kin
