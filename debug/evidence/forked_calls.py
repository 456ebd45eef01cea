"""Collectives that a forked child of a rank has called: in a data loader's worker, say.

A process group's threads and connections do not survive a fork, so the call never ends. The child leaves a note beside
the rank's ring, `forked.RANK.aATTEMPT.JOB.PID.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from distsim.debug.evidence.typed import text, whole
from distsim.debug.messages.phrases import place
from distsim.debug.records import Finding, Site
from distsim.debug.records.kinds import Kind
from distsim.debug.rings.private import write_private
from distsim.debug.rings.reader import RingReader
from distsim.text.untrusted_input import load_json, printable, read_bytes

__all__ = ["count_notes", "forked_call", "forked_calls", "write_note"]

PATTERN = "forked.*.json"


def write_note(directory: Path, ring: str, pid: int, op: str, stack: Sequence[Site]) -> None:
    """Note that process *pid*, a forked child of the rank that writes the ring named *ring*, has called *op*."""
    content = {"ring": ring, "pid": pid, "op": op, "stack": [site.to_json() for site in stack]}
    write_private(directory / f"forked.{Path(ring).stem}.{pid}.json", json.dumps(content))


def count_notes(directory: Path) -> int:
    """How many children have left one."""
    return sum(1 for _ in directory.glob(PATTERN))


def forked_calls(readers: Iterable[RingReader]) -> list[Finding]:
    """A finding for each rank and line."""
    by_ring = {reader.path.name: reader for reader in readers}
    found: dict[tuple[int, str, Site | None], Finding] = {}
    for directory in sorted({reader.path.parent for reader in by_ring.values()}):
        for path in sorted(directory.glob(PATTERN)):
            try:
                note = load_json(read_bytes(path, 1 << 16))
                reader = by_ring.get(text(note["ring"], "ring"))
                op, pid = printable(text(note["op"], "op", 80)), whole(note["pid"], "pid")
                stack = [Site.from_json(frame) for frame in note["stack"]]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if reader is not None:
                rank, site = reader.number, stack[0] if stack else None
                found.setdefault((rank, op, site), forked_call((rank,), op, site, pid))
    return list(found.values())


def forked_call(ranks: Sequence[int], op: str, site: Site | None, pid: int | None = None) -> Finding:
    """What is said of it, on a real job and in a simulation."""
    process = "" if pid is None else f" (pid {pid})"
    return Finding(
        Kind.HOST_STUCK,
        tuple(ranks),
        f"a forked child process{process}, such as a data loader's worker, called {op} at {place(site)} on a process "
        "group of its parent: the group's threads and connections do not survive a fork, so this call never ends",
        site=site,
        suggestion=f"Make the call at {place(site)} in the rank's own process, before or after the loader, and give "
        "the workers its result; or load with num_workers=0.",
    )
