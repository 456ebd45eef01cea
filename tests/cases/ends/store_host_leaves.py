"""Rank 0 serves a store, and ends while the others wait for a key in it.

ranks: 3
kind: rank_raised
culprits: 1, 2
exit: 1
suite: check
says: Rank 0, which served the store at 127.0.0.1:
"""

import torch  # noqa: F401  (the copy for GPUs uses it)

from tests.cases.begin import dist, rank

port = [None]
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    port = [store.port]
dist.broadcast_object_list(port, src=0)
if rank != 0:
    store = dist.TCPStore("127.0.0.1", port[0], None, is_master=False)
dist.barrier()
if rank != 0:
    store.get("never")  # <-
