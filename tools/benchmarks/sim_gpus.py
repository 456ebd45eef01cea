"""Jobs of up to 102,400 simulated GPUs: CPU seconds and memory of each, and what a GPU costs.

    python -m tools.benchmarks.sim_gpus [--only NAME]

Peer: the same job on 8,192 GPUs, or a limit of its own. Aim: 102,400 GPUs of fsdp2 in 60 CPU s and 2.2 GB (HSDP 25 s
and 1.2 GB, MoE 25 s), 8,192 in 15 s and 0.6 GB, 16,384 of a program that makes its groups as Megatron-LM does in 60 s;
a set-up of 64k GPUs below 10 times that of 8k; below 25 KB a GPU.

Limits are for the machine that yardstick.py tells of. Megatron's way is ten families of `new_group` in a loop.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.benchmarks.arguments import Arguments
from tools.benchmarks.yardstick import scaled, simpy_events_per_s, told

FSDP2 = "scenarios/training/fsdp2.py --ckpt selective --mbs 1 --steps 2"
MEGATRON = """\
import os

import torch
import torch.distributed as dist

TP, PP = 8, 16
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
DP = size // (TP * PP)
place = torch.arange(size).view(PP, DP, TP)  # Megatron's order: tp, dp, pp
tp, dp, pp = (place.movedim(axis, -1).flatten(0, 1).tolist() for axis in (2, 1, 0))
alone = [[one] for one in range(size)]
model = place.movedim(1, 0).flatten(1).tolist()
families = {
    "dp_cp": dp, "dp": dp, "cp": alone, "mp": model, "tp": tp, "pp": pp, "embedding": [[g[0], g[-1]] for g in pp],
    "position": [[g[0]] for g in pp], "tp_dp_cp": place.flatten(1).tolist(), "tp_cp": tp,
}
group = {}
for name, rows in families.items():
    for ranks in rows:
        made = dist.new_group(ranks)
        if rank in ranks:
            group[name] = made
stage = dist.get_rank(group["pp"])
weight = torch.randn(4096, 4096 // TP, device="cuda", dtype=torch.bfloat16, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(2):
    for micro in range(PP):
        x = torch.zeros(1024, 4096, device="cuda", dtype=torch.bfloat16)
        if stage > 0:
            dist.recv(x, group=group["pp"], group_src=stage - 1)
        y = x @ weight @ weight.t()
        dist.all_reduce(y, group=group["tp"])
        if stage < PP - 1:
            dist.send(y.detach(), group=group["pp"], group_dst=stage + 1)
        y.sum().backward()
    dist.all_reduce(weight.grad, group=group["dp"])
    if stage in (0, PP - 1):
        dist.all_reduce(torch.ones(4096, device="cuda"), group=group["embedding"])
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
if rank == 0:
    print("done")
"""
SETUP = """\
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
mesh = dist.init_device_mesh("cuda", (dist.get_world_size() // 8, 8))
dist.all_reduce(torch.ones(8, device="cuda"))
torch.cuda.synchronize()
"""
JOBS = {
    "fsdp2-8k": (8_192, FSDP2, 15.0, 0.6),
    "fsdp2": (102_400, FSDP2, 60.0, 2.2),
    "hsdp": (102_400, f"{FSDP2} --replicas 1600", 25.0, 1.2),
    "moe": (102_400, "scenarios/training/moe.py --layers 4 --ep 64 --steps 2", 25.0, None),
    "megatron": (16_384, "megatron.py", 60.0, None),
    "setup-8k": (8_192, "setup.py", None, None),
    "setup-64k": (65_536, "setup.py", None, None),
}
"""Name -> GPUs, program, limits in CPU seconds and GB."""


def run(gpus: int, program: str, folder: Path) -> tuple[float, float]:
    """CPU seconds and GB of the job."""
    script, *words = program.split()
    path = script if "/" in script else str(folder / script)
    command = [sys.executable, "-m", "distsim", "run", "--on", f"dgx-h100:{gpus // 8}", "--quiet", "--ranks", "sample"]
    child = subprocess.Popen([*command, path, *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"{gpus:,} GPUs of {program}: exit code {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--only", choices=JOBS, help="one job alone")
    args = parser.parse_args()
    seen: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "megatron.py").write_text(MEGATRON)
        (Path(folder) / "setup.py").write_text(SETUP)
        for name in [args.only] if args.only else JOBS:
            gpus, program, limit_s, limit_gb = JOBS[name]
            rate, begun = simpy_events_per_s(), time.perf_counter()
            cpu_s, gigabytes = seen[name] = run(gpus, program, Path(folder))
            wall_s, scaled_s = time.perf_counter() - begun, scaled(cpu_s, (rate + simpy_events_per_s()) / 2)
            aims = [f"{limit_s:.0f} s" if limit_s else "", f"{limit_gb} GB" if limit_gb else ""]
            aim = f" (aim {', '.join(filter(None, aims))})" if any(aims) else ""
            over = (limit_s or scaled_s) < scaled_s or (limit_gb or gigabytes) < gigabytes
            print(
                f"{name:<10} {gpus:>7,} GPUs: {cpu_s:6.1f} CPU s, scaled {scaled_s:5.1f}; {gigabytes:.2f} GB; wall "
                f"{wall_s:.0f} s{aim}{'  OVER' if over else ''}",
                flush=True,
            )
    for small, large, what in (("setup-8k", "setup-64k", "set-up"), ("fsdp2-8k", "fsdp2", "fsdp2")):
        if small in seen and large in seen:
            more = JOBS[large][0] - JOBS[small][0]
            kilobytes = (seen[large][1] - seen[small][1]) * 1e6 / more
            print(
                f"{what}: {seen[large][0] / seen[small][0]:.1f} times the CPU (aim below 10), {kilobytes:.1f} KB a GPU"
            )
    print(told(simpy_events_per_s()))


if __name__ == "__main__":
    main()
