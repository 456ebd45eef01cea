"""The call record: the one currency of distsim.

Everything that is checked, diagnosed, traced or timed is a `CallRecord`. The simulator makes
them in virtual time, guarded real groups in wall time, importers from Flight Recorder dumps. A call between two workers
of torch.distributed.rpc has a `Remote` besides.
This module is plain data: no I/O, no clock, no torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

from msgspec import Meta, Struct

from distsim.debug.records.arguments import FIELDS
from distsim.debug.records.kinds import Kind
from distsim.debug.records.obligations import CREATIONS
from distsim.errors import CollectiveMismatch
from distsim.text.codec import Number, Rank, Whole

P2P = frozenset({"send", "recv"})
"""Operations of two ranks. `isend`, `irecv` and `batch_isend_irecv` record these with `is_async`."""

COLLECTIVES = (
    frozenset(FIELDS) - P2P
    | CREATIONS
    | {
        "init_process_group",
        "destroy_process_group",
        "init_rpc",
        "rpc_shutdown",
    }
)
"""Operations every member of a group takes part in, by torch.distributed's public names."""
REMOTE_CALLS = frozenset({"rpc_sync", "rpc_async", "remote", "to_here"})
"""Operations of a caller, by torch.distributed.rpc's public names."""
SERVE = "rpc_serve"
"""The callee's end: a thread of its pool runs the function."""
MOST_THREADS = 1 << 20


class State(enum.StrEnum):
    """Progress of a call."""

    ISSUED = "issued"  # the rank called it
    STARTED = "started"  # all members (both ends) are there, bytes move
    COMPLETED = "completed"
    FAILED = "failed"  # it raised (timeout, mismatch, abort)


class Site(Struct, frozen=True, array_like=True, eq=False):
    """One frame of the user's program."""

    file: str
    """Path, relative to the working folder if the file is below it (`frames.shown`)."""
    line: Whole
    function: str
    through: Site | None = None
    """The line of an installed library that this one called, and that made the call; None: this one made it."""
    inside: tuple[str, ...] = ()
    """Circumstances in which it made the call, or called the line below it (`circumstances`), innermost first."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def to_json(self) -> list[Any]:
        """Return `[file, line, function]`, then the same for the library's line and the circumstances if there are
        any.
        """
        content: list[Any] = [self.file, self.line, self.function]
        if self.through is not None or self.inside:
            content.append(None if self.through is None else self.through.to_json())
        return [*content, list(self.inside)] if self.inside else content

    def __eq__(self, other: object) -> bool:
        """Two places are one whatever the circumstances."""
        if not isinstance(other, Site):
            return NotImplemented
        line = self.line, self.function, self.file, self.through
        return line == (other.line, other.function, other.file, other.through)

    def __ne__(self, other: object) -> bool:
        return not self == other  # Struct has one of its own, which would go by identity

    def __hash__(self) -> int:
        return hash((self.file, self.line, self.function, self.through))


@lru_cache(maxsize=64)
def _lines(source: str) -> list[str]:
    return source.splitlines()


def line_of(sources: Mapping[str, str], site: Site | None) -> str:
    """Return the text of a line of the program; empty if its file is not known, or shorter."""
    lines = [] if site is None else _lines(sources.get(site.file) or "")
    return lines[site.line - 1].strip() if site is not None and 0 < site.line <= len(lines) else ""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as every rank must see it."""

    name: str
    """torch's internal unique name (`"0"`, or a hash)."""
    description: str
    """Name for people: `default_pg`, `group_desc=`, `mesh_dp`; may be empty."""
    ranks: tuple[Rank, ...]
    """Global ranks in group order."""

    def __hash__(self) -> int:
        """Hash the name only. Groups are used as keys everywhere, and hashing thousands of ranks is slow."""
        return hash((self.name, len(self.ranks)))

    @property
    def label(self) -> str:
        """Return the group's name for people: its description if it has one."""
        return self.description if self.description not in ("", "undefined") else self.name

    def beside(self, kind: str) -> Group:
        """Return the group of calls of this *kind*, which are matched and numbered apart from the others.

        Those on CPU tensors are `cpu`, if GPU tensors have another backend (`cpu:gloo,cuda:nccl`).
        torch.distributed.checkpoint can therefore gather its plans in a thread while the main thread trains.
        """
        return Group(f"{self.name}/{kind}", f"{self.label} ({kind})", self.ranks)

    def reconfigured(self, uuid: int, ranks: tuple[Rank, ...]) -> Group:
        """Return the group after the reconfiguration with number *uuid*, which left it *ranks*."""
        return Group(f"{self.first_name}@{uuid}", f"{self.label} (reconfigured, {uuid})", ranks)

    @property
    def first_name(self) -> str:
        """Return the name that it had before it was first reconfigured."""
        return self.name.partition("@")[0]

    def of_signals(self, source: int, target: int, channel: int | None) -> Group:
        """Return the group of the signals from one member to another, which are messages without data.

        *channel*: that of symmetric memory; None: windows have none.
        """
        return self.beside(f"signals {source}->{target}" + ("" if channel is None else f", channel {channel}"))

    @property
    def has_signals(self) -> bool:
        """Return whether its messages are signals of one member to another."""
        return "/signals " in self.name

    def is_beside(self, other: Group) -> bool:
        """Return whether both are one group of the program, and one of them has its calls on CPU tensors."""
        return self == other.beside("cpu") or other == self.beside("cpu")


