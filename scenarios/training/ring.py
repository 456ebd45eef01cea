"""Attention of a sequence that lies on several ranks: keys and values travel around a ring (arXiv:2310.01889).

While attention over one part is computed, the next part is already on its way. A rank has a piece of the front and its
mirror image of the back, so that the causal mask leaves all of them the same work. A part is one call of flash
attention; its sums of exponentials say how much each part counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from options import refuse
from stages import legacy

aten = torch.ops.aten


@dataclass(frozen=True)
class Ring:
    """The context parallel group: its size, and this rank's place in it."""

    group: Any
    size: int
    rank: int

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Of [seq, ...] the pieces that this rank has."""
        pieces = x.chunk(2 * self.size)
        return torch.cat([pieces[self.rank], pieces[2 * self.size - 1 - self.rank]])

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention of [batch, heads, part, dim]; keys and values may have fewer heads."""
        return _Attend.apply(q, torch.stack([k, v]), self)

    def shift(self, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Send *x* to the next rank, and what comes from the one before."""
        ranks = dist.get_process_group_ranks(self.group)
        out = torch.empty_like(x)
        send = dist.P2POp(dist.isend, x, ranks[(self.rank + 1) % self.size], self.group)
        recv = dist.P2POp(dist.irecv, out, ranks[self.rank - 1], self.group)
        return out, dist.batch_isend_irecv([send, recv])

    def seen(self, turn: int, half: int) -> tuple[slice, slice, bool]:
        """Which queries see which keys of the part that is here at *turn*, and whether a causal mask is between them.

        All queries see the front *half* of a part of a rank before this one, the back of them that of a rank behind.
        """
        if turn == 0:
            return slice(None), slice(None), True
        if turn <= self.rank:
            return slice(None), slice(half), False
        return slice(half, None), slice(None), False


def layout(args: Any, device: torch.device) -> tuple[DeviceMesh, Any]:
    """The mesh of pp, dp, cp and tp, and the group over which parameters are equal; `args.ring` where cp cuts."""
    mesh = init_device_mesh(device.type, (args.pp, args.dp, args.cp, args.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    if args.cp == 1:
        return mesh, mesh.get_group("dp")
    if legacy(args):
        refuse(f"--cp {args.cp}: a GPT in fp16, or that recomputes, has no flash attention here; try --arch llama")
    args.ring = Ring(mesh.get_group("cp"), args.cp, mesh.get_local_rank("cp"))
    sizes = (args.pp, args.dp * args.cp, args.tp)
    return mesh, init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "equal", "tp")).get_group("equal")


class _Attend(Function):
    """q [batch, heads, part, dim] over kv [2, batch, heads, part, dim] of all ranks."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, kv: torch.Tensor, ring: Ring) -> torch.Tensor:
        half = q.shape[2] // 2
        mine = kv
        for turn in range(ring.size):
            coming, works = ring.shift(kv) if turn < ring.size - 1 else (kv, [])
            rows, columns, causal = ring.seen(turn, half)
            part, sums = _flash(q[:, :, rows], *kv[:, :, :, columns], causal)
            if turn == 0:
                out, total = part.float(), sums
            else:
                both = torch.logaddexp(total[:, :, rows], sums)
                out[:, :, rows] *= (total[:, :, rows] - both).exp()[..., None]
                out[:, :, rows] += part * (sums - both).exp()[..., None]
                total[:, :, rows] = both
            for work in works:
                work.wait()
            kv = coming
        out = out.to(q.dtype)
        ctx.save_for_backward(q, mine, out, total)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of keys and values travel behind these, and one turn more, home."""
        q, kv, out, total = ctx.saved_tensors
        ring, half = ctx.ring, q.shape[2] // 2
        dq, dkv, travelling = torch.zeros_like(q), torch.zeros_like(kv), []
        for turn in range(ring.size):
            coming, works = ring.shift(kv) if turn < ring.size - 1 else (kv, [])
            rows, columns, causal = ring.seen(turn, half)
            here = (each[:, :, rows] for each in (dy, q, out, total))
            gradients = _flash_backward(*here, *kv[:, :, :, columns], causal)
            dq[:, :, rows] += gradients[0]
            for work in travelling:
                work.wait()
            dkv[:, :, :, columns] += torch.stack(gradients[1:])
            dkv, travelling = ring.shift(dkv)
            for work in works:
                work.wait()
            kv = coming
        for work in travelling:
            work.wait()
        return dq, dkv, None


def _flash(q: Any, k: Any, v: Any, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithm of each row's sum of exponentials, [batch, heads, part]."""
    if q.device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled():
        out, sums, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        sums = sums.view(q.shape[:3])  # [batch, heads, part, 1]
    elif q.device.type == "cuda":
        out, sums, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, sums


def _flash_backward(
    dy: Any, q: Any, out: Any, sums: Any, k: Any, v: Any, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if q.device.type != "cuda":
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, out, sums, 0.0, causal)
        return gradients
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout, of which there is none
    lengths = (None, None, q.shape[2], k.shape[2])
    if torch.backends.cuda.cudnn_sdp_enabled():
        sums = sums.unsqueeze(-1).contiguous()
        saved = (dy.contiguous(), q, k, v, out.contiguous(), sums, seed, seed, None)
        return aten._scaled_dot_product_cudnn_attention_backward(*saved, *lengths, 0.0, causal)
    return aten._scaled_dot_product_flash_attention_backward(dy, q, k, v, out, sums, *lengths, 0.0, causal, seed, seed)
