"""Compiles collectives to phases of coupled flows, and chooses their algorithms.

`compiler.py` turns a `Transfer` into a `Plan`, with the algorithm that a library chooses.
"""

from __future__ import annotations

from distsim.collectives.compiler import Compiler, Explained, compiler_of
from distsim.collectives.plan import (
    OPS,
    SYMMETRIC,
    Loads,
    Overlap,
    Plan,
    PlannedMessage,
    PlanPhase,
    Transfer,
    TransferCost,
    canonical_op,
)

__all__ = [
    "OPS",
    "SYMMETRIC",
    "Compiler",
    "Explained",
    "Loads",
    "Overlap",
    "Plan",
    "PlanPhase",
    "PlannedMessage",
    "Transfer",
    "TransferCost",
    "canonical_op",
    "compiler_of",
]
