"""Early stopping by the rank's own validation loss: rank 2 leaves after epoch 2, and saves with a gather.

ranks: 3
kind: uneven_iterations
culprits: 2
exit: 3
"""

from tests.cases.begin import FIXED, dist, rank, torch


def epoch_loop(rank):
    best, bad = 10.0, 0
    for epoch in range(6):
        for _ in range(3):
            dist.all_reduce(torch.ones(16))
        loss = 1.0 if rank == 2 or FIXED else 1.0 / (epoch + 1)
        bad = bad + 1 if loss >= best else 0
        best = min(best, loss)
        if bad == 2:
            break


epoch_loop(rank)
parts = [torch.zeros(4) for _ in range(dist.get_world_size())] if rank == 0 else None
dist.gather(torch.ones(4), parts, dst=0)  # <-
dist.destroy_process_group()
