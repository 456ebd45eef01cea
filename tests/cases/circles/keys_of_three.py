"""Each rank waits for the key of the next one before it sets its own.

ranks: 3
kind: deadlock_cycle
culprits: 0, 1, 2
exit: 3
says: Break the circle
suite: check
"""

import datetime

from tests.cases.begin import FIXED, dist, rank

LONG = datetime.timedelta(hours=1)


class Peer:
    """The handshake of a rank with the next one."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store

    def offer(self, turn: int) -> None:
        self.store.set(f"turn{turn}/offer{rank}", b"1")

    def accept(self, turn: int) -> None:
        self.store.wait([f"turn{turn}/offer{(rank + 1) % 3}"], LONG)  # <-


peer = Peer(dist.PrefixStore("handshake", dist.distributed_c10d._get_default_store()))
for turn in range(2):
    if turn == 0 or FIXED:
        peer.offer(turn)
        peer.accept(turn)
    else:
        peer.accept(turn)
        peer.offer(turn)
dist.barrier()
dist.destroy_process_group()
