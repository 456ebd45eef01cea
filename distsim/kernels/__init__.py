"""PROVISIONAL (dev only): replaced by branch `cost`."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry
__all__ = ["Cost", "Gpu"]
@dataclass(frozen=True, slots=True)
class Cost:
    seconds: float
    kernels: int
    flops: int
    nbytes: int
    kind: str
    memory_bound: bool
def _leaves(v: Any) -> Any:
    if isinstance(v, Tensor): yield v
    elif isinstance(v, (list, tuple)):
        for x in v: yield from _leaves(x)
class Gpu:
    host_op_s = 6e-6
    launch_s = 4e-6
    memory_bytes = 80 * 10**9
    context_bytes = 500 << 20
    name = "NVIDIA H100 80GB HBM3"
    multiprocessors = 132
    peak_flops = {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12, "fp64": 33.5e12}
    @classmethod
    def named(cls, model: str) -> "Gpu":
        return cls()
    def comm_load(self, channels: int) -> tuple[float, float]:
        return channels / 132, 0.05
    def cost(self, func: Any, args: Any, kwargs: Any, result: Any) -> Cost:
        formula = flop_registry.get(func._overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula else 0
        nbytes = sum(t.numel() * t.element_size() for t in (*_leaves(args), *_leaves(result)))
        s = max(3e-6, flops / 600e12, nbytes / 2.8e12)
        return Cost(s, 1, flops, nbytes, "gemm" if flops else "elementwise", flops == 0)
    def copy_cost(self, nbytes: int) -> Cost:
        return Cost(max(3e-6, nbytes / 2.8e12), 1, 0, nbytes, "copy", True)
    def transfer_cost(self, nbytes: int, to_host: bool, pinned: bool) -> Cost:
        return Cost(max(5e-6, nbytes / (55e9 if pinned else 12e9)), 1, 0, nbytes, "copy", False)
