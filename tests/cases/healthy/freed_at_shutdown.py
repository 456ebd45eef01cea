"""An object whose `__del__` makes a call is freed while Python shuts down, when there is no group any more.

ranks: 2
kind: healthy
suite: check
"""

import builtins

from tests.cases.begin import dist, rank, torch


class Kept:
    """Averages what it holds when it is freed."""

    def __del__(self) -> None:
        if dist is not None and dist.is_initialized():
            dist.all_reduce(torch.ones(3))
        raise ValueError("nobody hears of this")


builtins.kept = Kept() if rank == 0 else None  # type: ignore[attr-defined]
dist.barrier()
dist.destroy_process_group()
