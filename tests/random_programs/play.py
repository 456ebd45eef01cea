"""Random programs: every rank draws the same steps from a seed, and tells what each answered."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.random_programs.draw import Draw, bits
from tests.random_programs.mistakes import mistakes
from tests.random_programs.stage import Answer, Stage, settle
from tests.random_programs.steps import STEPS

__all__ = ["play"]

EVERY = (*STEPS, mistakes, mistakes, mistakes)


def play(rank: int, size: int, seed: int, num_steps: int) -> dict[str, Any]:
    """One program: what every step answered, by its number and name."""
    stage = Stage(rank, size)
    draw = Draw(seed)
    groups(stage, draw)
    for number in range(num_steps):
        draw = Draw(seed * 1000 + number)
        step = draw.choice(EVERY)
        stage.found[f"{seed}.{number} {step.__name__}"] = answer = Answer()
        try:
            step(stage, draw, answer)
        except Exception as error:
            answer["step raised"] = bits(error)
        if Draw(number).coin(0.3):
            settle(stage, Draw(number))
    settle(stage, Draw(seed))
    dist.barrier()
    return stage.found


def groups(stage: Stage, draw: Draw) -> None:
    for _ in range(draw.randrange(4)):
        ranks = draw.sample(range(stage.size), draw.randint(1, stage.size))
        made = dist.new_group(ranks, use_local_synchronization=False)
        stage.groups.append((made, sorted(ranks)))
    if draw.coin(0.3):
        mine, _ = dist.new_subgroups(2)
        first = stage.rank // 2 * 2
        stage.groups.append((mine, [first, first + 1]))
    if draw.coin(0.3):
        mesh = init_device_mesh("cpu", (2, stage.size // 2), mesh_dim_names=("a", "b"))
        for name in ("a", "b"):
            pg = mesh[name].get_group()
            stage.groups.append((pg, dist.get_process_group_ranks(pg)))
