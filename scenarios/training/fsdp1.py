"""Teaches: FSDP1, FullyShardedDataParallel. Flat parameters, a unit a block, gathers ahead in the backward pass.

Gradients of a step's micro-batches add up unsharded under no_sync, and are reduce-scattered with the last.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from gpt import GPT, Block
from log import Log, start, tokens
from options import GPT_2, options, recomputed, refuse

STRATEGIES = {  # --sharding, and whether there are replicas
    ("full", False): ShardingStrategy.FULL_SHARD,
    ("grad_op", False): ShardingStrategy.SHARD_GRAD_OP,
    ("full", True): ShardingStrategy.HYBRID_SHARD,
    ("grad_op", True): ShardingStrategy._HYBRID_SHARD_ZERO2,
}

shape = GPT_2 | {"layers": 24, "hidden": 2048, "heads": 16}
args = options("FSDP1", shape, does=("shard",), archs=("gpt",), mbs=4)
if args.ckpt == "selective":
    refuse("--ckpt selective: FSDP1 here recomputes whole blocks (full) or nothing (none)")
device = start()
torch.manual_seed(0)
with device:
    model = GPT(args, bias=True)
    model.init_weights()
hybrid = args.replicas > 1
mesh = init_device_mesh(device.type, (args.replicas, args.dp // args.replicas), mesh_dim_names=("replicas", "shards"))
model = FullyShardedDataParallel(
    model,
    device_mesh=mesh if hybrid else mesh["shards"],
    sharding_strategy=STRATEGIES[args.sharding, hybrid],
    auto_wrap_policy=ModuleWrapPolicy({Block}),
    mixed_precision=MixedPrecision(param_dtype=args.torch_dtype, reduce_dtype=args.torch_dtype),  # as Modalities' BF_16
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    device_id=device,
    use_orig_params=True,
    limit_all_gathers=True,
)
if args.ckpt == "full":
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    again = {id(block) for n, block in enumerate(blocks) if recomputed(args, n) == "full"}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in again)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")

torch.manual_seed(1 + dist.get_rank())
log = Log(device, args.accum * args.mbs * args.seq)
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    for micro in range(args.accum):
        x, y = tokens(args.vocab, args.seq, args.mbs, device)
        with model.no_sync() if micro < args.accum - 1 else nullcontext():
            loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten(0, 1)) / args.accum
            loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    log.step(step, loss.detach() * args.accum)
dist.destroy_process_group()
