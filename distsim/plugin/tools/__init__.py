"""What other tools need so that a body on ranks is for them what a body is.

`coverage.py` counts what forked ranks run, `hypothesis.py` has one engine draw for all, `debugger.py` finds a frame.
"""

from __future__ import annotations

__all__ = ["coverage", "debugger", "hypothesis"]
