"""A clock for a thread on a machine that others use as well."""

from __future__ import annotations

import time

__all__ = ["own_s"]

_real_monotonic = time.monotonic
_real_open = open


def own_s(native: int) -> float:
    """Seconds that stand still while thread *native* of this process could run but the machine is busy with others
    (Linux says how long; elsewhere they are the machine's)."""
    try:
        with _real_open(f"/proc/self/task/{native}/schedstat") as file:
            kept_waiting_s = int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        kept_waiting_s = 0.0
    return _real_monotonic() - kept_waiting_s
