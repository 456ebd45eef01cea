"""Two models without an optimizer: every second backward pass updates one of them.

ranks: 2
kind: healthy
"""

from tests.cases.begin import dist, nn, rank, torch, world

torch.manual_seed(0)
models = [nn.Linear(8, 8), nn.Linear(8, 4)]
torch.manual_seed(1 + rank)
for s in range(8):
    models[1](models[0](torch.randn(8, 8))).pow(2).mean().backward()
    for p in models[s % 2].parameters():
        dist.all_reduce(p.grad)
        p.data = p.data - 0.01 * p.grad / world
    for m in models:
        m.zero_grad()
dist.destroy_process_group()
