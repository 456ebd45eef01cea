"""Teaches: FSDP2 as torchtitan uses it. Llama-3-8B, sharded over all ranks, with --tp over two dimensions.

Parameters are made on `meta` and materialised sharded; each block is all-gathered in bfloat16 before it computes and
its gradients are reduce-scattered in float32. --ckpt selective saves every second matrix multiplication and attention.
Where the shape is a GPT's, the model is one as llm-foundry trains it under FSDP.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from attention import as_published
from fused import cross_entropy
from gpt import GPT
from llama import Llama
from log import Log, start, tokens
from options import LLAMA_3_8B, options, refuse

aten = torch.ops.aten
SAVED = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def every_second_mm():
    """What --ckpt selective keeps: attention, and the first, third, ... matrix multiplication of a block."""
    multiplications = {False: 0, True: 0}

    def policy(ctx, func, *args, **kwargs):
        if func == aten.mm.default:
            multiplications[ctx.is_recompute] += 1
            keep = multiplications[ctx.is_recompute] % 2 == 1
        else:
            keep = func in SAVED
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def recompute(model: nn.Module, kind: str) -> None:
    contexts = {"context_fn": every_second_mm} if kind == "selective" else {}
    for name, layer in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(layer, preserve_rng_state=False, **contexts))


def cut_over(model: nn.Module, mesh) -> None:
    """Tensor parallel with sequence parallel, as torchtitan's plan for Llama."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    whole = partial(PrepareModuleInput, desired_input_layouts=(Replicate(), None))
    for layer in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": whole(input_layouts=(Shard(1), None)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.wo", "feed_forward.w2")}
        parallelize_module(layer, mesh, plan)


@torch.no_grad()
def measured(logits: torch.Tensor, targets: torch.Tensor, metrics: torch.Tensor) -> None:
    """What composer's trainer does after each micro-batch for the metrics of llm-foundry's models, cross entropy and
    perplexity: the loss again, for each (composer/trainer/trainer.py; composer/metrics/nlp.py)."""
    for metric in metrics:
        metric.add_(F.cross_entropy(logits.float(), targets, reduction="sum"))


def main() -> None:
    args = options("FSDP2, in the manner of torchtitan", LLAMA_3_8B, does=("tp", "fused_norm", "compile"))
    if args.arch == "gpt" and args.tp > 1:
        refuse(f"--tp {args.tp}: here it is for a Llama (--arch llama); tp_pp.py cuts a GPT")
    device = start()
    as_published(device, first=args.arch == "gpt")
    mesh = init_device_mesh(device.type, (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = Llama(args) if args.arch == "llama" else GPT(args, bias=True)
    if args.tp > 1:
        cut_over(model, mesh["tp"])
    if args.ckpt != "none":
        recompute(model, args.ckpt)
    if args.compile:
        for name, layer in model.layers.named_children():
            model.layers.register_module(name, torch.compile(layer, fullgraph=True))
    # llm-foundry's mixed precision "DEFAULT" reduces in the parameters' type (composer, mosaic_fsdp_utils.py).
    reduced = torch.float32 if args.arch == "llama" else args.torch_dtype
    policy = MixedPrecisionPolicy(param_dtype=args.torch_dtype, reduce_dtype=reduced)
    for name, layer in model.layers.items():
        last = int(name) == args.layers - 1  # its backward comes at once
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=not last)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    model.to_empty(device=device)
    torch.manual_seed(0)
    model.init_weights()
    # llm-foundry's is composer's DecoupledAdamW: operator after operator.
    fused = device.type == "cuda" and args.arch == "llama"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=fused)

    torch.manual_seed(1 + mesh.get_local_rank("dp"))
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
                loss.backward()
            if args.arch == "gpt":
                measured(logits.detach(), y.flatten(0, 1), metrics)
            del logits
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        log.step(step, loss.detach() * args.accum)
    torch.distributed.destroy_process_group()


main()
