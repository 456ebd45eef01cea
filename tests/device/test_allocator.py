"""The caching allocator's rules, each by hand: sizes, segments, splitting, joining, and what is counted."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from distsim.sim.device.allocator import ExpandableAllocator, is_expandable
from distsim.sim.device.allocator.allocator import MIB, Allocator, Block, Full, rounded

GIB = 1 << 30
SIZES = {0: 512, 1: 512, 511: 512, 512: 512, 513: 1024, 1024: 1024, MIB: MIB, MIB + 1: MIB + 512, 5 * MIB - 1: 5 * MIB}
"""Asked for -> what it takes."""
SEGMENTS = {
    1: 2 * MIB,
    MIB: 2 * MIB,
    MIB + 1: 20 * MIB,
    10 * MIB - 512: 20 * MIB,
    10 * MIB: 10 * MIB,
    10 * MIB + 1: 12 * MIB,
    12 * MIB: 12 * MIB,
    21 * MIB: 22 * MIB,
}
"""The first allocation -> the segment that the device gives for it."""
LEFT = {
    # small pool: whatever is left is a block by itself
    MIB: 2 * MIB - MIB,
    512: 2 * MIB - 512,
    # large pool: only where more than 1 MiB is left
    20 * MIB - MIB: 0,
    20 * MIB - MIB + 512: 0,
    11 * MIB: 0,
    10 * MIB - 512: 10 * MIB + 512,
}
"""The first allocation -> bytes of its segment that are a free block of their own."""


def addresses(*blocks: Block) -> list[int]:
    return [block.address for block in blocks]


@pytest.mark.parametrize(("nbytes", "size"), SIZES.items())
def test_sizes_are_rounded_to_512_bytes(nbytes: int, size: int) -> None:
    """At least that many, and nothing more than the next multiple."""
    assert rounded(nbytes) == size
    allocator = Allocator(GIB)
    assert allocator.allocate(nbytes).size >= size
    assert allocator.requested == max(1, nbytes)


@pytest.mark.parametrize(("nbytes", "segment"), SEGMENTS.items())
def test_a_segment_goes_by_the_size_of_its_first_block(nbytes: int, segment: int) -> None:
    """2 MiB, 20 MiB, or as large as it is asked for, in steps of 2 MiB."""
    allocator = Allocator(GIB)
    allocator.allocate(nbytes)
    assert allocator.reserved == segment


@pytest.mark.parametrize(("nbytes", "left"), LEFT.items())
def test_a_block_is_split_where_enough_is_left(nbytes: int, left: int) -> None:
    """Else the program has the whole block, and it counts as allocated."""
    allocator = Allocator(GIB)
    block = allocator.allocate(nbytes)
    assert allocator.all.inactive_split_bytes.current == left
    assert block.size == allocator.reserved - left == allocator.allocated
    assert allocator.free_in_segments == left
    assert (block.after is None) == (left == 0)


def test_a_block_of_the_large_pool_is_split_above_one_mib() -> None:
    """At exactly one MiB left it is not, at 512 bytes more it is."""
    for nbytes, parts in ((19 * MIB, 1), (19 * MIB - 512, 2)):
        allocator = Allocator(GIB)
        allocator.free(allocator.allocate(20 * MIB))
        block = allocator.allocate(nbytes)
        assert allocator.reserved == 20 * MIB
        assert (block.after is not None) == (parts == 2)
        assert allocator.allocated == (20 * MIB if parts == 1 else nbytes)


def test_the_small_pool_splits_down_to_512_bytes() -> None:
    """A full segment has no free rest."""
    allocator = Allocator(GIB)
    first = allocator.allocate(MIB)
    second = allocator.allocate(MIB - 512)
    third = allocator.allocate(512)
    assert addresses(first, second, third) == [0, MIB, 2 * MIB - 512]
    assert third.after is None
    assert (allocator.reserved, allocator.free_in_segments) == (2 * MIB, 0)


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    """Of its own stream and pool, and an exact fit before a larger one."""
    allocator = Allocator(GIB)
    blocks = [allocator.allocate(size) for size in (4096, 512, 1024, 512, 2048, 512)]
    for block in blocks[::2]:
        allocator.free(block)
    assert addresses(allocator.allocate(1024)) == addresses(blocks[2])
    assert addresses(allocator.allocate(1500)) == addresses(blocks[4])
    assert addresses(allocator.allocate(2048)) == addresses(blocks[0])


def test_streams_and_pools_share_no_block() -> None:
    """Another stream, or a size of the other pool, takes a segment of its own."""
    allocator = Allocator(GIB)
    allocator.free(allocator.allocate(1024, stream=1))
    allocator.allocate(1024, stream=0)
    assert allocator.reserved == 4 * MIB
    allocator.allocate(1024, stream=1)
    assert allocator.reserved == 4 * MIB
    allocator.allocate(MIB + 1, stream=1)
    assert allocator.reserved == 24 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_free_neighbours_are_one_block_in_whatever_order_they_came_back(order: tuple[int, ...]) -> None:
    """The whole segment is one free block again, which a block of its size takes."""
    allocator = Allocator(GIB)
    blocks = [allocator.allocate(size) for size in (512, 1024, 2048)]
    for number in order:
        allocator.free(blocks[number])
    assert allocator.all.inactive_split.current == 0
    assert allocator.allocated == allocator.requested == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_a_neighbour_in_use_stays_a_block_by_itself() -> None:
    """What was free behind and before it are two blocks."""
    allocator = Allocator(GIB)
    first, middle, _ = (allocator.allocate(512) for _ in range(3))
    allocator.free(first)
    assert allocator.all.inactive_split.current == 2
    assert addresses(allocator.allocate(512)) == addresses(first)
    allocator.free(middle)
    assert allocator.all.inactive_split.current == 2
    assert addresses(allocator.allocate(512)) == addresses(middle)


def test_only_whole_segments_go_back_to_the_device() -> None:
    """One block in use keeps its segment, also where only the block behind or before it is free."""
    allocator = Allocator(GIB)
    first, second = allocator.allocate(MIB), allocator.allocate(MIB)
    other = allocator.allocate(30 * MIB)
    allocator.free(other)
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.reserved == 2 * MIB
    allocator.free(first)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.all.segment.freed, allocator.all.reserved_bytes.freed) == (0, 2, 32 * MIB)


def test_a_full_device_gives_its_cache_back_before_it_is_full() -> None:
    """One retry where that helps; out of memory where it does not, with what was asked for."""
    allocator = Allocator(40 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    held = allocator.allocate(12 * MIB, stream=1)
    assert (allocator.reserved, allocator.num_retries, allocator.num_out_of_memory) == (12 * MIB, 1, 0)
    assert allocator.allocate(28 * MIB).size == 28 * MIB  # to the last byte
    with pytest.raises(Full) as full:
        allocator.allocate(3)
    assert full.value.nbytes == 3
    assert (allocator.num_retries, allocator.num_out_of_memory) == (2, 1)
    assert allocator.allocated == 40 * MIB
    allocator.free(held)


def test_the_allowed_part_of_the_device_is_a_limit() -> None:
    """What set_per_process_memory_fraction leaves, or the capacity, whichever is less."""
    allocator = Allocator(40 * MIB)
    allocator.allowed = 20 * MIB
    allocator.allocate(20 * MIB)
    with pytest.raises(Full):
        allocator.allocate(20 * MIB)
    allocator.allowed = 80 * MIB
    allocator.allocate(20 * MIB)
    with pytest.raises(Full):
        allocator.allocate(20 * MIB)


def test_a_block_that_a_stream_still_uses_is_active_and_not_allocated() -> None:
    """It can be given to others once it is reclaimed."""
    allocator = Allocator(GIB)
    block = allocator.allocate(600)
    allocator.let_go(block)
    tallies = allocator.all
    assert (tallies.allocated_bytes.current, tallies.active_bytes.current, tallies.active.current) == (0, 1024, 1)
    assert allocator.allocate(600).address != block.address
    allocator.reclaim(block)
    assert (tallies.active_bytes.current, tallies.active.current) == (1024, 1)
    assert allocator.allocate(600).address == block.address


def test_what_is_counted() -> None:
    """Of both pools and of each: now, at most, came and went; peaks and totals are set back apart."""
    allocator = Allocator(GIB)
    small, large = allocator.allocate(1000), allocator.allocate(3 * MIB)
    allocator.free(small)
    tallies = {"all": allocator.all, "small": allocator.of_pool[True], "large": allocator.of_pool[False]}
    counted = {name: (t.allocation.as_dict(), t.allocated_bytes.as_dict()) for name, t in tallies.items()}
    assert counted == {
        "all": (
            {"current": 1, "peak": 2, "allocated": 2, "freed": 1},
            {"current": 3 * MIB, "peak": 3 * MIB + 1024, "allocated": 3 * MIB + 1024, "freed": 1024},
        ),
        "small": (
            {"current": 0, "peak": 1, "allocated": 1, "freed": 1},
            {"current": 0, "peak": 1024, "allocated": 1024, "freed": 1024},
        ),
        "large": (
            {"current": 1, "peak": 1, "allocated": 1, "freed": 0},
            {"current": 3 * MIB, "peak": 3 * MIB, "allocated": 3 * MIB, "freed": 0},
        ),
    }
    requested = allocator.all.requested_bytes.as_dict()
    assert requested == {"current": 3 * MIB, "peak": 3 * MIB + 1000, "allocated": 3 * MIB + 1000, "freed": 1000}
    assert tallies["small"].inactive_split.as_dict() == {"current": 0, "peak": 1, "allocated": 1, "freed": 1}
    assert (allocator.all.allocation.allocated, allocator.peak_allocated, allocator.peak_reserved) == (
        2,
        3 * MIB + 1024,
        22 * MIB,
    )
    allocator.reset_peaks()
    assert (allocator.peak_allocated, allocator.highest) == (3 * MIB, (3 * MIB + 1024, 22 * MIB))
    assert allocator.all.allocation.allocated == 2
    allocator.reset_totals()
    assert allocator.all.allocation.allocated == allocator.all.allocation.freed == 0
    assert allocator.allocated == 3 * MIB
    allocator.free(large)
    grown = allocator.allocate(50 * MIB)
    assert allocator.highest == (grown.size, 72 * MIB)


def test_retries_are_set_back_with_the_totals() -> None:
    """Both how often the cache went back and how often that did not help."""
    allocator = Allocator(MIB)
    with pytest.raises(Full):
        allocator.allocate(1)
    assert (allocator.num_retries, allocator.num_out_of_memory) == (1, 1)
    allocator.reset_totals()
    assert (allocator.num_retries, allocator.num_out_of_memory) == (0, 0)


def expandable(pages: int = 4) -> ExpandableAllocator:
    """A device of some pages of 20 MiB."""
    return ExpandableAllocator(pages * 20 * MIB)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:128, expandable_segments:True", True),
        ("expandable_segments:False", False),
        ("", False),
    ],
)
def test_the_environment_asks_for_expandable_segments(settings: str, expected: bool) -> None:
    """By both names of the variable."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        assert is_expandable({name: settings}) is expected


