"""On rank 1 the thread's call comes before the main thread's, on the others after it.

ranks: 3
kind: thread_race
culprits: 1
exit: 4
gpus: no, the GPU of a new thread is the first, and NCCL takes no two ranks on one
"""

import threading
import time

from tests.cases.begin import dist, rank, t, torch

turn = threading.Event()


def metrics():
    turn.wait()
    dist.all_reduce(torch.ones(8))  # <-


thread = threading.Thread(target=metrics, name="metrics")
thread.start()
if rank == 1:
    turn.set()
    thread.join()
dist.all_reduce(t)
turn.set()
thread.join()
time.sleep(1)
dist.barrier()
