"""The handle of a call of an MPI group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from distsim.realexec.mpi.progress import PROGRESS

__all__ = ["MpiWork"]


class MpiWork(Work):
    """Ends with MPI's requests; *land* then puts what came where the program wants it."""

    def __init__(
        self,
        name: str,
        outputs: Sequence[Tensor],
        keep: Sequence[Tensor],
        begin: Callable[[], Sequence[Any]],
        land: Callable[[], None] | None = None,
        received: bool = False,
    ) -> None:
        super().__init__()
        self.requests: list[Any] = []
        self.over = False
        self._name = name
        self._outputs = list(outputs)
        self._keep = (*outputs, *keep)
        """MPI reads and writes their memory until the end."""
        self._land = land
        self._received = received
        self._sender = -1
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None
        PROGRESS.start(self, begin)

    def ends(self, statuses: Sequence[Any], error: BaseException | None) -> None:
        """All requests are over; called once, by whoever saw it."""
        self._error = error
        if error is None:
            if self._land is not None:
                self._land()
            if self._received:
                self._sender = int(statuses[0].Get_source())
        self._keep, self._land = (), None
        self.over = True
        self._settle()

    def _settle(self) -> None:
        future = self._future
        if future is None or future.done():
            return
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        if not PROGRESS.until(self, seconds):
            raise RuntimeError(f"MPI: {self._name} was not over after {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if not self.over:
            PROGRESS.step()
        return self.over

    def is_success(self) -> bool:
        return self.over and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def source_rank(self) -> int:
        return self._source_rank()

    def _source_rank(self) -> int:
        if not self._received:
            raise RuntimeError(
                "sourceRank() may only be called on work objects that correspond to a recv or recv-from-any call."
            )
        return self._sender

    def result(self) -> list[Tensor]:
        if not self.over:
            raise RuntimeError(
                "Work needs to be completed before calling result(). Should call wait() before result()."
            )
        return self._outputs

    def synchronize(self) -> None:
        """Tensors of the host need no stream."""

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        if self._future is None:
            self._future = Future()
            if self.over:
                self._settle()
            else:
                PROGRESS.go_on_alone()
        return self._future
