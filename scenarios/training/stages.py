"""Layers cut over the ranks of a tensor parallel group, as Megatron-LM and nanotron cut them: [seq, batch, hidden].

With sequence parallelism what lies between the layers is cut along the sequence, so that an all_gather and a
reduce_scatter take the place of each all_reduce (arXiv:2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import float8
from attention import flash_attention, triton_rms_norm
from fused import causal_softmax, cross_entropy
from options import recomputed


@dataclass(frozen=True)
class Tensor:
    """The tensor parallel group: its size, this rank's index, and whether it splits activations between the layers.

    *overlap*: send the gradients of activations while computing those of weights. *fp8*: how operands of the layers'
    products are scaled (float8.py), in a group of one.
    """

    group: Any = None
    size: int = 1
    rank: int = 0
    sequence: bool = False
    overlap: bool = True
    fp8: str = "none"


ALONE = Tensor()
# Their names since 2.13, or before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathered(x: torch.Tensor, tp: Tensor, *, async_op: bool = False) -> tuple[torch.Tensor, Any]:
    out = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
    return out, all_gather(out, x.contiguous(), group=tp.group, async_op=async_op)


def scattered(x: torch.Tensor, tp: Tensor, *, async_op: bool = False) -> tuple[torch.Tensor, Any]:
    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    return out, reduce_scatter(out, x.contiguous(), group=tp.group, async_op=async_op)


class _Column(Function):
    """x @ weight.T with rows of the weight on each rank; the gradient of x travels while that of the weight is made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.has_bias = tp, bias is not None
        whole = gathered(x, tp)[0] if tp.sequence else x
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        tp = ctx.tp
        gathering = None
        if tp.sequence:
            x, gathering = gathered(x, tp, async_op=True)
        dx = dy.matmul(weight)
        if gathering is not None:
            gathering.wait()
            dx, travelling = scattered(dx, tp, async_op=True)
        else:
            dx = dx.contiguous()
            travelling = dist.all_reduce(dx, group=tp.group, async_op=True)
        flat = dy.reshape(-1, dy.shape[-1])
        dweight = flat.t().matmul(x.reshape(-1, x.shape[-1]))
        dbias = flat.sum(0) if ctx.has_bias else None
        travelling.wait()
        return dx, dweight, dbias, None


class _Reduce(Function):
    """The sum over the ranks; cut along the sequence where activations are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Tensor) -> torch.Tensor:
        ctx.tp = tp
        if tp.sequence:
            return scattered(x, tp)[0]
        dist.all_reduce(x, group=tp.group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return (gathered(dy, ctx.tp)[0] if ctx.tp.sequence else dy), None


class _SummedGradient(Function):
    """Return x; in backward, sum its gradient over the ranks, without overlap."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Tensor) -> torch.Tensor:
        ctx.tp = tp
        return x

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        dist.all_reduce(dy, group=ctx.tp.group)
        return dy, None


