"""Pricing rules: one function for each kind of operator, found by the operator's name.

`price` looks an operator up in `pricing.RULES`; `memory_bound.default` prices all others.
"""

from __future__ import annotations

from distsim.kernels.cost import NOTHING, Cost, OperatorCall
from distsim.kernels.pricing import RULES, Pricing
from distsim.kernels.rules import compute_bound, memory_bound
from distsim.kernels.rules.memory_bound import default

__all__ = ["price"]

_IMPORTED_FOR_THEIR_RULES = (compute_bound, memory_bound)
_DEFAULT = ("aten", "prims", "rngprims", "fsdp")
"""Namespaces whose operators are priced by their bytes if they have no rule."""


def price(pricing: Pricing, call: OperatorCall) -> Cost | None:
    """Return the cost of the call; None for an unknown operator."""
    rule = RULES.get(call.name)
    if rule is not None:
        return rule(pricing, call)
    if call.name.split("::")[0] in _DEFAULT:
        return default(pricing, call)
    return None if call.inputs or call.outputs else NOTHING  # profiler::_record_function_enter_new and its kin
