"""A thread waits for a message while the main thread makes collectives.

ranks: 3
kind: healthy
"""

import threading
import time

from tests.cases.begin import dist, rank, t, torch


def serve():
    x = torch.zeros(8)
    dist.recv(x, src=1, tag=99)


th = None
if rank == 0:
    th = threading.Thread(target=serve, name="server")
    th.start()

for _ in range(5):
    dist.all_reduce(t)
    time.sleep(0.1)
if rank == 1:
    dist.send(t, 0, tag=99)
if th:
    th.join()
dist.barrier()
dist.destroy_process_group()
