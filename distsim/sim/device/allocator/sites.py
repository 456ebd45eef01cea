"""The line, the operator and the tensor for which memory of a simulated GPU was taken."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from distsim.debug.records.frames import Owner, owner

if TYPE_CHECKING:
    from distsim.sim.device.allocator.allocator import Ledger

__all__ = ["Site", "site_reader"]


class Site(NamedTuple):
    """Where an allocation was made."""

    file: str
    """Innermost file of the user's code; empty where none is on the stack."""
    line: int
    operator: str
    tensor: str
    """dtype and shape, as `float32[8192,128256]`; empty where the allocation is not an operator's result."""


def site_reader(ledger: Ledger, accelerators: Any) -> Any:
    """Return a function that describes the allocation which is being made for *ledger*."""

    def read() -> Site:
        frame, file, line = sys._getframe(2), "", 0
        while frame is not None:
            name = frame.f_code.co_filename
            if owner(name) is Owner.USER:
                file, line = name, frame.f_lineno
                break
            frame = frame.f_back  # type: ignore[assignment]
        shape, ledger.shape = ledger.shape, None
        tensor = "" if shape is None else f"{str(shape[1]).removeprefix('torch.')}[{','.join(map(str, shape[0]))}]"
        operator = accelerators.operator
        if shape is None:  # not an operator's result: storage.resize_ (FSDP's gathered parameters), NCCL's own
            return Site(file, line, "buffer", "")
        return Site(file, line, "" if operator is None else operator._schema.name.removeprefix("aten::"), tensor)

    return read
