"""What freed tensors leave is taken up again, however many ranks there are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from sim.running import ranks

from distsim.sim.c10d import backend
from distsim.sim.kernel import interrupts

pytestmark = pytest.mark.skipif(interrupts._libc is None, reason="the C library is not glibc")

_IN_A_PROCESS = """
import ctypes, threading
from distsim.sim.kernel import interrupts

libc = ctypes.PyDLL(None)
libc.malloc.restype = ctypes.c_void_p
free = libc.free
free.argtypes = [ctypes.c_void_p]
found = ctypes.c_void_p()


def aligned(size):
    assert libc.posix_memalign(ctypes.byref(found), ctypes.c_size_t(64), ctypes.c_size_t(size)) == 0
    return found.value


def is_taken_up_again():
    if {fill}:
        interrupts.fill_small_blocks()
    first = [aligned(65_536) for _ in range(8)]
    between = [libc.malloc(ctypes.c_size_t(200)) for _ in range(8)]
    for block in first:
        free(block)
    again = [aligned(65_536) for _ in range(8)]
    print(max(again) < max(between))


thread = threading.Thread(target=is_taken_up_again)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("fill", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_memory_of_freed_tensors_is_taken_up_again(fill: bool) -> None:
    """In a thread of its own, past what its process has done to its cache before. Without this it is not, or glibc has
    learnt it and fill_small_blocks can go."""
    ran = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS.replace("{fill}", str(fill))],
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_ARENA_MAX": "4"},
        check=True,
    )
    assert ran.stdout.split() == [str(fill)]


def test_each_rank_fills_its_cache_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When its first group is there, not for each."""
    filled: list[int] = []
    monkeypatch.setattr(backend, "fill_small_blocks", lambda: filled.append(1))

    def body() -> float:
        dist.init_process_group("gloo")
        group = dist.new_group()
        tensor = torch.ones(4)
        dist.all_reduce(tensor, group=group)
        return float(tensor[0])

    assert ranks(body, 3).results == [3.0] * 3
    assert len(filled) == 3
