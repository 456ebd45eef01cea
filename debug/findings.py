"""What guards saw with their own eyes and wrote into flags and notes: NaN, changed buffers, dropped handles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.debug import ring as rings
from distsim.debug.kinds import Kind
from distsim.debug.records import CallRecord, Evidence, Finding
from distsim.debug.ring_reader import RingReader

__all__ = ["findings"]


def findings(readers: Sequence[RingReader], evidence: Evidence) -> list[Finding]:
    """Findings of all ranks, the earliest first."""
    found: list[Finding] = []
    for reader in readers:
        records, _ = reader.since(0)
        flags = records["flags"]
        calls = {call.index: call for call in evidence.records.get(reader.header.rank, ())}
        for flag, make in (
            (rings.NAN_INPUT, _nan),
            (rings.MODIFIED, _modified),
            (rings.RACE, _race),
        ):
            hits = np.flatnonzero(flags & flag)
            if len(hits):
                record = records[hits[0]]
                call = calls.get(int(record["commit"]) - 1) or reader.decode(record, 0)
                found.append(make(call))
    found.sort(key=lambda finding: (finding.at_s or 0.0, finding.ranks))
    nans = [finding for finding in found if finding.kind is Kind.NAN]
    return [finding for finding in found if finding.kind is not Kind.NAN or finding is nans[0]]


def _nan(call: CallRecord) -> Finding:
    return Finding(
        Kind.NAN,
        (call.rank,),
        f"the input of {call.op} #{call.seq} on rank {call.rank} holds NaN or infinity, before any other rank's did",
        group=call.group,
        call=call,
        site=call.site,
        at_s=call.issued_s,
        suggestion=f"Look at what rank {call.rank} computed just before {call.site}: its input batch, its loss scale.",
    )


def _modified(call: CallRecord) -> Finding:
    return Finding(
        Kind.BUFFER_MODIFIED_IN_FLIGHT,
        (call.rank,),
        f"rank {call.rank} wrote to the buffer of {call.op} #{call.seq} before it had waited for the call",
        group=call.group,
        call=call,
        site=call.site,
        at_s=call.issued_s,
        suggestion="Call wait() on the handle before the buffer is used again, or give the call its own copy.",
    )


def _race(call: CallRecord) -> Finding:
    return Finding(
        Kind.THREAD_RACE,
        (call.rank,),
        f"thread {call.thread} of rank {call.rank} called {call.op} #{call.seq} while another thread was inside "
        "a call on the same group: which comes first differs from run to run and from rank to rank",
        group=call.group,
        call=call,
        site=call.site,
        at_s=call.issued_s,
        suggestion="Give each thread a group of its own (new_group), or make all calls from one thread.",
    )
