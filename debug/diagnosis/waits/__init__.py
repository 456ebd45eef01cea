"""Who waits for whom, who can never go on, and whether that is proven.

`wait_graph.py` is the graph, `remote_waits.py` its part of remote calls; `assess_proof.py` asks it what is proven.
"""

from __future__ import annotations

__all__ = ["assess_proof", "remote_waits", "rendezvous", "standstill", "wait_graph"]
