"""How these dumps were made, with torch 2.13 on gloo: `TORCH_FR_BUFFER_SIZE=2000 torchrun --nproc-per-node 4 hang.py
CASE FOLDER`. Nothing dumps when gloo hangs, so each rank does it itself once nothing has moved for some seconds."""

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

case, folder = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()


def dump() -> None:
    time.sleep(4)
    (folder / f"dump_{rank}").write_bytes(_dump_fr_trace(True, True, False))
    said = _dump_fr_trace_json(True, False)
    Path(f"{folder}_json/dump_{rank}.json").write_bytes(said if isinstance(said, bytes) else said.encode())
    time.sleep(2)
    os._exit(0)


threading.Thread(target=dump, daemon=True).start()
t = torch.ones(8)
for _ in range(5):
    dist.all_reduce(t)
    dist.broadcast(t, src=0)
if case == "missing":
    if rank != 2:
        dist.all_reduce(t)
elif case == "branch":
    if rank == 1:
        dist.broadcast(t, src=0)
    else:
        dist.all_reduce(t)
    dist.all_reduce(t)
elif case == "shape":
    dist.all_gather([torch.ones(8) for _ in range(4)], t)
    dist.all_reduce(torch.ones(8 if rank != 3 else 4))
elif case == "mixed":
    dist.all_gather_object([None] * 4, {"rank": rank})
    dist.reduce(t, dst=1)
    dist.scatter(t, [torch.ones(8)] * 4 if rank == 0 else None, src=0)
    if rank == 0:
        dist.barrier()
    dist.all_reduce(t)
time.sleep(60)
