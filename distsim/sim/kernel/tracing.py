"""What traces the program around a simulation traces its threads, too."""

from __future__ import annotations

import sys
import threading

__all__ = ["take_up_tracing"]


def take_up_tracing() -> None:
    """As `threading.Thread` does: what traces or profiles new threads (coverage, a debugger, cProfile) sees this one.
    `sys.monitoring` sees all threads anyway."""
    trace, profile = threading.gettrace(), threading.getprofile()
    if trace is not None:
        sys.settrace(trace)
    if profile is not None:
        sys.setprofile(profile)
