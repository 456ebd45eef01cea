"""A run as its calls: what each rank called, and how it ended."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from distsim.debug.records import CallRecord, CallWait, Evidence, HostWait, Phase, RankState
from distsim.debug.records.arguments import FIELDS

MAX_ELEMENTS = 1 << 16
"""Largest number of elements of a tensor in a reproduction; larger ones are replaced, so that it runs quickly."""

SPIN = "while True: pass  # the rank never left this line"
ROOTED = frozenset(op for op, fields in FIELDS.items() if fields.rooted)
"""Flight Recorder does not say the root: the first member does as well, it is the same for all."""
LEFT_OUT = (
    "init_process_group",
    "destroy_process_group",
    "monitored_barrier",
    "split_group",
    "shrink_group",
    "init_rpc",
    "rpc_shutdown",
)


@dataclass(frozen=True, slots=True)
class ReproducedCall:
    """One call of one rank. *key* is the same for the calls that belong together."""

    key: tuple[object, ...]
    op: str
    members: tuple[int, ...]
    """Global ranks of its group, in group order."""
    group: str
    """Name of the group; empty for the world."""
    label: str = ""
    """Label of the call for people."""
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    dtype: str = "float32"
    reduce_op: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    is_async: bool = False
    waited: bool = True
    blocked: bool = False
    """Its rank waits for it at the end."""
    site: str = ""
    """Line of the original program, for a comment."""
    prompt: bool = False
    """Whether the call completed before the rank's next call, or the rank waits for it: it may have been a blocking
    one.
    """


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls and endings of all ranks. *ranks* are those of the original run; the program renumbers them."""

    ranks: tuple[int, ...]
    calls: Mapping[int, tuple[ReproducedCall, ...]]
    endings: Mapping[int, str]
    """Line of code with which a rank ends after its calls; empty if it just ends."""
    absent: tuple[int, ...] = ()
    """Ranks that never joined."""

    @property
    def keys(self) -> list[tuple[object, ...]]:
        """Return the keys of everything that can be removed, in the order of the calls."""
        keys: dict[tuple[object, ...], None] = {}
        longest = max((len(calls) for calls in self.calls.values()), default=0)
        for index in range(longest):
            for rank in self.ranks:
                if index < len(self.calls[rank]):
                    keys[self.calls[rank][index].key] = None
        return list(keys)

    def only(self, keys: Iterable[tuple[object, ...]]) -> Calls:
        """Return the run with only the calls whose key is in *keys*."""
        kept = set(keys)
        calls = {rank: tuple(c for c in own_calls if c.key in kept) for rank, own_calls in self.calls.items()}
        return replace(self, calls=calls)

    def blocking(self) -> Calls:
        """Return the calls with `send` for `isend` (and so on) where no record contradicts, as not every record
        distinguishes them.
        """

        def sync(call: ReproducedCall) -> ReproducedCall:
            return replace(call, is_async=False) if call.op in ("send", "recv") and call.prompt else call

        return replace(self, calls={rank: tuple(map(sync, own_calls)) for rank, own_calls in self.calls.items()})

    def is_stuck(self, rank: int) -> bool:
        """Return whether the rank waits in its last call."""
        return rank not in self.endings and any(call.blocked for call in self.calls[rank][-1:])

    def without(self, rank: int) -> Calls:
        """Return the run without one rank: groups shrink, and its messages vanish."""
        calls = {}
        for other in self.ranks:
            if other != rank:
                kept = [c for c in self.calls[other] if rank not in (c.peer, c.root) or c.op == "all_reduce"]
                calls[other] = tuple(_leave_out(c, rank) for c in kept)
        ranks = tuple(r for r in self.ranks if r != rank)
        endings = {r: e for r, e in self.endings.items() if r != rank}
        return Calls(ranks, calls, endings, tuple(r for r in self.absent if r != rank))


def calls_of(evidence: Evidence, new_groups: bool = False) -> Calls:
    """Return the calls of a run from its records. With *new_groups*, include calls that create groups.

    Otherwise all ranks create the groups at the start.
    """
    ranks = tuple(range(evidence.world_size))
    sizes = [_elements(r) for records in evidence.records.values() for r in records]
    small = max(sizes, default=0) > MAX_ELEMENTS
    calls = {}
    for rank in ranks:
        state = evidence.ranks.get(rank)
        waits = [w.record for w in state.waits if isinstance(w, CallWait)] if state is not None else []
        numbers: dict[tuple[object, ...], int] = {}
        own_calls = []
        records = evidence.records.get(rank, ())
        for record, after in itertools.zip_longest(records, records[1:]):
            if record.remote is not None or record.op in LEFT_OUT or (record.op == "new_group" and not new_groups):
                continue
            call = _call(record, numbers, any(w is record for w in waits), small)
            over = after is None or (record.completed_s is not None and record.completed_s <= after.issued_s)
            own_calls.append(replace(call, prompt=over))
        calls[rank] = tuple(own_calls)
    endings = {r: e for r in ranks if (e := _ending(evidence.ranks.get(r)))}
    absent = tuple(
        r
        for r in ranks
        if (s := evidence.ranks.get(r)) is not None
        and (s.phase is Phase.ABSENT or (s.phase is Phase.FINISHED and not evidence.records.get(r)))
    )
    return Calls(ranks, calls, endings, absent)


