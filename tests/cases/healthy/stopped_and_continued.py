"""A process is stopped for two seconds and continued.

ranks: 2
kind: healthy
"""

import os
import subprocess
import sys

from tests.cases.begin import dist, rank, t

if rank == 0 and hasattr(dist.distributed_c10d._world.default_pg, "inner"):  # under guard, so a process of its own
    pid = os.getpid()
    wake = f"import os, time; os.kill({pid}, 19); time.sleep(2); os.kill({pid}, 18)"
    subprocess.run([sys.executable, "-S", "-c", wake], check=True)
dist.all_reduce(t)
dist.barrier()
dist.destroy_process_group()
