"""What a world asks of its faults."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from distsim.debug.records import CallRecord, Finding

if TYPE_CHECKING:
    from distsim.sim.isolation.process import RankTask, SimProcess

__all__ = ["Injected"]


class Injected(Protocol):
    """What a world asks of its faults (planted.Faults), everywhere where something can go wrong; *members* are
    the arrivals of a call. Of a world without faults nobody answers."""

    def begin(self) -> None: ...

    def on_call(self, task: RankTask, record: CallRecord) -> None: ...

    def on_start(self, members: Sequence[Any]) -> None: ...

    def after_data(self, members: Sequence[Any]) -> None: ...

    def compute_s(self, process: SimProcess, start_s: float, seconds: float) -> float: ...

    def host_s(self, process: SimProcess, start_s: float, seconds: float) -> float: ...

    def kernel_s(self, process: SimProcess, start_s: float, seconds: float) -> float: ...

    def on_connect(self, task: RankTask, host_name: str, port: int, timeout: timedelta, explicit: bool) -> None: ...

    def accesses(self) -> AbstractContextManager[None]: ...

    def findings(self) -> Sequence[Finding]: ...

    @property
    def are_planted(self) -> bool: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def never_struck(self) -> Sequence[Any]: ...
