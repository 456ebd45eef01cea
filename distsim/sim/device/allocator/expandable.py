"""The caching allocator with `expandable_segments:True`: its segments grow by pages."""

from __future__ import annotations

from collections.abc import Mapping

from distsim.sim.device.allocator.allocator import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    SMALL_SEGMENT,
    Allocator,
    Block,
)

_ROOM = LARGE_SEGMENT << 20
"""Addresses that a new segment may grow into."""


def is_expandable(environ: Mapping[str, str]) -> bool:
    """Return whether the environment of a process asks for expandable segments (torch's AllocatorConfig)."""
    settings = environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    pairs = (part.partition(":") for part in settings.replace(" ", "").split(","))
    return {name: value for name, _, value in pairs}.get("expandable_segments") == "True"


class ExpandableAllocator(Allocator):
    """One device's memory with a segment for each stream and pool, which grows by pages.

    A page has 2 MiB in the small pool and 20 MiB in the large one. Memory that is short is taken from whole free pages,
    also between blocks in use, so that nothing is lost between segments (c10/cuda/CUDACachingAllocator.cpp:
    `ExpandableSegment`, `try_allocate_expandable_block`, `unmap_block`). A page that was given back leaves a hole in
    the addresses, and memory that comes later is at the end.
    """

    def _is_split(self, left: int, small: bool) -> bool:
        return left >= MIN_BLOCK

    def _new(self, size: int, stream: int, small: bool) -> Block | None:
        """Return a free block of at least *size* at the end of its segment, which grows."""
        end = self._end(stream, small)
        tail = end if end is not None and not end.requested else None
        page = _page(small)
        grown = -(-(size - (tail.size if tail else 0)) // page) * page
        if not self._fits(grown):
            return None
        if tail is not None:
            self._remove(tail)
            tail.size += grown
            block = tail
        elif end is not None:
            block = Block(end.address + end.size, grown, stream, small, end)
            end.after = block
        else:
            block = self.segments[self._next] = Block(self._next, grown, stream, small)
            self._next += _ROOM
        self._reserve(grown, small)
        return block

    def _end(self, stream: int, small: bool) -> Block | None:
        """Return the last block of the segment; its parts between holes are `segments` of their own."""
        parts = [address for address, one in self.segments.items() if (one.stream, one.small) == (stream, small)]
        block = self.segments[max(parts)] if parts else None
        while block is not None and block.after is not None:
            block = block.after
        return block

    def empty_cache(self) -> None:
        """Return every free page to the device."""
        for block in list(self._blocks.values()):
            page = _page(block.small)
            begin, end = -(-block.address // page) * page, (block.address + block.size) // page * page
            if begin < end:
                self._unmap(block, begin, end)

    def _unmap(self, block: Block, begin: int, end: int) -> None:
        """Return the pages of the free *block* from address *begin* to *end*; what is left of it stays free."""
        self._remove(block)
        stream, small, last, after = block.stream, block.small, block.address + block.size, block.after
        left = block if block.address < begin else None
        right = Block(end, last - end, stream, small, None, after) if end < last else None
        if left is not None:
            left.size, left.after = begin - left.address, None
            self._put(left)
        else:
            self.segments.pop(block.address, None)
            if block.before is not None:
                block.before.after = None
        if after is not None:
            after.before = right
        first = right or after
        if first is not None:
            self.segments[first.address] = first
        if right is not None:
            self._put(right)
        self._reserve(begin - end, small)

    def _reserve(self, nbytes: int, small: bool) -> None:
        for tally in (self.all.reserved_bytes, self.of_pool[small].reserved_bytes):
            tally.current += nbytes
            tally.peak = max(tally.peak, tally.current)
            tally.allocated += max(0, nbytes)
            tally.freed += max(0, -nbytes)


def _page(small: bool) -> int:
    return SMALL_SEGMENT if small else LARGE_SEGMENT
