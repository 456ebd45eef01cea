"""Makes findings of faulty calls that a guard reports in a simulation or a real job.

Two findings need more than one call. Handles without a wait() are counted at the end of a job. A forked
child of a rank (such as a data loader's worker) that calls a collective leaves a note beside the rank's ring,
`forked.RANK.aATTEMPT.JOB.PID.json`: the threads and connections of a process group do not survive a fork, so the
call never ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import Struct

from distsim.debug.messages import are, ranks_text, site_text
from distsim.debug.records import COLLECTIVES, P2P, CallRecord, Evidence, Finding, Phase, Site
from distsim.debug.records.call import line_of
from distsim.debug.records.call_log import LEAST_KEPT
from distsim.debug.records.kinds import Kind
from distsim.debug.rings.files import write_private
from distsim.debug.rings.reader import RingReader
from distsim.text.codec import Whole, encode, read

PATTERN = "forked.*.json"


def nan(call: CallRecord) -> Finding:
    """Return the finding that a call sends NaN. Infinity is often sent on purpose (the start of a minimum, a mask)."""
    return _finding(
        Kind.NAN,
        call,
        f"the input of {call.op} #{call.seq} on rank {call.rank} contains NaN, and that of no other rank did before",
        f"Look at what rank {call.rank} computed just before {call.site}: its input batch, its loss scale.",
    )


def modified(call: CallRecord) -> Finding:
    """Return the finding that a buffer was written to while its call was in flight."""
    return _finding(
        Kind.BUFFER_MODIFIED_IN_FLIGHT,
        call,
        f"rank {call.rank} wrote to the buffer of {call.op} #{call.seq} before it had waited for the call",
        "Call wait() on the handle before the buffer is used again, or give the call its own copy.",
    )


def raced_by_kernel(call: CallRecord, at: Site | None, *, writes: bool, was_waited: bool) -> Finding:
    """Return the finding that a kernel on another stream uses a buffer of a call in flight.

    *was_waited* says that some stream has waited for the call, but not the kernel's.
    """
    verb = "writes to" if writes else "reads"
    text = (
        f"a kernel of rank {call.rank}, launched at {site_text(at)}, {verb} the buffer of {call.op} #{call.seq} on a "
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
    """Return the finding that all outputs of a call are one tensor."""
    return _finding(
        Kind.ALIASED_OUTPUTS,
        call,
        f"the outputs of {call.op} #{call.seq} on rank {call.rank} are one tensor, {len(call.output_shapes)} times: "
        "each part is written over the one before, and only the last is left",
        "Give each part a tensor of its own: [torch.empty_like(t) for _ in range(n)], not [torch.empty_like(t)] * n.",
    )


def race(call: CallRecord, inside: CallRecord | None = None) -> Finding:
    """Return the finding that two threads of a rank use one group at once: one makes *call* while the other is in
    *inside*.
    """
    other = "another thread was inside a call on the same group"
    if inside is not None:
        one = f"{inside.op} #{inside.seq}"
        other = f"thread {inside.thread} was inside {one} on the same group, at {site_text(inside.site)}"
    return _finding(
        Kind.THREAD_RACE,
        call,
        f"thread {call.thread} of rank {call.rank} called {call.op} #{call.seq} while {other}: "
        "which comes first differs from run to run and from rank to rank",
        "Give each thread a group of its own (new_group), or make all calls from one thread.",
    )


def dropped(call: CallRecord) -> Finding:
    """Return the finding that a handle was dropped without waiting for it."""
    return _finding(
        Kind.ASYNC_NEVER_WAITED,
        call,
        f"the handle of {call.op} #{call.seq} was dropped and the call was never waited for: its buffer may be read "
        "before the data are there, and its error is lost",
        "Keep the handle and call wait() on it, or leave async_op out.",
    )


def other_gpu(calls: Sequence[CallRecord], gpu: int, earlier_gpu: int, earlier: CallRecord) -> Finding:
    """Return the finding that some members make a collective with another GPU than before, and the others do not.

    *gpu* is that of the first of *calls*, *earlier_gpu* that of its *earlier* call.
    """
    call, who = calls[0], tuple(sorted(call.rank for call in calls))
    others = "" if len(who) == 1 else f" ({ranks_text(who)} alike)"
    text = (
        f"rank {call.rank} calls {call.op} #{call.seq} with GPU {gpu}, and called {earlier.op} #{earlier.seq} at "
        f"{site_text(earlier.site)} with GPU {earlier_gpu}{others}: NCCL connects {are(who, 'it', 'them')} anew and "
        "waits for ever, because the other ranks use the GPUs that are connected"
    )
    cure = (
        "Call torch.cuda.set_device(LOCAL_RANK) first, and pass device_id=torch.device('cuda', LOCAL_RANK) to "
        "init_process_group: without it torch guesses that the GPU of a barrier is the rank modulo the number of GPUs."
    )
    return replace(_finding(Kind.DEVICE_MISMATCH, call, text, cure), ranks=who)


def corrupted(call: CallRecord, cause: str) -> Finding:
    """Report that the received data differs from the sent data; *cause* names the reason."""
    return _finding(
        Kind.NETWORK_FAULT,
        call,
        f"rank {call.rank} received other data in {call.op} #{call.seq} than was sent: the checksums differ ({cause})",
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


class ForkNote(Struct):
    """The note of a forked child."""

    ring: str
    """Name of the ring of its parent."""
    pid: Whole
    op: str
    stack: Sequence[Site]


def write_note(directory: Path, ring: str, pid: int, op: str, stack: Sequence[Site]) -> None:
    """Note that process *pid*, a forked child of the rank that writes the ring named *ring*, has called *op*."""
    write_private(directory / f"forked.{Path(ring).stem}.{pid}.json", encode(ForkNote(ring, pid, op, stack)).decode())


def count_notes(directory: Path) -> int:
    """Return how many children have left a note."""
    return sum(1 for _ in directory.glob(PATTERN))


def forked_calls(readers: Iterable[RingReader]) -> list[Finding]:
    """Return a finding for each rank and line."""
    by_ring = {reader.path.name: reader for reader in readers}
    findings: dict[tuple[int, str, Site | None], Finding] = {}
    for directory in sorted({reader.path.parent for reader in by_ring.values()}):
        for path in sorted(directory.glob(PATTERN)):
            try:
                note = read(path, ForkNote)
            except (OSError, ValueError):
                continue
            if (reader := by_ring.get(note.ring)) is not None:
                rank, op, site = reader.number, note.op, next(iter(note.stack), None)
                findings.setdefault((rank, op, site), forked_call((rank,), op, site, note.pid))
    return list(findings.values())


def forked_call(ranks: Sequence[int], op: str, site: Site | None, pid: int | None = None) -> Finding:
    """Report a call in a forked child, for real and simulated jobs."""
    process = "" if pid is None else f" (pid {pid})"
    return Finding(
        Kind.HOST_STUCK,
        tuple(ranks),
        f"a forked child process{process}, such as a data loader's worker, called {op} at {site_text(site)} on a "
        "process group of its parent: the group's threads and connections do not survive a fork, so this call "
        "never ends",
        site=site,
        suggestion=f"Make the call at {site_text(site)} in the rank's own process, before or after the loader, and "
        "give the workers its result; or load with num_workers=0.",
    )


def unwaited(evidence: Evidence, *, written_out: bool = False) -> list[Finding]:
    """Return one finding for each line whose handles were never waited for, on ranks that have ended.

    With *written_out*, only lines that contain the call count: torch's own code (DDP, FSDP) keeps handles whose
    waits a guard does not see. This needs evidence with `CallRecord.waited`, which a Flight Recorder dump lacks. The
    results of such a call may be read before they have arrived, and its errors are lost.
    """
    lines: dict[tuple[str, Site | None], list[CallRecord]] = {}
    for rank, records in sorted(evidence.records.items()):
        state = evidence.ranks.get(rank)
        if state is None or state.phase not in (Phase.FINISHED, Phase.EXITED):
            continue
        for record in records:
            if record.remote is not None or record.rejected:
                continue  # who sends an order need not wait for its end; a refused call has no handle
            if record.is_async and not record.waited and not (written_out and not _named(record, evidence)):
                lines.setdefault((record.op, record.site), []).append(record)
    findings = []
    for (op, site), left in lines.items():
        ranks = tuple(sorted({record.rank for record in left}))
        each = sum(record.rank == ranks[0] for record in left)
        least = "at least " if each >= LEAST_KEPT and ranks[0] in evidence.cut else ""  # only the newest are on record
        calls = f"{least}{each} {op} call{'s' if each != 1 else ''}"
        findings.append(
            Finding(
                Kind.ASYNC_NEVER_WAITED,
                ranks,
                f"{ranks_text(ranks)} {are(ranks, 'has', 'each have')} {calls} without a wait()",
                group=left[0].group,
                call=left[-1],
                site=site,
            )
        )
    return findings


def _named(record: CallRecord, evidence: Evidence) -> bool:
    text = line_of(evidence.sources, record.site)
    # torch's functional gathers make the calls of the same name for several tensors
    return "async_op" in text or any(op in text for op in COLLECTIVES | P2P if record.op.startswith(op))