def _call(record: CallRecord, numbers: dict[tuple[object, ...], int], blocked: bool, small: bool) -> ReproducedCall:
    members = record.group.ranks
    if record.is_p2p:
        ends = (record.rank, record.peer) if record.op == "send" else (record.peer, record.rank)
        pair: tuple[object, ...] = (record.op, members, ends, record.tag)
        numbers[pair] = numbers.get(pair, 0) + 1
        key: tuple[object, ...] = ("p2p", members, ends, record.tag, numbers[pair])
    elif record.new_ranks is not None:
        members = record.new_ranks
        numbers[members] = numbers.get(members, 0) + 1
        key = ("new_group", members, numbers[members])
    else:
        key = (record.group.name, members, record.seq)
    inputs, outputs = record.input_shapes, record.output_shapes
    if small:
        inputs, outputs = _small(record, inputs), _small(record, outputs)
    splits = None
    if record.input_splits is not None and record.output_splits is not None:
        splits = (record.input_splits, record.output_splits)
    site = record.site
    return ReproducedCall(
        key,
        record.op,
        members,
        "" if record.group.description == "default_pg" or record.group.name == "0" else record.group.name,
        "" if record.group.description == "undefined" else record.group.label,
        inputs,
        outputs,
        record.dtypes[0] if record.dtypes else "float32",
        record.reduce_op,
        members[0] if record.root is None and record.op in ROOTED else record.root,
        record.peer,
        record.tag or 0,
        splits,
        record.is_async,
        record.waited or record.done,
        blocked,
        "" if site is None else f"{os.path.basename(site.file)}:{site.line}",
    )


def _elements(record: CallRecord) -> int:
    return max(map(math.prod, (*record.input_shapes, *record.output_shapes)), default=0)


def _small(record: CallRecord, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return shapes of a few elements, consistent with each other as the operation requires."""
    n = len(record.group.ranks)
    wide = shapes is record.output_shapes if record.op.startswith("all_gather_into") else shapes is record.input_shapes
    several = record.op.startswith(("all_gather_into", "reduce_scatter_tensor")) and wide
    size = 4 * n if several or record.op == "all_to_all_single" else 4
    return tuple((size,) for _ in shapes)


def _leave_out(call: ReproducedCall, rank: int) -> ReproducedCall:
    if rank not in call.members:
        return call
    n = len(call.members)
    members = tuple(r for r in call.members if r != rank)

    def cut(shapes: tuple[tuple[int, ...], ...], whole: bool) -> tuple[tuple[int, ...], ...]:
        if not whole or (call.splits is not None and len(set(call.splits[0])) > 1):
            return shapes
        return tuple((s[0] // n * (n - 1), *s[1:]) if s else s for s in shapes)

    gathers = call.op.startswith("all_gather_into")
    scatters = call.op.startswith("reduce_scatter_tensor")
    both = call.op == "all_to_all_single"
    splits = call.splits
    if splits is not None:
        at = call.members.index(rank)
        splits = tuple(s[:at] + s[at + 1 :] for s in splits)  # type: ignore[assignment]
    return replace(
        call,
        members=members,
        inputs=cut(call.inputs, scatters or both),
        outputs=cut(call.outputs, gathers or both),
        splits=splits,
    )


def _ending(state: RankState | None) -> str:
    """Return a line of code that ends a rank as it ended in the records."""
    if state is None:
        return ""
    match state.phase:
        case Phase.RAISED:
            return f"raise RuntimeError({(state.exception or 'raised')[:120]!r})"
        case Phase.KILLED:
            return f"os.kill(os.getpid(), signal.{state.signal or 'SIGKILL'})"
        case Phase.EXITED:
            return f"os._exit({state.exit_code or 0})"
        case Phase.HOST_STUCK:
            return SPIN
        case Phase.FROZEN:
            return "time.sleep(1e4)  # stopped here (see [[faults]])"
        case Phase.BLOCKED if any(isinstance(wait, HostWait) for wait in state.waits):
            return "threading.Event().wait()  # it waited on the host"
        case _:
            return ""
