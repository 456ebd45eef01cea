"""Teaches: rank 0 owns the store and leaves the last barrier first, so that the others' next look fails.
Seen in vllm-project/vllm 18506.
"""

import sys

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
is_cured = "cured" in sys.argv
store = dist.TCPStore("localhost", 29_600, None, rank == 0, wait_for_workers=False)
everyone = [f"done {other}" for other in range(size)]

store.set(f"done {rank}", "1")
if rank == 0 or not is_cured:  # the others need not look: rank 0 stays until they are done
    store.wait(everyone)
