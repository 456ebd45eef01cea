"""This host's memory: what was moved to simulated GPUs is given back, numbers that nobody knows share their pages."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["filled", "moved_to_gpu"]

EVERY = 256 << 20
"""Bytes moved between two looks: a look takes milliseconds."""
PIECE = 16 << 20
"""Bytes of one pattern: a checkpoint of 100 GB has 6,000 mappings of 65,530 that a process may have
(vm.max_map_count)."""
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # of x86 and Arm (asm-generic/mman.h); not among Python's
FAILED = ctypes.c_void_p(-1).value

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


def filled(shape: Sequence[int], number: float, dtype: torch.dtype) -> Tensor:
    """As torch.full, on the host. A large one takes next to no memory before it is written to: the same few pages are
    seen again and again. (All ranks' checkpoints are copied to this one host.)"""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = _seen_again(nbytes, _pattern(number, dtype)) if nbytes > PIECE else None
    if memory is None:
        return torch.full(tuple(shape), number, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


@functools.lru_cache(maxsize=64)
def _pattern(number: float, dtype: torch.dtype) -> int:
    """A file in memory of nothing but *number*; -1: this system has no such files."""
    if not hasattr(os, "memfd_create"):
        return -1
    file = os.memfd_create("distsim placeholders")
    one = torch.full((PIECE // dtype.itemsize,), number, dtype=dtype, device="cpu")
    with open(file, "wb", closefd=False) as stream:
        stream.write(one.view(torch.uint8).numpy().data)
    return file


def _seen_again(nbytes: int, pattern: int) -> ctypes.Array[ctypes.c_char] | None:
    """*nbytes* of memory that are *pattern*, again and again, and the writer's own where they are written to."""
    if pattern < 0:
        return None
    libc = _libc()
    flags, access = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    begin = libc.mmap(None, nbytes, access, flags | mmap.MAP_ANONYMOUS, -1, 0)
    if begin == FAILED:
        return None
    for at in range(0, nbytes, PIECE):
        size = min(PIECE, nbytes - at)
        if libc.mmap(begin + at, size, access, flags | MAP_FIXED, pattern, 0) == FAILED:
            libc.munmap(begin, nbytes)
            return None
    memory = (ctypes.c_char * nbytes).from_address(begin)
    weakref.finalize(memory, libc.munmap, begin, nbytes).atexit = False  # tensors may outlive the interpreter's end
    return memory


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
