"""Do the calls of one meeting agree? Pure comparisons of records, one aspect at a time.

A meeting is what the members of a group bring to one sequence number. The majority is right
until other evidence says more: the culprits are the ranks that differ from it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from distsim.debug.matching.aspect import Found, differ, payload_text, texts
from distsim.debug.matching.sizes import sizes
from distsim.debug.records import CallRecord, Group
from distsim.debug.records.arguments import FIELDS
from distsim.debug.records.kinds import Kind

__all__ = ["Mismatch", "check_meeting", "check_pair", "itemsize", "payload_text", "same_call"]

ROOTED = frozenset(op for op, fields in FIELDS.items() if fields.rooted)
BY_LISTS = frozenset(op for op, fields in FIELDS.items() if fields.pairwise)
"""Alike on all ranks is not enough: one rank's list is compared with the others' tensors."""
BARRIERS = frozenset(
    {"barrier", "monitored_barrier", "init_process_group", "destroy_process_group", "init_rpc", "rpc_shutdown"}
)
REDUCING = frozenset(op for op, fields in FIELDS.items() if fields.reduces)

_ITEMSIZE = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "half"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "float", "int"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "double", "long", "complex64"), 8),
    "complex128": 16,
}
"""Bytes an element, by torch's dtype names."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks that met in one call and do not agree about it."""

    kind: Kind
    group: Group
    seq: int
    culprits: tuple[int, ...]
    """Global ranks that differ from the reference side."""
    reference: tuple[int, ...]
    """Global ranks that agree with each other: the majority, or in a tie the lowest rank's side."""
    expected: str
    """What the reference side says: `all_reduce`, `float32[4,8]`, `SUM`."""
    found: Mapping[int, str]
    """What each culprit says."""
    tie: bool
    """There was no majority."""
    records: Mapping[int, CallRecord]

    def swapped(self) -> Mismatch:
        """The same seen from the other side: the reference becomes the culprit."""
        said = next(iter(self.found.values()), "")
        found = dict.fromkeys(self.reference, self.expected)
        return replace(self, culprits=self.reference, reference=self.culprits, expected=said, found=found, tie=False)

    def __str__(self) -> str:
        """One line in the house's form: `expected ..., got ..., at rank R, group G, call #N, file:line`."""
        rank = self.culprits[0]
        record = self.records[rank]
        at = f", {record.site}" if record.site else ""
        return (
            f"{self.kind.label}: expected {self.expected}, got {self.found[rank]}, "
            f"at rank {rank}, group {self.group.label}, call #{self.seq} ({record.op}){at}"
        )


def check_meeting(
    records: Sequence[CallRecord],
    histories: Mapping[int, Sequence[CallRecord]] | None = None,
) -> Mismatch | None:
    """Compare the calls that ranks of one group brought to the same sequence number.

    Members may be absent: what is there is compared. *histories* (each rank's own earlier records)
    settles a tie: the rank that says something else than it used to at the same line is the culprit.
    Without a majority and without history, the side of the lowest group rank is the reference.
    """
    if len(records) < 2:
        return None
    first = records[0]
    plain = first.op not in BY_LISTS
    if plain and all(same_call(first, r) and first.output_shapes == r.output_shapes for r in records):
        return None  # the common case, without any voting
    position = {rank: i for i, rank in enumerate(first.group.ranks)}
    ordered = sorted(records, key=lambda r: position.get(r.rank, len(position)))
    found = _first_difference(ordered, histories or {})
    if found is None:
        return None
    kind, vote, says = found
    return Mismatch(
        kind=kind,
        group=first.group,
        seq=first.seq,
        culprits=vote.culprits,
        reference=vote.reference,
        expected=says[vote.reference[0]] if vote.reference else "something else",
        found={rank: says[rank] for rank in vote.culprits},
        tie=vote.tie,
        records={record.rank: record for record in ordered},
    )


