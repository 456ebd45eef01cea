"""Traces of all ranks of a job: arrival, exposed communication, critical path.

`kineto.py` reads them, `answers.py` evaluates them, `trace.py` is `distsim trace`. The path over ranks is that of
simulations (network/critical_path.py).
"""

__all__ = ["answers", "kineto", "trace"]
