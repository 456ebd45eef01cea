"""The parameters of one rank: their names, and what is kept of each between two steps.

A tensor of a call is found by its address at that moment: which parameter's gradient it is, or which parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.nn import Module

from distsim.debug.diagnosis.silent.collect.sketch import Reader, array_of, is_constant, local_part
from distsim.debug.diagnosis.silent.facts import ParameterFact, Vector

__all__ = ["Addresses", "Parameters", "Tracked", "mesh_ranks", "parameters_of"]


class Tracked:
    """A parameter that was seen, and the sketches of its gradients since its last step."""

    __slots__ = ("index", "local", "reference", "sampled")

    def __init__(self, index: int, parameter: Any) -> None:
        self.index = index
        self.reference = weakref.ref(parameter)
        self.sampled = True
        """Whether its gradients are sketched before the next step."""
        self.local: list[Vector] = []
        """Of each backward pass, before any reduction."""


class Parameters:
    """All parameters that a rank was seen to have. *on_gradient(tracked, gradient)* hears of each local gradient."""

    def __init__(self, read: Reader, on_gradient: Callable[[Tracked, Any], None]) -> None:
        self.facts: list[ParameterFact] = []
        self._read = read
        self._on_gradient = on_gradient
        self._by_id: dict[int, Tracked] = {}

    def get(self, parameter: Any) -> Tracked | None:
        """Return the record of *parameter*; None if it is unknown."""
        tracked = self._by_id.get(id(parameter))
        return tracked if tracked is not None and tracked.reference() is parameter else None

    def living(self) -> Iterable[tuple[Any, Tracked]]:
        """All that the program still has."""
        for tracked in list(self._by_id.values()):
            parameter = tracked.reference()
            if parameter is not None:
                yield parameter, tracked

    def add_model(self, model: Any) -> None:
        """Name the parameters of *model* that have no name yet."""
        for name, parameter, module in parameters_of(model):
            if parameter.requires_grad and self.get(parameter) is None:
                self.add(parameter, name, module)

    def add(self, parameter: Any, name: str, module: str) -> Tracked:
        """Begin to follow *parameter*."""
        tracked = Tracked(len(self.facts), parameter)
        self._by_id[id(parameter)] = tracked
        shape = tuple(int(size) for size in local_part(parameter).shape)
        fact = ParameterFact(name, shape, module, is_constant(parameter, self._read))
        if type(parameter).__name__ == "DTensor":
            fact.mesh = mesh_ranks(parameter.device_mesh, parameter.placements)
        elif parameter.is_leaf and parameter.requires_grad:
            parameter.register_hook(lambda gradient: self._on_gradient(tracked, gradient))
        self.facts.append(fact)
        return tracked


def parameters_of(model: Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any, str]]:
    """Name, parameter and the name of its module, of all of *model*, past methods that its classes may have replaced: a
    RemoteModule raises in `named_modules`, and one that came by RPC has no parameters at all, not even none."""
    seen = set() if seen is None else seen
    if id(model) in seen or not {"_parameters", "_modules"} <= vars(model).keys():
        return
    seen.add(id(model))
    for leaf, parameter in Module.named_parameters(model, recurse=False):
        yield f"{prefix}.{leaf}".lstrip("."), parameter, prefix
    for name, part in Module.named_children(model):
        yield from parameters_of(part, f"{prefix}.{name}".lstrip("."), seen)


def mesh_ranks(mesh: Any, placements: Any) -> tuple[int, ...]:
    """The ranks that hold the same part as this one: alike in the coordinates of all dimensions that are no copies."""
    ranks, coordinate = mesh.mesh, mesh.get_coordinate()
    if coordinate is None:
        return ()
    shape = tuple(ranks.shape)
    numbers = _numbers(ranks)
    same = []
    for dim in range(len(numbers)):
        at: list[int] = []
        rest = dim
        for size in reversed(shape):
            rest, step = divmod(rest, size)
            at.insert(0, step)
        if all(
            placement.is_replicate() or mine == other
            for placement, mine, other in zip(placements, coordinate, at, strict=True)
        ):
            same.append(numbers[dim])
    return tuple(same)


def _numbers(ranks: Any) -> list[int]:
    """The ranks of a mesh in order, read past the program's modes."""
    values = array_of(ranks)
    return [int(rank) for rank in (ranks.flatten().tolist() if values is None else values.reshape(-1))]


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
