"""Which parameter's gradient, or which parameter itself, a tensor of a call is: by its address at that moment."""

from __future__ import annotations

from typing import Any

from distsim.debug.diagnosis.silent.collect.names import Parameters, Tracked
from distsim.debug.diagnosis.silent.collect.sketch import local_part

__all__ = ["Addresses"]


class Addresses:
    """Finds parameters by address. An address is compared again when it is looked up: memory is used anew."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._gradients: dict[int, Tracked] = {}
        self._values: dict[int, Tracked] = {}
        self._are_stale = True

    def forget(self) -> None:
        """Gradients were made: their addresses are not known."""
        self._are_stale = True

    def gradient_of(self, tensor: Any) -> Tracked | None:
        """The parameter whose `.grad` *tensor* is."""
        return self._look_up(tensor, self._gradients, of_gradient=True)

    def value_of(self, tensor: Any) -> Tracked | None:
        """The parameter that *tensor* is, or whose `.data` it is."""
        return self._look_up(tensor, self._values, of_gradient=False)

    def _look_up(self, tensor: Any, table: dict[int, Tracked], of_gradient: bool) -> Tracked | None:
        if self._are_stale:
            self._learn()
        address = _address(tensor)
        tracked = table.get(address) if address else None
        parameter = None if tracked is None else tracked.reference()
        current = parameter.grad if of_gradient and parameter is not None else parameter
        if current is None or tensor.numel() != local_part(current).numel() or _address(current) != address:
            return None
        return tracked

    def _learn(self) -> None:
        self._are_stale = False
        self._gradients.clear()
        self._values.clear()
        for parameter, tracked in self._parameters.living():
            self._values[_address(parameter)] = tracked
            if parameter.grad is not None:
                self._gradients[_address(parameter.grad)] = tracked


def _address(tensor: Any) -> int:
    """Zero where it has no memory of its own."""
    try:
        return int(local_part(tensor).data_ptr())
    except RuntimeError:  # sparse, fake
        return 0
