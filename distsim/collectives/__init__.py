"""Collectives: each algorithm compiled to phases of coupled flows, and what chooses between them.

A `Transfer` goes into `compiler.py`, which asks a library which algorithm it takes, and comes out as a `Plan`.
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
