"""Teaches: FSDP2 as torchtitan uses it. Llama-3-8B, sharded over all ranks, with --tp over two dimensions.

Parameters are made on `meta` and materialised sharded; each block is all-gathered in bfloat16 before it computes and
its gradients are reduce-scattered in float32. --ckpt selective saves every second matrix multiplication and attention.
Where the shape is a GPT's, the model is one as llm-foundry trains it under FSDP.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import float8
from attention import as_published
from fused import cross_entropy
from gpt import GPT
from llama import Llama
from log import Log, start, tokens
from options import LLAMA_3_8B, options, refuse
from torchtitan import built


@torch.no_grad()
def measured(logits: torch.Tensor, targets: torch.Tensor, metrics: torch.Tensor) -> None:
    """What composer's trainer does after each micro-batch for the metrics of llm-foundry's models, cross entropy and
    perplexity: the loss again, for each (composer/trainer/trainer.py; composer/metrics/nlp.py)."""
    for metric in metrics:
        metric.add_(F.cross_entropy(logits.float(), targets, reduction="sum"))


def main() -> None:
    args = options(
        "FSDP2, in the manner of torchtitan", LLAMA_3_8B, does=("tp", "shard", "fp8", "fused_norm", "compile")
    )
    if args.arch == "gpt" and args.tp > 1:
        refuse(f"--tp {args.tp}: here it is for a Llama (--arch llama); tp_pp.py cuts a GPT")
    device = start()
    as_published(device, first=args.arch == "gpt")
    if args.fp8 != "none" and (why := float8.lacks(device, args.fp8)):
        refuse(why)
    sizes = (args.replicas, args.dp // args.replicas, args.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicas", "shards", "tp"))
    with torch.device("meta"):
        model = Llama(args) if args.arch == "llama" else GPT(args, bias=True)
    # llm-foundry's mixed precision "DEFAULT" reduces in the parameters' type (composer, mosaic_fsdp_utils.py).
    reduced = torch.float32 if args.arch == "llama" else args.torch_dtype
    torch.manual_seed(0)
    built(args, mesh, model, device, reduced)
    # llm-foundry's is composer's DecoupledAdamW: operator after operator.
    fused = device.type == "cuda" and args.arch == "llama"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=fused)

    torch.manual_seed(1 + dist.get_rank() // args.tp)
    metrics = torch.zeros(2, device=device)
    log = Log(device, args.accum * args.mbs * args.seq / args.tp)
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        for _ in range(args.accum):
            x, y = tokens(args.vocab, args.seq, args.mbs, device)
            with loss_parallel():
                logits = model(x).flatten(0, 1)
                if args.arch == "gpt":  # llm-foundry's loss is flash-attn's (loss_fn: fused_crossentropy)
                    loss = cross_entropy(logits, y.flatten(0, 1)) / args.accum
                else:
                    loss = F.cross_entropy(logits.float(), y.flatten(0, 1)) / args.accum
                    del logits  # as torchtitan's trainer: backward needs those in float32 alone
                loss.backward()
            if args.arch == "gpt":
                measured(logits.detach(), y.flatten(0, 1), metrics)
                del logits
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        log.step(step, loss.detach() * args.accum)
    dist.destroy_process_group()


main()
