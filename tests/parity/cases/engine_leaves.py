# ranks: 4
# kind: uneven_iterations
# culprits: 2
# exit: 3
# cure: Agree on `command[0] == 'sleep' and rank == 2
"""Rank 0 sends commands; one worker takes `sleep` for the end of its loop."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def serve():
    while True:
        command = [None]
        dist.broadcast_object_list(command, src=0)  # <-
        if command[0] == "shutdown":
            return
        if command[0] == "sleep" and rank == 2 and "fixed" not in sys.argv:
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