def test_an_expandable_segment_grows_by_pages() -> None:
    """Allocations lie one behind the other, and only pages that are needed are reserved."""
    memory = expandable()
    blocks = [memory.allocate(15 * MIB) for _ in range(3)]
    assert addresses(*blocks) == [0, 15 * MIB, 30 * MIB]
    assert memory.reserved == 60 * MIB
    small = memory.allocate(512)
    assert memory.reserved == 62 * MIB
    assert not 0 <= small.address < 80 * MIB
    assert len(memory.segments) == 2


def free_bytes(memory: Allocator) -> int:
    """Of the blocks that nothing holds."""
    total = 0
    for first in memory.segments.values():
        block: Block | None = first
        while block is not None:
            total += 0 if block.requested else block.size
            block = block.after
    return total


def test_free_pages_between_blocks_are_used_again() -> None:
    """Three free pages apart from each other hold 50 MiB, for which separate segments would have no room."""
    plain, memory = Allocator(6 * 20 * MIB), expandable(6)
    for one in (plain, memory):
        blocks = [one.allocate(20 * MIB) for _ in range(6)]
        for block in blocks[::2]:
            one.free(block)
    memory.allocate(50 * MIB)
    assert (memory.reserved, memory.allocated, memory.num_retries) == (120 * MIB, 110 * MIB, 1)
    with pytest.raises(Full):
        plain.allocate(64 * MIB)
    memory.empty_cache()
    assert free_bytes(memory) == memory.reserved - memory.allocated