@dataclass(slots=True)
class CallRecord:
    """One call of one rank. Times are seconds (virtual or wall) since the run began."""

    rank: int
    """Global rank."""
    group: Group
    seq: int
    """Number of the call in its group on this rank, from 1.

    Collectives and point-to-point calls are counted separately, as in torch's Flight Recorder.
    """
    op: str
    """torch.distributed's public name: a member of `COLLECTIVES` or `P2P`."""
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the outputs; empty if the result replaces the inputs (all_reduce, broadcast, reduce)."""
    dtypes: tuple[str, ...] = ()
    """`"float32"`, one for each input (or output, for recv), without repeats if all are equal."""
    reduce_op: str | None = None
    """`"SUM"`, `"AVG"`, ..."""
    root: int | None = None
    """Global rank of a rooted collective's root."""
    peer: int | None = None
    """Global rank of the other end of a send / recv; None: recv from any source."""
    tag: int | None = None
    input_splits: tuple[int, ...] | None = None
    """Split sizes that the program passed to all_to_all_single; None: equal shares."""
    output_splits: tuple[int, ...] | None = None
    new_ranks: tuple[int, ...] | None = None
    """For new_group: the requested ranks.

    Its `group` is the world and its `seq` counts only new_group calls. Every rank that calls it has a record,
    whether it is a member or not; only members wait for each other.
    """
    nbytes: int = 0
    """Payload, with nccl-tests' meaning of size."""
    device: str = "cpu"
    is_async: bool = False
    waited: bool = False
    """For asynchronous calls: whether wait() was called, the future was waited for, or torch's own code has the
    handle.

    DDP's join never waits for some of its handles.
    """
    site: Site | None = None
    """The innermost frame of the user's own code."""
    stack: tuple[Site, ...] = ()
    """The user's frames, innermost first."""
    thread: str = "MainThread"
    issued_s: float = 0.0
    started_s: float | None = None
    completed_s: float | None = None
    state: State = State.ISSUED
    error: str | None = None
    fleeing: bool = False
    """Whether the call was made in a `finally` or `except` block while an exception propagated; known for real ranks
    only.
    """
    rejected: bool = False
    """Whether the call failed on its own rank before any other rank could notice it (a wrong argument).

    It does not count as made, and the next call has the same `seq`.
    """
    index: int = 0
    """Number of this record on its rank over all groups, from 0: the rank's program order."""
    remote: Remote | None = None
    """A call of torch.distributed.rpc from this rank to `peer`, or (`rpc_serve`) this rank's serving one of `peer`."""

    @property
    def way(self) -> tuple[Site, ...]:
        """Return the position of the call with all frames above it, because a helper's line may have different
        callers.
        """
        return self.stack or (() if self.site is None else (self.site,))

    @property
    def is_p2p(self) -> bool:
        return self.op in P2P

    @property
    def is_of_two(self) -> bool:
        """Return whether it is between two ranks: a message or a remote call."""
        return self.remote is not None or self.is_p2p

    @property
    def members(self) -> tuple[int, ...]:
        """Return global ranks that must take part."""
        if self.new_ranks is not None:
            return self.new_ranks
        if self.remote is None and not self.is_p2p:
            return self.group.ranks
        return self.group.ranks if self.peer is None else (self.rank, self.peer)

    @property
    def done(self) -> bool:
        return self.state in (State.COMPLETED, State.FAILED)


