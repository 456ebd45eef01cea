"""Scenarios made for one test: a program and a file in a folder."""

from __future__ import annotations

from pathlib import Path

from distsim.scenario import Result, Scenario, load_scenario, run_scenario

STEPS = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(1 << 16)
for step in range(4):
    torch.ones(64, 64) @ torch.ones(64, 64)
    dist.all_reduce(t)  # <- step
print(f"rank {rank} has {t[0].item():g}")
"""

RACE = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    came = []
    for _ in range(3):
        t = torch.zeros(1)
        dist.recv(t)
        came.append(int(t))
    assert came[-1] != 1, f"rank 1 came last: {came}"
else:
    dist.send(torch.tensor([float(rank)]), 0)
"""
"""Right only if messages come in the order in which one machine happens to send them."""


def made(folder: Path, toml: str, program: str = STEPS, name: str = "made") -> Scenario:
    """A scenario of four ranks on two hosts, from the rest of its file."""
    head = "" if "program =" in toml else f'program = "{name}.py"\n'
    place = "" if "on =" in toml else 'on = "ethernet-cpu:2"\nnproc_per_node = 2\n'
    (folder / f"{name}.py").write_text(program)
    (folder / f"{name}.toml").write_text(head + place + toml)
    return load_scenario(folder / f"{name}.toml")


def ran(folder: Path, toml: str, program: str = STEPS, name: str = "made") -> Result:
    """What comes of it."""
    return run_scenario(made(folder, toml, program, name))
