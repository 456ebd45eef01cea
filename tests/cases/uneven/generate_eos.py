"""FSDP2 generate: each rank stops at its own end-of-sequence, then all go on with training.

ranks: 3
kind: uneven_iterations
culprits: 2
exit: 3
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cases.begin import FIXED, dist, rank, torch

mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
LENGTH = [5, 5, 5] if FIXED else [5, 5, 3]


@torch.no_grad()
def generate(ids):
    for position in range(8):
        token = model(ids)[:, -1:].argmax(-1)
        ids = torch.cat([ids, token], 1)
        if position + 1 == LENGTH[rank]:
            break
    return ids


for _ in range(2):
    answer = generate(torch.zeros(2, 3, dtype=torch.long))
    rewards = torch.tensor([float(answer.shape[1])])
    dist.all_reduce(rewards)  # <-
    model(answer[:, :3]).sum().backward()
dist.destroy_process_group()
