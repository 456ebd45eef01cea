"""What a rule of its own for an operator (special.py, transfers.py) asks of the mode that met the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from distsim.kernels import Cost
from distsim.sim.device.operators.plan import Made
from distsim.sim.device.operators.values import Values

if TYPE_CHECKING:
    from types import TracebackType

    from distsim.sim.isolation.process import RankTask
    from distsim.sim.observe.reading import Reading

__all__ = ["Handler", "Mode"]


class Mode(Protocol):
    """dispatch.ComputeMode: within it, operators are dispatched again."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> Any: ...

    @property
    def task(self) -> RankTask: ...

    @property
    def values(self) -> Values: ...

    def under_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def indexed(self, device: torch.device) -> torch.device: ...

    def cost_of(self, device: torch.device) -> Callable[..., Cost]: ...

    def carry(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def make(self, out: Made, device: torch.device) -> Tensor: ...

    def launch(self, device: torch.device, cost: Cost, name: Any) -> None: ...

    def launch_plain(self, device: torch.device, nbytes: int) -> None: ...

    def copy_time(self, tensor: Tensor, to_host: bool, blocking: bool) -> None: ...

    def synchronize(self, tensor: Tensor) -> None: ...

    def where(self) -> Reading: ...


Handler = Callable[[Mode, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Answers (the mode, the operator, its arguments) with the operator's result, or NotImplemented where it is one like
others."""
