"""Rank 0 alone takes the FSDP2 model's full state dict, which gathers.

ranks: 3
kind: extra_collective
culprits: 0
exit: 4
"""

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cases.begin import FIXED, dist, rank, torch

mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
for _ in range(2):
    model(torch.ones(2, 8)).sum().backward()
if rank == 0 or FIXED:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # <-
    print(len(state))
model(torch.ones(2, 8)).sum().backward()
dist.destroy_process_group()
