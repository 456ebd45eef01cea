"""Replicas of a model that torchft keeps in step; each rank is one replica. Prints a line a step.

`BY_DDP`: let torchft's DistributedDataParallel average the gradients, instead of the manager.
`KILL_AT=STEP`: replica 1 kills itself at the step's end, unless it was started again. `SKIP_AT=STEP`: replica 1
does not average its bias.
"""

import os
import signal
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main() -> float:
    """Train, and return the sum of the weights."""
    replica, steps = int(os.environ["RANK"]), int(os.environ.get("STEPS", "12"))
    host = os.environ.get("HOST", socket.gethostname())
    torch.manual_seed(0)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    model = torch.nn.Linear(4, 2)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=int(os.environ.get("TIMEOUT", "5")))),
        min_replica_size=1,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        replica_id=f"replica_{replica}",
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        hostname=host,
        timeout=timedelta(seconds=30),
    )
    by_ddp = "BY_DDP" in os.environ
    module = DistributedDataParallel(manager, model) if by_ddp else model
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    while manager.current_step() < steps:
        optimizer.zero_grad()
        module(torch.ones(3, 4)).sum().backward()
        if not by_ddp:
            skips = replica == 1 and str(manager.current_step()) == os.environ.get("SKIP_AT")
            for parameter in [model.weight] if skips else model.parameters():
                longer = replica == 1 and str(manager.current_step()) == os.environ.get("OTHER_AT")
                manager.allreduce(torch.zeros(9) if longer else parameter.grad).wait()
        if replica == 1 and str(manager.current_step()) == os.environ.get("KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        print(f"replica {replica}: step {manager.current_step()} of {manager.num_participants()}", flush=True)
        time.sleep(0.1)
    total = float(model.weight.detach().sum())
    print(f"replica {replica}: {total}", flush=True)
    manager.shutdown()
    return total


if __name__ == "__main__":
    main()
