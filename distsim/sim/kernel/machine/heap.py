"""glibc's heap: why it does not take up the memory of a freed tensor again, and what is done about it.

torch asks for tensors at multiples of 64 bytes (posix_memalign), so glibc takes 96 bytes more and gives the rest back
at once. Small pieces that are given back go into a cache of the thread's own, seven of each size, where they count as
used: what lies before them, once it is free, cannot be joined with them, and is 96 bytes too small for the next tensor
of the same size. A process loses seven tensors of each rest's size that way and nobody notices. A thousand ranks lose
them a thousand times (1,024 ranks with one fresh tensor of 64 KiB a call: 0.84 GiB after 10 calls instead of 0.58,
1.2 instead of 0.60 after 40). With a cache that is full already the pieces go where they are joined again.
(glibc 2.36, malloc/malloc.c: _int_memalign, _int_free, malloc_consolidate.)
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["fill_small_blocks"]

_SIZES = range(24, 137, 16)
"""Bytes that may be asked for of the blocks that such a rest can be: 32 to 144 with glibc's own 8."""
_KEPT = 7
"""Of each size by a thread (TCACHE_FILL_COUNT)."""


def _heap() -> Any:
    """None where the C library is another one."""
    try:
        libc = ctypes.PyDLL(None)  # so short that the interpreter is kept
        libc.gnu_get_libc_version  # noqa: B018
    except (AttributeError, OSError, TypeError):
        return None
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    return libc


_libc = _heap()


def fill_small_blocks() -> None:
    """Fill the calling thread's cache, once what it keeps for long has been taken from there."""
    if _libc is not None:
        for block in [_libc.malloc(size) for size in _SIZES for _ in range(_KEPT)]:
            _libc.free(block)
