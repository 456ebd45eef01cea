"""Context parallelism of transformer_engine: ranks share the sequence of attention.

Of a causal sequence in twice as many chunks as ranks, rank i has chunks i and 2 * size - 1 - i, so that all have
equally much to do. `a2a` exchanges heads for sequence around the attention. `p2p` passes keys and values round a ring,
while the attention over those that came before is computed.

Source: NVIDIA/TransformerEngine, attention/dot_product_attention/context_parallel.py at 2.20 (AttnFuncWithCPAndQKVOA2A,
AttnFuncWithCPAndKVP2P).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distsim.errors import NotSimulated
from distsim.libraries.flash_attn import FA2
from distsim.libraries.fused import refuse_values
from distsim.torch_compat.device import aten


def check_context_parallel(cp_group: Any, kind: str) -> None:
    """Refuse what is not simulated.

    Raises:
        NotSimulated: A combination of both, or keys and values gathered at once.
    """
    if isinstance(cp_group, list) or kind not in ("a2a", "p2p"):
        raise NotSimulated(
            f"transformer_engine's context parallelism of cp_comm_type={kind!r}", "use cp_comm_type p2p or a2a"
        )


def attend_by_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, group: Any
) -> Tensor:
    """Return the attention of this rank's part of a sequence, computed for a part of the heads and all of it.

    Args:
        attend: The attention of q, k and v (batch, length, heads, dim).
        q: This rank's queries, and *k*, *v* likewise.
        group: Ranks that share the sequence.
    """
    size = dist.get_world_size(group)
    if k.shape[2] % size:
        raise AssertionError(f"cp_comm_type='a2a': {k.shape[2]} heads of keys for a context-parallel size of {size}")
    q, k, v = (_Exchange.apply(t, group, True) for t in (q, k, v))
    out: Tensor = _Exchange.apply(attend(q, k, v), group, False)
    return out


class _Exchange(torch.autograd.Function):
    """Give parts of the heads for parts of the sequence, or (not *to_heads*) back; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _to_heads(x, group) if to_heads else _to_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        exchange = _to_sequence if ctx.to_heads else _to_heads
        return exchange(grads[0], ctx.group), None, None


def _order(size: int, device: torch.device) -> Tensor:
    """Return where each chunk of the sequence is among those of all ranks."""
    return torch.tensor([*range(0, 2 * size, 2), *range(2 * size - 1, 0, -2)], device=device)


