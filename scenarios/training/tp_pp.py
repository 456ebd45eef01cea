"""Teaches: tensor and pipeline parallelism of a GPT, as Megatron-LM: 1F1B, with --vpp interleaved.

Tensor parallel collectives are on the forward path and half hidden on the backward path; stages talk point to point;
the data parallel gradients are reduced after the last backward pass, all at once. With --ckpt full it is the program
of 2021 (attention in three operators, activations whole on each rank), else activations are cut along the sequence.
"""

import torch
import torch.distributed as dist

from attention import as_published
from log import Log, start
from ring import layout
from stages import Stage, Tensor
from optimizer import Optimizer
from options import GPT_7B, options
from pipeline import Pipeline

args = options(
    "GPT with tensor and pipeline parallelism",
    GPT_7B,
    does=("tp", "pp", "vpp", "cp"),
    frameworks=("megatron", "nanotron"),
    dtypes=("bf16", "fp16", "fp32"),
)
device = start()
as_published(device, framework=args.framework)
mesh, equal = layout(args, device)
pp, tp = mesh.get_group("pp"), mesh.get_group("tp")
sequence = args.tp > 1 and args.sequence_parallel == "on" and args.ckpt != "full"
nanotrons = args.arch == "llama" and args.framework == "nanotron"
# nanotron's benchmarks (67c5ebb: scaling_benchmarks.py) overlap communication only where they cut along the sequence.
cut = Tensor(tp, args.tp, mesh.get_local_rank("tp"), sequence, overlap=sequence or not nanotrons)

torch.manual_seed(mesh.get_local_rank("pp") * args.tp + cut.rank)
pipeline = Pipeline(args, pp, cut, device, lambda number, stages: Stage(args, number, stages, cut, device))
model = tuple(group for group, size in ((pp, args.pp), (tp, args.tp)) if size > 1)
optimizer = Optimizer([(pipeline.parameters(), equal)], model=model, tp=tp, share=False, overlap=False, late=nanotrons)

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
