"""The words of a diagnosis: calls, places and waits as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from distsim.debug.matching.agreement import BARRIERS, payload_text
from distsim.debug.records import (
    CallRecord,
    CallWait,
    Group,
    HostWait,
    Phase,
    RankState,
    Site,
    StoreWait,
    Wait,
)
from distsim.debug.records.frames import packaged
from distsim.debug.records.remote import SERVE
from distsim.debug.report.stack_tree import blank_addresses, short_path
from distsim.text.ranks import format_ranks, some_ranks

__all__ = [
    "are",
    "call_text",
    "capital",
    "exception_line",
    "exception_text",
    "group_text",
    "numbered",
    "one_line",
    "place",
    "ranks_text",
    "remote_text",
    "several",
    "shape_of_call",
    "some_ranks_text",
    "state_text",
    "wait_text",
    "worker_text",
]

LONGEST = 300
"""Letters of an exception that a sentence holds."""
MOST_RUNS = 24
"""Ranges of ranks that a sentence holds; the lists of a diagnosis, and its report, have all its culprits."""
RAISES = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")
"""How the last line of a traceback begins."""


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2,4-7`."""
    listed = sorted(set(ranks))
    if not listed:
        return "no rank"
    if len(listed) == 1:
        return f"rank {listed[0]}"
    runs = format_ranks(listed).split(",")
    if len(runs) > MOST_RUNS:
        return f"ranks {','.join(runs[: MOST_RUNS // 2])},...,{runs[-1]} ({len(listed)} of them)"
    return f"ranks {','.join(runs)}"


def some_ranks_text(ranks: Iterable[int]) -> str:
    """`ranks 0,2,4,6 and 16 more`, where the whole list stands elsewhere; few as `ranks_text`."""
    listed = list(ranks)
    return some_ranks(listed) if listed else ranks_text(listed)


def capital(text: str) -> str:
    """The first letter made large, nothing else touched."""
    return text[:1].upper() + text[1:]


def several(text: str, ranks: Iterable[int]) -> str:
    """`is stopped` -> `are stopped` where more than one rank does it."""
    if len(set(ranks)) == 1:
        return text
    text = text.replace(" its program", " their program")
    verbs = (("has ", "have "), ("is ", "are "), ("was ", "were "), ("waits ", "wait "), ("runs", "run"))
    for one, many in verbs:
        if text.startswith(one):
            return many + text[len(one) :]
    return text


def are(ranks: Iterable[int], one: str, many: str) -> str:
    """The verb's form for so many ranks."""
    return one if len(set(ranks)) == 1 else many


def group_text(group: Group) -> str:
    """`group dp (ranks 0-7)`."""
    return f"group {group.label or 'without a name'} ({ranks_text(group.ranks)})"


def place(site: Site | None, *, function: bool = False, through: bool = True) -> str:
    """`train.py:131`, or `train.py:131 in step`; `train.py:88 (through accelerate/accelerator.py:2345)` where a
    library that the line called has made the call."""
    if site is None:
        return "an unknown line"
    text = f"{short_path(site.file)}:{site.line}"
    if function and site.function not in ("", "<module>"):
        text += f" in {site.function}"
    below = site.through
    return f"{text} (through {packaged(below.file)}:{below.line})" if through and below is not None else text


def call_text(call: CallRecord) -> str:
    """`all_reduce #42`, `send to rank 1 (tag 7)`, `rpc_sync of train.step to worker1`."""
    if call.remote is not None:
        return remote_text(call)
    if not call.is_p2p:
        return f"{call.op} #{call.seq}"
    tag = f" (tag {call.tag})" if call.tag is not None else ""
    if call.op == "send":
        return f"send to rank {call.peer}{tag}"
    return f"recv from {'any rank' if call.peer is None else f'rank {call.peer}'}{tag}"


def remote_text(call: CallRecord) -> str:
    """`rpc_sync of train.step to worker1 (rank 1)`; what is served: `train.step for worker0 (rank 0)`."""
    remote = call.remote
    if remote is None:
        return call.op
    if call.op == SERVE:
        return f"{remote.function or 'a call'} for {worker_text(remote.caller, call.peer)}"
    to = worker_text(remote.callee, call.peer)
    return f"to_here from {to}" if call.op == "to_here" else f"{call.op} of {remote.function} to {to}"


def worker_text(name: str, rank: int | None) -> str:
    """`worker1 (rank 1)`."""
    return name if rank is None else f"{name} (rank {rank})"


