"""Teaches: ZeRO-1, the optimizer's state cut over the data parallel ranks, with tensor parallelism inside a node.

Parameters are bfloat16 and whole; gradients add up in float32 and are summed after the last backward pass, by nanotron
all in one all_reduce, by Megatron-LM's distributed optimizer bucket by bucket in reduce_scatters; the updated shares
are all-gathered.
"""

import torch
import torch.distributed as dist

from attention import as_published, by_nanotron
from log import Log, start
from ring import layout
from stages import Stage, Tensor
from optimizer import Optimizer
from options import LLAMA_1B, options
from pipeline import Pipeline

args = options("ZeRO-1 with tensor and pipeline parallelism", LLAMA_1B, does=("tp", "pp", "vpp", "cp"), mbs=2)
device = start()
as_published(device)
mesh, equal = layout(args, device)
pp, tp = mesh.get_group("pp"), mesh.get_group("tp")
sequence = args.tp > 1 and args.sequence_parallel == "on"
# nanotron's benchmarks (67c5ebb: scaling_benchmarks.py) overlap communication only where they cut along the sequence.
cut = Tensor(tp, args.tp, mesh.get_local_rank("tp"), sequence, overlap=sequence or not by_nanotron(device))

torch.manual_seed(mesh.get_local_rank("pp") * args.tp + cut.rank)
pipeline = Pipeline(args, pp, cut, device, lambda number, stages: Stage(args, number, stages, cut, device))
model = tuple(group for group, size in ((pp, args.pp), (tp, args.tp)) if size > 1)
# nanotron's benchmarks (its branch bench2, 67c5ebb, trainer.py: make_ddp) have no DDP where the optimizer is cut.
# SimuMax's launcher has Megatron-LM reduce after the last micro-batch, too.
optimizer = Optimizer(
    [(pipeline.parameters(), equal)], model=model, tp=tp, share=True, overlap=False, late=by_nanotron(device)
)

torch.manual_seed(1 + mesh.get_local_rank("dp"))
log = Log(
    device,
    args.accum * args.mbs * args.seq / (args.tp * args.pp * args.cp),
    rank=(args.pp - 1) * args.dp * args.cp * args.tp,
)
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    loss = pipeline.step(optimizer)
    optimizer.step()
    log.step(step, loss)
dist.destroy_process_group()
