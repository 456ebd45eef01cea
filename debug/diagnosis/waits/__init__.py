"""Who waits for whom, who can never go on, and what proof a verdict needs to end a job.

`wait_graph.py` is the graph; `proof.py` the table from kind to proof.
"""

from __future__ import annotations

__all__ = ["digraph", "patience", "proof", "unwaited", "wait_graph", "weigh"]
