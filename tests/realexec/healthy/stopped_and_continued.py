# ranks: 2

import os
import subprocess
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
if rank == 0 and hasattr(dist.distributed_c10d._world.default_pg, "inner"):  # under guard, so a process of its own
    pid = os.getpid()
    wake = f"import os, time; os.kill({pid}, 19); time.sleep(2); os.kill({pid}, 18)"
    subprocess.run([sys.executable, "-S", "-c", wake], check=True)
dist.all_reduce(t)
dist.barrier()
dist.destroy_process_group()
