"""A program that shows an exception as the interpreter would, and goes on, while another rank waits for it.

ranks: 2
kind: healthy
"""

import sys
import threading
import time

from tests.cases.begin import dist, rank, t

threading.excepthook = lambda args: sys.excepthook(*args[:3])


def fails():
    raise OSError("no such shard")


if rank == 1:
    try:
        fails()
    except OSError:
        sys.excepthook(*sys.exc_info())
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    time.sleep(1)
dist.all_reduce(t)
dist.destroy_process_group()
