"""Expands the key of a call's arguments, converts it to and from a ring's JSON, and makes records of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import prod
from typing import Any

from distsim.debug.records.arguments import FIELDS, Key
from distsim.debug.records.call import SERVE, CallRecord, Remote
from distsim.text.untrusted_input import MOST_RANKS, text, whole, wholes, wrong

__all__ = ["REDUCE_OPS", "Signature", "content"]

REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
"""Names of reduce ops by torch's numbers (ReduceOp.RedOpType)."""


@dataclass(frozen=True)
class Signature:
    """The part of a `CallRecord` that comes from the arguments, with the same field names."""

    op: str = "?"
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    reduce_op: str | None = None
    root: int | None = None
    input_splits: tuple[int, ...] | None = None
    output_splits: tuple[int, ...] | None = None
    new_ranks: tuple[int, ...] | None = None
    nbytes: int = 0
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

    @classmethod
    def read(cls, content: dict[str, Any]) -> Signature:
        """Parse its JSON. Raises ValueError."""
        root, reduce_op, dtype = content.get("root"), content.get("reduce"), content.get("dtype", [])
        return cls(
            op=text(content.get("op", "?"), "op", 200),
            inputs=tuple(wholes(shape, "in") for shape in _listed(content, "in")),
            outputs=tuple(wholes(shape, "out") for shape in _listed(content, "out")),
            dtypes=tuple(text(one, "dtype", 40) for one in (dtype if isinstance(dtype, list) else (dtype,))),
            reduce_op=None if reduce_op is None else text(reduce_op, "reduce", 100),
            root=None if root is None else whole(root, "root", -MOST_RANKS, MOST_RANKS),
            input_splits=wholes(content["isplit"], "isplit") if "isplit" in content else None,
            output_splits=wholes(content["osplit"], "osplit") if "osplit" in content else None,
            new_ranks=wholes(content["new"], "new", 0, MOST_RANKS) if "new" in content else None,
            nbytes=whole(content.get("bytes", 0), "bytes"),
            device=text(content.get("device", "cpu"), "device", 40),
            remote=Remote.from_json(_listed(content, "remote")) if "remote" in content else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return it without empty entries."""
        dtypes = list(self.dtypes)
        content = {
            "op": self.op,
            "in": [list(shape) for shape in self.inputs],
            "out": [list(shape) for shape in self.outputs],
            "dtype": dtypes[0] if len(dtypes) == 1 else dtypes,
            "bytes": self.nbytes if dtypes else None,
            "reduce": self.reduce_op,
            "root": self.root,
            "isplit": list(self.input_splits or ()),
            "osplit": list(self.output_splits or ()),
            "device": None if self.device == "cpu" else self.device,
            "remote": None if self.remote is None else self.remote.to_json(),
        }
        return {name: value for name, value in content.items() if value is not None and value != []}

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
        return {
            "op": self.op,
            "input_shapes": self.inputs,
            "output_shapes": self.outputs,
            "dtypes": self.dtypes,
            "reduce_op": self.reduce_op,
            "root": self.root,
            "input_splits": self.input_splits,
            "output_splits": self.output_splits,
            "new_ranks": self.new_ranks,
            "nbytes": self.nbytes,
            "device": self.device,
        }

    def record(self, **rest: Any) -> CallRecord:
        """Return the record of a call; *rest* contains the properties that its arguments do not (rank, group, number,
        line, times)."""
        return CallRecord(**self.fields(), **rest)


def content(key: Key) -> tuple[dict[str, Any], bool]:
    """Return a key as text (JSON) for a ring, and whether calls with equal keys may still not match."""
    return Signature.of(key).to_json(), FIELDS[key[0]].pairwise


def _reduce_op(number: int) -> str:
    return REDUCE_OPS[number] if 0 <= number < len(REDUCE_OPS) else str(number)


def _bytes(shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> int:
    """Return the bytes of tensors.

    *dtypes* are those of the inputs; if outputs belong to other members, they count once for each member.
    """
    return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, cycle(dtypes), strict=False))


def _listed(content: dict[str, Any], key: str) -> list[Any]:
    result = content.get(key, [])
    if not isinstance(result, list):
        raise wrong(result, key, "a list")
    return result
