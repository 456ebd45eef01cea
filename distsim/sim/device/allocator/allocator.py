"""PyTorch's caching allocator on simulated memory, and a ledger of what the memory is used for."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# -- What a GPU's memory was taken for when most of it was in use.
#
# Every allocation has a tag. What it is for may be known only later (a gradient, when the optimizer looks at it): so
# what came and went is kept until the end of a step, and the moment of the peak is looked for then.
#
# The rule, first match: optimizer (its state, and what was allocated while it made its step), gradients (`.grad` of
# what it updates), parameters, communication (what a collective reads or writes, tensor-parallel ones excepted, and
# what `storage.resize_` brings back: FSDP's gathered parameters), activations (all that is allocated from the first
# forward on), other (before).

KINDS = ("parameters", "gradients", "optimizer", "activations", "communication", "other")
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION, OTHER = KINDS

MOST_POINTS = 240
"""Number of points of a memory curve, about as many as a page shows."""
ALIKE = 0.8
"""If the peak of the step with named allocations is at least this fraction of the peak, its names are used for the
peak.
"""


class Tag:
    """One allocation."""

    __slots__ = ("alive", "kind", "module", "nbytes", "site")

    def __init__(self, nbytes: int, kind: str, module: str = "", site: Any = None) -> None:
        self.nbytes = nbytes
        self.kind = kind
        self.module = module
        """Module in which the memory was allocated, if known (modules.py)."""
        self.site = site
        """Line, operator and tensor of the allocation (`claims.py`); None if sites are not kept."""
        self.alive = False
        """Whether the allocation exists at the position up to which the ledger was read."""


class Ledger:
    """Allocations of one device in one process."""

    def __init__(self) -> None:
        self.kind = OTHER
        """Kind of the memory that is allocated now."""
        self.module = ""
        self.named = False
        """Whether allocations record `module`."""
        self.peak: dict[str, int] = dict.fromkeys(KINDS, 0)
        """Bytes by kind when most were in use."""
        self.peak_curve: list[dict[str, int]] = []
        """Bytes by kind over the step that contains the peak."""
        self.peak_modules: dict[str, int] = {}
        """Bytes at the peak by module, from the step with named allocations if a later one needs little more."""
        self.site_of: Callable[[], Any] | None = None
        """Returns the site of the allocation that is being made; None: sites are not kept."""
        self.shape: tuple[Any, Any] | None = None
        """Size and dtype of the tensor that is being made."""
        self.peak_sites: dict[tuple[str, Any], list[int]] = {}
        """Bytes of `peak` and number of allocations, by kind and site."""
        self._named_bytes = 0
        self.peak_bytes = 0
        self.in_use = self.most = 0
        """Bytes now, and the most since `settle`."""
        self._events: list[Tag] = []
        """Tags as they came (the first time) and went (the second)."""
        self._alive: list[Tag] = []

    def born(self, nbytes: int) -> Tag:
        tag = Tag(nbytes, self.kind, self.module, None if self.site_of is None else self.site_of())
        self._events.append(tag)
        self.in_use += nbytes
        if self.in_use > self.most:
            self.most = self.in_use
        return tag

    def died(self, tag: Tag) -> None:
        self._events.append(tag)
        self.in_use -= tag.nbytes

    @property
    def _beaten(self) -> int:
        """Return the threshold of a new peak; a peak with names counts as much as one without."""
        return self.peak_bytes - (1 if self.named else 0)

    @property
    def has_risen(self) -> bool:
        """Return whether more memory is or was in use since `settle` than ever before, so that tags matter."""
        return self.most > self._beaten

    def settle(self) -> None:
        """Find the peak among the recorded allocations, once all their tags are known."""
        peak_event = self._peak_at() if self.has_risen else None
        if peak_event is not None:
            self.peak_curve = self._curve()
        for number, tag in enumerate(self._events):
            if number == peak_event:
                self._look(self._events[:peak_event])
            tag.alive = not tag.alive
        if peak_event == len(self._events):
            self._look(self._events)
        seen: dict[int, Tag] = {id(tag): tag for tag in (*self._alive, *self._events) if tag.alive}
        self._alive = list(seen.values())
        self._events.clear()
        self.most = self.in_use

    def _peak_at(self) -> int | None:
        """Return the number of events at the peak; None if the previous peak was not exceeded."""
        now, peak_event, most = sum(tag.nbytes for tag in self._alive), None, self._beaten
        for number, (_, change) in enumerate(self._changes(), 1):
            now += change
            if now > most:
                peak_event, most = number, now
        return peak_event

    def _changes(self) -> Iterator[tuple[str, int]]:
        """Yield the kind of memory and the change in bytes of each recorded event."""
        on = {id(tag) for tag in self._alive}
        for tag in self._events:
            is_free = id(tag) in on
            on.add(id(tag))
            yield tag.kind, -tag.nbytes if is_free else tag.nbytes

    def _curve(self) -> list[dict[str, int]]:
        """Return the bytes in use by kind over the recorded events, in equal parts; each part shows its maximum."""
        now = self._held()
        total = sum(now.values())
        every = -(-len(self._events) // MOST_POINTS)
        points: list[tuple[int, dict[str, int]]] = []
        for number, (kind, change) in enumerate(self._changes()):
            now[kind] += change
            total += change
            if number % every == 0:
                points.append((total, {**now}))
            elif total > points[-1][0]:
                points[-1] = (total, {**now})
        return [by_kind for _, by_kind in points]

    def _look(self, events: list[Tag]) -> None:
        """Record a new peak after *events*."""
        tags = {id(tag): tag for tag in (*self._alive, *events) if tag.alive}.values()
        self.peak = dict.fromkeys(KINDS, 0)
        modules: dict[str, int] = {}
        for tag in tags:
            self.peak[tag.kind] += tag.nbytes
            modules[tag.module] = modules.get(tag.module, 0) + tag.nbytes
        self.peak_bytes = sum(self.peak.values())
        if self.named:
            self._named_bytes = self.peak_bytes
        if self.named or self._named_bytes < ALIKE * self.peak_bytes:
            self.peak_modules = modules
        if self.site_of is not None:
            self.peak_sites = {}
            for tag in tags:
                sums = self.peak_sites.setdefault((tag.kind, tag.site), [0, 0])
                sums[0] += tag.nbytes
                sums[1] += 1

    def now(self) -> dict[str, int]:
        """Return bytes in use by kind."""
        self.settle()
        return self._held()

    def _held(self) -> dict[str, int]:
        held = dict.fromkeys(KINDS, 0)
        for tag in self._alive:
            held[tag.kind] += tag.nbytes
        return held


# -- PyTorch's caching allocator on a device that is not there: what is allocated, what is reserved, and when it is
# full.
#
# The rules and constants are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13) with its default settings: sizes
# are rounded to 512 bytes; up to 1 MiB they share segments of 2 MiB, up to 10 MiB segments of 20 MiB, larger ones have
# a segment of their own, rounded to 2 MiB; the smallest free block that fits is taken, of the same stream, and split
# where enough is left; a freed block is joined with its free neighbours; segments go back to the device only when it
# is full.

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
    """Raised if there is no room for *nbytes* even after all cached segments were released."""

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
    requested: int = 0
    """Requested bytes; 0 for a free block."""
    tag: Tag | None = None
    """Purpose of the allocation."""


@dataclass(slots=True)
class Pool:
    """Free blocks of one size class."""

    free: list[tuple[int, int, int]] = field(default_factory=list)
    """(stream, size, address), sorted: the smallest that fits is found by bisection."""


def rounded(nbytes: int) -> int:
    """Return the size of an allocation of *nbytes* (`round_size`)."""
    return MIN_BLOCK if nbytes < MIN_BLOCK else -(-nbytes // MIN_BLOCK) * MIN_BLOCK


def _segment(size: int) -> int:
    """Return the size of the segment for a block of *size* (`get_allocation_size`)."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class Tally:
    """One of torch.cuda.memory_stats: how much there is, was at most, and came and went in all."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def as_dict(self) -> dict[str, int]:
        return {"current": self.current, "peak": self.peak, "allocated": self.allocated, "freed": self.freed}


class Tallies:
    """Counters of one pool, or of both."""

    __slots__ = (
        "active", "active_bytes", "allocated_bytes", "allocation", "inactive_split", "inactive_split_bytes",
        "requested_bytes", "reserved_bytes", "segment",
    )  # fmt: skip

    def __init__(self) -> None:
        self.allocation, self.allocated_bytes, self.requested_bytes = Tally(), Tally(), Tally()
        self.active, self.active_bytes = Tally(), Tally()
        """Counts that include blocks which a stream still uses after they were freed."""
        self.segment, self.reserved_bytes = Tally(), Tally()
        self.inactive_split, self.inactive_split_bytes = Tally(), Tally()
        """Free blocks that hold a part of a segment only."""

    def taken(self, size: int, wanted: int) -> None:
        """Count a block of *size* bytes that was allocated for *wanted* bytes."""
        _more(self.allocation, self.allocated_bytes, size)
        _more(self.active, self.active_bytes, size)
        requested = self.requested_bytes
        requested.allocated += wanted
        requested.current += wanted
        if requested.current > requested.peak:
            requested.peak = requested.current

    def let_go(self, size: int, requested: int) -> None:
        _less(self.allocation, self.allocated_bytes, size)
        self.requested_bytes.freed += requested
        self.requested_bytes.current -= requested

    def reclaimed(self, size: int) -> None:
        _less(self.active, self.active_bytes, size)

    def split(self, size: int) -> None:
        """Count a new free block that covers only a part of a segment."""
        _more(self.inactive_split, self.inactive_split_bytes, size)

    def whole(self, size: int) -> None:
        """Count a removed block that covered only a part of a segment."""
        _less(self.inactive_split, self.inactive_split_bytes, size)

    def grown(self, size: int) -> None:
        _more(self.segment, self.reserved_bytes, size)

    def returned(self, size: int) -> None:
        _less(self.segment, self.reserved_bytes, size)


def _more(number: Tally, nbytes: Tally, size: int) -> None:
    """Add one allocation of *size* bytes to both tallies. Every operator calls this, so one call updates two."""
    number.allocated += 1
    number.current = now = number.current + 1
    if now > number.peak:
        number.peak = now
    nbytes.allocated += size
    nbytes.current = now = nbytes.current + size
    if now > nbytes.peak:
        nbytes.peak = now


def _less(number: Tally, nbytes: Tally, size: int) -> None:
    number.freed += 1
    number.current -= 1
    nbytes.freed += size
    nbytes.current -= size


class Allocator:
    """One device's memory as one process sees it. *capacity*: bytes that are left to it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = self.allowed = capacity
        """`allowed`: what torch.cuda.set_per_process_memory_fraction leaves of it."""
        self.is_unlimited = False
        self.fraction = 1.0
        self.all = Tallies()
        self.of_pool = {True: Tallies(), False: Tallies()}
        """Counts of the small pool (True) and the large pool (False)."""
        self.num_retries = 0
        """Number of times that all cached segments were released because memory was short (num_alloc_retries)."""
        self.num_out_of_memory = 0
        self.ledger = Ledger()
        self.segments: dict[int, Block] = {}
        """First block of each segment, by address."""
        self._before = (0, 0)
        """The peaks before they were reset."""
        self._pools = {True: Pool(), False: Pool()}
        self._blocks: dict[int, Block] = {}
        """Free blocks by address."""
        self._next = 0

    @property
    def allocated(self) -> int:
        """Return bytes of blocks in use (torch.cuda.memory_allocated)."""
        return self.all.allocated_bytes.current

    @property
    def requested(self) -> int:
        """Return the requested bytes."""
        return self.all.requested_bytes.current

    @property
    def reserved(self) -> int:
        """Return bytes of segments (torch.cuda.memory_reserved)."""
        return self.all.reserved_bytes.current

    @property
    def peak_allocated(self) -> int:
        return self.all.allocated_bytes.peak

    @property
    def peak_reserved(self) -> int:
        return self.all.reserved_bytes.peak

    @property
    def free_in_segments(self) -> int:
        """Return bytes that are reserved and not in use."""
        return self.reserved - self.allocated

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Return a block of at least *nbytes*, for use on *stream*. Raises `Full`."""
        size = rounded(nbytes)
        small = size <= SMALL
        block = self._take(size, stream, small)
        if block is None:
            block = self._new(size, stream, small)
            if block is None:
                self.empty_cache()
                self.num_retries += 1
                block = self._new(size, stream, small)
                if block is None:
                    self.num_out_of_memory += 1
                    raise Full(nbytes)
        left = block.size - size
        if self._is_split(left, small):
            rest = Block(block.address + size, left, stream, small, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        block.requested = max(1, nbytes)
        block.tag = self.ledger.born(block.size)
        self.all.taken(block.size, block.requested)
        self.of_pool[small].taken(block.size, block.requested)
        return block

    def free(self, block: Block) -> None:
        """Free *block*, which the program has released and no stream uses any more."""
        self.let_go(block)
        self.reclaim(block)

    def let_go(self, block: Block) -> None:
        """Release *block* for the program. Streams may still use it."""
        assert block.tag is not None
        self.ledger.died(block.tag)
        self.all.let_go(block.size, block.requested)
        self.of_pool[block.small].let_go(block.size, block.requested)

    def reclaim(self, block: Block) -> None:
        """Make the released *block* available, and merge it with its free neighbours."""
        self.all.reclaimed(block.size)
        self.of_pool[block.small].reclaimed(block.size)
        block.requested = 0
        for other in (block.before, block.after):
            if other is not None and not other.requested:
                self._remove(other)
                block = _joined(block, other)
        self._put(block)

    def empty_cache(self) -> None:
        """Return segments without a block in use to the device."""
        for block in [b for b in self._blocks.values() if b.before is None and b.after is None]:
            self._remove(block)
            del self.segments[block.address]
            self.all.returned(block.size)
            self.of_pool[block.small].returned(block.size)

    def reset_peaks(self) -> None:
        """Implement torch.cuda.reset_peak_memory_stats."""
        self._before = self.highest
        for tally in self._tallies():
            tally.peak = tally.current

    @property
    def highest(self) -> tuple[int, int]:
        """Return the most bytes ever allocated and reserved, also before the program reset its peaks."""
        return max(self._before[0], self.peak_allocated), max(self._before[1], self.peak_reserved)

    def reset_totals(self) -> None:
        """Implement torch.cuda.reset_accumulated_memory_stats."""
        for tally in self._tallies():
            tally.allocated = tally.freed = 0
        self.num_retries = self.num_out_of_memory = 0

    def _tallies(self) -> list[Tally]:
        return [getattr(one, name) for one in (self.all, *self.of_pool.values()) for name in Tallies.__slots__]

    def _take(self, size: int, stream: int, small: bool) -> Block | None:
        free = self._pools[small].free
        position = bisect_left(free, (stream, size, -1))
        if position == len(free) or free[position][0] != stream:
            return None
        block = self._blocks.pop(free.pop(position)[2])
        self._split_less(block)
        return block

    def _is_split(self, left: int, small: bool) -> bool:
        """Return whether *left* bytes of a block that are not needed become a block of their own (`should_split`)."""
        return left >= MIN_BLOCK if small else left > SMALL

    def _fits(self, nbytes: int) -> bool:
        return self.is_unlimited or self.reserved + nbytes <= min(self.capacity, self.allowed)

    def _new(self, nbytes: int, stream: int, small: bool) -> Block | None:
        """Return the block of a new segment for *nbytes*; None if the device is full."""
        size = _segment(nbytes)
        if not self._fits(size):
            return None
        block = self.segments[self._next] = Block(self._next, size, stream, small)
        self._next += size
        self.all.grown(size)
        self.of_pool[small].grown(size)
        return block

    def _put(self, block: Block) -> None:
        insort(self._pools[block.small].free, (block.stream, block.size, block.address))
        self._blocks[block.address] = block
        if block.before is not None or block.after is not None:
            self.all.split(block.size)
            self.of_pool[block.small].split(block.size)

    def _remove(self, block: Block) -> None:
        free = self._pools[block.small].free
        del free[bisect_left(free, (block.stream, block.size, block.address))]
        del self._blocks[block.address]
        self._split_less(block)

    def _split_less(self, block: Block) -> None:
        if block.before is not None or block.after is not None:
            self.all.whole(block.size)
            self.of_pool[block.small].whole(block.size)


def _joined(block: Block, other: Block) -> Block:
    """Return one block of two neighbours."""
    first, second = (block, other) if block.address < other.address else (other, block)
    first.size += second.size
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    return first
