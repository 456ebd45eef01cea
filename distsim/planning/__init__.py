"""Commands that answer questions before a cluster is booked: does it fit, which layout, what does it cost.

A shelf: `distsim.cli.dispatch` names its commands, and nothing imports it. `fits.py` is a command, `memory.py` what
it measures, and `advice.py` finds changes that help; `sweep.py` and `tune.py` run many points (`points.py`,
`variations.py`), of which `search.py` chooses the next, and show them (`tables.py`); `buy` compares machines, `equal`
what two layouts compute.
"""

from __future__ import annotations

__all__ = [
    "advice",
    "buy",
    "command",
    "equal",
    "fits",
    "memory",
    "points",
    "schema",
    "search",
    "sweep",
    "tables",
    "tune",
    "variations",
]
