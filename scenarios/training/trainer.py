"""Teaches: a plain trainer loop. Accumulation under no_sync, autocast, GradScaler, clipping, a scheduler, evaluation.

Alone a GPT-2 in float16, whose gradients need their scale; --dtype bf16 needs none, and GradScaler does nothing then.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpt import GPT
from log import Log, start, tokens
from options import GPT_2, options, refuse

args = options("a plain trainer loop", GPT_2, dtypes=("fp16", "bf16", "fp32"), archs=("gpt",), mbs=8)
if args.ckpt != "none":
    refuse(f"--ckpt {args.ckpt}: this loop recomputes nothing; ddp.py does")
device = start()
torch.manual_seed(0)
with device:
    model = GPT(args)
    model.init_weights()
model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=device.type == "cuda")
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")


def loss_of(x, y):
    with torch.autocast(device.type, args.torch_dtype, enabled=args.dtype != "fp32"):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten(0, 1))


torch.manual_seed(1 + dist.get_rank())
log = Log(device, args.accum * args.mbs * args.seq)
for step in range(1, args.steps + 1):
    total = torch.zeros((), device=device)
    for micro in range(args.accum):
        with model.no_sync() if micro < args.accum - 1 else nullcontext():
            loss = loss_of(*tokens(args.vocab, args.seq, args.mbs, device)) / args.accum
            scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    log.step(step, total)

model.eval()
with torch.no_grad():
    held_out = loss_of(*tokens(args.vocab, args.seq, args.mbs, device))
dist.all_reduce(held_out)
if dist.get_rank() == 0:
    print(f"held out: {held_out.item() / dist.get_world_size():.4f}")
dist.destroy_process_group()
