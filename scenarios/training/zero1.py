"""Teaches: ZeRO-1, the optimizer's state cut over the data parallel ranks, with tensor parallelism inside a node.

Parameters are bfloat16 and whole; gradients add up in float32 and are summed after the last backward pass, by nanotron
all in one all_reduce, by Megatron-LM's distributed optimizer bucket by bucket in reduce_scatters; the updated shares
are all-gathered. InternEvo's gradients stay in bfloat16, and an owner updates and broadcasts whole parameters.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import float8
from attention import as_published
from hybrid_zero import HybridZero
from log import Log, start
from ring import layout
from stages import Stage, Tensor
from optimizer import Optimizer
from options import LLAMA_1B, options, refuse
from pipeline import Pipeline

does, frameworks = ("tp", "pp", "vpp", "cp", "replicas", "bf16 gradients", "fp8"), ("megatron", "nanotron", "internevo")
args = options("ZeRO-1 with tensor and pipeline parallelism", LLAMA_1B, does=does, frameworks=frameworks, mbs=2)
internevos, nanotrons = args.framework == "internevo", args.framework == "nanotron"
if internevos and args.pp * args.cp > 1:
    refuse(f"--pp {args.pp} --cp {args.cp}: --framework internevo has neither here")
if args.replicas > 1 and not internevos:
    refuse(f"--replicas {args.replicas}: give --framework internevo, whose optimizer is cut over dp / replicas ranks")
if args.fp8 != "none" and args.tp > 1:
    refuse(f"--fp8 {args.fp8} --tp {args.tp}: products in 8 bits are not cut here; try fsdp2.py")
device = start()
if args.fp8 != "none" and (why := float8.lacks(device, args.fp8)):
    refuse(why)
float8.scaled = torch.compile(float8.scaled)  # Transformer Engine casts in one kernel
as_published(device, framework=args.framework)
mesh, equal = layout(args, device)
pp, tp = mesh.get_group("pp"), mesh.get_group("tp")
sequence = args.tp > 1 and args.sequence_parallel == "on"
# nanotron's benchmarks (67c5ebb: scaling_benchmarks.py) overlap communication only where they cut along the sequence.
cut = Tensor(tp, args.tp, mesh.get_local_rank("tp"), sequence, sequence or not nanotrons, args.fp8)

torch.manual_seed(mesh.get_local_rank("pp") * args.tp + cut.rank)
pipeline = Pipeline(args, pp, cut, device, lambda number, stages: Stage(args, number, stages, cut, device))
model = tuple(group for group, size in ((pp, args.pp), (tp, args.tp)) if size > 1)
# nanotron's benchmarks (its branch bench2, 67c5ebb, trainer.py: make_ddp) have no DDP where the optimizer is cut.
# SimuMax's launcher has Megatron-LM reduce after the last micro-batch, too.
if internevos:
    sizes = (args.replicas, args.dp // args.replicas, args.tp)
    owners = init_device_mesh(device.type, sizes, mesh_dim_names=("replicas", "owners", "tp")).get_group("owners")
    optimizer = HybridZero(pipeline.parameters(), equal, owners, model)
else:
    parts, in_16_bits = [(pipeline.parameters(), equal)], args.grad_reduce_in_bf16
    optimizer = Optimizer(parts, model=model, tp=tp, share=True, overlap=False, late=nanotrons, in_16_bits=in_16_bits)

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
