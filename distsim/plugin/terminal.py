"""The real stderr, which pytest captures during tests: for the report of a test that never comes back."""

from __future__ import annotations

import contextlib
import os
import sys

stderr_fd: int | None = None
"""A copy of stderr's file descriptor, made before pytest captures it; None if there is none."""


def keep_stderr() -> None:
    """Copy it, once."""
    global stderr_fd
    if stderr_fd is None and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):
            stderr_fd = os.dup(sys.__stderr__.fileno())
