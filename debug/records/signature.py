"""Expands the key of a call's arguments to what a ring keeps of it, and makes records of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from math import prod
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from distsim.debug.records.arguments import FIELDS, Key
from distsim.debug.records.call import SERVE, CallRecord, Remote
from distsim.text.codec import Integer, Rank, Whole
from distsim.text.untrusted_input import MOST_RANKS

REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
"""Names of reduce ops by torch's numbers (ReduceOp.RedOpType)."""


_NAMES = {
    "input_shapes": "in",
    "output_shapes": "out",
    "dtypes": "dtype",
    "reduce_op": "reduce",
    "input_splits": "isplit",
    "output_splits": "osplit",
    "new_ranks": "new",
    "nbytes": "bytes",
}
"""Names of fields in a ring that are shorter there."""


class Signature(Struct, frozen=True, omit_defaults=True, rename=_NAMES):
    """The part of a `CallRecord` that comes from the arguments, with the same field names."""

    op: str = "?"
    input_shapes: tuple[tuple[Integer, ...], ...] = ()
    output_shapes: tuple[tuple[Integer, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    reduce_op: str | None = None
    root: Annotated[int, Meta(ge=-MOST_RANKS, le=MOST_RANKS)] | None = None
    input_splits: tuple[Integer, ...] | None = None
    output_splits: tuple[Integer, ...] | None = None
    new_ranks: tuple[Rank, ...] | None = None
    nbytes: Whole = 0
    device: str = "cpu"
    remote: Remote | None = None

    @classmethod
    def of(cls, key: Key) -> Signature:
        """Return the signature of a call from the arguments that `arguments` read."""
        op, inputs, outputs, dtype, reduce_op, root, input_splits, output_splits, device = key
        dtypes = () if dtype is None else dtype if isinstance(dtype, tuple) else (dtype,)
        return cls(
            op,
            tuple([tuple(shape) for shape in inputs]),
            tuple([tuple(shape) for shape in outputs]),
            tuple([str(one).removeprefix("torch.") for one in dtypes]),
            None if reduce_op is None else _reduce_op(reduce_op),
            root,
            input_splits or None,
            output_splits or None,
            nbytes=_bytes(key[FIELDS[op].sized_by], dtypes),
            device="cpu" if device is None or device.type == "cpu" else str(device),
        )

    def remote_call(self, peer: int, tag: int, ordinal: int) -> Remote:
        """Return the remote call, completed by fields of the call's record.

        *ordinal* - 1 is, for a served call, the index of the record of rank *peer*; else the number of an RRef that
        rank *tag* requested. 0 means unknown.
        """
        remote = self.remote or Remote("?", "?", "?")
        first = peer if self.op == SERVE else tag
        if not ordinal or not 0 <= first < MOST_RANKS:
            return remote
        pair = (first, ordinal - 1)
        return replace(remote, request=pair) if self.op == SERVE else replace(remote, rref=pair)

    def renumbered(self, number: Callable[[int], int]) -> Signature:
        """Return the signature with ranks translated by *number*."""
        if self.root is None and self.new_ranks is None:
            return self
        root = None if self.root is None else number(self.root)
        new_ranks = None if self.new_ranks is None else tuple(map(number, self.new_ranks))
        return replace(self, root=root, new_ranks=new_ranks)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `CallRecord` that the arguments determine."""
        fields = asdict(self)
        del fields["remote"]
        return fields

    def record(self, **rest: Any) -> CallRecord:
        """Return the record of a call; *rest* contains the properties that its arguments do not (rank, group, number,
        line, times)."""
        return CallRecord(**self.fields(), **rest)


def content(key: Key) -> tuple[Signature, bool]:
    """Return the signature of a key, and whether calls with equal keys may still not match."""
    return Signature.of(key), FIELDS[key[0]].pairwise


def _reduce_op(number: int) -> str:
    return REDUCE_OPS[number] if 0 <= number < len(REDUCE_OPS) else str(number)


def _bytes(shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> int:
    """Return the bytes of tensors.

    *dtypes* are those of the inputs; if outputs belong to other members, they count once for each member.
    """
    return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, cycle(dtypes), strict=False))
