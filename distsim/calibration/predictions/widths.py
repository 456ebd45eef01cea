"""How far from its prediction a machine that no fit has seen is to be expected.

A median error is known well where many machines were measured and hardly at all where one was. So that of a fabric is
held to that of its kind (inside a node, InfiniBand, all others), and that to that of all, by how many machines stand
behind it. How much further than a median error eight of ten points lie is asked of machines that were left out here,
too: each measured against widths that its own errors had no part in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distsim.collectives.uncertainty import NODE_CLASSES, OTHERS, SIZES

__all__ = ["Error", "Widths", "ratios", "weighted"]

_HOLD = 2.0
"""So many machines' word the next wider class has. With 2 to 4 the widths are narrowest at the same share held."""
_LEAST = 5e-3
"""Of a median error: measured times are no better than that."""


@dataclass(frozen=True, slots=True)
class Error:
    """One measured point of a machine that was left out."""

    machine: str
    fabric: str
    nodes: str
    size: str
    value: float
    """Logarithm of measured / predicted."""


def weighted(values: Iterable[tuple[str, float]], share: float) -> float:
    """The quantile of values by machine, each machine with the same weight."""
    found: dict[str, list[float]] = {}
    for machine, value in values:
        found.setdefault(machine, []).append(value)
    every = np.concatenate([np.array(each) for each in found.values()])
    weight = np.concatenate([np.full(len(each), 1.0 / len(each)) for each in found.values()])
    order = np.argsort(every, kind="stable")
    reached: NDArray[np.float64] = np.cumsum(weight[order]) - weight[order] / 2
    return float(np.interp(share * weight.sum(), reached, every[order]))


def _kind(fabric: str) -> str:
    return fabric if fabric in ("none", "ib") else OTHERS


class Widths:
    """Of errors: about their median, by fabric, nodes and size."""

    def __init__(self, errors: Sequence[Error]) -> None:
        self._scale: dict[tuple[str, ...], float] = {}
        self._by_nodes: dict[str, float] = {}
        for size in SIZES:
            some = [error for error in errors if error.size == size]
            if not some:
                continue
            self._scale[(size,)] = max(weighted(((one.machine, abs(one.value)) for one in some), 0.5), _LEAST)
            for key in {(size, _kind(one.fabric)) for one in some}:
                self._hold(key, [one for one in some if _kind(one.fabric) == key[1]])
            for key in {(size, one.fabric) for one in some if _kind(one.fabric) == OTHERS}:
                self._hold((size, OTHERS, key[1]), [one for one in some if one.fabric == key[1]])
        for nodes in NODE_CLASSES:
            some = [error for error in errors if error.nodes == nodes]
            if some:
                ratio = weighted(
                    ((one.machine, abs(one.value) / self._near(one.fabric, one.size)) for one in some), 0.5
                )
                machines = len({one.machine for one in some})
                own = max(ratio, 0.1) ** (machines / (machines + _HOLD))
                # More nodes are no surer than two.
                fewer = [self._by_nodes[one] for one in NODE_CLASSES[1:] if one in self._by_nodes]
                self._by_nodes[nodes] = max([own, *fewer]) if nodes != NODE_CLASSES[0] else own

    def _hold(self, key: tuple[str, ...], errors: Sequence[Error]) -> None:
        own = max(weighted(((one.machine, abs(one.value)) for one in errors), 0.5), _LEAST)
        machines, above = len({one.machine for one in errors}), self._scale[key[:-1]]
        self._scale[key] = math.exp((machines * math.log(own) + _HOLD * math.log(above)) / (machines + _HOLD))

    def _near(self, fabric: str, size: str) -> float:
        for key in ((size, OTHERS, fabric), (size, _kind(fabric)), (size,)):
            if key in self._scale:
                return self._scale[key]
        return max(self._scale.values(), default=1.0)

    def of(self, fabric: str, nodes: str, size: str) -> float:
        """The median of |log (measured / predicted)| that is to be expected."""
        return self._near(fabric, size) * self._by_nodes.get(nodes, 1.0)


def ratios(errors: Sequence[Error]) -> list[tuple[str, float]]:
    """Each point's error, by its machine, in medians that know nothing of that machine."""
    found: list[tuple[str, float]] = []
    for machine in dict.fromkeys(error.machine for error in errors):
        others = Widths([error for error in errors if error.machine != machine])
        mine = [error for error in errors if error.machine == machine]
        of = {key: others.of(*key) for key in {(one.fabric, one.nodes, one.size) for one in mine}}
        found += [(machine, abs(one.value) / of[(one.fabric, one.nodes, one.size)]) for one in mine]
    return found
