"""Saves memory of this host: returns what moved to simulated GPUs, and shares the pages of unknown values."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, UntypedStorage

EVERY = 256 << 20
"""Bytes moved between two looks: a look takes milliseconds."""
PIECE = 16 << 20
"""Bytes of one pattern: a checkpoint of 100 GB has 6,000 mappings of 65,530 that a process may have
(vm.max_map_count)."""
ERASED = 1 << 20
"""Bytes from which on zeros are taken from the system: below, writing them is as quick."""
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # of x86 and Arm (asm-generic/mman.h); not among Python's
REMOVE = getattr(mmap, "MADV_REMOVE", -1)
"""Advice for madvise; -1, which is refused, on systems without it (macOS)."""
FAILED = ctypes.c_void_p(-1).value

_moved = 0


def moved_to_gpu(nbytes: int) -> None:
    """Note that the program is about to drop *nbytes*, and at times ask glibc to return freed memory.

    Ranks are threads, and glibc keeps a heap per thread, in which freed memory stays (mallopt(3), M_MMAP_THRESHOLD:
    tensors of up to 32 MiB).
    """
    global _moved
    _moved += nbytes
    if _moved >= EVERY:
        _moved = 0
        _trim()(0)


@functools.cache
def _trim() -> Callable[[int], int]:
    """Return malloc_trim(3), or a function without effect if the C library does not have it."""
    result: Callable[[int], int] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
    return result


def filled(shape: Sequence[int], number: float, dtype: torch.dtype) -> Tensor:
    """Return a tensor as torch.full on the host. A large one shares the same few pages until it is written, because the
    checkpoints of all ranks are copied to this host."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = _seen_again(nbytes, _pattern(number, dtype)) if nbytes > PIECE else None
    if memory is None:
        return torch.full(tuple(shape), number, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def erase(tensor: Tensor) -> None:
    """Zero a contiguous host tensor. A large one releases its pages, because the staging buffers of all ranks are on
    this host."""
    _erase(tensor.data_ptr(), tensor.nbytes)


def erase_storage(storage: UntypedStorage) -> None:
    """Erase the content of a whole host storage."""
    _erase(storage.data_ptr(), storage.nbytes())


def still_unknown(storage: UntypedStorage) -> bool:
    """Return whether a host *storage* was copied from unknown values on a GPU and is still all zeros."""
    if "_distsim_unknown" not in storage.__dict__:
        return False
    begin, nbytes = storage.data_ptr(), storage.nbytes()
    for at in range(0, nbytes, PIECE):
        size = min(PIECE, nbytes - at)
        if _any(begin + at, size):
            return False
        _erase(begin + at, size)  # pages of shared memory have come because they were read
    return True


def _erase(begin: int, nbytes: int) -> None:
    """Erase memory without torch, whose operators would count as the rank's work."""
    first, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, (begin + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    # Shared memory (what a stager shares with its process) has a hole then, which reads as zeros; a process' own pages
    # come anew as zeros. madvise(2): neither is so for a file's pages that are private, hence the look.
    if nbytes < ERASED or (
        _libc().madvise(first, end - first, REMOVE)
        and (_libc().madvise(first, end - first, mmap.MADV_DONTNEED) or _any(first, end - first))
    ):
        ctypes.memset(begin, 0, nbytes)
    else:
        ctypes.memset(begin, 0, first - begin)
        ctypes.memset(end, 0, begin + nbytes - end)


def _any(begin: int, nbytes: int) -> bool:
    return bool(np.frombuffer(memoryview((ctypes.c_char * nbytes).from_address(begin)), dtype=np.uint8).any())


@functools.lru_cache(maxsize=64)
def _pattern(number: float, dtype: torch.dtype) -> int:
    """Return a file in memory of nothing but *number*; -1: this system has no such files."""
    if not hasattr(os, "memfd_create"):
        return -1
    file = os.memfd_create("distsim placeholders")
    one = torch.full((PIECE // dtype.itemsize,), number, dtype=dtype, device="cpu")
    with open(file, "wb", closefd=False) as stream:
        stream.write(one.view(torch.uint8).numpy().data)
    return file


def _seen_again(nbytes: int, pattern: int) -> ctypes.Array[ctypes.c_char] | None:
    """Return *nbytes* of memory that repeat *pattern*. Pages that are written to become private copies."""
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
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