def _to_heads(x: Tensor, group: Any) -> Tensor:
    size, (batch, length, heads, dim) = dist.get_world_size(group), x.shape
    sent = x.view(batch, length, size, heads // size, dim).movedim(2, 0).contiguous()
    received = _all_to_all(sent, group).movedim(0, 1).reshape(batch, 2 * size, length // 2, heads // size, dim)
    return received.index_select(1, _order(size, x.device)).view(batch, size * length, heads // size, dim)


def _to_sequence(x: Tensor, group: Any) -> Tensor:
    size, (batch, length, heads, dim) = dist.get_world_size(group), x.shape
    chunks = x.reshape(batch, 2 * size, length // (2 * size), heads, dim)
    chunks = chunks.index_select(1, _order(size, x.device).argsort())
    received = _all_to_all(chunks.view(batch, size, length // size, heads, dim).movedim(1, 0).contiguous(), group)
    return received.movedim(0, 2).reshape(batch, length // size, size * heads, dim)


def _all_to_all(x: Tensor, group: Any) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def attend_in_ring(
    q: Tensor, k: Tensor, v: Tensor, group: Any, causal: bool, scale: float | None, kernel: Any
) -> Tensor:
    """Return the attention of this rank's q over the keys and values of all ranks of *group*, by torch's *kernel*.

    Shapes are (batch, length, heads, dim).
    """
    refuse_values("transformer_engine's context parallelism of cp_comm_type='p2p'", "its values are not computed")
    out: Tensor = _Ring.apply(*(t.transpose(1, 2) for t in (q, k, v)), group, causal, scale, kernel)
    return out.transpose(1, 2)


class _Ring(torch.autograd.Function):
    """Attention of q (batch, heads, length, dim), one step for the keys and values of each rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any, causal: bool, scale: Any, kernel: Any) -> Tensor:
        ctx.group, ctx.causal, ctx.scale, ctx.kernel, ctx.looks = group, causal, scale, kernel, (k.shape, v.shape)
        pair = torch.cat((k.flatten(), v.flatten()))
        out, sums = torch.zeros_like(q), torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device)
        steps = dist.get_world_size(group)
        for step in range(steps):
            following, works = _pass_on(pair, group) if step + 1 < steps else (pair, [])
            queries, keys, values, whole = _piece(ctx, step, q, pair)
            part, of_part = _forward(ctx, queries, keys, values, step)
            rows, of_rows = (out, sums) if whole else (_second_half(out), _second_half(sums))
            of_part = of_part.view(of_rows.shape)
            torch.logaddexp(of_rows, of_part, out=of_rows)
            rows.addcmul_(part, of_part.unsqueeze(-1).to(part.dtype))
            for work in works:
                work.wait()
            pair = following
        ctx.save_for_backward(q, pair, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, pair, out, sums = ctx.saved_tensors
        grad, of_q = grads[0].contiguous(), torch.zeros_like(q)
        of_pair = torch.zeros_like(pair)
        steps = dist.get_world_size(ctx.group)
        for step in range(steps):
            following, works = _pass_on(pair, ctx.group) if step + 1 < steps else (pair, [])
            if step:  # the gradients follow their keys and values
                of_pair, of_gradients = _pass_on(of_pair, ctx.group)
                works += of_gradients
            queries, keys, values, whole = _piece(ctx, step, q, pair)
            halves = (grad, out, sums) if whole else tuple(map(_second_half, (grad, out, sums)))
            parts = _backward(ctx, queries, keys, values, step, *(half.contiguous() for half in halves))
            (of_q if whole else _second_half(of_q)).add_(parts[0])
            for work in works:
                work.wait()
            of_pair[: parts[1].numel() + parts[2].numel()].add_(torch.cat((parts[1].flatten(), parts[2].flatten())))
            pair = following
        of_k, of_v = of_pair.split([shape.numel() for shape in ctx.looks])
        return of_q, of_k.view(ctx.looks[0]), of_v.view(ctx.looks[1]), None, None, None, None


def _second_half(x: Tensor) -> Tensor:
    return x[:, :, x.shape[2] // 2 :]


def _pass_on(x: Tensor, group: Any) -> tuple[Tensor, list[Any]]:
    """Begin to send *x* to the next rank of the ring; return what comes from the one before, and what completes it."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    received = torch.empty_like(x)
    after, before = ((rank + shift) % size for shift in (1, -1))
    ends = [(dist.isend, x, after), (dist.irecv, received, before)]
    operations = [dist.P2POp(op, tensor, group=group, group_peer=peer) for op, tensor, peer in ends]
    return received, dist.batch_isend_irecv(operations)


def _piece(ctx: Any, step: int, q: Tensor, pair: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return queries, keys and values of a step, and whether these are all queries.

    Of a causal sequence the ranks before this one have keys that all queries see in their first halves; the second
    half of the queries sees all keys of the ranks after it.
    """
    sizes = [shape.numel() for shape in ctx.looks]
    k, v = (part.view(shape) for part, shape in zip(pair.split(sizes), ctx.looks, strict=True))
    if not ctx.causal or step == 0:
        return q, k, v, True
    if step <= dist.get_rank(ctx.group):
        half = k.shape[2] // 2
        return q, k[:, :, :half].contiguous(), v[:, :, :half].contiguous(), True
    return _second_half(q).contiguous(), k, v, False


def _forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    causal = ctx.causal and step == 0
    if ctx.kernel is FA2:
        out, sums = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=ctx.scale)[:2]
    else:
        arguments = (None, True, 0.0, causal, False)
        out, sums = aten._scaled_dot_product_cudnn_attention(q, k, v, *arguments, scale=ctx.scale)[:2]
    return out, sums


def _backward(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, step: int, grad: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    causal, seed = ctx.causal and step == 0, torch.empty((), dtype=torch.int64)
    lengths = (None, None, q.shape[2], k.shape[2], 0.0, causal)
    if ctx.kernel is FA2:
        run: Any = aten._scaled_dot_product_flash_attention_backward
        parts = run(grad, q, k, v, out, sums, *lengths, seed, seed, scale=ctx.scale)
    else:
        run = aten._scaled_dot_product_cudnn_attention_backward
        parts = run(grad, q, k, v, out, sums, seed, seed, None, *lengths, scale=ctx.scale)
    given: tuple[Tensor, Tensor, Tensor] = parts
    return given
