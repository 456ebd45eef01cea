"""What a program prints, simulated and for real, in a form that can be compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from conformance.arms import free_ports, gloo_script

PREFIX = re.compile(r"^\[ *(?:\d+|launcher)\] ?")
TORCH_DIED_AT_EXIT = "terminate called without an active exception"
"""A thread of torch's that asks for the GIL while Python 3.11 ends is unwound through `noexcept` and aborts."""
SPEED = re.compile(r" *\|.*samples/s$")


def lines_of(text: str, *, prefixed: bool) -> list[str]:
    """The lines, without the rank in front, sorted: ranks print in any order. Speeds are left out."""
    lines = [PREFIX.sub("", line) if prefixed else line for line in text.splitlines()]
    return sorted(SPEED.sub("", line) for line in lines if line.strip())


def starts_its_own_ranks(program: Path) -> bool:
    return "torch import multiprocessing as mp" in program.read_text()


def printed_for_real(program: Path) -> list[str]:
    """Run the program on gloo: as a process that starts its ranks, or as four of torchrun's."""
    if not starts_its_own_ranks(program):
        return lines_of(gloo_script(program), prefixed=False)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, str(program)]
    for _ in range(5):
        env |= {"OMP_NUM_THREADS": "1", "TUTORIAL_PORT": str(free_ports(2)[0])}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        if TORCH_DIED_AT_EXIT not in done.stderr:
            break
    assert done.returncode == 0, f"{program.name} on gloo ended with {done.returncode}\n{done.stderr[-2000:]}"
    return lines_of(done.stdout, prefixed=False)
