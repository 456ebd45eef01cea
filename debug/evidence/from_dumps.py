"""PyTorch Flight Recorder dumps (version 2.x, pickle or JSON) as evidence.

The rank is only in the file's name. Gloo's dumps do not list the members of their groups and leave the state at
`scheduled`, so members are taken from the dumps that mention the group, and the end of a call from `retired`.

A pickle may come from an untrusted source, so it is read by an unpickler of plain data (containers, numbers,
strings) that executes nothing. Python's C unpickler, even without classes, can be made to allocate a memo of 32 GiB
with ten bytes, or to hash a tuple that is nested a million deep (a crash) or shared forty times over (without end).
Its Python version keeps the memo in a dictionary and reads no more than the file has; here it knows only the opcodes
of plain data, and accepts only strings and numbers as keys.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from distsim.debug.diagnosis.pace.durations import TimedCall
from distsim.debug.evidence.rank_state import sources
from distsim.debug.messages import ranks_text
from distsim.debug.records import P2P, CallRecord, CallWait, Evidence, Group, Phase, RankState, State
from distsim.debug.records.frames import program_frames
from distsim.errors import UsageError
from distsim.text.codec import Integer, Rank, Whole, convert_foreign
from distsim.text.untrusted_input import MOST_RANKS, load_json, read_bytes

OPERATIONS = {
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_to_all_base": "all_to_all_single",
    "alltoall_base": "all_to_all_single",
    "alltoall": "all_to_all",
}
"""Public names of torch.distributed for operations that the Flight Recorder names differently."""

DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}

MOST_BYTES = 256 << 20
"""Maximum bytes of a dump: a hundred times the size of the recorder's default of 2,000 entries."""
MOST_ENTRIES = 1 << 20
LONGEST_MS = 1e9
MOST_FRAMES = 1024
"""Frames of a stack that are looked at, the innermost: a recursion has more."""
_PLAIN = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT LONG FLOAT BININT BININT1 BININT2 BINFLOAT LONG1 LONG4
    STRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS
    PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET
""".split()  # noqa: SIM905
_LOADS_CODE = {pickle.GLOBAL[0], pickle.STACK_GLOBAL[0], pickle.INST[0]}
_FROM_OUTSIDE = {pickle.PERSID[0], pickle.BINPERSID[0]}
_KEYS = {str, int, float, bool, bytes}


class DumpFrame(Struct):
    """One frame of a call's stack."""

    filename: str = "?"
    line: Whole | None = None
    name: str = "?"


Shapes = Annotated[list[Annotated[tuple[Integer, ...], Meta(max_length=64)]], Meta(max_length=MOST_RANKS)]


class Entry(Struct):
    """One call in a dump."""

    profiling_name: str | None = None
    """`nccl:all_reduce`, `nccl:send 1->2`."""
    process_group: str | int | list[str | int] | None = None
    """Name and description."""
    record_id: Whole | None = None
    collective_seq_id: Whole | None = None
    p2p_seq_id: Whole | None = None
    input_sizes: Shapes | None = None
    output_sizes: Shapes | None = None
    input_dtypes: list[str] | None = None
    output_dtypes: list[str] | None = None
    frames: list[DumpFrame] | None = None
    thread_name: str | None = None
    state: str | None = None
    retired: bool | None = None
    time_created_ns: Whole | None = None
    time_discovered_started_ns: Whole | None = None
    time_discovered_completed_ns: Whole | None = None
    duration_ms: float | None = None
    """Time on the device, with TORCH_NCCL_ENABLE_TIMING=1."""

    @property
    def group(self) -> tuple[str, str]:
        """Return name and description of the group."""
        names = self.process_group or ""
        name, description = [*names[:2], "", ""][:2] if isinstance(names, list) else (names, "")
        return str(name), str(description)


class _GroupConfig(Struct):
    desc: str = ""
    ranks: str | list[Rank] | None = None
    """Members, also as text: `[0, 1]`."""

    def members(self) -> tuple[int, ...]:
        ranks = re.findall(r"\d{1,9}", self.ranks) if isinstance(self.ranks, str) else self.ranks or ()
        return tuple(convert_foreign(ranks, list[Rank]))


@dataclass
class Dump:
    """One rank's dump."""

    path: Path
    rank: int
    version: str
    groups: dict[str, tuple[str, tuple[int, ...]]]
    """Description and members of each group, as far as the dump contains them, by name."""
    entries: list[Entry] = field(default_factory=list)


class NotADump(UsageError):
    """A file's content is neither a dump nor like one."""


