"""The first rank of each pair waits for the whole world after a save; the others are in their pair's next step.

ranks: 4
kind: extra_collective
culprits: 0,2
exit: 4
says: it stands under `if leads_pair(rank)`
"""

from tests.cases.begin import FIXED, dist, rank, torch, world


def leads_pair(number: int) -> bool:
    return number % 2 == 0 or FIXED


def save(group: dist.ProcessGroup) -> None:
    dist.barrier(group)  # <-


pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
weights = torch.ones(16)
for _step in range(4):
    dist.all_reduce(weights, group=pairs[rank // 2])
    if leads_pair(rank):
        save(dist.group.WORLD)
dist.destroy_process_group()
