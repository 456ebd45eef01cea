"""What a cluster's graph is made of: vertices, directed links, and the slots that take ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["Link", "Links", "Slot", "Vertex"]


@dataclass(frozen=True, slots=True)
class Vertex:
    """A piece of hardware. *kind* is one of gpu, cpu, nvswitch, pcie, nic, leaf, spine, switch.

    *host* is None for what several hosts share (switches, an NVLink domain of a rack); *local* is the index
    among the vertices of that kind on the host, or in the fabric.
    """

    name: str
    kind: str
    host: int | None
    local: int


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link. *bandwidth_bytes_per_s* is what transfers can have of it (the specified rate times the
    efficiency that the cluster file states); *index* is its position in `Cluster.links`.

    *kind* is one of nvlink, c2c, pcie, socket, nic, fabric, loopback.
    """

    index: int
    src: str
    dst: str
    bandwidth_bytes_per_s: float
    latency_s: float
    kind: str

    @property
    def name(self) -> str:
        """`src->dst`, as reports print it."""
        return f"{self.src}->{self.dst}"


class Links(Sequence[Link]):
    """Every link of a cluster by index: arrays of what each has, from which its `Link` is made when it is asked for.

    *codes* are positions in *kinds*; *ends* gives the names that link i leads from and to.
    """

    def __init__(
        self,
        bandwidth_bytes_per_s: NDArray[np.float64],
        latency_s: NDArray[np.float64],
        codes: NDArray[np.integer[Any]],
        kinds: Sequence[str],
        ends: Callable[[int], tuple[str, str]],
    ) -> None:
        self.bandwidth_bytes_per_s, self.latency_s = bandwidth_bytes_per_s, latency_s
        self._codes, self._kinds, self._ends = codes, kinds, ends

    @classmethod
    def of(cls, links: Sequence[Link]) -> Links:
        """The same links."""
        kinds = list(dict.fromkeys(link.kind for link in links))
        ends = [(link.src, link.dst) for link in links]
        return cls(
            np.array([link.bandwidth_bytes_per_s for link in links], dtype=np.float64),
            np.array([link.latency_s for link in links], dtype=np.float64),
            np.array([kinds.index(link.kind) for link in links], dtype=np.uint16),
            kinds,
            ends.__getitem__,
        )

    def are(self, kinds: Collection[str]) -> NDArray[np.bool_]:
        """Which links are of one of *kinds*."""
        found: NDArray[np.bool_] = np.array([kind in kinds for kind in self._kinds], dtype=bool)[self._codes]
        return found

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> Link: ...
    @overload
    def __getitem__(self, index: slice) -> list[Link]: ...
    def __getitem__(self, index: int | slice) -> Link | list[Link]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        place = range(len(self))[index]
        rate, latency = float(self.bandwidth_bytes_per_s[place]), float(self.latency_s[place])
        return Link(place, *self._ends(place), rate, latency, self._kinds[self._codes[place]])

    def __iter__(self) -> Iterator[Link]:
        every = zip(self.bandwidth_bytes_per_s.tolist(), self.latency_s.tolist(), self._codes.tolist(), strict=True)
        for place, (rate, latency, code) in enumerate(every):
            yield Link(place, *self._ends(place), rate, latency, self._kinds[code])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Link.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a rank runs."""

    rank: int
    host: int
    local_rank: int
    device: str
