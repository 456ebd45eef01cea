"""One member's part in a call of its group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distsim.debug.records import CallRecord, State
from distsim.sim.c10d.data import Tensors
from distsim.sim.c10d.work import SimWork
from distsim.sim.device.operators.values import Values

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess

__all__ = ["Arrival", "HostSide"]


@dataclass(slots=True)
class HostSide:
    """What is known of the values of a member's tensors on a GPU, which have no data themselves."""

    values: Values
    """All that is known on that process's GPUs."""
    inputs: list[Tensor] | None
    """Copies made when the call was; None: unknown."""
    outputs: list[Tensor]
    """The tensors to write to, where their values may be known; else none."""
    guess: bool = False
    before: tuple[Any, ...] = ()
    """What was known of each output's storage."""


@dataclass(slots=True)
class Arrival:
    """One member's part in a collective."""

    process: SimProcess
    record: CallRecord
    work: SimWork
    inputs: Tensors = ()
    outputs: Tensors = ()
    host_side: HostSide | None = None
    """Of a call on a GPU: what is known of its values."""
    sums: list[tuple[int | None, int | None]] | None = None
    """Checksums of the inputs when the call was made, and how often torch had counted a write to each (guards.py)."""
    on_start: Callable[[], None] | None = None
    """Called when the other members have come too: bytes move from now on."""

    def start(self, now_s: float) -> None:
        """The other members have come too, at *now_s*."""
        self.record.started_s, self.record.state = now_s, State.STARTED
        if self.on_start is not None:
            self.on_start()
