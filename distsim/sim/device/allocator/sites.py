"""The line, the operator and the tensor for which memory of a simulated GPU was taken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from distsim.debug.records.frames import Owner, owner

if TYPE_CHECKING:
    from distsim.sim.device.allocator.allocator import Ledger

__all__ = ["AllocationSite", "site_reader"]


class AllocationSite(NamedTuple):
    """Line, operator and tensor of an allocation."""

    file: str
    """Innermost file of the user's code; empty where none is on the stack."""
    line: int
    function: Any
    """The operator of aten; None where it is not an operator's result: storage.resize_ (FSDP's gathered parameters),
    buffers of NCCL."""
    shape: tuple[Any, Any] | None
    """Size and dtype of the operator's result."""

    @property
    def operator(self) -> str:
        """The operator's name."""
        return "buffer" if self.function is None else self.function._schema.name.removeprefix("aten::")

    @property
    def tensor(self) -> str:
        """dtype and shape, as `float32[8192,128256]`; empty where the allocation is not an operator's result."""
        if self.shape is None:
            return ""
        size, dtype = self.shape
        return f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, size))}]"


def site_reader(ledger: Ledger, accelerators: Any) -> Callable[[], AllocationSite]:
    """Return a function that describes the allocation which is being made for *ledger*."""
    are_users: dict[CodeType, bool] = {}

    def read() -> AllocationSite:
        shape, ledger.shape = ledger.shape, None
        function = None if shape is None else accelerators.operator
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            is_users = are_users.get(code)
            if is_users is None:
                is_users = are_users[code] = owner(code.co_filename) is Owner.USER
            if is_users:
                return AllocationSite(code.co_filename, frame.f_lineno, function, shape)
            frame = frame.f_back  # type: ignore[assignment]
        return AllocationSite("", 0, function, shape)

    return read