class _CrossEntropy(Function):
    """Of logits whose words are cut over the ranks, in float32: [n, vocab / tp] and [n] give [n]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, tp: Tensor) -> torch.Tensor:
        ctx.dtype = logits.dtype
        mine = logits.dtype != torch.float32
        logits = logits.float()
        peak = logits.amax(-1)
        if tp.size > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=tp.group)
        logits = logits.sub_(peak[:, None]) if mine else logits - peak[:, None]
        words = logits.shape[1]
        local = target - tp.rank * words
        elsewhere = (local < 0) | (local >= words)
        local = local.masked_fill(elsewhere, 0)
        picked = logits.gather(1, local[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        total = logits.exp_().sum(-1)
        if tp.size > 1:
            dist.all_reduce(picked, group=tp.group)
            dist.all_reduce(total, group=tp.group)
        ctx.save_for_backward(logits.div_(total[:, None]), elsewhere, local)
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        grad, elsewhere, local = ctx.saved_tensors
        grad.scatter_add_(1, local[:, None], elsewhere.float().sub_(1.0)[:, None])
        return grad.mul_(dloss[:, None]).to(ctx.dtype), None, None


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: Tensor) -> torch.Tensor:
    if tp.fp8 == "none":
        return F.linear(x, weight, bias)
    y = float8.linear(x, weight, tp.fp8)
    return y if bias is None else y + bias


class Column(nn.Module):
    def __init__(self, inputs: int, outputs: int, tp: Tensor, bias: bool, **where: Any) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(outputs // tp.size, inputs, **where))
        self.bias = nn.Parameter(torch.empty(outputs // tp.size, **where)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return _linear(x, self.weight, self.bias, self.tp)
        if not self.tp.overlap:
            return F.linear(_SummedGradient.apply(x, self.tp), self.weight, self.bias)
        return _Column.apply(x, self.weight, self.bias, self.tp)


class Row(nn.Module):
    def __init__(self, inputs: int, outputs: int, tp: Tensor, bias: bool, **where: Any) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(outputs, inputs // tp.size, **where))
        self.bias = nn.Parameter(torch.empty(outputs, **where)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return _linear(x, self.weight, self.bias, self.tp)
        y = _Reduce.apply(F.linear(x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias


class Embedding(nn.Module):
    """Tokens [batch, seq] to [seq, batch, hidden]; each rank has some of the words."""

    def __init__(self, words: int, hidden: int, tp: Tensor, **where: Any) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(words // tp.size, hidden, **where))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.t().contiguous()
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.tp.rank * self.weight.shape[0]
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return _Reduce.apply(x.masked_fill(elsewhere[..., None], 0.0), self.tp)


class Norm(nn.Module):
    """LayerNorm or RMSNorm, whole on every rank; its gradient is summed over tp where the sequence is cut."""

    def __init__(self, args: Any, tp: Tensor, width: int | None = None, **where: Any) -> None:
        super().__init__()
        width = width or args.hidden
        self.weight = nn.Parameter(torch.empty(width, **where))
        self.bias = nn.Parameter(torch.empty(width, **where)) if args.arch == "gpt" else None
        self.framework, self.again = args.framework, args.framework == "internevo" and args.ckpt != "full"
        for parameter in self.parameters():
            parameter.cut_sequence = tp.sequence

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:  # InternEvo's `dropout_selective_checkpoint`
            return checkpoint(self._normalised, x, use_reentrant=False, preserve_rng_state=False)
        return self._normalised(x)

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        if self.framework == "internevo":
            return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), 1e-5).to(x.dtype)
        if self.bias is None and x.is_cuda and self.framework == "nanotron":
            return triton_rms_norm(x, self.weight)
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class _Rotate(Function):
    """Rotary positions in three operators: [seq, batch, heads, dim], cos and sin [seq, 1, 1, dim / 2]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return _turned(dy, *ctx.saved_tensors, -1.0), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    first, second = x.unflatten(-1, (2, -1)).unbind(-2)
    out = x.unflatten(-1, (2, -1)) * cos[..., None, :]
    out[..., 0, :].addcmul_(second, sin, value=-sign)
    out[..., 1, :].addcmul_(first, sin, value=sign)
    return out.flatten(-2)


