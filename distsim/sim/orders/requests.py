"""Remote calls in an exploration: which of the requests that have come to a worker is served next."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distsim.sim.kernel.clocks import Clock
from distsim.sim.kernel.steps import Access, NextOperation, Step
from distsim.sim.kernel.turns import order_of

if TYPE_CHECKING:
    from distsim.sim.kernel.chooser import Orders
    from distsim.sim.kernel.turns import TurnQueue

# -- Each request is an actor of its own, because any thread of the worker may serve it: it begins, and what its
# function does follows. Requests of one worker are dependent, because their functions share the worker's objects.


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request that has come to its worker and is not served yet."""

    name: str
    """Name of the actor: `0@1.0#2` is the second request of thread 0 of rank 1 to worker 0."""
    label: str
    line: str
    clock: Callable[[], Clock]
    """What happens before it can be served."""
    begin: Callable[[Clock], None]
    """Hands it to a thread, whose clock is then the given one."""
    is_possible: Callable[[], bool]
    only_reads: bool


class RequestQueue:
    """The requests of the program at one worker.

    Args:
        turns: The operations of the run.
        worker: Number of the worker.
    """

    def __init__(self, turns: TurnQueue, worker: int) -> None:
        self._worker = worker
        self._waiting: list[WaitingRequest] = []
        turns.sources[self] = None

    def post(self, request: WaitingRequest) -> None:
        """Keep a request until it has its turn."""
        self._waiting.append(request)

    def offers(self) -> Iterator[tuple[NextOperation, Callable[[Step], None]]]:
        """Yield each request that may be served next."""
        for request in self._waiting:
            if request.is_possible():
                yield self._offer(request), functools.partial(self._begin, request)

    def _offer(self, request: WaitingRequest) -> NextOperation:
        access = Access.READ if request.only_reads else Access.WRITE
        objects: dict[Hashable, Access] = {("requests", self._worker): access}
        order = (1, *order_of(request.name))  # not that of coming: two that come at once may come in either
        return NextOperation(request.name, request.name, objects, order, request.label, request.line, request.clock())

    def _begin(self, request: WaitingRequest, step: Step) -> None:
        self._waiting.remove(request)
        request.begin(step.clock)

    def close(self, orders: Orders) -> None:
        """Add the requests that were not served to what was about to happen."""
        orders.trace.pending += map(self._offer, self._waiting)
