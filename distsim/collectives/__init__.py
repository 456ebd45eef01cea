"""Collectives: each algorithm compiled to phases of coupled flows, and what chooses between them.

A `Transfer` goes into `compiler.py`, which asks a library which algorithm it takes, and comes out as a `Plan`.
"""

from __future__ import annotations

from distsim.collectives.compiler import Compiler, Explained, compiler_of
from distsim.collectives.plan import OPS, Cost, Loads, Message, Overlap, Phase, Plan, Transfer, canonical_op

__all__ = [
    "OPS",
    "Compiler",
    "Cost",
    "Explained",
    "Loads",
    "Message",
    "Overlap",
    "Phase",
    "Plan",
    "Transfer",
    "canonical_op",
    "compiler_of",
]
