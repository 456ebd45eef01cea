"""Teaches: recv without a source takes whoever comes and says who it was; a small work queue."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
STOP = -1.0

if rank == 0:
    tasks = [float(i) for i in range(8)]
    answers: dict[int, float] = {}
    idle = world_size - 1
    request = torch.zeros(2)  # (task done or -1, answer)
    while idle:
        worker = dist.recv(request)
        if request[0] >= 0:
            answers[int(request[0])] = request[1].item()
        task = tasks.pop(0) if tasks else STOP
        dist.send(torch.tensor([task]), worker)
        idle -= task == STOP
    print(f"rank 0: {[answers[i] for i in sorted(answers)]}")
else:
    done = torch.tensor([-1.0, 0.0])
    task = torch.zeros(1)
    while True:
        dist.send(done, 0)
        dist.recv(task, 0)
        if task.item() == STOP:
            break
        done = torch.tensor([task.item(), task.item() ** 2])
dist.destroy_process_group()
