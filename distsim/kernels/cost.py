"""What an operator costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["NOTHING", "Cost"]


@dataclass(frozen=True, slots=True)
class Cost:
    """One operator on an otherwise idle device, all its kernels together."""

    seconds: float
    """From the first kernel's begin to the last one's end, the gaps between them included."""
    kernels: int
    """How many it launches; 0 for a view."""
    flops: int
    """What the model asks for, not what a kernel wastes on padding."""
    nbytes: int
    """To and from device memory."""
    kind: str
    """gemm, attention, conv, norm, softmax, elementwise, reduction, embedding, optimizer, copy, index, random, sort,
    transfer (over PCIe), custom or none."""
    memory_bound: bool

    def plus(self, other: Cost) -> Cost:
        """One after the other; the kind is that of the longer."""
        longer = self if self.seconds >= other.seconds else other
        return replace(
            longer,
            seconds=self.seconds + other.seconds,
            kernels=self.kernels + other.kernels,
            flops=self.flops + other.flops,
            nbytes=self.nbytes + other.nbytes,
        )


NOTHING = Cost(0.0, 0, 0, 0, "none", False)
"""A view: the device never hears of it."""
