"""Determine which rank waits for which, which can never continue, and whether that is proven.

`wait_graph.py` is the graph, with its part about remote calls; `assess_proof.py` decides what is
proven; `locks.py` and `keys.py` have the edges of threads and of stores.
"""

from __future__ import annotations

__all__ = ["assess_proof", "keys", "locks", "rendezvous", "standstill", "wait_graph"]
