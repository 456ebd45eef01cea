"""A swallowed exception is named with its line, in the program or in a library, on gloo and simulated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs import Zygote

from distsim.sim.run import RunRequest, run_program

SCRIPT = """
import sys

import torch.distributed as dist

sys.path[:0] = [{paths}]
import steps

dist.init_process_group("gloo")
steps.train()
dist.destroy_process_group()
"""
OWN = """
import torch
import torch.distributed as dist


def step(n):
    if n == 2 and dist.get_rank() == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    dist.all_reduce(torch.ones(4))


def train():
    for n in range(4):
        try:
            step(n)
        except torch.OutOfMemoryError:  # <-
            pass
    dist.barrier()
"""
CALLS_LIBRARY = """
import torch
import torch.distributed as dist
import batch_finder


def step(n):
    if n == 2 and dist.get_rank() == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    dist.all_reduce(torch.ones(4))


def train():
    for n in range(4):
        batch_finder.run(step, n)
    dist.barrier()
"""
LIBRARY = """
import torch


def run(function, n):
    try:
        function(n)
    except torch.OutOfMemoryError:  # <-
        return None
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gloo", "simulated"])
@pytest.mark.parametrize("whose", ["own", "library"])
def test_a_swallowed_exception_is_named(whose: str, way: str, zygote: Zygote, folder: Path) -> None:
    """The report says which rank caught it and where, and shows the line of the handler."""
    installed = folder / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "batch_finder.py").write_text(LIBRARY)
    (folder / "steps.py").write_text(OWN if whose == "own" else CALLS_LIBRARY)
    script = folder / "main.py"
    script.write_text(SCRIPT.format(paths=f"{str(folder)!r}, {str(installed)!r}"))
    if way == "gloo":
        d = zygote.run(script, 3, directory=folder, hang_after_s=6).diagnoses[0]
    else:
        with pytest.MonkeyPatch.context() as patch:  # a later test of the same process imports its own
            for name in ("steps", "batch_finder"):
                patch.delitem(sys.modules, name, raising=False)
            d = run_program(RunRequest(program=str(script), on="ethernet-cpu:1", nproc_per_node=3)).diagnoses[0]
            sys.modules.pop("batch_finder", None)
    assert d.culprits == (1,), d
    handler = folder / "steps.py" if whose == "own" else installed / "batch_finder.py"
    line = 1 + next(i for i, text in enumerate(handler.read_text().splitlines()) if "# <-" in text)
    assert "Rank 1 caught torch.OutOfMemoryError: CUDA out of memory." in d.explanation
    assert (Path(d.causes[0].file).name, d.causes[0].line) == (handler.name, line)
    assert d.suggestion.startswith("Skip the step on all ranks or on none")
