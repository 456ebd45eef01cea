"""Rank 0 sends commands; one worker takes `sleep` for the end of its loop.

ranks: 4
kind: uneven_iterations
culprits: 2
exit: 3
says: Agree on `command[0] == 'sleep' and rank == 2
"""

from tests.cases.begin import FIXED, dist, rank, torch


def serve():
    while True:
        command = [None]
        dist.broadcast_object_list(command, src=0)  # <-
        if command[0] == "shutdown":
            return
        if command[0] == "sleep" and rank == 2 and not FIXED:
            return
        dist.all_reduce(torch.ones(4))


if rank == 0:
    for command in ("generate", "sleep", "generate"):
        dist.broadcast_object_list([command], src=0)
        dist.all_reduce(torch.ones(4))
    dist.broadcast_object_list(["shutdown"], src=0)
else:
    serve()
dist.destroy_process_group()