def read_dump(path: Path) -> Dump:
    """Read one file, or raise a UsageError of one line if it is not a dump."""
    try:
        data = read_bytes(path, MOST_BYTES)
    except OSError as error:
        raise UsageError(f"{path.name}: cannot be read ({error.strerror})") from None
    content = _load(path, data)
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list) or "version" not in content:
        raise NotADump(f"{path.name}: not a Flight Recorder dump (expected a dict with version and entries)")
    version = content["version"]
    if not isinstance(version, str):
        raise UsageError(f"{path.name}: version: expected a text such as '2.10', got a {type(version).__name__}")
    if not version.startswith("2."):
        raise UsageError(f"{path.name}: Flight Recorder dump of version {version[:40]}, expected 2.x")
    rank = named_rank(path)
    if rank is None:
        raise UsageError(
            f"{path.name}: expected a file name that ends in the rank, because the dump itself does not contain it"
        )
    try:
        if rank >= MOST_RANKS:
            raise ValueError(f"it would be of rank {rank}")
        config = convert_foreign(content.get("pg_config") or {}, dict[str | int, _GroupConfig])
        groups = {str(name): (of.desc, of.members()) for name, of in config.items() if name != ""}
        entries = [entry for entry in content["entries"][-MOST_ENTRIES:] if isinstance(entry, dict)]
        return Dump(path, rank, version, groups, convert_foreign(entries, list[Entry]))
    except ValueError as error:
        raise UsageError(f"{path.name}: damaged, left out ({error})") from None


def named_rank(path: Path) -> int | None:
    """Return the last number of a dump's name: which rank wrote it."""
    digits = re.findall(r"\d+", path.stem if path.suffix in (".json", ".pkl", ".pickle") else path.name)
    return int(digits[-1]) if digits and len(digits[-1]) < 10 else None


def _load(path: Path, data: bytes) -> Any:
    if data[:4096].lstrip()[:1] == b"{":
        try:
            return load_json(data)
        except ValueError as error:
            raise UsageError(f"{path.name}: broken JSON ({error})") from None
    try:
        return loads(data)
    except pickle.UnpicklingError as error:
        raise NotADump(f"{path.name}: neither a pickle of plain data nor JSON ({error})") from None


