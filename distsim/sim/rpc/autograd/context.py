"""Autograd contexts: what one worker knows of each, and which one a thread is in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["Container", "Context", "Send"]

ID_BITS = 48
MOST_WORKERS = 65_535
NONE = -1

_here = threading.local()


class Send:
    """Stands where tensors left: their gradients come here. torch's SendRpcBackward."""

    def __init__(self, edges: list[Any]) -> None:
        self.edges = edges
        """`GradientEdge` of each tensor that requires a gradient."""
        self.arrived = False

    def name(self) -> str:
        return "torch::distributed::autograd::SendRpcBackward"

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        return tuple((edge.node, edge.output_nr) for edge in self.edges)


class Context:
    """`DistAutogradContext` of one worker."""

    def __init__(self, context_id: int) -> None:
        self.id = context_id
        self.sends: dict[int, Send] = {}
        self.recvs: dict[int, Any] = {}
        self.workers: dict[int, None] = {}
        """Those it has sent something to."""
        self.grads: dict[Tensor, Tensor] = {}
        self.backward: Any = None
        """The pass that runs (engine.Pass)."""

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Any]:
        return dict(self.sends)

    def _recv_functions(self) -> dict[int, Any]:
        return dict(self.recvs)

    def _known_worker_ids(self) -> set[int]:
        return set(self.workers)


class Container:
    """All contexts of one worker."""

    def __init__(self) -> None:
        self.worker: int | None = None
        self.contexts: dict[int, Context] = {}
        self._next_id = self._next_message = self._max_id = 0

    def init(self, worker: int) -> None:
        if not 0 <= worker <= MOST_WORKERS:
            raise RuntimeError(f"worker_id needs to be in the range [0, {MOST_WORKERS}]")
        if self.worker is not None:
            if self.worker != worker:
                raise RuntimeError(
                    f"Container is already initialized with worker_id: {self.worker}, cannot initialize with different "
                    f"worker_id: {worker}"
                )
            return
        self.worker = worker
        self._next_id = self._next_message = worker << ID_BITS
        self._max_id = worker << ID_BITS | (1 << ID_BITS) - 1

    def ready(self) -> Container:
        if self.worker is None:
            raise RuntimeError("Need to initialize distributed autograd using torch.distributed.autograd.init()")
        return self

    @property
    def max_id(self) -> int:
        return self._max_id

    @property
    def current_id(self) -> int:
        return int(getattr(_here, "context_id", NONE))

    def new_message_id(self) -> int:
        self._next_message += 1
        return self._next_message - 1

    def new_context(self) -> Context:
        if self.current_id != NONE:
            raise RuntimeError("Already have an autograd context id for this thread.")
        context = self.contexts[self._next_id] = Context(self._next_id)
        _here.context_id = self._next_id
        self._next_id += 1
        return context

    def get_or_create(self, context_id: int) -> Context:
        return self.contexts.setdefault(context_id, Context(context_id))

    def retrieve(self, context_id: int) -> Context:
        found = self.contexts.get(context_id)
        if found is None:
            raise RuntimeError(f"Could not find autograd context with id: {context_id}")
        return found

    def current(self) -> Context:
        if self.current_id == NONE:
            raise RuntimeError(
                "Current thread doesn't have a valid autograd context. Please wrap your code using: "
                "`with torch.distributed.autograd.context() as context_id` to generate a valid context"
            )
        found = self.contexts.get(self.current_id)
        if found is None:
            raise RuntimeError("Couldn't find autograd context data for current autograd context id")
        return found

    def erase(self, context_id: int) -> None:
        self.contexts.pop(context_id, None)
        if self.current_id == context_id:
            _here.context_id = NONE

    @contextlib.contextmanager
    def entered(self, context_id: int | None) -> Iterator[None]:
        """The running thread serves a request of that context."""
        if context_id is None:
            yield
            return
        before = self.current_id
        _here.context_id = context_id
        try:
            yield
        finally:
            _here.context_id = before
