"""One aspect of a meeting: who differs in it, and what each says."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from distsim.debug.matching.majority import Vote, majority
from distsim.debug.records import CallRecord
from distsim.debug.records.kinds import Kind

__all__ = ["Found", "Shape", "differ", "payload_text", "texts"]

Shape = tuple[int, ...]

Found = tuple[Kind, Vote, Mapping[int, str]]


def differ(
    kind: Kind,
    ordered: Sequence[CallRecord],
    values: Mapping[int, Hashable],
    says: Mapping[int, str],
    histories: Mapping[int, Sequence[CallRecord]],
) -> Found | None:
    if len(set(values.values())) < 2:
        return None
    vote = majority(values)
    if vote.tie and histories:
        vote = _settle(vote, kind, ordered, histories)
    return kind, vote, says


_ASPECT: dict[Kind, Callable[[CallRecord], Hashable]] = {
    Kind.OP_MISMATCH: lambda r: r.op,
    Kind.ROOT_MISMATCH: lambda r: r.root,
    Kind.SHAPE_MISMATCH: lambda r: (r.input_shapes, r.output_shapes),
    Kind.SPLITS_MISMATCH: lambda r: (r.input_splits, r.output_splits),
    Kind.DTYPE_MISMATCH: lambda r: r.dtypes,
    Kind.REDUCE_OP_MISMATCH: lambda r: r.reduce_op,
    Kind.GROUP_CREATION_ORDER: lambda r: r.new_ranks,
}


def _settle(
    vote: Vote, kind: Kind, ordered: Sequence[CallRecord], histories: Mapping[int, Sequence[CallRecord]]
) -> Vote:
    """A tie: blame the ranks that left their own habit at this line, if the others kept theirs."""
    aspect = _ASPECT[kind]
    strayed: list[int] = []
    for record in ordered:
        past = [
            aspect(p)
            for p in histories.get(record.rank, ())
            if p is not record
            and p.index < record.index
            and p.site == record.site
            and p.group.ranks == record.group.ranks
        ]
        if past and aspect(record) not in past:
            strayed.append(record.rank)
    everyone = tuple(r.rank for r in ordered)
    if not strayed or len(strayed) == len(everyone):
        return vote
    return Vote(tuple(r for r in everyone if r not in strayed), tuple(strayed), tie=False)


def payload_text(record: CallRecord) -> str:
    """`float32[4,8]`; lists are cut after three tensors."""
    shapes = record.input_shapes or record.output_shapes
    dtype = record.dtypes[0] if record.dtypes else ""
    if not shapes:
        return dtype or (f"{record.nbytes} B" if record.nbytes else "no tensor")
    texts = [f"{dtype}[{','.join(map(str, s))}]" for s in shapes[:3]]
    more = f", ... {len(shapes)} in all" if len(shapes) > 3 else ""
    return ", ".join(texts) + more


def texts(ordered: Sequence[CallRecord]) -> dict[int, str]:
    return {r.rank: payload_text(r) for r in ordered}
