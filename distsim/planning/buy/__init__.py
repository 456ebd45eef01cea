"""The command `distsim buy`: which machine to book for a training, how many, for how long, and for how much.

`command.py` has its flags and files, `plan.py` chooses the points that run, `offers.py` makes offers of their results
and chooses among them, `show.py` prints them.
"""

from __future__ import annotations

__all__ = ["command", "offers", "plan", "show"]
