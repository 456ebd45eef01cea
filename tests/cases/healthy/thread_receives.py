"""A thread receives from the rank that waits for the main thread's message.

ranks: 2
kind: healthy
"""

import threading
import time

from tests.cases.begin import dist, rank, t, torch

got = torch.zeros(8)
if rank == 0:
    receiver = threading.Thread(target=dist.recv, args=(got, 1))
    receiver.start()
    time.sleep(2)  # rank 1 waits for the message below, the thread for rank 1's answer: no circle
    dist.send(t, 1)
    receiver.join()
else:
    dist.recv(got, 0)
    dist.send(t, 0)
dist.barrier()
dist.destroy_process_group()