def _first_difference(ordered: Sequence[CallRecord], histories: Mapping[int, Sequence[CallRecord]]) -> Found | None:
    ops = {r.rank: r.op for r in ordered}
    if found := differ(Kind.OP_MISMATCH, ordered, ops, ops, histories):
        return found
    op = ordered[0].op
    if op in BARRIERS:
        return None
    if op == "new_group":
        asked: dict[int, Hashable] = {r.rank: r.new_ranks for r in ordered}
        says = {r.rank: f"new_group({list(r.new_ranks or ())})" for r in ordered}
        if all(len(r.new_ranks or ()) == 1 for r in ordered):
            return None  # groups of one rank meet nobody: `new_subgroups(group_size=1)` makes other ones on each side
        return differ(Kind.GROUP_CREATION_ORDER, ordered, asked, says, histories)
    if op in ROOTED and all(r.root is not None for r in ordered):
        roots: dict[int, Hashable] = {r.rank: r.root for r in ordered}
        says = {r.rank: f"root {r.root}" for r in ordered}
        if found := differ(Kind.ROOT_MISMATCH, ordered, roots, says, histories):
            return found
    if found := sizes(op, ordered, histories):
        return found
    dtypes: dict[int, Hashable] = {r.rank: _dtypes(r) for r in ordered if r.dtypes}
    says = {r.rank: ", ".join(r.dtypes) for r in ordered}
    if found := differ(Kind.DTYPE_MISMATCH, ordered, dtypes, says, histories):
        return found
    if op in REDUCING:
        reduce_ops: dict[int, Hashable] = {r.rank: r.reduce_op for r in ordered if r.reduce_op}
        says = {r.rank: str(r.reduce_op) for r in ordered}
        return differ(Kind.REDUCE_OP_MISMATCH, ordered, reduce_ops, says, histories)
    return None


def _dtypes(record: CallRecord) -> Hashable:
    return record.dtypes[0] if len(set(record.dtypes)) == 1 else record.dtypes


def check_pair(send: CallRecord, recv: CallRecord) -> Mismatch | None:
    """Compare a send with the receive it is to meet: tag, size in bytes, dtype.

    There is no majority of two, so both ends are culprits and it is a tie; `diagnose` asks the
    ranks' histories as well.
    """
    kind: Kind | None = None
    says: dict[int, str] = {}
    if send.tag is not None and recv.tag is not None and send.tag != recv.tag:
        kind, says = Kind.P2P_UNMATCHED, {send.rank: f"tag {send.tag}", recv.rank: f"tag {recv.tag}"}
    elif _bytes(send) != _bytes(recv):
        kind, says = Kind.P2P_SIZE_MISMATCH, texts((send, recv))
    elif send.dtypes and recv.dtypes and send.dtypes[0] != recv.dtypes[0]:
        kind, says = Kind.DTYPE_MISMATCH, {send.rank: send.dtypes[0], recv.rank: recv.dtypes[0]}
    if kind is None:
        return None
    return Mismatch(
        kind=kind,
        group=recv.group,
        seq=recv.seq,
        culprits=(send.rank, recv.rank),
        reference=(),
        expected=says[recv.rank],
        found=says,
        tie=True,
        records={send.rank: send, recv.rank: recv},
    )


def itemsize(dtype: str) -> int:
    """Bytes of one element; 1 for a dtype nobody knows here."""
    return _ITEMSIZE.get(dtype.removeprefix("torch."), 1)


def _bytes(record: CallRecord) -> int:
    shapes = record.input_shapes or record.output_shapes
    if not shapes or not record.dtypes:
        return record.nbytes
    return sum(prod(s) for s in shapes) * itemsize(record.dtypes[0])


def same_call(a: CallRecord, b: CallRecord) -> bool:
    """Cheap and exact: nothing that any rank may not have differently is different."""
    return (
        a.op == b.op
        and a.input_shapes == b.input_shapes
        and a.dtypes == b.dtypes
        and a.reduce_op == b.reduce_op
        and a.root == b.root
        and a.input_splits == b.input_splits
        and a.output_splits == b.output_splits
        and a.new_ranks == b.new_ranks
    )