def shape_of_call(call: CallRecord) -> str:
    """`all_reduce float32[4096,1024] SUM`, for those who wait in it."""
    if call.remote is not None:
        return remote_text(call)
    if call.op in BARRIERS:
        return call.op
    if call.op == "new_group":
        return f"new_group({list(call.new_ranks)})" if call.new_ranks is not None else "new_group"
    head = call_text(call) if call.is_p2p else call.op
    parts = [head, payload_text(call)]
    if call.reduce_op:
        parts.append(call.reduce_op)
    if call.root is not None:
        parts.append(f"root {call.root}")
    return " ".join(parts)


def numbered(call: CallRecord) -> str:
    """`all_reduce #42 float32[4096,1024] SUM`."""
    text = shape_of_call(call)
    return text if call.is_of_two else text.replace(call.op, f"{call.op} #{call.seq}", 1)


def wait_text(wait: Wait) -> str:
    """What a rank waits for."""
    if isinstance(wait, CallWait):
        call = wait.record
        on = "" if call.is_of_two else f" on {group_text(call.group)}"
        return f"{call_text(call)}{on}"
    if isinstance(wait, StoreWait):
        keys = ", ".join(repr(k) for k in wait.keys[:3]) + (", ..." if len(wait.keys) > 3 else "")
        purpose = f" ({wait.purpose})" if wait.purpose else ""
        return f"store key{'s' if len(wait.keys) != 1 else ''} {keys}{purpose}"
    return wait.what


def exception_text(state: RankState) -> str | None:
    """`ValueError: bad batch`, without the addresses of objects: ranks that raised alike say the same."""
    return None if state.exception is None else blank_addresses(state.exception)


def exception_line(state: RankState) -> str | None:
    """The same in one line, for a sentence: the whole of it is in the traceback. The last line of one that a
    data loader's worker has sent is the error itself; NCCL names its reason under `Last error:`."""
    text = exception_text(state)
    return None if text is None else one_line(text)


def one_line(text: str) -> str:
    """The words of an exception, as a sentence holds them."""
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if len(lines) < 2:
        return _cut(text)
    rest = f" {_cut(lines[-1])}" if RAISES.match(lines[-1]) or lines[-2] == "Last error:" else ""
    return f"{_cut(lines[0])} ...{rest}"


def _cut(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    head = text[: LONGEST - 4]
    end = head.rfind(". ") + 1  # of a sentence, where there is one
    return f"{head[:end] if end > LONGEST // 2 else head} ..."


def state_text(state: RankState, waits: Iterable[Wait], last: CallRecord | None) -> str:
    """Where a rank is, as the rest of a sentence: `waits in barrier #3 ..., at train.py:9`."""
    seen = "" if state.silent_s is None else "last seen "
    at = f", {seen}at {place(state.site, function=True)}" if state.site else ""
    match state.phase:
        case Phase.BLOCKED:
            listed = list(waits)
            if not listed:
                return f"is blocked{at}"
            first = listed[0]
            where = state.site
            if isinstance(first, CallWait):
                where = first.record.site or where
            at = f", at {place(where)}" if where else ""
            verb = "waits on the host:" if isinstance(first, HostWait) else "waits in"
            if isinstance(first, StoreWait):
                verb = "waits for"
            return f"{verb} {wait_text(first)}{at}"
        case Phase.FINISHED:
            return "has finished its program"
        case Phase.EXITED:
            code = f" with exit code {state.exit_code}" if state.exit_code is not None else ""
            return f"has left its program{code}{at}"
        case Phase.RAISED:
            return f"raised {exception_line(state) or 'an exception'}{at}"
        case Phase.KILLED:
            if state.signal is None:
                return "is gone: its process ended, and nobody saw an exit code or a signal"
            after = ", after its program and all its calls had ended" if state.over else ""
            return f"was killed by {state.signal}{after}"
        case Phase.FROZEN:
            return f"is stopped and does not run{at}"
        case Phase.HOST_STUCK:
            return f"is stuck outside torch.distributed{at}"
        case Phase.ABSENT:
            at = f", last seen at {place(state.site, function=True)}" if state.site is not None else ""
            return f"never joined the rendezvous{at}"
        case Phase.RUNNING if state.leaving:
            return "has ended its program, though its process is still there"
        case _:
            if state.site is not None:
                return f"{'was' if seen else 'is'} {seen}at {place(state.site, function=True)}"
            return f"runs, after {call_text(last)}" if last is not None else "runs"
