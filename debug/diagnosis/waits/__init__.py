"""Determine which rank waits for which, which can never continue, and whether that is proven.

`wait_graph.py` is the graph, with its part about remote calls; `assess_proof.py` decides what is
proven.
"""

from __future__ import annotations

__all__ = ["assess_proof", "rendezvous", "standstill", "wait_graph"]
