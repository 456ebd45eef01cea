"""InternEvo's HybridZeroOptimizer: gradients stay in 16 bits, and each rank updates some parameters as a whole.

Source: InternLM/InternLM at 20fe5ac, internlm/solver/optimizer/hybrid_zero_optim.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

BUCKET = 512 * 2**20
"""Elements of a bucket (`reduce_bucket_size` of its configs/7B_sft.py)."""


class HybridZero:
    """AdamW on float32 copies of the parameters that this rank owns among *owners* (`zero1` in InternEvo).

    The last backward pass sums gradients over *equal*, the data parallel group, by an all_reduce for each full bucket,
    on a stream of its own; the host waits for the one before. Owners broadcast what they have updated.
    """

    scale = 1.0

    def __init__(self, parameters: list[nn.Parameter], equal: Any, owners: Any, model: tuple[Any, ...]) -> None:
        self.parameters, self.equal, self.owners, self.norm_groups = parameters, equal, owners, (*model, owners)
        self.last, self.bucket, self.filled = False, [], 0
        self.cuda = parameters[0].is_cuda
        self.stream = torch.cuda.Stream() if self.cuda else None
        shares = self._shares()
        self.mine = shares[dist.get_rank(owners)]
        self.flats = [self._flat(share) for share in shares]
        own = self.flats[dist.get_rank(owners)]
        self.master = None if own is None else own.float()
        settings = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
        self.adamw = None if self.master is None else torch.optim.AdamW([self.master], **settings)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def _shares(self) -> list[list[nn.Parameter]]:
        """The parameters of each owner: the largest first, to the owner with the fewest elements; some have none."""
        shares: list[list[nn.Parameter]] = [[] for _ in range(dist.get_world_size(self.owners))]
        elements = [0] * len(shares)
        for parameter in sorted(self.parameters, key=lambda p: p.numel(), reverse=True):
            owner = elements.index(min(elements))
            shares[owner].append(parameter)
            elements[owner] += parameter.numel()
        return shares

    @torch.no_grad()
    def _flat(self, share: list[nn.Parameter]) -> torch.Tensor | None:
        """One tensor of an owner's parameters, of which they become views."""
        if not share:
            return None
        flat = flatten([p.detach() for p in share])
        for p, view in zip(share, unflatten(flat, share), strict=True):
            p.data = view
        return flat

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self.last:
            return
        if self.filled + parameter.numel() > BUCKET:
            self._reduce()
        self.bucket.append(parameter.grad)
        self.filled += parameter.numel()

    def _reduce(self) -> None:
        """Sum the gradients of the bucket over the replicas while backward goes on."""
        if not self.bucket:
            return
        if self.cuda:
            torch.cuda.synchronize()
        with torch.cuda.stream(self.stream) if self.cuda else nullcontext():
            flat = flatten(self.bucket)
            dist.all_reduce(flat, group=self.equal)
            torch._foreach_copy_(self.bucket, list(unflatten(flat, self.bucket)))
        self.bucket, self.filled = [], 0

    def zero_grad(self) -> None:
        self.last = False
        for parameter in self.parameters:
            parameter.grad = None

    def expect_last(self) -> None:
        """The next backward pass is the last before step()."""
        self.last = True

    def after_backward(self) -> None:
        """Nothing: autograd adds gradients up where they are."""

    @torch.no_grad()
    def step(self) -> None:
        self._reduce()
        if self.cuda:
            torch.cuda.synchronize()
        gradients = [p.grad for p in self.mine]
        self.zero_grad()
        self._refuse_overflow(gradients)
        square = torch.zeros((), device=self.parameters[0].device)
        if gradients:
            square = torch.stack(torch._foreach_norm([g.float() for g in gradients])).square().sum()
        for group in self.norm_groups:
            dist.all_reduce(square, group=group)
        norm = square.sqrt().item()
        if self.master is not None:
            self.master.grad = flatten(gradients).float()
            gradients.clear()
            self.master.grad.mul_(1.0 / max(1.0, norm + 1e-6))
            self.adamw.step()
            self.master.grad = None
            self.flats[dist.get_rank(self.owners)].copy_(self.master)
        sent = [(rank, flat) for rank, flat in enumerate(self.flats) if flat is not None]
        works = [dist.broadcast(flat, group=self.owners, group_src=rank, async_op=True) for rank, flat in sent]
        for work in works:
            work.wait()

    def _refuse_overflow(self, gradients: list[torch.Tensor]) -> None:
        """Look at the sum of every gradient on the host, as it does in bfloat16, too."""
        overflow = torch.zeros(1, device=self.parameters[0].device)
        for gradient in gradients:
            total = gradient.float().sum().item()
            if total in (float("inf"), float("-inf")) or total != total:
                overflow.fill_(1.0)
                break
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        if overflow.item():
            raise RuntimeError("a gradient is not finite")
