"""Tensor parallelism by hand, as in Megatron-LM: what begins and ends a region whose ranks compute parts of a layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["AllToAll", "Copy", "Gather", "Reduce", "Scatter", "part"]


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def own_part(x: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's part of the sum."""
    return summed(x, group).chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()


def whole(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The parts of all ranks."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


class Copy(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return summed(grad, ctx.group), None


class Reduce(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Gather(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward (sequence parallel)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return whole(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return own_part(grad, ctx.group), None


class Scatter(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return own_part(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return whole(grad, ctx.group), None


class AllToAll(torch.autograd.Function):
    """An exchange of equal parts, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous())
        return out


def part(tensor: torch.Tensor, dim: int, parts: int, number: int) -> torch.nn.Parameter:
    """One of *parts* of a weight."""
    return torch.nn.Parameter(tensor.chunk(parts, dim)[number].clone())
