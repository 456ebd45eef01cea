"""Replicas that go on without one that died, and take it back when it returns (torch 2.14).

Each rank trains a replica. When a call fails, the ranks that are left reconfigure their group and repeat the step. A
rank that was started again asks by the store to be taken in, and gets the weights of rank 0. `KILL_AT=STEP`: rank 1
kills itself there. `UNTIL_BACK`: go on until it has returned.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

STEPS = 40
BACK = 3
"""Number of the reconfiguration by which the rank is a member again."""


def members(store: dist.Store, number: int, ranks: list[int], me: int) -> None:
    """Reconfigure the default group to *ranks*, which all call this with the same *number*."""
    store.set(f"{number}/{me}", dist._get_reconfigure_handle())
    handles = [store.get(f"{number}/{rank}").decode() for rank in ranks]
    dist._reconfigure(number, handles).wait()


def main() -> int:
    me, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_back = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    dist.init_process_group("gloo", timeout=timedelta(seconds=30), enable_reconfigure=True)
    store = dist.distributed_c10d._get_default_store()
    weights, step, number, present = torch.zeros(1000), 0, 1, list(range(size))
    if is_back:
        store.set(f"back/{me}", "1")
        number = int(store.get(f"number/{me}"))
    members(store, number, present, me)
    while True:
        if number > 2 or is_back:  # whoever is new has nothing, and whoever is old has the same
            dist.broadcast(weights, src=0)
            step = int(weights[0])
        while step < STEPS or ("UNTIL_BACK" in os.environ and number < BACK):
            if me == 1 and not is_back and str(step) == os.environ.get("KILL_AT"):
                os.kill(os.getpid(), 9)
            try:
                gradient = torch.ones(1000)
                dist.all_reduce(gradient)
                back = torch.tensor([float(len(present) < size and store.check(["back/1"]))])
                dist.all_reduce(back, op=dist.ReduceOp.MAX)
            except RuntimeError:
                number, present = number + 1, [rank for rank in present if rank != 1]
                members(store, number, present, me)
                continue
            weights += gradient / len(present)
            step += 1
            if back:
                number, present = number + 1, list(range(size))
                if me == 0:
                    store.set("number/1", str(number))
                members(store, number, present, me)
                break
        else:
            return step


if __name__ == "__main__":
    print("steps", main())
