"""A loop goes on when the guard is taken off in its middle.

ranks: 2
kind: healthy
guard: check
"""

import distsim.debug
from tests.cases.begin import dist, torch

for step in range(4):
    if step == 2:
        distsim.debug.remove()
        assert "distsim/realexec" not in dist.all_reduce.__closure__[0].cell_contents.__code__.co_filename
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2]
dist.destroy_process_group()