def dump_evidence(dumps: Sequence[Dump], others: Collection[int] = (), roots: Sequence[Path] | None = None) -> Evidence:
    """Return all dumps as one Evidence, at the time of the last entry.

    *others* are ranks with unreadable dumps; source lines come only from files under *roots*.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    others = [rank for rank in others if rank < MOST_RANKS]
    groups, guessed = _groups(by_rank, others)
    start = min((e.time_created_ns or 0 for d in dumps for e in d.entries), default=0)
    records: dict[int, list[CallRecord]] = {}
    for rank, dump in sorted(by_rank.items()):
        records[rank] = [_record(rank, entry, groups, start) for entry in dump.entries if _is_call(entry)]
        for index, record in enumerate(records[rank]):
            record.index = index + (dump.entries[0].record_id or 0)
    known = [rank for group in groups.values() for rank in group.ranks]
    world_size = max([*known, *by_rank, *others, 0]) + 1
    if world_size > MOST_RANKS:
        raise ValueError(f"a job of {world_size} ranks")
    states: dict[int, RankState] = {}
    for rank in range(world_size):
        state = states[rank] = RankState(rank)
        calls = records.get(rank)
        if calls is None:
            continue
        waiting = [call for call in calls if not call.done]
        if waiting:
            state.phase = Phase.BLOCKED
            state.waits = (CallWait(waiting[0]),)
            state.site, state.stack, state.since_s = waiting[0].site, waiting[0].stack, waiting[0].issued_s
    now_s = max((call.issued_s for calls in records.values() for call in calls), default=0.0)
    missing = sorted(set(range(world_size)) - set(by_rank))
    unreadable = set(missing) & set(others)
    without = {"no": set(missing) - unreadable, "unreadable": unreadable}
    notes = [f"{absence} dump of {ranks_text(ranks)}" for absence, ranks in without.items() if ranks]
    return Evidence(
        world_size=world_size,
        ranks=states,
        records=records,
        now_s=now_s,
        notes=notes,
        sources=sources(records.values(), roots),
        hang_after_s=0.0,
        unrecorded=frozenset(missing),
        members_guessed=guessed,
    )


def timed_calls(dumps: Sequence[Dump], evidence: Evidence) -> dict[int, list[TimedCall]]:
    """Return the calls of each rank whose time on the device is in the dumps."""
    timed: dict[int, list[TimedCall]] = {}
    for dump in dumps:
        entries = [entry for entry in dump.entries if _is_call(entry)]
        timed[dump.rank] = [
            TimedCall(
                call.group,
                call.seq,
                call.op,
                (call.site, call.input_shapes, call.dtypes),
                entry.duration_ms / 1e3,
                call.issued_s if call.completed_s is None else call.completed_s,
            )
            for entry, call in zip(entries, evidence.records[dump.rank], strict=True)
            if entry.duration_ms is not None and 0.0 <= entry.duration_ms < LONGEST_MS and not call.is_p2p
        ]
    return timed


def _groups(dumps: Mapping[int, Dump], others: Collection[int]) -> tuple[dict[str, Group], bool]:
    """Return the groups by name from pg_config, or from their users, and whether one was guessed."""
    described: dict[str, str] = {}
    members: dict[str, tuple[int, ...]] = {}
    users: dict[str, set[int]] = {}
    for rank, dump in dumps.items():
        for name, (description, ranks) in dump.groups.items():
            if ranks:
                members.setdefault(name, ranks)
            if description:
                described.setdefault(name, description)
        for entry in dump.entries:
            name, description = entry.group
            users.setdefault(name, set()).add(rank)
            described.setdefault(name, description)
    names = sorted({*users, *members})
    named_ranks = [rank for ranks in members.values() for rank in ranks]
    everyone = tuple(range(min(MOST_RANKS, max([*named_ranks, *dumps, *others, 0]) + 1)))
    groups = {
        name: Group(
            name,
            described.get(name, ""),
            members.get(name)
            or (everyone if described.get(name) == "default_pg" else tuple(sorted(users.get(name, ())))),
        )
        for name in names
    }
    return groups, any(name not in members for name in users)


def _is_call(entry: Entry) -> bool:
    return bool(entry.profiling_name) and not str(entry.profiling_name).endswith(":coalesced")


def _record(rank: int, entry: Entry, groups: Mapping[str, Group], start_ns: int) -> CallRecord:
    group = groups[entry.group[0]]
    words = str(entry.profiling_name).partition(":")[2].split()
    op = OPERATIONS.get(words[0], words[0]) if words else "?"
    peer = None
    p2p = op in P2P
    if p2p and len(words) > 1:
        # "send 1->2": ranks of the group
        ends = [int(digits) for digits in re.findall(r"\d{1,9}", words[1])]
        other = ends[-1] if ends else None
        peer = group.ranks[other] if other is not None and other < len(group.ranks) else other
    # dumps come from other machines: torch lies elsewhere there
    frames = [(frame.filename, frame.line or 0, frame.name) for frame in (entry.frames or ())[:MOST_FRAMES]]
    own = program_frames(frames, abroad=True)
    inputs, outputs = tuple(entry.input_sizes or ()), tuple(entry.output_sizes or ())
    dtypes = [DTYPES.get(one, one.lower()) for one in entry.input_dtypes or entry.output_dtypes or ()]
    created, begun, ended = entry.time_created_ns, entry.time_discovered_started_ns, entry.time_discovered_completed_ns
    state = State.STARTED if entry.state == "started" else State.ISSUED
    return CallRecord(
        rank=rank,
        group=group,
        seq=(entry.p2p_seq_id if p2p else entry.collective_seq_id) or 0,
        op=op,
        input_shapes=() if op in ("recv", "barrier") else inputs,
        output_shapes=() if op in ("send", "barrier") or outputs == inputs else outputs,
        dtypes=tuple(dict.fromkeys(dtypes)) if op != "barrier" else (),
        peer=peer,
        tag=0 if p2p else None,
        waited=True,
        site=own[0] if own else None,
        stack=own,
        thread=entry.thread_name or "MainThread",
        issued_s=((created or start_ns) - start_ns) / 1e9,
        started_s=(begun - start_ns) / 1e9 if begun else None,
        completed_s=(ended - start_ns) / 1e9 if ended else None,
        state=State.COMPLETED if entry.state == "completed" or entry.retired else state,
    )


def loads(data: bytes) -> Any:
    """Return the value in *data*; raise `pickle.UnpicklingError` if it is broken or not plain data."""
    try:
        return _Reader(io.BytesIO(data), encoding="latin-1").load()
    except (EOFError, IndexError, struct.error):
        raise pickle.UnpicklingError("it is cut off or damaged") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise pickle.UnpicklingError(str(error)) from None


class _Opcodes(dict[int, Callable[[Any], None]]):
    """Loaders of the allowed pickle opcodes; all others are errors."""

    def __missing__(self, op: int) -> Callable[[Any], None]:
        if op in _LOADS_CODE:
            raise pickle.UnpicklingError("it would load code, which a dump never does")
        if op in _FROM_OUTSIDE:
            raise pickle.UnpicklingError("it refers to an outside object, which a dump never does")
        raise pickle.UnpicklingError(f"opcode {op:#04x} is not one of plain data")


class _Reader(pickle._Unpickler):
    """Python's own, with fewer opcodes and without keys that have to be hashed piece by piece."""

    stack: list[Any]
    dispatch = _Opcodes({op: pickle._Unpickler.dispatch[op] for name in _PLAIN for op in getattr(pickle, name)})

    def load_dict(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self.stack.append({})
        self._set(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())  # type: ignore[attr-defined]

    def _set(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        if type(target) is not dict:
            raise pickle.UnpicklingError("it sets a key of an object that is not a dictionary")
        for key in keys:
            if type(key) not in _KEYS:
                raise pickle.UnpicklingError(f"a key of type {type(key).__name__}")
        target.update(zip(keys, items[1::2], strict=True))

    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
