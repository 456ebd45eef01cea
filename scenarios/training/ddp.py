"""Teaches: data parallel training. Alone, nanoGPT's 124 M on DistributedDataParallel with autocast.

In the shape of a Llama parameters are bfloat16 and gradients add up in float32, reduced under the last backward pass,
with --framework nanotron by DDP's hook. With recomputation it is Megatron-LM's GPT of 2021, which reduces them
afterwards.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from attention import as_published
from gpt import GPT
from log import Log, start, tokens
from stages import ALONE, Stage
from optimizer import Optimizer
from options import GPT_2, options


def automatic(args, device) -> None:
    """Parameters and gradients in float32, matrix multiplications in --dtype, DDP's buckets under the backward pass."""
    torch.manual_seed(0)
    with device:
        model = GPT(args)
        model.init_weights()
    model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")
    precision = torch.autocast(device.type, args.torch_dtype, enabled=args.dtype != "fp32")
    torch.manual_seed(1 + dist.get_rank())
    log = Log(device, args.accum * args.mbs * args.seq)
    for step in range(1, args.steps + 1):
        for micro in range(args.accum):
            x, y = tokens(args.vocab, args.seq, args.mbs, device)
            with model.no_sync() if micro < args.accum - 1 else nullcontext():
                with precision:
                    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(0, 1)) / args.accum
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        log.step(step, loss.detach() * args.accum)


def fits(model, device) -> bool:
    """Whether a GPU holds the whole optimizer: 16 bytes a parameter in fp16, and its activations beside them."""
    if device.type != "cuda":
        return True
    return 16 * sum(p.numel() for p in model.parameters()) < 0.8 * torch.cuda.mem_get_info(device)[1]


def with_masters(args, device) -> None:
    """16-bit parameters, one buffer of gradients, float32 masters; cut over the ranks (ZeRO-1) if they do not fit."""
    torch.manual_seed(0)
    model = Stage(args, 0, 1, ALONE, device)
    nanotrons = args.framework == "nanotron"
    parts = [(list(model.parameters()), dist.group.WORLD)]
    share, overlap = not fits(model, device), args.ckpt == "none"
    optimizer = Optimizer(parts, share=share, overlap=overlap, ddp=nanotrons, late=nanotrons)
    torch.manual_seed(1 + dist.get_rank())
    log = Log(device, args.accum * args.mbs * args.seq)
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        for micro in range(args.accum):
            x, y = tokens(args.vocab, args.seq, args.mbs, device)
            if micro == args.accum - 1:
                optimizer.expect_last()
            loss = model(x, y) / args.accum
            (loss * (optimizer.scale / args.dp)).backward()
            optimizer.after_backward()
        optimizer.step()
        log.step(step, loss.detach() * args.accum)


args = options(
    "data parallel training", GPT_2, frameworks=("megatron", "nanotron"), dtypes=("bf16", "fp16", "fp32"), mbs=12
)
device = start()
as_published(device, framework=args.framework)
if args.arch == "gpt" and args.ckpt == "none":
    automatic(args, device)
else:
    with_masters(args, device)
dist.destroy_process_group()
