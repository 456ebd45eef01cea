"""A driver sends commands by broadcast, workers loop; the driver leaves early, without the stop command.

ranks: 3
kind: missing_rank
culprits: 0
exit: 3
"""

from tests.cases.begin import FIXED, dist, rank, torch

STOP, STEP = 0, 1


def send(command):
    dist.broadcast(torch.tensor([command]), src=0)


def driver():
    for number in range(4):
        send(STEP)
        out = torch.ones(8)
        dist.all_reduce(out)
        if out.sum() > 8 and number == 2:
            break
    else:
        send(STOP)
    if FIXED:
        send(STOP)


def worker():
    while True:
        command = torch.zeros(1, dtype=torch.long)
        dist.broadcast(command, src=0)
        if command.item() == STOP:
            return
        dist.all_reduce(torch.ones(8))


driver() if rank == 0 else worker()
dist.destroy_process_group()
