"""What torchtitan does to a Llama: recompute, cut over a tensor parallel mesh, compile each layer, shard."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import float8
from options import recomputed

aten = torch.ops.aten
SAVED = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    aten.linalg_vector_norm.default,  # the peaks of operands in 8 bits
}
PRODUCTS = (aten.mm.default, aten._scaled_mm.default)


def every_second_mm() -> Any:
    """What --ckpt selective keeps: attention, and the first, third, ... matrix multiplication of a block."""
    multiplications = {False: 0, True: 0}

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in PRODUCTS:
            multiplications[ctx.is_recompute] += 1
            keep = multiplications[ctx.is_recompute] % 2 == 1
        else:
            keep = func in SAVED
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def built(args: Any, mesh: DeviceMesh, model: nn.Module, device: torch.device, reduced: torch.dtype) -> nn.Module:
    """Give *model*, on meta, what the flags say, and its weights. *mesh* has replicas, shards and tp."""
    if args.fp8 != "none":
        float8.convert(model.layers, args.fp8)
    if args.tp > 1:
        cut_over(model, mesh["tp"], args.sequence_parallel == "on")
    recompute(model, args)
    shard(model, args, mesh["replicas", "shards"] if args.replicas > 1 else mesh["shards"], reduced)
    model.to_empty(device=device)
    model.init_weights()
    return model


def recompute(model: nn.Module, args: Any) -> None:
    """Wrap the layers that --ckpt and --ckpt-every name."""
    for name, layer in model.layers.named_children():
        kind = recomputed(args, int(name))
        if kind != "none":
            contexts = {"context_fn": every_second_mm} if kind == "selective" else {}
            model.layers.register_module(name, checkpoint_wrapper(layer, preserve_rng_state=False, **contexts))


def cut_over(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """Tensor parallel as torchtitan's plan for Llama; where *sequence*, activations are cut between the products."""
    between = Shard(1) if sequence else Replicate()
    words = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    logits = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    ends = {"tok_embeddings": words, "output": logits}
    parallelize_module(model, mesh, {name: plan for name, plan in ends.items() if getattr(model, name) is not None})
    norms = [] if model.norm is None else [model.norm]
    for layer in model.layers.values():
        plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
        plan |= {name: RowwiseParallel(output_layouts=between) for name in ("attention.wo", "feed_forward.w2")}
        if sequence:
            whole = partial(PrepareModuleInput, desired_input_layouts=(Replicate(), None))
            plan["attention"] = whole(input_layouts=(Shard(1), None))
            plan["feed_forward"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        parallelize_module(layer, mesh, plan)
        norms += [layer.attention_norm, layer.ffn_norm]
    for norm in norms:
        parallelize_module(norm, mesh, SequenceParallel()) if sequence else replicate(norm, mesh)


def replicate(norm: nn.Module, mesh: DeviceMesh) -> None:
    """The same norm of the same activations on every rank, with weights that a clip of all gradients can sum."""
    distribute_module(
        norm,
        mesh,
        None,
        lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),
        lambda _, output, mesh: output.to_local(),
    )


def shard(model: nn.Module, args: Any, mesh: DeviceMesh, reduced: torch.dtype) -> None:
    """Compile each layer if --compile, then shard each and what is around them over *mesh*."""
    if args.compile:
        for name, layer in model.layers.named_children():
            model.layers.register_module(name, torch.compile(layer, fullgraph=True))
    policy = MixedPrecisionPolicy(param_dtype=args.torch_dtype, reduce_dtype=reduced)
    for name, layer in model.layers.items():
        last = int(name) == args.layers - 1  # its backward comes at once
        again = args.sharding == "full" and not last and args.pp == 1  # else each micro-batch would gather it
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, mp_policy=policy)