class CallWait(Struct, frozen=True, tag=True):
    """The rank waits for the end of its own call."""

    record: CallRecord


class StoreWait(Struct, frozen=True, tag=True):
    """A rank waits for keys of a store (rendezvous, store barrier, RPC)."""

    keys: tuple[str, ...]
    purpose: str = ""


class HostWait(Struct, frozen=True, tag=True):
    """A rank waits on the host: a lock, a thread, a queue, sleep, its own loop."""

    what: str
    on_ranks: tuple[int, ...] = ()
    """Ranks that could end the wait; empty if they are not known."""


Wait = CallWait | StoreWait | HostWait


class Phase(enum.StrEnum):
    """State of a rank as a whole."""

    RUNNING = "running"
    BLOCKED = "blocked"
    FINISHED = "finished"  # returned from its program, or exit code 0
    EXITED = "exited"  # left early with sys.exit / os._exit while others still need it
    RAISED = "raised"
    KILLED = "killed"  # by a signal
    FROZEN = "frozen"  # stopped (SIGSTOP), no heartbeat
    HOST_STUCK = "host_stuck"  # spins or blocks outside torch.distributed, or holds the GIL
    ABSENT = "absent"  # never joined the rendezvous


class Caught(Struct, frozen=True):
    """An exception that the program handled on one rank, or that ended one of its threads."""

    error: str
    """`"ValueError: bad batch"`: the last line of its traceback."""
    site: Site
    """The line of its `except`."""
    times: int = 1
    """Number of times that the rank caught an exception of this type at this line."""
    calls: int = 0
    """Calls that the rank had made when it last did."""
    thread: str = ""
    """Name of the thread that the exception ended; then *site* is the line that raised it."""
    crossed: tuple[Site, ...] = ()
    """The user's frames that it went through, innermost first: where it was raised, where it left each function, and at
    last the line of the `try` that handled it."""

    @property
    def kind(self) -> str:
        """Return the exception's type, as in the last line of its traceback."""
        return self.error.partition(":")[0]


class RankThread(Struct, frozen=True, array_like=True):
    """A Python thread of a rank that stands still."""

    name: str
    daemon: bool
    stack: tuple[Site, ...] = ()
    """Its user's frames, innermost first; empty for one that only serves: an idle worker of a pool."""
    held_by: str = ""
    """Name of the thread that holds the lock for which it waits, if that is known exactly."""
    pool: Site | None = None
    """Line that made the pool whose worker it is, if it is one and not in the program's functions."""


class MainPosition(Struct, frozen=True, array_like=True):
    """Where the main thread of a rank is, as its heartbeat writes it."""

    innermost: Site | None = None
    frames: tuple[Site, ...] = ()
    """The user's frames, innermost first."""
    keys: tuple[str, ...] = ()
    """Keys of the store for which it waits."""
    threads: tuple[RankThread, ...] = ()
    """The other threads of the program, once the rank stands still."""
    through: bool = False
    """Whether the script has ended, so that the process waits for threads or child processes."""
    cut: bool = False
    """Whether threads or frames are left out, because there was no room for them."""


