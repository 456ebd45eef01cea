"""What a guard says of a call it saw go wrong, in a real job and in a simulated one: a call in, a finding out."""

from __future__ import annotations

from distsim.debug.kinds import Kind
from distsim.debug.records import CallRecord, Finding

__all__ = ["dropped", "modified", "nan", "race"]


def nan(call: CallRecord) -> Finding:
    """A call sends NaN. (Infinity is sent on purpose: the start of a minimum, a mask.)"""
    return Finding(
        Kind.NAN,
        (call.rank,),
        f"the input of {call.op} #{call.seq} on rank {call.rank} holds NaN, before any other rank's did",
        group=call.group,
        call=call,
        site=call.site,
        at_s=call.issued_s,
        suggestion=f"Look at what rank {call.rank} computed just before {call.site}: its input batch, its loss scale.",
    )


def modified(call: CallRecord) -> Finding:
    """A buffer was written while its call was in flight."""
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


def race(call: CallRecord) -> Finding:
    """Two threads of a rank are on the same group at once."""
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


def dropped(call: CallRecord) -> Finding:
    """A handle was thrown away unwaited."""
    return Finding(
        Kind.ASYNC_NEVER_WAITED,
        (call.rank,),
        f"the handle of {call.op} #{call.seq} was thrown away and nobody waited for the call: its buffer may be "
        "read before the data are there, and its error is lost",
        group=call.group,
        call=call,
        site=call.site,
        at_s=call.issued_s,
        suggestion="Keep the handle and call wait() on it, or leave async_op out.",
    )