def turns(args: Any, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each position of this rank and pair of channels, [seq, 1, 1, dim / 2]."""
    speeds = 500000.0 ** (torch.arange(0, dim, 2, device=device).float() / -dim)
    positions = torch.arange(args.seq, device=device).float()
    positions = positions if args.ring is None else args.ring.part(positions)
    angles = torch.outer(positions, speeds)[:, None, None]
    return angles.cos().to(args.torch_dtype), angles.sin().to(args.torch_dtype)


class Attention(nn.Module):
    """Fused, or in three kernels and dropout, as it was when activations were recomputed for want of it."""

    def __init__(self, args: Any, tp: Tensor, number: int, **where: Any) -> None:
        super().__init__()
        self.dim, self.legacy = args.hidden // args.heads, legacy(args)
        self.heads, self.kv_heads = args.heads // tp.size, args.kv_heads // tp.size
        self.ring = args.ring
        self.recompute = recomputed(args, number) == "selective"
        gpt = args.arch == "gpt"
        bias = gpt or args.framework == "internevo"
        self.nanotrons = not gpt and args.framework == "nanotron"
        self.qkv = Column(args.hidden, (args.heads + 2 * args.kv_heads) * self.dim, tp, bias, **where)
        self.proj = Row(args.hidden, args.hidden, tp, bias, **where)

    def forward(self, x: torch.Tensor, shared: tuple[torch.Tensor, ...]) -> torch.Tensor:
        qkv = self.qkv(x)
        seq, batch, _ = qkv.shape
        qkv = qkv.view(seq, batch, -1, self.dim)
        if self.nanotrons and not self.recompute and self.ring is None:
            return self.proj(self.batch_first(qkv, *shared))
        if len(shared) == 2:
            qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
            q, k = _Rotate.apply(qk, *shared).split([self.heads, self.kv_heads], dim=2)
        else:
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        core = self.unfused if self.legacy else self.fused
        if self.recompute:
            y = checkpoint(core, q, k, v, *shared, use_reentrant=False, preserve_rng_state=self.legacy)
        else:
            y = core(q, k, v, *shared)
        return self.proj(y)

    def fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        if self.ring is not None:
            y = self.ring.attend(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return y.permute(2, 0, 1, 3).flatten(2)

    def batch_first(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """As nanotron copies: to [batch, seq, ...], keys and values into one tensor, and the answer back."""
        each = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = (part.transpose(0, 1).contiguous() for part in qkv.split(each, dim=2))
        kv = torch.stack([k, v]).permute(1, 2, 0, 3, 4).contiguous()
        if kv.is_cuda:
            return flash_attention(q, kv, cos[:, 0, 0], sin[:, 0, 0])
        k, v = kv.unbind(2)
        cos, sin = (part.transpose(0, 1) for part in (cos, sin))
        q, k, v = (part.transpose(1, 2) for part in (_Rotate.apply(q, cos, sin), _Rotate.apply(k, cos, sin), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return y.permute(2, 0, 1, 3).flatten(2)

    def unfused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seq, batch, heads, dim = q.shape
        q, k, v = (part.reshape(seq, batch * heads, dim).transpose(0, 1) for part in (q, k, v))
        scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=dim**-0.5)
        weights = F.dropout(causal_softmax(scores), 0.1)
        return torch.bmm(weights, v).transpose(0, 1).reshape(seq, batch, heads * dim)


class _SwiGLU(Function):
    """silu(gate) * up with only what both are cut from kept: Megatron-LM's bias-swiglu fusion, in a few operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, dim=-1)
        torch.mul(dy, F.silu(gate), out=dup)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=dgate)
        return dx


