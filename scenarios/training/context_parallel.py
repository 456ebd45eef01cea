"""Teaches: context parallelism. Each rank has a part of every sequence; keys and values travel around a ring.

While attention over one part is computed, the next part is already on its way. A rank has a piece of the front and its
mirror image of the back, so that the causal mask leaves all of them the same work. Parameters are equal on all ranks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh

from log import Log, start
from options import LLAMA_1B, options, refuse


class Neighbours(Function):
    """The tensor of the rank before; backward, the gradient goes back to it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return shifted(x, group, 1)

    @staticmethod
    def backward(ctx, dy):
        return shifted(dy, ctx.group, -1), None


def shifted(x, group, by):
    ranks = dist.get_process_group_ranks(group)
    me = dist.get_rank(group)
    x = x.contiguous()
    out = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, ranks[(me + by) % len(ranks)], group)
    recv = dist.P2POp(dist.irecv, out, ranks[(me - by) % len(ranks)], group)
    for work in dist.batch_isend_irecv([send, recv]):
        work.wait()
    return out


def ring_attention(q, kv, places, group):
    """Causal attention of this rank's queries [batch, heads, part, dim] over the keys and values of all ranks.

    *places* [ranks, part] are the positions in the sequence that each rank has.
    """
    me, size = dist.get_rank(group), dist.get_world_size(group)
    top = torch.full(q.shape[:-1], float("-inf"), device=q.device)
    weight = torch.zeros(q.shape[:-1], device=q.device)
    out = torch.zeros(q.shape, device=q.device)
    for turn in range(size):
        coming = Neighbours.apply(kv, group) if turn < size - 1 else None
        k, v = kv.unbind(0)
        scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        future = places[me][:, None] < places[(me - turn) % size][None, :]
        scores = scores.masked_fill(future, float("-inf"))
        # A row may see nothing of this part; the first part is its own, so that its maximum is known.
        higher = torch.maximum(top, scores.amax(-1))
        seen = (scores - higher[..., None]).exp()
        shrink = (top - higher).exp()
        out = out * shrink[..., None] + (seen.to(v.dtype) @ v).float()
        weight = weight * shrink + seen.sum(-1)
        top, kv = higher, coming
    return (out / weight[..., None]).to(q.dtype)


def main() -> None:
    args = options("context parallelism", LLAMA_1B, does=("cp",), archs=("llama",))
    if args.ckpt != "none" or args.kv_heads != args.heads:
        refuse("--ckpt and --kv-heads: this program recomputes nothing and has as many keys as queries")
    if args.seq % (2 * args.cp):
        refuse(f"--seq {args.seq} must be a multiple of 2 * --cp {args.cp}")
    device = start()
    mesh = init_device_mesh(device.type, (args.dp, args.cp), mesh_dim_names=("dp", "cp"))
    group, rank = mesh.get_group("cp"), mesh.get_local_rank("cp")
    pieces = torch.arange(args.seq, device=device).view(2 * args.cp, -1)
    places = torch.stack([torch.cat([pieces[r], pieces[2 * args.cp - 1 - r]]) for r in range(args.cp)])

    torch.manual_seed(0)
    hidden, heads = args.hidden, args.heads
    shapes = {
        "qkv": (3 * hidden, hidden),
        "proj": (hidden, hidden),
        "up": (2 * args.ffn, hidden),
        "down": (hidden, args.ffn),
    }
    layers = [
        {
            name: torch.empty(shape, device=device, dtype=args.torch_dtype).normal_(std=0.02)
            for name, shape in shapes.items()
        }
        for _ in range(args.layers)
    ]
    words = torch.empty(args.vocab, hidden, device=device, dtype=args.torch_dtype).normal_(std=0.02)
    parameters = [words, *(w for layer in layers for w in layer.values())]
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, fused=device.type == "cuda")

    torch.manual_seed(1 + mesh.get_local_rank("dp"))
    log = Log(device, args.accum * args.mbs * args.seq / args.cp)
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        for _ in range(args.accum):
            text = torch.randint(args.vocab, (args.mbs, args.seq + 1), device=device)
            x = F.embedding(text[:, places[rank]], words)
            for layer in layers:
                qkv = (
                    F.linear(F.rms_norm(x, (hidden,)), layer["qkv"])
                    .unflatten(-1, (3, heads, -1))
                    .permute(2, 0, 3, 1, 4)
                )
                y = ring_attention(qkv[0], qkv[1:].contiguous(), places, group)
                x = x + F.linear(y.transpose(1, 2).flatten(2), layer["proj"])
                gate, up = F.linear(F.rms_norm(x, (hidden,)), layer["up"]).chunk(2, dim=-1)
                x = x + F.linear(F.silu(gate) * up, layer["down"])
            logits = F.linear(F.rms_norm(x, (hidden,)), words).flatten(0, 1).float()
            loss = F.cross_entropy(logits, text[:, places[rank] + 1].flatten()) / args.accum
            loss.backward()
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        log.step(step, loss.detach() * args.accum)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
