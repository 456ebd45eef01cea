"""Teaches: context parallelism. Each rank has a part of every sequence; keys and values travel around a ring.

Parameters are equal on all ranks, and --tp cuts the layers besides. Where they do not fit, zero1.py and tp_pp.py have
--cp, too.
"""

import torch
import torch.distributed as dist

from attention import as_published
from log import Log, start
from optimizer import Optimizer
from options import LLAMA_1B, options
from pipeline import Pipeline
from ring import layout
from stages import Stage, Tensor

args = options("context parallelism", LLAMA_1B, does=("cp", "tp"), archs=("llama",))
device = start()
as_published(device)
mesh, equal = layout(args, device)
pp, tp = mesh.get_group("pp"), mesh.get_group("tp")
cut = Tensor(tp, args.tp, mesh.get_local_rank("tp"), sequence=args.tp > 1 and args.sequence_parallel == "on")

torch.manual_seed(cut.rank)
model = Pipeline(args, pp, cut, device, lambda number, stages: Stage(args, number, stages, cut, device))
optimizer = Optimizer(
    [(model.parameters(), equal)], model=(tp,) if args.tp > 1 else (), tp=tp, share=False, overlap=True
)

torch.manual_seed(1 + mesh.get_local_rank("dp"))
log = Log(device, args.accum * args.mbs * args.seq / (args.cp * args.tp))
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    loss = model.step(optimizer)
    optimizer.step()
    log.step(step, loss)
dist.destroy_process_group()
