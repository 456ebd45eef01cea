"""Teaches: a mixture of experts in the shape of DeepSeek-V3, its experts spread over --ep ranks by all_to_all_single.

Every layer but the first routes each token to some experts: tokens are sorted by expert, sent to the ranks that have
them, multiplied expert by expert, and sent back. Attention is multi-head latent attention. Experts are equal over
dp / ep ranks, the rest over dp; both have their optimizer cut over those (Megatron-LM's distributed optimizer).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from log import Log, start
from stages import ALONE, Attention, Block, Column, FeedForward, Norm, Row, Stage, _Rotate
from optimizer import Optimizer
from options import DEEPSEEK_V3, options, recomputed, refuse
from pipeline import Pipeline

PUBLISHED = {  # hidden: experts, experts of a token, width of an expert, width of those that all tokens share
    7168: (256, 8, 2048, 2048),  # DeepSeek-V3
    5120: (160, 6, 1536, 3072),  # DeepSeek-V2
}


class Exchange(Function):
    """all_to_all_single of rows; backward, the other way. With *flight*, a list, it goes on until Arrive."""

    @staticmethod
    def forward(ctx, x, received, sent, group, flight=None):
        ctx.splits, ctx.group, ctx.flight = (received, sent), group, flight
        out, work = exchanged(x, received, sent, group, flight is not None)
        if flight is not None:
            flight.append(work)
        return out

    @staticmethod
    def backward(ctx, dy):
        received, sent = ctx.splits
        if ctx.flight is None:
            return exchanged(dy, sent, received, ctx.group, False)[0], None, None, None, None
        dx, work = ctx.flight.pop()
        work.wait()
        return dx, None, None, None, None


class Arrive(Function):
    """Wait for the rows of an Exchange; backward, send their gradients back."""

    @staticmethod
    def forward(ctx, x, received, sent, group, flight):
        ctx.splits, ctx.group, ctx.flight = (received, sent), group, flight
        flight.pop().wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        received, sent = ctx.splits
        ctx.flight.append(exchanged(dy, sent, received, ctx.group, True))
        return dy, None, None, None, None


def exchanged(x, received, sent, group, async_op):
    out = x.new_empty(sum(received), *x.shape[1:])
    return out, dist.all_to_all_single(out, x.contiguous(), received, sent, group=group, async_op=async_op)


class Sort(Function):
    """Tokens [n, hidden] to rows by expert [n * top_k, hidden]."""

    @staticmethod
    def forward(ctx, x, order, top_k):
        ctx.save_for_backward(order)
        ctx.top_k, ctx.tokens = top_k, x.shape[0]
        return by_expert(x, order, top_k)

    @staticmethod
    def backward(ctx, dy):
        (order,) = ctx.saved_tensors
        return unsorted(dy, order, ctx.top_k, ctx.tokens), None, None


class Unsort(Function):
    """Rows by expert [n * top_k, hidden] to the sum of each token's, [n, hidden]."""

    @staticmethod
    def forward(ctx, y, order, top_k, tokens):
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return unsorted(y, order, top_k, tokens)

    @staticmethod
    def backward(ctx, dy):
        (order,) = ctx.saved_tensors
        return by_expert(dy, order, ctx.top_k), None, None, None


def by_expert(x, order, top_k):
    """Row by row of *order*; where that has more than all, because experts get as many each, they are zeros."""
    if order.numel() > x.shape[0] * top_k:
        order = order.clamp(max=x.shape[0] * top_k)
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return x.index_select(0, order.div(top_k, rounding_mode="floor"))


def unsorted(rows, order, top_k, tokens):
    return rows.index_select(0, order.argsort()[: tokens * top_k]).unflatten(0, (-1, top_k)).sum(1)


