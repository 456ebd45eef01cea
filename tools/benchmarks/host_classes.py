"""The classes of host work that need no GPU: what of the constants of distsim/kernels/gpu.py is Python.

    python -m tools.benchmarks.host_classes

The last line counts what an eager layer of a Llama launches for one token, as gpt-fast's first version does: the
denominator of the published time of an operator.

Peer: the constants themselves, which are scaled from an EPYC 7003. Aim: within a factor of 1.5 of them on such a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tools.benchmarks.arguments import Arguments

ROUNDS, CALLS, CHAIN = 15, 500, 40


class _Clone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].clone()


def best_s(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Seconds of one call, in the fastest of `ROUNDS` rounds."""
    fastest = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        fastest = min(fastest, (time.perf_counter() - began) / calls)
    return fastest


def chained_s(step: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor) -> float:
    """Seconds of *step*, forward and backward, in a chain of `CHAIN`."""

    def run(length: int) -> None:
        y = weight
        for _ in range(length):
            y = step(y)
        y.sum().backward()
        weight.grad = None

    return (best_s(lambda: run(CHAIN), 50) - best_s(lambda: run(0), 50)) / CHAIN


class _Counts(TorchDispatchMode):
    """Operators that launch a kernel, and views."""

    kernels = views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = func.is_view or func in (torch.ops.aten._unsafe_view.default, torch.ops.aten.detach.default)
        self.views += view
        self.kernels += not view
        return func(*args, **(kwargs or {}))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    up = x.float()
    return (up * torch.rsqrt((up * up).mean(-1, keepdim=True) + 1e-5)).type_as(x) * weight


def _rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs, turns = x.float().reshape(*x.shape[:-1], -1, 2), turns.view(1, 1, 1, -1, 2)
    real = pairs[..., 0] * turns[..., 0] - pairs[..., 1] * turns[..., 1]
    imaginary = pairs[..., 1] * turns[..., 0] + pairs[..., 0] * turns[..., 1]
    return torch.stack([real, imaginary], -1).flatten(3).type_as(x)


def layer_counts() -> tuple[int, int]:
    """Kernels and views of one eager layer for one token: two norms, attention over a static cache, a gated MLP."""
    heads, dim = 4, 16
    width = heads * dim

    def ones(*size: int) -> torch.Tensor:
        return torch.ones(*size, dtype=torch.bfloat16)

    x, norm, turns = ones(1, 1, width), ones(width), ones(dim // 2, 2)
    square, wide, tall = ones(width, width), ones(3 * width, width), ones(width, 3 * width)
    caches = [ones(1, heads, 8, dim) for _ in range(2)]
    mask, position = torch.ones(1, 1, 1, 8, dtype=torch.bool), torch.tensor([3])
    with torch.no_grad(), _Counts() as counts:
        q, k, v = (part.view(1, 1, heads, dim) for part in F.linear(_norm(x, norm), wide).split(width, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in (_rotated(q, turns), _rotated(k, turns), v))
        for cache, new in zip(caches, (k, v), strict=True):
            cache[:, :, position] = new
        keys, values = (cache.repeat_interleave(1, dim=1) for cache in caches)
        with sdpa_kernel(SDPBackend.MATH):
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + F.linear(y.transpose(1, 2).contiguous().view(1, 1, width), square)
        y = _norm(x, norm)
        x = x + F.linear(F.silu(F.linear(y, wide)) * F.linear(y, wide), tall)
    return counts.kernels, counts.views


def main() -> None:
    """Print microseconds of each class."""
    Arguments(__doc__).parse_args()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    x, weight = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)

    def exchange() -> None:
        ops = [dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, x, 1)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    clone_s, function_s = chained_s(torch.clone, weight), chained_s(_Clone.apply, weight)
    rows = {
        "operator that autograd does not record": best_s(lambda: x * x),
        "operator that it records": best_s(lambda: weight * x),
        "view": best_s(lambda: weight.view(2, 8)),
        "operator and its node, forward and backward": clone_s,
        "autograd.Function with that operator both ways": function_s,
        "of it, beyond the operators": function_s - 2 * best_s(lambda: torch.clone(x)),
        "all_reduce, Python alone": best_s(lambda: dist.all_reduce(x)),
        "batch_isend_irecv of two messages, Python alone, a message": best_s(exchange) / 2,
    }
    for name, seconds in rows.items():
        print(f"{name:60s} {seconds * 1e6:6.1f} us")
    print("kernels {} and views {} of an eager layer".format(*layer_counts()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
