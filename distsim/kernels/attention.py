"""How long fused attention takes: blocks of queries over blocks of keys, shared out to the multiprocessors."""

from __future__ import annotations

from dataclasses import dataclass

from distsim.kernels.gpu_file import AttentionKernel, ChipSpec

__all__ = ["Attention", "attention_seconds"]

_KEYS = 128
"""Keys of one block."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries against keys: *heads* counts those of the queries."""

    batch: int
    heads: int
    queries: int
    keys: int
    dim: int
    """Of queries and keys."""
    value_dim: int
    causal: bool = False
    backward: bool = False
    fp32: bool = False

    @property
    def pairs(self) -> int:
        """Query and key that meet, of one head; a causal mask, its queries the last ones, leaves about half."""
        if not self.causal:
            return self.queries * self.keys
        past = max(0, self.keys - self.queries)
        seen = min(self.queries, self.keys)
        return self.queries * past + seen * (seen + 1) // 2

    @property
    def flops(self) -> int:
        """Two products forward; five backward (the scores again, and four gradients), as FlashAttention counts."""
        forward = 2 * self.batch * self.heads * self.pairs * (self.dim + self.value_dim)
        return forward * 5 // 2 if self.backward else forward


def attention_seconds(kernel: AttentionKernel, chip: ChipSpec, call: Attention) -> float:
    """Seconds beyond the kernel's floor.

    A block of queries goes through its blocks of keys, and pays *overhead* blocks more for its begin and its end;
    with a causal mask the blocks on the diagonal are done whole. The device takes block after block; at the end the
    longest runs nearly alone (*tail*).
    """
    rate = _rate(kernel, call)
    overhead = kernel.overhead_backward if call.backward else kernel.overhead
    tail = kernel.tail_backward if call.backward else kernel.tail
    rows = _KEYS if call.backward else kernel.query_block  # backward's blocks are of keys, and as many
    blocks = -(-call.queries // rows)
    longest = -(-call.keys // _KEYS)
    ratio = rows / _KEYS
    if call.causal:
        first = max(0, call.keys - call.queries) / _KEYS
        work = (
            sum(min(longest, first + (block + 1) * ratio) for block in range(blocks))
            if blocks < 4096
            else (blocks * (first + (blocks + 1) / 2 * ratio))
        )
    else:
        work = float(blocks * longest)
    work += blocks * overhead
    work *= call.batch * call.heads
    longest_block = longest + overhead
    spread = work / chip.multiprocessors
    units = max(spread + tail * longest_block, longest_block)
    one = 2 * rows * _KEYS * (call.dim + call.value_dim) * (2.5 if call.backward else 1.0)
    return units * one * chip.multiprocessors / rate


def _rate(kernel: AttentionKernel, call: Attention) -> float:
    """Flops a second of a long sequence, on the whole device."""
    if call.backward:
        rate = kernel.backward_64 if call.dim <= 64 else kernel.backward
        rate *= kernel.wide_backward if call.dim > 128 else 1.0
    else:
        rate = kernel.forward_64 if call.dim <= 64 else kernel.forward
        rate *= kernel.wide if call.dim > 128 else 1.0
    return rate * (kernel.fp32 if call.fp32 else 1.0) * (kernel.causal if call.causal else 1.0)
