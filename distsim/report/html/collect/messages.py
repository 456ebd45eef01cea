"""Sends and receives: those that met, `[sender, from_s, receiver, to_s, text]`, and those that did not,
`[rank, peer or null, "send" or "recv", at_s, text]`."""

from __future__ import annotations

from collections import deque
from typing import Any

from distsim.debug.messages import call_text, place
from distsim.debug.records import CallRecord
from distsim.report.html.collect.material import Material

__all__ = ["messages"]

MOST = 1_500
MOST_DANGLING = 300

Ends = tuple[str, int, int, int]
"""Group, sender, receiver, tag."""


def messages(material: Material, left_out: dict[str, str]) -> dict[str, Any]:
    """`messages` and `dangling`: matched first come first served, as torch does."""
    sends: dict[Ends, deque[CallRecord]] = {}
    receives: list[tuple[Ends, CallRecord]] = []
    dangling: list[CallRecord] = []
    for rank in sorted(material.records):
        for record in material.records[rank]:
            if not record.is_p2p or record.rejected:
                continue
            if record.peer is None:
                if not record.done:
                    dangling.append(record)
            elif record.op == "send":
                sends.setdefault((record.group.name, rank, record.peer, record.tag or 0), deque()).append(record)
            else:
                receives.append(((record.group.name, record.peer, rank, record.tag or 0), record))
    met: list[list[Any]] = []
    for key, receive in receives:
        waiting = sends.get(key)
        if waiting:
            send = waiting.popleft()
            met.append([send.rank, send.issued_s, receive.rank, receive.completed_s or material.end_s, _text(send)])
        elif not receive.done:
            dangling.append(receive)
    known = material.records
    # A send to a rank of which there is no record may well have arrived.
    dangling += [send for waiting in sends.values() for send in waiting if send.peer in known or not send.done]
    met.sort(key=lambda one: (one[1], one[0], one[2]))
    if len(met) > MOST:
        left_out["messages"] = f"The last {MOST:,} of {len(met):,} messages are drawn."
    if len(dangling) > MOST_DANGLING:
        more = f"{MOST_DANGLING:,} of {len(dangling):,} without an other end are drawn."
        left_out["messages"] = f"{left_out.get('messages', '')} {more}".strip()
    dangling.sort(key=lambda record: (record.done, record.issued_s, record.rank))
    return {
        "messages": met[-MOST:],
        "dangling": [[r.rank, r.peer, r.op, r.issued_s, _text(r)] for r in dangling[:MOST_DANGLING]],
    }


def _text(record: CallRecord) -> str:
    where = "" if record.site is None else f", {place(record.site)}"
    return f"{call_text(record)}, {record.nbytes:,} bytes{where}"
