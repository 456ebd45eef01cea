"""PyTorch's caching allocator on a device that is not there: what is allocated, what is reserved, and when it is full.

The rules and constants are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13) with its default settings: sizes are
rounded to 512 bytes; up to 1 MiB they share segments of 2 MiB, up to 10 MiB segments of 20 MiB, larger ones have a
segment of their own, rounded to 2 MiB; the smallest free block that fits is taken, of the same stream, and split where
enough is left; a freed block is joined with its free neighbours; segments go back to the device only when it is full.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

__all__ = ["Allocator", "Block", "Full", "rounded"]

MIB = 1 << 20
MIN_BLOCK = 512
SMALL = MIB
"""The largest size of the small pool (kSmallSize)."""
SMALL_SEGMENT = 2 * MIB
"""kSmallBuffer."""
LARGE_SEGMENT = 20 * MIB
"""kLargeBuffer, for sizes below `OWN_SEGMENT`."""
OWN_SEGMENT = 10 * MIB
"""kMinLargeAlloc."""
ROUND_LARGE = 2 * MIB
"""kRoundLarge."""


class Full(Exception):
    """No room for *nbytes*, also after all cached segments went back."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment."""

    address: int
    size: int
    stream: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    asked: int = 0
    """Bytes that were asked for; 0: free."""


@dataclass(slots=True)
class Pool:
    """Free blocks of one size class."""

    free: list[tuple[int, int, int]] = field(default_factory=list)
    """(stream, size, address), sorted: the smallest that fits is found by bisection."""


def rounded(nbytes: int) -> int:
    """What an allocation of *nbytes* takes (`round_size`)."""
    return MIN_BLOCK if nbytes < MIN_BLOCK else -(-nbytes // MIN_BLOCK) * MIN_BLOCK


def _segment(size: int) -> int:
    """What is asked of the device for a block of *size* (`get_allocation_size`)."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class Allocator:
    """One device's memory as one process sees it. *capacity*: bytes that are left to it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.allocated = 0
        """Bytes of blocks in use (torch.cuda.memory_allocated)."""
        self.requested = 0
        """Bytes that were asked for."""
        self.reserved = 0
        """Bytes of segments (torch.cuda.memory_reserved)."""
        self.peak_allocated = 0
        self.peak_reserved = 0
        self._before = (0, 0)
        """The peaks before they were reset."""
        self.num_allocations = 0
        self.num_retries = 0
        """How often all cached segments went back because one was needed (num_alloc_retries)."""
        self._pools = {True: Pool(), False: Pool()}
        self._blocks: dict[int, Block] = {}
        """Free blocks by address."""
        self._next = 0

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """A block of at least *nbytes*, for use on *stream*. Raises `Full`."""
        size = rounded(nbytes)
        small = size <= SMALL
        block = self._take(size, stream, small)
        if block is None:
            block = self._grow(_segment(size), stream, small)
            if block is None:
                self.empty_cache()
                self.num_retries += 1
                block = self._grow(_segment(size), stream, small)
                if block is None:
                    raise Full(nbytes)
        left = block.size - size
        if left >= MIN_BLOCK if small else left > SMALL:
            rest = Block(block.address + size, left, stream, small, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        block.asked = max(1, nbytes)
        self.num_allocations += 1
        self.requested += nbytes
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """*block* may be given to others; with its free neighbours it is one again."""
        self.allocated -= block.size
        self.requested -= block.asked
        block.asked = 0
        for other in (block.before, block.after):
            if other is not None and not other.asked:
                self._remove(other)
                block = _joined(block, other)
        self._put(block)

    def empty_cache(self) -> None:
        """Segments without a block in use go back to the device."""
        for block in [b for b in self._blocks.values() if b.before is None and b.after is None]:
            self._remove(block)
            self.reserved -= block.size

    def reset_peaks(self) -> None:
        """torch.cuda.reset_peak_memory_stats."""
        self._before = self.highest
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    @property
    def highest(self) -> tuple[int, int]:
        """The most bytes ever allocated and reserved, whatever the program has reset."""
        return max(self._before[0], self.peak_allocated), max(self._before[1], self.peak_reserved)

    @property
    def free_in_segments(self) -> int:
        """Bytes that are reserved and not in use."""
        return self.reserved - self.allocated

    def _take(self, size: int, stream: int, small: bool) -> Block | None:
        free = self._pools[small].free
        place = bisect_left(free, (stream, size, -1))
        if place == len(free) or free[place][0] != stream:
            return None
        return self._blocks.pop(free.pop(place)[2])

    def _grow(self, size: int, stream: int, small: bool) -> Block | None:
        if self.reserved + size > self.capacity:
            return None
        block = Block(self._next, size, stream, small)
        self._next += size
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _put(self, block: Block) -> None:
        insort(self._pools[block.small].free, (block.stream, block.size, block.address))
        self._blocks[block.address] = block

    def _remove(self, block: Block) -> None:
        free = self._pools[block.small].free
        del free[bisect_left(free, (block.stream, block.size, block.address))]
        del self._blocks[block.address]


def _joined(block: Block, other: Block) -> Block:
    """One block of two neighbours."""
    first, second = (block, other) if block.address < other.address else (other, block)
    first.size += second.size
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    return first