class FeedForward(nn.Module):
    def __init__(self, args: Any, tp: Tensor, ffn: int | None = None, **where: Any) -> None:
        super().__init__()
        ffn = ffn or args.ffn
        self.gated, self.framework = args.arch == "llama", args.framework
        self.up = Column(args.hidden, 2 * ffn if self.gated else ffn, tp, not self.gated, **where)
        self.down = Row(ffn, args.hidden, tp, not self.gated, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        if not self.gated:
            return self.down(F.gelu(x, approximate="tanh"))
        if self.framework == "megatron":
            return self.down(_SwiGLU.apply(x))
        gate, up = x.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, args: Any, attention: nn.Module, feed_forward: nn.Module, tp: Tensor, **where: Any) -> None:
        super().__init__()
        self.dropout = 0.1 if legacy(args) else 0.0
        self.attention_norm, self.attention = Norm(args, tp, **where), attention
        self.ffn_norm, self.feed_forward = Norm(args, tp, **where), feed_forward

    def forward(self, x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        x = x + self._dropped(self.attention(self.attention_norm(x), shared))
        return x + self._dropped(self.feed_forward(self.ffn_norm(x)))

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class Stage(nn.Module):
    """Some layers of the model, with the embedding before the first and the loss behind the last.

    Tokens [batch, seq], or activations [seq, batch, hidden], give activations or, with targets, the mean loss; seq is
    what context parallelism leaves on this rank.
    """

    def __init__(
        self, args: Any, number: int, stages: int, tp: Tensor, device: torch.device, block: Any = None
    ) -> None:
        super().__init__()
        where = {"dtype": args.torch_dtype, "device": device}
        self.args, self.tp, self.first, self.last = args, tp, number == 0, number == stages - 1
        self.tied = ties(args, stages)
        if self.first:
            self.embedding = Embedding(args.vocab, args.hidden, tp, **where)
            if args.arch == "gpt":
                self.positions = nn.Parameter(torch.empty(args.seq, 1, args.hidden, **where))
        mine = range(number * args.layers // stages, (number + 1) * args.layers // stages)
        if block is None and args.arch == "llama" and args.vpp == 1 and args.framework == "nanotron":
            mine = balanced(args, stages)[number]
        block = block or dense_block
        self.layers = nn.ModuleList(block(args, n, tp, where) for n in mine)
        self.ckpt = [recomputed(args, n) for n in mine]
        if self.last:
            self.norm = Norm(args, tp, **where)
            self.output = Column(args.hidden, args.vocab, replace(tp, fp8="none"), False, **where)
            if self.first and self.tied:
                self.output.weight = self.embedding.weight
        self.shared = _shared(args, device)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
                elif parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(std=0.02)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        if self.first:
            x = self.embedding(x)
            if self.args.arch == "gpt":
                positions = self.positions if self.args.ring is None else self.args.ring.part(self.positions)
                x = x + (positions.chunk(self.tp.size)[self.tp.rank] if self.tp.sequence else positions)
        for layer, ckpt in zip(self.layers, self.ckpt, strict=True):
            if ckpt == "full":
                # As Megatron-LM's: the whole layer again, to its last operator.
                x = checkpoint(layer, x, *self.shared, use_reentrant=True, preserve_rng_state=legacy(self.args))
            else:
                x = layer(x, *self.shared)
        if not self.last:
            return x
        logits = self.output(self.norm(x)).flatten(0, 1)
        if self.args.framework == "internevo" and self.tp.size == 1:
            return cross_entropy(logits, target.t().reshape(-1))
        if self.args.arch == "llama" and self.args.framework == "nanotron":
            logits = logits.float()  # beside what the loss makes of them
        return _CrossEntropy.apply(logits, target.t().reshape(-1), self.tp).mean()


def balanced(args: Any, stages: int) -> list[range]:
    """The layers of each stage as nanotron shares them out (models/base.py, build_model): by the flops of products, the
    output layer's among them, each stage until it has its share. The last has few, or none.

    The published steps of the 1B, whose output layer costs as much as four layers, show that a share which is met
    exactly is enough: a layer takes 5.3 ms without a pipeline (204 ms for two micro-batches of 16 layers and the
    output), a step of two stages 54 ms (10 layers, not 11), of four 27.6 ms (5, not 6)."""
    layer = 4 * args.hidden**2 + 3 * args.ffn * args.hidden
    total = args.layers * layer + args.vocab * args.hidden
    starts = [0]
    for n in range(1, args.layers):
        if n * layer >= total * len(starts) / stages:
            starts.append(n)
    if len(starts) < stages - 1:  # more stages than its blocks can fill
        starts = [number * args.layers // stages for number in range(stages)]
    starts += [args.layers] * (stages + 1 - len(starts))
    return [range(start, end) for start, end in pairwise(starts)]


def dense_block(args: Any, number: int, tp: Tensor, where: dict[str, Any]) -> Block:
    return Block(args, Attention(args, tp, number, **where), FeedForward(args, tp, **where), tp, **where)


def legacy(args: Any) -> bool:
    """A GPT that recomputes, or is in fp16, is Megatron-LM's before flash attention: attention in three operators, and
    dropout."""
    return args.arch == "gpt" and (args.ckpt != "none" or args.dtype == "fp16")


def ties(args: Any, stages: int) -> bool:
    """Whether the output layer is the embedding: GPT's is, Llama's below 4 B and in one stage (as nanotron has it)."""
    return args.arch == "gpt" or (args.arch == "llama" and args.hidden < 4096 and stages == 1)


def _shared(args: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What every layer reads: the turns of a Llama."""
    return () if args.arch == "gpt" else turns(args, getattr(args, "rope", args.hidden // args.heads), device)
