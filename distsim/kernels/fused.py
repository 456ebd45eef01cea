"""What torch's compiler makes of consecutive operators that only pass numbers through: one kernel.

Its inputs are read once and its outputs written once, at the bandwidth that the GPU's data file gives a plain kernel of
that sort; a kernel that goes over its rows twice (a norm's backward) reads its inputs twice. It is never dearer than
its operators one by one. What a host does for a compiled graph was measured: meta-pytorch/tritonbench pull request 1016
has 33 us for a compiled function of one empty kernel, of it 6.5 us the kernel's launcher and 12 us all that lies below
the compiled graph; pytorch/pytorch issue 191753 has 0.89 ms for the guards of qwen3-8b, which has 399 parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distsim.kernels.cost import Cost

if TYPE_CHECKING:
    from distsim.kernels.gpu import Gpu

__all__ = ["BACKWARD_S", "FUSABLE", "GRAPH_S", "GUARD_S", "KERNEL_S", "MOST_FUSED", "fused_cost"]

FUSABLE = frozenset({"elementwise", "norm", "softmax", "reduction", "copy", "random"})
"""Kinds that merge; matrix products, attention, look-ups, sorts and optimizers stay kernels of their own."""
_REDUCING = frozenset({"norm", "softmax", "reduction"})
MOST_FUSED = 64
"""Operators of one kernel (`max_fusion_size` in torch/_inductor/config.py)."""
KERNEL_S = 6.5e-6
"""The host's, for each kernel of a compiled graph."""
GRAPH_S = 26.5e-6
"""The host's, for each call of a compiled function beside its kernels: 33 us less one kernel."""
GUARD_S = 2.2e-6
"""The host's, for each parameter of a compiled module and call: 0.89 ms for 399."""
BACKWARD_S = 5.5e-6
"""The host's, for each backward of a compiled function: the graph's own wrapper."""


def fused_cost(gpu: Gpu, parts: Sequence[Cost], read: int, written: int) -> Cost:
    """Of *parts* as one kernel that reads and writes so many bytes. One part alone stays what it is."""
    if len(parts) == 1:
        return parts[0]
    memory = gpu.spec.memory
    kinds = {part.kind for part in parts}
    share = memory.reduction if kinds & _REDUCING else memory.elementwise
    passes = max(part.kernels for part in parts)
    nbytes = passes * read + written
    seconds = passes * memory.floor + (passes - 1) * gpu.gap_s + nbytes / (gpu.memory_bandwidth * share)
    apart_s = sum(part.seconds for part in parts) + (len(parts) - 1) * gpu.gap_s
    longest = max(parts, key=lambda part: part.seconds)
    return Cost(min(seconds, apart_s), passes, sum(part.flops for part in parts), nbytes, longest.kind, True)
