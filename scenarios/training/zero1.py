"""Teaches: ZeRO-1, the optimizer's state cut over the data parallel ranks, with tensor parallelism inside a node.

Parameters are bfloat16 and whole; gradients add up in float32, are reduce-scattered bucket by bucket under the last
backward pass, and the updated shares are all-gathered: nanotron's and Megatron-LM's distributed optimizer.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from attention import as_published, by_nanotron
from log import Log, start
from stages import Stage, Tensor
from optimizer import Optimizer
from options import LLAMA_1B, options
from pipeline import Pipeline

args = options("ZeRO-1 with tensor and pipeline parallelism", LLAMA_1B, does=("tp", "pp", "vpp"), mbs=2)
device = start()
as_published(device)
mesh = init_device_mesh(device.type, (args.pp, args.dp, args.tp), mesh_dim_names=("pp", "dp", "tp"))
pp, dp, tp = (mesh.get_group(name) for name in ("pp", "dp", "tp"))
cut = Tensor(tp, args.tp, mesh.get_local_rank("tp"), sequence=args.tp > 1)

torch.manual_seed(mesh.get_local_rank("pp") * args.tp + cut.rank)
pipeline = Pipeline(args, pp, cut, device, lambda number, stages: Stage(args, number, stages, cut, device))
model = tuple(group for group, size in ((pp, args.pp), (tp, args.tp)) if size > 1)
# nanotron reduces in DistributedDataParallel's hook; SimuMax's launcher has Megatron-LM reduce after the last one.
ddp = by_nanotron(device)
optimizer = Optimizer(
    [(pipeline.parameters(), dp)], model=model, tp=tp, share=True, overlap=args.vpp == 1 and ddp, ddp=ddp
)

torch.manual_seed(1 + mesh.get_local_rank("dp"))
log = Log(device, args.accum * args.mbs * args.seq / (args.tp * args.pp), rank=(args.pp - 1) * args.dp * args.tp)
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    loss = pipeline.step(optimizer)
    optimizer.step()
    log.step(step, loss)
dist.destroy_process_group()
