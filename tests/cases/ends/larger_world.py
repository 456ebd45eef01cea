"""world_size is computed by hand, and larger than what was started.

ranks: 2
kind: never_joined
culprits: 2, 3
exit: 3
hang_after: 3
says: Take world_size from WORLD_SIZE
"""

import os
import sys

import torch.distributed as dist

started = int(os.environ["WORLD_SIZE"])
size = started if "fixed" in sys.argv else 2 * started
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=size)
dist.barrier()
dist.destroy_process_group()