class Experts(nn.Module):
    """The router, this rank's experts, and the one that all tokens share."""

    def __init__(self, args, group, where) -> None:
        super().__init__()
        self.group, self.ep, self.top_k = group, args.ep, args.top_k
        self.experts, self.own = args.experts, args.experts // args.ep
        self.grouped, self.overlap = args.grouped_gemm, args.overlap
        self.router = nn.Parameter(torch.empty(args.experts, args.hidden, **where))
        self.up = nn.Parameter(torch.empty(self.own, args.hidden, 2 * args.expert_ffn, **where))
        self.down = nn.Parameter(torch.empty(self.own, args.expert_ffn, args.hidden, **where))
        self.common = FeedForward(args, ALONE, args.shared_ffn, **where) if args.shared_ffn else None

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = F.linear(flat, self.router).float().softmax(-1)
        weights, order, counts = self.balanced(*scores.topk(self.top_k))
        # How many rows go where is known on the device; the host has to wait for it.
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        sent = counts.view(self.ep, -1).sum(1).tolist()
        received = coming.view(self.ep, -1).sum(1).tolist()
        flight = [] if self.overlap else None
        rows = Exchange.apply(Sort.apply(flat, order, self.top_k), received, sent, self.group, flight)
        common = 0.0 if self.common is None else self.common(flat)
        if flight is not None:
            rows = Arrive.apply(rows, received, sent, self.group, flight)
        weights = Exchange.apply(Sort.apply(weights.flatten(), order, 1), received, sent, self.group)
        # From [ranks, experts, rows] to [experts, ranks * rows]: every expert has as many.
        each = rows.shape[0] // (self.ep * self.own)
        rows = rows.view(self.ep, self.own, each, -1).transpose(0, 1).reshape(self.own, self.ep * each, -1)
        weights = weights.view(self.ep, self.own, each).transpose(0, 1).reshape(self.own, self.ep * each, 1)
        gate, up = self.products(rows, self.up).chunk(2, dim=-1)
        rows = self.products(F.silu(gate) * up * weights.to(up.dtype), self.down)
        rows = rows.view(self.own, self.ep, each, -1).transpose(0, 1).reshape(self.ep * self.own * each, -1)
        rows = Exchange.apply(rows, sent, received, self.group)
        return (Unsort.apply(rows, order, self.top_k, flat.shape[0]) + common).view_as(x)

    def products(self, rows, weights):
        """Each expert's [rows, k] @ [k, m]: a batch, or one kernel of groups that may be of any size."""
        if not self.grouped:
            return torch.bmm(rows, weights)
        ends = torch.arange(1, self.own + 1, device=rows.device, dtype=torch.int32) * rows.shape[1]
        return F.grouped_mm(rows.flatten(0, 1), weights, offs=ends).view(self.own, rows.shape[1], -1)

    def balanced(self, weights, chosen):
        """The router's weights, but the experts in turn, as it would be perfectly balanced.

        Returns the weights [n, top_k], the order of the n * top_k rows by expert, and the rows of each expert: all have
        as many, so that the last may be beyond the n * top_k.
        """
        each = -(-chosen.numel() // self.experts)
        turn = torch.arange(each * self.experts, device=chosen.device)
        order = turn.view(-1, self.experts).t().reshape(-1)
        counts = torch.full((self.experts,), each, device=chosen.device)
        return weights, order, counts


class LatentAttention(nn.Module):
    """Queries, keys and values from narrow latents; a part of each head, shared by all for the keys, has positions."""

    def __init__(self, args, number, where) -> None:
        super().__init__()
        self.heads, self.nope, self.rope = args.heads, args.nope, args.rope
        self.recompute = recomputed(args, number) == "selective"
        self.latent = args.kv_latent
        self.q_down = Column(args.hidden, args.q_latent, ALONE, False, **where)
        self.q_norm = Norm(args, ALONE, args.q_latent, **where)
        self.q_up = Column(args.q_latent, args.heads * (args.nope + args.rope), ALONE, False, **where)
        self.kv_down = Column(args.hidden, args.kv_latent + args.rope, ALONE, False, **where)
        self.kv_norm = Norm(args, ALONE, args.kv_latent, **where)
        self.kv_up = Column(args.kv_latent, args.heads * 2 * args.nope, ALONE, False, **where)
        self.proj = Row(args.heads * args.nope, args.hidden, ALONE, False, **where)

    def forward(self, x, shared):
        seq, batch, _ = x.shape
        q = self.q_up(self.q_norm(self.q_down(x))).view(seq, batch, self.heads, -1)
        q, q_turned = q.split([self.nope, self.rope], dim=-1)
        q = torch.cat([q, _Rotate.apply(q_turned, *shared)], dim=-1)
        latent, k_turned = self.kv_down(x).split([self.latent, self.rope], dim=-1)
        k, v = self.kv_up(self.kv_norm(latent)).view(seq, batch, self.heads, -1).chunk(2, dim=-1)
        k_turned = _Rotate.apply(k_turned.unsqueeze(2), *shared).expand(-1, -1, self.heads, -1)
        k = torch.cat([k, k_turned], dim=-1)
        if self.recompute:
            return self.proj(checkpoint(self.core, q, k, v, use_reentrant=False, preserve_rng_state=False))
        return self.proj(self.core(q, k, v))

    def core(self, q, k, v):
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


args = options("a mixture of experts", DEEPSEEK_V3, does=("pp", "vpp", "ep", "bf16 gradients"), archs=("llama",))
published = args.hidden in PUBLISHED
other = (8, 2, args.hidden, args.hidden)  # as many as Mixtral 8x7B has, and of a token, whatever --ep is
for name, value in zip(
    ("experts", "top_k", "expert_ffn", "shared_ffn"), PUBLISHED.get(args.hidden, other), strict=True
):
    if getattr(args, name) is None:
        setattr(args, name, value)
if args.dense_layers is None:
    args.dense_layers = 3 if args.layers == 61 else 1
args.nope = 128 if published else args.hidden // args.heads
args.rope = args.nope // 2 if args.attention == "latent" else args.hidden // args.heads
args.q_latent, args.kv_latent = (1536, 512) if published else (args.hidden // 2, args.hidden // 4)
if args.attention == "latent" and args.kv_heads != args.heads:
    refuse(f"--kv-heads {args.kv_heads}: latent attention has keys for each head; give --attention grouped, too")
if args.overlap and not args.shared_ffn:
    refuse("--overlap: what the exchange of rows is hidden by is the expert that all tokens share; --shared-ffn is 0")
if args.experts % args.ep:
    refuse(f"--ep {args.ep} does not divide the {args.experts} experts; --experts says how many the model has")
if args.experts < args.top_k:
    refuse(f"--experts {args.experts} is fewer than the {args.top_k} of a token")

device = start()
mesh = init_device_mesh(device.type, (args.pp, args.dp), mesh_dim_names=("pp", "dp"))
expert_mesh = init_device_mesh(device.type, (args.pp, args.dp // args.ep, args.ep), mesh_dim_names=("pp", "edp", "ep"))
pp, dp = mesh.get_group("pp"), mesh.get_group("dp")
edp, ep = expert_mesh.get_group("edp"), expert_mesh.get_group("ep")


def block(args, number, tp, where):
    dense = number < args.dense_layers
    feed_forward = FeedForward(args, tp, **where) if dense else Experts(args, ep, where)
    latent = args.attention == "latent"
    attention = LatentAttention(args, number, where) if latent else Attention(args, tp, number, **where)
    return Block(args, attention, feed_forward, tp, **where)


if dist.get_rank() == 0:
    print(
        f"model: {args.layers} layers, {min(args.dense_layers, args.layers)} of them dense, hidden {args.hidden}; "
        f"{args.experts} experts a layer, {args.expert_ffn} wide, {args.top_k} of a token; "
        f"{args.experts // args.ep} of them a rank (--ep {args.ep})",
        flush=True,
    )

torch.manual_seed(mesh.get_local_rank("pp"))
pipeline = Pipeline(args, pp, ALONE, device, lambda number, stages: Stage(args, number, stages, ALONE, device, block))
everything = {name: p for n, c in enumerate(pipeline.chunks) for name, p in c.named_parameters(prefix=str(n))}
spread = [p for name, p in everything.items() if name.endswith(("feed_forward.up", "feed_forward.down"))]
others = [p for name, p in everything.items() if not name.endswith(("feed_forward.up", "feed_forward.down"))]
parts = [(others, dp)] + ([(spread, edp)] if spread else [])
model, in_16_bits = (pp,) if args.pp > 1 else (), args.grad_reduce_in_bf16
optimizer = Optimizer(parts, model=model, share=True, overlap=False, in_16_bits=in_16_bits)

torch.manual_seed(1 + mesh.get_local_rank("dp"))
log = Log(device, args.accum * args.mbs * args.seq / args.pp, rank=(args.pp - 1) * args.dp)
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    loss = pipeline.step(optimizer)
    optimizer.step()
    log.step(step, loss)
dist.destroy_process_group()
