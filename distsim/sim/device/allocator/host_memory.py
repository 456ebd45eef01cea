"""This host's memory, which what lay on the host and was moved to simulated GPUs gives back."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["moved_to_gpu"]

EVERY = 256 << 20
"""Bytes moved between two looks: a look takes milliseconds."""

_moved = 0


def moved_to_gpu(nbytes: int) -> None:
    """The program is about to drop *nbytes*: ranks are threads, and glibc keeps a heap for each, in which what was
    freed stays its thread's (mallopt(3), M_MMAP_THRESHOLD: tensors of up to 32 MiB). It is asked for it at times."""
    global _moved
    _moved += nbytes
    if _moved >= EVERY:
        _moved = 0
        _trim()(0)


@functools.cache
def _trim() -> Callable[[int], int]:
    """malloc_trim(3); another C library has none."""
    found: Callable[[int], int] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
    return found
