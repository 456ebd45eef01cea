"""Faults of a simulated world: rules in, strikes at calls, processes, links and tensors out.

`rules.py` is plain data; `injector.py` makes rules strike.
"""

from __future__ import annotations

__all__ = ["injector", "links", "rules", "tensors"]
