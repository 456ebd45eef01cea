"""Which rule prices which operator."""

from __future__ import annotations

from collections.abc import Callable

from distsim.kernels.call import Call
from distsim.kernels.cost import Cost
from distsim.kernels.pricing import Pricing

__all__ = ["RULES", "Rule", "rule"]

Rule = Callable[[Pricing, Call], Cost]

RULES: dict[str, Rule] = {}
"""By the operator's name as in its schema (`aten::mm`), for all its overloads."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Prices the named operators; a name without a namespace is of aten."""

    def register(found: Rule) -> Rule:
        for name in names:
            RULES[name if "::" in name else f"aten::{name}"] = found
        return found

    return register
