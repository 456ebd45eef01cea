"""Teaches: a rank that never calls init_process_group: the others wait at the rendezvous."""

import os

import torch.distributed as dist

if os.environ["RANK"] != "3":  # rank 3 looks at the wrong variable and takes itself for a single process
    dist.init_process_group("gloo")  # <- waits
    dist.barrier()
