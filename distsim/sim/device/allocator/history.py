"""The history of an allocator that torch.cuda.memory._record_memory_history asks for, and its snapshot."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distsim.debug.records.frames import is_ours

__all__ = ["History", "segments_of"]

BASE = 0x7F00_0000_0000
"""First simulated address in a snapshot, as addresses on a GPU are never 0."""
POOL = (0, 0)
"""Id of the only memory pool."""
Frames = tuple[tuple[str, int, str], ...]
"""File, line, function; the innermost first."""


@dataclass(slots=True)
class History:
    """Allocation history of one allocator."""

    now_us: Callable[[], int]
    context: str | None = "all"
    """Entries for which stacks are kept: None, state, alloc, all."""
    most: int = sys.maxsize
    skipped: Collection[str] = ()
    """Actions that are not recorded."""
    entries: deque[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.entries = deque(maxlen=min(self.most, sys.maxsize))

    def stack(self, is_free: bool) -> Frames:
        """Return the stack of the call that is being made, as far as *context* wants it."""
        wanted = self.context == "all" if is_free else self.context is not None
        return tuple(_stack()) if wanted else ()

    def add(self, action: str, address: int, size: int, stream: int, frames: Frames = (), **more: Any) -> None:
        """Record an *action* of an allocator."""
        if action in self.skipped:
            return
        kept = frames if self.context in ("alloc", "all") else ()
        entry = {"action": action, "addr": BASE + address, "size": size, "stream": stream, "pool_id": POOL}
        self.entries.append(entry | {"time_us": self.now_us(), "frames": kept} | more)

    def trace(self) -> list[dict[str, Any]]:
        """Return the entries as torch has them."""
        return [entry | {"frames": _as_dicts(entry["frames"])} for entry in self.entries]


def _stack() -> Iterator[tuple[str, int, str]]:
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if not is_ours(code.co_filename):
            yield code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back  # type: ignore[assignment]


def _as_dicts(frames: Frames) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in frames]


def segments_of(first_blocks: Mapping[int, Any], index: int, is_expandable: bool = False) -> list[dict[str, Any]]:
    """Return the segments of GPU *index* as torch's memorySnapshot has them, of the first blocks by address."""
    return [_segment(first, index) | {"is_expandable": is_expandable} for _, first in sorted(first_blocks.items())]


def _segment(first: Any, index: int) -> dict[str, Any]:
    blocks = []
    block = first
    while block is not None:
        state = "inactive"
        if block.asked:
            state = "active_awaiting_free" if block.awaits_streams else "active_allocated"
        blocks.append(
            {
                "address": BASE + block.address,
                "size": block.size,
                "requested_size": block.asked,
                "state": state,
                "frames": _as_dicts(block.frames if block.asked else ()),
            }
        )
        block = block.after
    active = [block for block in blocks if block["state"] != "inactive"]
    return {
        "device": index,
        "address": BASE + first.address,
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": sum(block["size"] for block in active if block["state"] == "active_allocated"),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": first.stream,
        "segment_type": "small" if first.small else "large",
        "segment_pool_id": POOL,
        "frames": [],
        "blocks": blocks,
    }
