"""A rank that is through becomes another program by exec.

ranks: 2
kind: healthy
simulated: no, os.execv would replace all ranks at once, and is refused by its name
"""

import os
import sys

from tests.cases.begin import dist, rank

dist.barrier()
dist.destroy_process_group()
if rank == 0:
    try:
        os.execv("/no/such/program", ["program"])
    except OSError:
        os.execlp(sys.executable, sys.executable, "-S", "-c", "import time; time.sleep(0.5)")
