"""Prices on one GPU: bytes, matrix products, attention, copies over PCIe. What the rules call."""

from __future__ import annotations

from typing import Any

import torch

from distsim.kernels.attention import Attention, attention_seconds
from distsim.kernels.cost import Cost
from distsim.kernels.gemm import Gemm, gemm_seconds
from distsim.kernels.gpu_file import GpuFile

__all__ = ["Pricing", "math_dtype"]

_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
}


def math_dtype(dtype: Any) -> str:
    """What a matrix product of *dtype* is multiplied in; fp32 is tf32 where the program allows it, as of now.

    `fp32_precision` follows all the ways to allow it; reading `allow_tf32` raises where a program sets the former.
    """
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    if dtype.is_floating_point and dtype.itemsize == 1:
        return "fp8"
    return _DTYPES.get(dtype, "fp32")


class Pricing:
    """Of one GPU's data file."""

    def __init__(self, spec: GpuFile) -> None:
        self.spec = spec

    def bytes(self, nbytes: int, efficiency: float, kind: str, *, kernels: int = 1, flops: int = 0) -> Cost:
        """*nbytes* to and from memory at a share of its bandwidth, by so many kernels one after the other."""
        if not kernels:
            return Cost(0.0, 0, 0, 0, "none", False)
        seconds = kernels * self.spec.memory.floor + nbytes / (self.spec.chip.memory_bandwidth * efficiency)
        seconds += (kernels - 1) * self.spec.host.gap
        return Cost(seconds, kernels, flops, nbytes, kind, True)

    def gemm(self, gemm: Gemm, *, kind: str = "gemm", rate: float = 1.0, flops: int | None = None) -> Cost:
        """One matrix product; *rate* is what of a plain product's rate it gets."""
        seconds, kernels, memory_bound = gemm_seconds(self.spec.gemm, self.spec.chip, gemm)
        seconds = self.spec.gemm.floor + (seconds - self.spec.gemm.floor) / rate
        seconds += (kernels - 1) * self.spec.host.gap
        return Cost(seconds, kernels, gemm.flops if flops is None else flops, gemm.nbytes, kind, memory_bound)

    def attention(self, call: Attention, kernel: str, nbytes: int) -> Cost:
        """Fused attention by flash, cudnn or efficient. Backward first sums the output's gradient, and last turns
        the queries' gradient into 16 bits: two small kernels."""
        found = getattr(self.spec.attention, kernel)
        math = attention_seconds(found, self.spec.chip, call)
        memory = nbytes / (self.spec.chip.memory_bandwidth * self.spec.memory.elementwise)
        kernels = 3 if call.backward else 1
        seconds = max(math, memory) + kernels * self.spec.memory.floor + (kernels - 1) * self.spec.host.gap
        return Cost(seconds, kernels, call.flops, nbytes, "attention", memory > math)

    def transfer(self, nbytes: int, *, to_device: bool, pinned: bool) -> Cost:
        """A copy between host and GPU."""
        host = self.spec.host
        rate = (host.h2d if to_device else host.d2h) if pinned else min(host.pageable, host.h2d)
        return Cost(host.transfer_floor + nbytes / rate, 1, 0, nbytes, "transfer", True)