@dataclass(slots=True)
class RankState:
    """One rank at the moment of the diagnosis."""

    rank: int
    phase: Phase = Phase.RUNNING
    waits: tuple[Wait, ...] = ()
    """Waits that must all end before the rank continues (a wait for any sender is one CallWait with peer None)."""
    site: Site | None = None
    stack: tuple[Site, ...] = ()
    since_s: float | None = None
    """Since when it has been in this phase."""
    exit_code: int | None = None
    signal: str | None = None
    exception: str | None = None
    """`"ValueError: ..."`: the last line of its traceback. On a blocked rank: an exception that is
    on its way while a `finally` or `except` block makes calls."""
    traceback: str | None = None
    origins: str | None = None
    """Last lines of the exception and of all exceptions behind it, whether the traceback shows them or not; None if
    unknown.
    """
    host: str | None = None
    pid: int | None = None
    folder: str | None = None
    """Folder of its flight records on that host."""
    over: bool = False
    """Whether the rank was killed after its program and all its calls had ended, while the interpreter shut down."""
    at_large: bool = False
    """Whether another thread of the waiting rank is not waiting, and may end the wait."""
    joining: bool = False
    """Whether the rank's program has started and has not reached its first call."""
    leaving: bool = False
    """Whether the program has ended and the process is exiting."""
    left_group: bool = False
    """Whether the rank has destroyed its process group, or makes calls that are not watched, so that no rank waits
    for it.
    """
    seen_s: float | None = None
    """Time of its last heartbeat; None if it is not known."""
    stood_s: float | None = None
    """Seconds for which its main thread had stood at one instruction by then."""
    silent_s: float | None = None
    """Seconds for which none of its Python threads has run: one of them holds the interpreter lock (the GIL)."""
    idle_s: float | None = None
    """Seconds without a call, in which the main thread has not moved and its processes neither computed nor read nor
    wrote.

    None if the rank was not watched.
    """
    asleep_s: float | None = None
    """Seconds in which the main thread, the only one that makes calls, used no CPU time, regardless of other
    threads.

    None if the rank was not watched.
    """
    meets_at: str | None = None
    """Address `host:port` of the store that the rank uses in init_process_group."""
    reached_store: bool = True
    """Whether the rank has connected to that store."""
    stores: Mapping[str, bool] = field(default_factory=dict)
    """TCPStores that the rank has used, by `host:port`, and whether its process serves them."""
    meets_by_hand: str | None = None
    """Address of the store, and name of the group, if the rank waits in the program's own call of `rendezvous` or
    `_new_process_group_helper`.
    """
    reused_store: str | None = None
    """The store of its world where that holds the keys of an earlier world, too: `host:port`."""
    reason: str | None = None
    """Reason why the rank is stuck, or activity when it died, if known: `it recurses without end`."""
    caught: tuple[Caught, ...] = ()
    """Exceptions that the program handled, the last ones of different lines and types."""
    threads: tuple[RankThread, ...] = ()
    """The main thread and the others, if the main thread stands still."""
    threads_cut: bool = False
    """Whether some of its threads, or of their frames, are not among `threads`: then nobody knows what they do."""
    children: tuple[RankThread, ...] = ()
    """Child processes that are in the program's functions, by pid; read with the stacks."""
    memory: tuple[int, ...] = ()
    """Bytes of its GPU in use at the ends of its last steps."""
    through: bool = False
    """Whether the script has ended and the process waits for its other threads or its child processes."""

    @property
    def lines(self) -> Iterator[Site]:
        """Yield the lines of the program at which the rank stands, or has handled exceptions."""
        yield from self.stack
        for thread in self.threads:
            yield from thread.stack
        for caught in self.caught:
            yield from (caught.site, *caught.crossed)


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that a guard observed directly: a NaN, a changed buffer, a cut link.

    `diagnose` merges findings with the records: a finding that explains a hang comes first.
    """

    kind: Kind
    ranks: tuple[int, ...]
    """Global ranks at fault."""
    text: str
    """One sentence that says what was observed, with names (`parameter encoder.head.weight ...`)."""
    group: Group | None = None
    call: CallRecord | None = None
    site: Site | None = None
    suggestion: str = ""
    at_s: float | None = None
    guess: bool = False
    """Whether the finding only explains other findings about the same ranks, and is not reported by itself."""
    warns: bool = False
    """Whether no user asked for the check, so that the finding is only a warning."""
    pace: Mapping[str, float] = field(default_factory=dict)
    """What was measured of a slow rank, by name (`diagnosis.pace.statistic.SlowRank`)."""


@dataclass(slots=True)
class Evidence:
    """All facts on which a diagnosis may be based."""

    world_size: int
    ranks: Mapping[int, RankState]
    records: Mapping[int, Sequence[CallRecord]] = field(default_factory=dict)
    """Per global rank, in program order."""
    now_s: float = 0.0
    notes: Sequence[str] = ()
    """Injected faults and other context, one sentence each."""
    findings: Sequence[Finding] = ()
    """Findings of guards."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Text of the user's files that positions refer to, if they can be read. It distinguishes a rank that skipped a
    call from one that took another branch; without it the kind is `op_mismatch`.
    """
    straggler_after_s: float | None = None
    """Name a running rank a straggler once others have waited this long for it; None: never."""
    hang_after_s: float | None = None
    """Take a running rank for missing once others have waited this long; None: never. Post mortem: 0."""
    quiet_after_s: float | None = None
    """Take a job without a call for a hang after this long, also while its ranks compute; None: never."""
    all_ended: bool = False
    """Whether no process of the job lives; those whose end is not on record were ended during their work."""
    unrecorded: frozenset[int] = frozenset()
    """Ranks without a readable record and with an unknown end."""
    not_run: frozenset[int] = frozenset()
    """Ranks that a simulation did not run, or not to its end: they are in no group of a record, and in no diagnosis."""
    members_guessed: bool = False
    """The records do not say who is in a group: its members are the ranks seen to use it."""
    cut: frozenset[int] = frozenset()
    """Ranks whose oldest calls are not among the records, but for some that are still open."""
    unseen: frozenset[int] = frozenset()
    """Members of groups that are not known to be processes of this job: they may still arrive."""
    launched: int = 0
    """World size of the launcher if it differs from the program's; else 0."""
    doubles: Sequence[str] = ()
    """Processes that call themselves the same rank of one world, a sentence each with what to do about it."""
    double_ranks: Mapping[int, int] = field(default_factory=dict)
    """Their numbers in this evidence -> the rank that they call themselves."""
    processes: Mapping[int, str] = field(default_factory=dict)
    """Descriptions of processes whose rank differs from their launcher's."""
    away_s: Sequence[tuple[float, float]] = ()
    """Periods (from, to) without a watcher: the monitor was stopped, or its host suspended. Waits do not count in
    them.
    """

    def watched_s(self, since_s: float) -> float:
        """Return the seconds since *since_s* in which the ranks were watched and could run."""
        away_s = sum(max(0.0, end - max(begin, since_s)) for begin, end in self.away_s)
        return max(0.0, self.now_s - since_s - away_s)


def was_refused(call: CallRecord) -> bool:
    """Return whether level strict refused *call*."""
    return call.state is State.FAILED and (call.error or "").startswith(f"{CollectiveMismatch.__name__}: ")


class Remote(Struct, frozen=True, array_like=True):
    """A remote call, or the serving of one."""

    function: str
    """`train.step`; of to_here empty."""
    caller: str
    callee: str
    """Names of the workers."""
    threads: Annotated[int, Meta(ge=0, le=MOST_THREADS)] = 0
    """Number of threads of the recording worker, which serve requests and process replies; 0 if unknown."""
    gives_up_s: Number | None = None
    """Seconds after which the call raises; None if the program has set no limit."""
    request: tuple[Rank, Whole] | None = None
    """For a served call: rank and index of the caller's record."""
    rref: tuple[Rank, Whole] | None = None
    """torch's RRefId of a value that is created (`remote`) or fetched (`to_here`): the requesting rank and a number."""
