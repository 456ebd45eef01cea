"""What a guard says of a call it saw go wrong, in a real job and in a simulated one: a call in, a finding out."""

from __future__ import annotations

from dataclasses import replace

from distsim.debug.messages.phrases import place
from distsim.debug.records import CallRecord, Finding, Site
from distsim.debug.records.kinds import Kind

__all__ = ["aliased", "corrupted", "dropped", "modified", "nan", "race", "raced_by_kernel"]


def nan(call: CallRecord) -> Finding:
    """A call sends NaN. (Infinity is sent on purpose: the start of a minimum, a mask.)"""
    return _finding(
        Kind.NAN,
        call,
        f"the input of {call.op} #{call.seq} on rank {call.rank} holds NaN, before any other rank's did",
        f"Look at what rank {call.rank} computed just before {call.site}: its input batch, its loss scale.",
    )


def modified(call: CallRecord) -> Finding:
    """A buffer was written while its call was in flight."""
    return _finding(
        Kind.BUFFER_MODIFIED_IN_FLIGHT,
        call,
        f"rank {call.rank} wrote to the buffer of {call.op} #{call.seq} before it had waited for the call",
        "Call wait() on the handle before the buffer is used again, or give the call its own copy.",
    )


def raced_by_kernel(call: CallRecord, at: Site | None, *, writes: bool, was_waited: bool) -> Finding:
    """A kernel on another stream uses a buffer of a call that is in flight. *was_waited*: a stream has waited for the
    call, but not the kernel's."""
    verb = "writes to" if writes else "reads"
    text = (
        f"a kernel of rank {call.rank}, launched at {place(at)}, {verb} the buffer of {call.op} #{call.seq} on a "
        "stream that has not waited for the call"
    )
    cure = (
        "Call wait_stream() on that stream, too: wait() orders only the stream that is current when it is called "
        "(stream.wait_stream(torch.cuda.current_stream()) behind it)."
        if was_waited
        else "Call wait() on the handle, on the stream that uses the buffer, before the kernel is launched."
    )
    return replace(_finding(Kind.BUFFER_MODIFIED_IN_FLIGHT, call, text, cure), site=at or call.site)


def aliased(call: CallRecord) -> Finding:
    """All outputs of a call are one tensor."""
    return _finding(
        Kind.ALIASED_OUTPUTS,
        call,
        f"the outputs of {call.op} #{call.seq} on rank {call.rank} are one tensor, {len(call.output_shapes)} times: "
        "each part is written over the one before, and only the last is left",
        "Give each part a tensor of its own: [torch.empty_like(t) for _ in range(n)], not [torch.empty_like(t)] * n.",
    )


def race(call: CallRecord, inside: CallRecord | None = None) -> Finding:
    """Two threads of a rank are on the same group at once: one makes *call*, the other is *inside*."""
    other = "another thread was inside a call on the same group"
    if inside is not None:
        other = (
            f"thread {inside.thread} was inside {inside.op} #{inside.seq} on the same group, at {place(inside.site)}"
        )
    return _finding(
        Kind.THREAD_RACE,
        call,
        f"thread {call.thread} of rank {call.rank} called {call.op} #{call.seq} while {other}: "
        "which comes first differs from run to run and from rank to rank",
        "Give each thread a group of its own (new_group), or make all calls from one thread.",
    )


def dropped(call: CallRecord) -> Finding:
    """A handle was thrown away unwaited."""
    return _finding(
        Kind.ASYNC_NEVER_WAITED,
        call,
        f"the handle of {call.op} #{call.seq} was thrown away and nobody waited for the call: its buffer may be "
        "read before the data are there, and its error is lost",
        "Keep the handle and call wait() on it, or leave async_op out.",
    )


def corrupted(call: CallRecord, cause: str) -> Finding:
    """What arrived is not what was sent; *cause* says what did it."""
    return _finding(
        Kind.NETWORK_FAULT,
        call,
        f"what {call.op} #{call.seq} brought to rank {call.rank} is not what was sent: the checksums differ ({cause})",
        f"Look at the memory and the NIC of rank {call.rank}'s host (ECC and CRC counters).",
    )


def _finding(kind: Kind, call: CallRecord, text: str, suggestion: str) -> Finding:
    return Finding(
        kind,
        (call.rank,),
        text,
        group=call.group,
        call=call,
        site=call.site,
        at_s=call.issued_s,
        suggestion=suggestion,
    )
