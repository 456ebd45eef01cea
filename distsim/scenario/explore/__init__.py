"""Explores the orders of a program's operations, and under which of them it fails.

Begin with `search.py`, which runs a program within a `budget.py`; `tree.py` decides what to run next and knows no
torch; `words.py` describes a failing order; `scenarios.py` explores a scenario file, on `workers.py` if asked to;
`faults.py` judges deaths.
"""

from __future__ import annotations

__all__ = ["budget", "faults", "scenarios", "search", "tree", "words", "workers"]
