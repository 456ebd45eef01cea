"""Groups from before the guard are used and destroyed by what the program has of them; the world is recorded again.

ranks: 2
kind: healthy
guard: check
"""

import os

import torch
import torch.distributed as dist

import distsim.debug
from distsim.debug.rings import layout
from distsim.realexec.install import current_session

distsim.debug.remove()
dist.init_process_group("gloo")
rank, half, world = dist.get_rank(), dist.new_group([0, 1]), dist.group.WORLD


def num_calls():
    return current_session().ring.words[layout.WORDS_AT // 8 + layout.W_COUNT]


for level in ("check", "strict", "check"):
    distsim.debug.install(level, dir=f"{os.environ['DISTSIM_DIR']}/{level}")
    for group in (half, world, None):
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        dist.broadcast(one, 0, group=group)
        assert one.item() == 2 and dist.get_rank(group) == rank and dist.get_world_size(group) == 2
    assert dist.get_process_group_ranks(half) == [0, 1]
    before = num_calls()
    for _ in range(4):
        dist.all_reduce(torch.ones(1))
    assert num_calls() == before + 4, (level, before, num_calls())
distsim.debug.remove()
dist.barrier(half)
distsim.debug.install("check", dir=f"{os.environ['DISTSIM_DIR']}/again")
dist.destroy_process_group(half)
try:
    dist.get_rank(half)
except ValueError:
    pass
else:
    raise AssertionError("it is still there")
dist.destroy_process_group(world)
assert not dist.is_initialized()
