"""Teaches: torch's own pipeline schedules, 1F1B to zero-bubble, around FSDP2 and tensor parallelism.

A rank has --vpp stages of a Llama: every --pp-th, or, where the schedule is a V, one of each half, so that the first
rank has the last stage, too. Schedules with zero in their name compute gradients of weights later than those of
activations, in what would be a bubble.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor.parallel import loss_parallel

import float8
from attention import as_published
from llama import Llama
from log import Log, start, tokens
from options import LLAMA_3_8B, options, refuse
from torchtitan import built

CHUNKS = {"GPipe": (1, 1), "1F1B": (1, 1), "Interleaved1F1B": (2, 64), "InterleavedZeroBubble": (2, 64)}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
CHUNKS |= dict.fromkeys(V_SHAPED, (2, 2))
"""Stages a rank, at least and at most."""
SPLIT = ("InterleavedZeroBubble", *V_SHAPED)


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def main() -> None:
    does = ("tp", "pp", "vpp", "shard", "fp8", "fused_norm", "compile")
    args = options("torch's pipeline schedules", LLAMA_3_8B, does=does, archs=("llama",), schedules=tuple(CHUNKS))
    least, most = CHUNKS[args.schedule]
    if args.pp == 1:
        refuse("a schedule is of a pipeline: give --pp, too")
    if not least <= args.vpp <= most:
        count = "one stage" if most == 1 else "two stages" if most == 2 else "two stages or more"
        refuse(f"--vpp {args.vpp}: {args.schedule} has {count} a rank")
    for flag, given in (("compile", args.compile), ("ckpt selective", args.ckpt == "selective")):
        if given and args.schedule in SPLIT:
            refuse(f"--{flag}: {args.schedule} goes backward through a stage twice, which torch refuses with this flag")
    if args.schedule == "DualPipeV" and args.accum < 2 * args.pp:
        refuse(f"--accum {args.accum}: DualPipeV takes 2 * --pp {args.pp} micro-batches, or more")
    device = start()
    as_published(device)
    if args.fp8 != "none" and (why := float8.lacks(device, args.fp8)):
        refuse(why)
    sizes = (args.pp, args.replicas, args.dp // args.replicas, args.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "replicas", "shards", "tp"))
    rank, count = mesh.get_local_rank("pp"), args.pp * args.vpp
    mine = [rank + chunk * args.pp for chunk in range(args.vpp)]
    if args.schedule in V_SHAPED:
        mine = [rank, count - 1 - rank]
    torch.manual_seed(rank)
    stages = []
    for number in mine:
        with torch.device("meta"):
            model = Llama(args, number, count)
        built(args, mesh, model, device, torch.float32)
        stages.append(PipelineStage(model, number, count, device, group=mesh.get_group("pp")))
    kind = get_schedule_class(args.schedule)
    schedule = kind(stages[0] if most == 1 else stages, args.accum, loss_fn=mean_loss)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1, fused=device.type == "cuda")

    torch.manual_seed(1 + dist.get_rank() % (args.dp * args.tp) // args.tp)
    first, last = 0 in mine, count - 1 in mine
    printing = 0 if args.schedule in V_SHAPED else (args.pp - 1) * args.dp * args.tp
    log = Log(device, args.accum * args.mbs * args.seq / (args.tp * args.pp), rank=printing)
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        x, y = tokens(args.vocab, args.seq, args.mbs * args.accum, device)
        losses: list[torch.Tensor] = []
        with loss_parallel():
            ends = {"target": y, "losses": losses} if last else {}
            schedule.step(*((x,) if first else ()), **ends, return_outputs=False)
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        log.step(step, torch.stack(losses).mean() if losses else None)
    dist.destroy_process_group()


main()