@hypothesis.given(st.lists(st.integers(1, 60 * MIB), max_size=40), st.randoms(use_true_random=False))
@hypothesis.settings(max_examples=30, deadline=None)
def test_an_expandable_device_is_full_only_if_its_pages_are(sizes: list[int], chance: Any) -> None:
    """Blocks never share an address, every page is counted once, and nothing is left when all is given back."""
    memory, held, most = expandable(8), list[Block](), [0, 0, 0]
    tallies = [one.reserved_bytes for one in (memory.all, memory.of_pool[False], memory.of_pool[True])]
    for size in sizes:
        try:
            held.append(memory.allocate(size))
        except Full:
            assert memory.allocated + size > 4 * 20 * MIB
        if held and chance.random() < 0.5:
            memory.free(held.pop(chance.randrange(len(held))))
        most = [max(peak, tally.current) for peak, tally in zip(most, tallies, strict=True)]
        if chance.random() < 0.1:
            memory.empty_cache()
        assert [tally.peak for tally in tallies] == most
        assert [tally.allocated - tally.freed for tally in tallies] == [tally.current for tally in tallies]
        assert tallies[0].current == tallies[1].current + tallies[2].current
        ends = sorted((block.address, block.address + block.size) for block in held)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise([(0, 0), *ends]))
        assert memory.reserved == memory.allocated + free_bytes(memory)
        assert memory.reserved <= memory.capacity
    for block in held:
        memory.free(block)
    memory.empty_cache()
    assert all(tally.allocated == tally.freed >= tally.peak for tally in tallies)
    assert (memory.reserved, memory.allocated, memory.segments) == (0, 0, {})
