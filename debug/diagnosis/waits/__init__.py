"""Who waits for whom, who can never go on, and what proof a verdict needs to end a job.

`wait_graph.py` is the graph, `remote_waits.py` its part of remote calls; `proof.py` the table from kind to proof.
"""

from __future__ import annotations

__all__ = [
    "assess_proof",
    "digraph",
    "edges",
    "hang_timeout",
    "idle",
    "proof",
    "remote_waits",
    "rendezvous",
    "unending",
    "unwaited",
    "wait_graph",
]
