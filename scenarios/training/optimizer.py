"""AdamW on float32 copies of 16-bit parameters, with gradients summed in one buffer, as Megatron-LM keeps them.

Whole on every data parallel rank (all_reduce), or a share on each (ZeRO-1: reduce_scatter, then all_gather).
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stages import all_gather, reduce_scatter

BUCKET = 40_000_000
"""Elements of a bucket (Megatron-LM: max(40,000,000, 1,000,000 * dp))."""
DDP_BUCKET = 25 * 2**20
"""Bytes of a bucket of 16-bit gradients (nanotron's `ddp_bucket_cap_mb`, and DistributedDataParallel's default)."""


class Bucket:
    """Parameters whose gradients travel together."""

    def __init__(
        self, params: list[nn.Parameter], group: Any, share: bool, dtype: torch.dtype, ddp: bool, whole: bool
    ) -> None:
        self.params, self.group, self.share, self.whole = params, group, share, whole
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        device = params[0].device
        numel = sum(p.numel() for p in params)
        pad = -numel % self.size if share and not whole else 0
        self.gradient = torch.zeros(numel + pad, dtype=dtype, device=device)
        self.ddps = torch.zeros(numel, dtype=params[0].dtype, device=device) if ddp and self.size > 1 else None
        flat = share and not whole
        self.weight = torch.zeros(numel + pad, dtype=params[0].dtype, device=device) if flat else None
        self.views, start = [], 0
        for p in params:
            self.views.append(self.gradient[start : start + p.numel()].view_as(p))
            if self.weight is not None:
                place = self.weight[start : start + p.numel()].view_as(p)
                place.copy_(p.detach())
                p.data = place
            start += p.numel()
        self.missing, self.work = len(params), None

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's share of a buffer."""
        each = flat.numel() // self.size
        return flat[self.rank * each : (self.rank + 1) * each]

    def share_sizes(self) -> list[int]:
        """Elements of each parameter on a rank where every parameter is cut for itself; the last ranks have fewer."""
        return [-(-p.numel() // self.size) for p in self.params]

    def pieces(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's shares of *tensors*, one for each parameter, where every parameter is cut for itself."""
        sizes = self.share_sizes()
        flats = [tensor.detach().view(-1) for tensor in tensors]
        return [flat[self.rank * n : (self.rank + 1) * n] for flat, n in zip(flats, sizes, strict=True)]

    def reduce(self) -> None:
        if self.size == 1:
            return
        if self.share and not self.whole:
            out = self.mine(self.gradient)
            self.work = reduce_scatter(out, self.gradient, group=self.group, async_op=True)
        else:
            self.work = dist.all_reduce(self.gradient, group=self.group, async_op=True)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work, self.missing = None, len(self.params)


class Optimizer:
    """*parts*: parameters and the group over which they are equal, the widest group first.

    *model*: the groups that cut the model itself, for the norm.

    Gradients add up over backward passes in float32; in the parameters' type if that is fp16, or where *in_16_bits*
    (Megatron-LM's --grad-reduce-in-bf16). With *overlap* each bucket is reduced as soon
    as the last micro-batch has its gradients, else all of them in step(). *ddp*: it is DistributedDataParallel's hook
    that does so, as in nanotron, and its own buckets of 16-bit gradients are there as well. *late*: 16-bit gradients
    stay until their backward pass has ended and after_backward() is called (nanotron's FP32GradientAccumulator); where
    no DDP reduces them, they are then summed in one call, whole even where each rank needs a share.
    """

    def __init__(
        self,
        parts: list[tuple[list[nn.Parameter], Any]],
        *,
        model: tuple[Any, ...] = (),
        tp: Any = None,
        share: bool,
        overlap: bool,
        ddp: bool = False,
        late: bool = False,
        in_16_bits: bool = False,
        lr: float = 3e-4,
    ) -> None:
        self.overlap, self.share, self.ddp, self.late, self.last = overlap, share, ddp, late, False
        self.model, self.tp = model, tp
        self.fp16 = parts[0][0][0].dtype == torch.float16
        self.scale = 65536.0 if self.fp16 else 1.0
        self.dtype = parts[0][0][0].dtype if self.fp16 or in_16_bits else torch.float32
        self.buckets = [bucket for params, group in parts for bucket in self._buckets(params, group)]
        self.norm_groups = [*model, parts[0][1]] if share else list(model)
        self.cut = [p for params, _ in parts for p in params if getattr(p, "cut_sequence", False)]
        self.masters = [master for bucket in self.buckets for master in self._masters(bucket)]
        fused = self.masters[0].device.type == "cuda"
        self.adamw = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)

    def _masters(self, bucket: Bucket) -> list[torch.Tensor]:
        if not bucket.whole:
            source = [bucket.mine(bucket.weight)] if self.share else bucket.params
            return [part.detach().float().clone() for part in source]
        parts = bucket.pieces(bucket.params) if self.share else [p.detach() for p in bucket.params]
        flat = torch.empty(sum(part.numel() for part in parts), device=parts[0].device)
        masters = flat.split([part.numel() for part in parts])
        torch._foreach_copy_(list(masters), [part.flatten() for part in parts])
        return [master.view_as(part) for master, part in zip(masters, parts, strict=True)]

    def _buckets(self, params: list[nn.Parameter], group: Any) -> list[Bucket]:
        whole = self.late and not self.ddp
        if self.ddp:
            limit = DDP_BUCKET / params[0].element_size()
        else:
            limit = inf if whole else max(BUCKET, 1_000_000 * dist.get_world_size(group))
        made, some = [], []
        for p in reversed(params):
            some.append(p)
            if sum(q.numel() for q in some) >= limit:
                made.append(some)
                some = []
        buckets = [Bucket(some, group, self.share, self.dtype, self.ddp, whole) for some in [*made, some] if some]
        for bucket in buckets:
            for p, view in zip(bucket.params, bucket.views, strict=True):
                p.register_post_accumulate_grad_hook(self._arrival(bucket, view))
                p.main_grad = view
        return buckets

    def _arrival(self, bucket: Bucket, view: torch.Tensor) -> Any:
        def arrived(p: torch.Tensor) -> None:
            if self.late and not (self.ddp and self.last):
                return
            view.add_(p.grad)
            if not self.late:
                p.grad = None
            if self.last:
                bucket.missing -= 1
                if not bucket.missing and self.overlap:
                    bucket.reduce()

        return arrived

    def zero_grad(self) -> None:
        self.last = False
        for bucket in self.buckets:
            bucket.gradient.zero_()

    def expect_last(self) -> None:
        """The next backward pass is the last before step()."""
        self.last = True

    @torch.no_grad()
    def after_backward(self) -> None:
        """Take the gradients of a backward pass that has ended; of a rank's other model chunks there are none."""
        for bucket in self.buckets if self.late else ():
            for p, view in zip(bucket.params, bucket.views, strict=True):
                if p.grad is None:
                    continue
                if not (self.ddp and self.last):
                    view.add_(p.grad)
                p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        if self.cut:  # norms saw a part of the sequence each
            both = torch.cat([p.main_grad.flatten() for p in self.cut])
            dist.all_reduce(both, group=self.tp)
            split = both.split([p.numel() for p in self.cut])
            torch._foreach_copy_([p.main_grad.flatten() for p in self.cut], split)
        for bucket in self.buckets:
            if not self.overlap or bucket.missing:
                bucket.reduce()
        for bucket in self.buckets:
            bucket.wait()
        gradients = []
        for bucket in self.buckets:
            if self.share:
                whole = bucket.whole
                gradients += bucket.pieces(bucket.views) if whole else [bucket.mine(bucket.gradient)]
            else:
                gradients += bucket.views
        if self.dtype != torch.float32:
            gradients = [gradient.float() for gradient in gradients]
        if self.fp16:
            torch._foreach_mul_(gradients, 1.0 / self.scale)
        square = torch.stack(torch._foreach_norm(gradients)).square().sum()
        for group in self.norm_groups:
            dist.all_reduce(square, group=group)
        norm = square.sqrt()
        if self.fp16 and not torch.isfinite(norm).item():
            self.scale /= 2
            return
        torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.adamw.step()
        for master in self.masters:
            master.grad = None
        self._copy_back()

    def _copy_back(self) -> None:
        """The 16-bit parameters anew; shares come from their owners."""
        if not self.share:
            torch._foreach_copy_([p.detach() for bucket in self.buckets for p in bucket.params], self.masters)
            return
        if self.buckets[0].whole:
            return self._gather_pieces()
        torch._foreach_copy_([bucket.mine(bucket.weight) for bucket in self.buckets], self.masters)
        works = []
        for bucket in self.buckets:
            if bucket.size > 1:
                mine = bucket.mine(bucket.weight)
                works.append(all_gather(bucket.weight, mine, group=bucket.group, async_op=True))
        for work in works:
            work.wait()

    def _gather_pieces(self) -> None:
        """As nanotron (distributed.py, all_gather_coalesced): all pieces of a rank in one tensor, and back.

        A buffer per rank, filled before, which all_gather of a list fills again from one more of them all: both take
        the memory of the parameters. nanotron copies the piece of every rank by itself. Here one operator takes them
        all, so that the host launches as many kernels on 512 replicas as on two.
        """
        masters = iter(self.masters)
        for bucket in self.buckets:
            mine, sizes = bucket.pieces(bucket.params), bucket.share_sizes()
            torch._foreach_copy_(mine, [next(masters) for _ in mine])
            if bucket.size == 1:
                continue
            sent = mine[0].new_zeros(sum(sizes))
            ends = [part[: piece.numel()] for part, piece in zip(sent.split(sizes), mine, strict=True)]
            torch._foreach_copy_(ends, mine)
            received = list(torch._foreach_mul([sent] * bucket.size, 1))
            dist.all_gather(received, sent, group=bucket.group)
            for p, parts in zip(bucket.params, torch.stack(received).split(sizes, dim=1), strict=True):
                p.view(-1).copy_(parts.flatten()[: p.numel()])
