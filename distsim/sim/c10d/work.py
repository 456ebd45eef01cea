"""A rank's call as data (`Arrival`), and its handle, `torch.distributed.Work`: waiting for it takes virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from distsim.debug.messages import NEVER_COMPLETED, second_wait
from distsim.debug.records import CallRecord, CallWait, HostWait, State, Wait
from distsim.sim.c10d.futures import InBackward, callback_patches, have_stream_wait, plain_futures, take_turn_at
from distsim.sim.isolation.for_ranks import name_for_ranks
from distsim.sim.isolation.process import RankTask, current_task, not_ordered, require_task
from distsim.sim.kernel.clocks import START, Clock
from distsim.sim.kernel.scheduler import Event
from distsim.sim.kernel.steps import Access
from distsim.sim.kernel.task import calls_behind, is_done, why_it_waits
from distsim.sim.kernel.turns import meet_clock
from distsim.text.tracebacks import message
from distsim.torch_compat.groups import CURRENT_GRAPH_TASK_ID, DELAY_ALL_REDUCE, EXECUTION_ENGINE, FUTURE

if TYPE_CHECKING:
    from distsim.sim.device.operators.values import Values
    from distsim.sim.isolation.process import SimProcess

_current_graph_task_id = CURRENT_GRAPH_TASK_ID.get()
_execution_engine = EXECUTION_ENGINE.get()
_Future = FUTURE.get()

Tensors = Sequence[Tensor]

NO_TIMEOUT = timedelta(0)
_NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    "http://www.nvidia.com/Download/index.aspx"
)
"""Error message of a CUDA build of torch without a GPU."""
_BUILT_FOR_CUDA = torch.version.cuda is not None  # in a simulation it says what the simulated machine has


class Member(Protocol):
    """A rank as a member of the group whose call it makes (group.SimGroup)."""

    @property
    def process(self) -> SimProcess: ...

    @property
    def group_rank(self) -> int:
        """Return its rank in the group."""
        ...

    def arrive(self, arrival: Any) -> None:
        """Let its call *arrival* meet those of the other members."""
        ...

    def timeout_error(self, record: CallRecord, seconds: float) -> BaseException:
        """Return the backend's error for a call that has not ended in *seconds*."""
        ...

    def break_up(self, error: BaseException, culprit: SimWork) -> None:
        """Close the group's connections, because this member gave up on a call."""
        ...


@dataclass(slots=True)
class HostSide:
    """Known values of a member's GPU tensors, which have no data themselves."""

    values: Values
    """Known values of the tensors on the process's simulated GPUs."""
    inputs: list[Tensor] | None
    """Copies of the inputs at the time of the call; None if their values are unknown."""
    outputs: list[Tensor]
    """Output tensors whose values may become known; empty if there are none."""
    guess: bool | str = False
    before: tuple[Any, ...] = ()
    """Known values of each output's storage before the call."""


@dataclass(slots=True, eq=False)
class Arrival:
    """One member's part in a call of its group.

    What is to be done is data: the record says operation, root, sizes, splits and reduction (operations.py looks them
    up), and the other fields say between whom and with which tensors.
    """

    member: Member
    inputs: Tensors = ()
    outputs: Tensors = ()
    library: str = ""
    """Library whose algorithm moves the bytes."""
    peer: int | None = None
    """For a message: place of the other end in the group; None if any member may send."""
    refusal: BaseException | None = None
    """Error with which the backend ends the call as soon as it arrives."""
    record: CallRecord = field(init=False)
    work: SimWork = field(init=False)
    clock: Clock = field(init=False)
    """In an exploration, what happens before the call."""
    host_side: HostSide | None = None
    """For a call on a GPU: the known values of its tensors."""
    sums: list[tuple[int | None, int | None]] | None = None
    """Checksums of the inputs when the call was made, and how often torch had counted a write to each (`Guards`)."""

    @property
    def process(self) -> SimProcess:
        return self.member.process

    def arrive(self) -> None:
        """Let the call meet those of the other members, once the world's clock has caught up with the rank's."""
        self.member.arrive(self)

    def start(self, now_s: float) -> None:
        """Note that all members have arrived at *now_s*."""
        self.record.started_s, self.record.state = now_s, State.STARTED
        self.work.starts()


class CallMembers:
    """The members of a call in the order of their group. For those that are not traced the arrival of an equal rank
    stands (world/equal_ranks.py).

    Args:
        came: Arrivals by place in the group.
        stands: For each place the place of the arrival that stands there.
    """

    def __init__(self, came: dict[int, Arrival], stands: Sequence[int]) -> None:
        self.came = came
        self._stands = stands

    def __len__(self) -> int:
        return len(self._stands)

    def __getitem__(self, index: int) -> Arrival:
        return self.came[self._stands[index]]

    def __iter__(self) -> Iterator[Arrival]:
        return map(self.came.__getitem__, self._stands)

    def all_came(self) -> bool:
        """Return whether every member arrived itself."""
        return len(self.came) == len(self._stands)

    def counts(self) -> list[tuple[Arrival, int]]:
        """Return each arrival with the number of members for which it stands."""
        return [(self.came[index], count) for index, count in Counter(self._stands).items()]

    def replaced(self, replace: Callable[[Arrival], Arrival]) -> CallMembers:
        """Return the same members with other arrivals."""
        return CallMembers({index: replace(arrival) for index, arrival in self.came.items()}, self._stands)


class SimWork(Work):
    """The handle of one call of one rank. *done* happens when the network has moved the last byte."""

    def __init__(
        self,
        member: Member,
        record: CallRecord,
        done: Event,
        outputs: Sequence[Tensor],
        timeout_s: float,
        explicit_timeout: bool,
    ) -> None:
        super().__init__()
        self.process = member.process
        self.record = record
        self.done = self._awaited = done
        self.clock: Clock = START
        """In an exploration, what happens before the end of the call."""
        self._member = member
        self._outputs = outputs
        self._timeout_s = timeout_s
        self.has_own_limit = explicit_timeout
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None
        self._settlers: list[Callable[[], None]] = []
        self.sender: int | None = None
        self._is_known: bool | None = False
        """In an exploration, whether the program has learned that the call is complete; None: torch has asked."""
        self._itself: SimWork | None = None
        self._of_torch = False

    def outlives_python(self, of_torch: bool) -> None:
        """Keep the Python half of a handle alive until it has been waited for, because C++ may hold the only
        reference.

        torch's own C++ (DDP's reducer) uses the handle even after that, so a handle *of_torch* lives until garbage
        collection.
        """
        self._itself, self._of_torch = self, of_torch
        if of_torch:
            self.process.groups.works_of_torch.add(self)

    def _was_waited_for(self) -> None:
        if not self._of_torch:
            self._itself = None
        self.process.groups.works_of_torch.discard(self)

    # -- torch.distributed.Work

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not isinstance(timeout, timedelta):
            raise TypeError("wait(): incompatible function arguments: timeout must be a datetime.timedelta")
        task = require_task()
        self.record.waited = True
        own_s = timeout.total_seconds() if timeout is not NO_TIMEOUT else 0.0
        if not self._awaited.processed:
            left_s = own_s if own_s > 0 else max(0.0, self.expires_s - task.now_s())
            if not task.wait_until(self._awaited, self._why(), left_s, own_s > 0 or self.has_own_limit):
                raise self.give_up(own_s if own_s > 0 else self._timeout_s)
        else:
            task.flush()
        self._is_known = True
        if self.clock:
            meet_clock(task, self.clock)
        self._settle_all()
        if self._error is not None:
            raise self._error
        self._was_waited_for()
        return True

    def _why(self) -> Wait:
        return CallWait(self.record)

    @property
    def timeout(self) -> timedelta:
        """Return the timeout of the call (torch 2.14), or else that of the group."""
        return timedelta(seconds=self._timeout_s)

    @property
    def expires_s(self) -> float:
        """Return the virtual time at which the group's timeout expires."""
        return self.record.issued_s + self._timeout_s

    def give_up(self, limit_s: float | None = None) -> BaseException:
        """Return the error of a call that has not ended in *limit_s* (None: the group's timeout)."""
        error = self._member.timeout_error(self.record, self._timeout_s if limit_s is None else limit_s)
        self._error = self._error or error
        self.record.state = State.FAILED
        self.record.error = message(error)
        self._member.break_up(error, self)
        self._settle_all()
        return error

    def give_up_if_late(self, task: RankTask) -> None:
        """End the call after its timeout even if the program only polls it, as a thread of gloo does."""
        late = task.now_s() > self.expires_s and (self.has_own_limit or not task.port.only_polls)
        if late and not self.done.triggered and not task.wait_until(self.done, CallWait(self.record), 0.0):
            self.give_up()

    def is_completed(self) -> bool:
        task = current_task()
        turns = None if task is None else task.port.facts.turns
        if task is not None and turns is not None and not self._is_known:
            self._is_known = turns.answer(
                task, "is_completed", lambda: bool(self.done.processed), CallWait(self.record)
            )
            if self._is_known is False:
                return False
        if not self.done.processed and task is not None:
            task.poll(CallWait(self.record), task.looks_on(self.record))
            self.give_up_if_late(task)
        meet_clock(task, self.clock)
        if self.done.processed or self._error is not None:
            self.record.waited = True
            return True
        return False

    def is_success(self) -> bool:
        return bool(self.done.processed) and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def source_rank(self) -> int:
        return self._source_rank()

    def _source_rank(self) -> int:
        if self.sender is None:
            raise RuntimeError(
                "sourceRank() may only be called on work objects that correspond to a recv or recv-from-any call."
            )
        return self.sender

    def result(self) -> Any:
        if self.record.is_p2p:
            raise RuntimeError("result() not implemented.")
        if not self.done.processed:
            raise RuntimeError(
                "Work needs to be completed before calling result(). Should call wait() before result()."
            )
        return self._value()

    def _value(self) -> Any:
        """Return the value of the call's future."""
        return list(self._outputs)

    def synchronize(self) -> None:
        """Do nothing, as on gloo: CPU tensors need no stream."""

    def block_current_stream(self) -> None:
        if self.process.accelerators is None:
            raise RuntimeError(_NO_DRIVER if _BUILT_FOR_CUDA else "Failed to create StreamBlock")
        self.wait()

    def get_future(self) -> Future[Any]:
        if self.record.is_p2p:
            raise RuntimeError("Work::getFuture not implemented.")
        if self._future is None:
            if self.process.groups.ddp_waits_in_cpp:
                self.wait()
            self._future = future = CallFuture(self)
            self._when_done(lambda: future.settle(self._value(), self._error))
        return self._future

    def get_future_result(self) -> Future[Any]:
        raise RuntimeError("Work::getFutureResult not implemented.")  # gloo's answer

    # -- completion

    def starts(self) -> None:
        """Note that all members have arrived, before bytes move; called by the scheduler."""

    def _when_done(self, settle: Callable[[], None]) -> None:
        """Settle a future in the owner's own thread: at once, at its next wake-up, or, inside backward, at the end
        of backward.

        DDP's reducer waits in C++ during backward, where no thread can pass the baton.
        """
        if self.done.processed:
            settle()
            return
        self.record.waited = True
        process = self.process
        self._settlers.append(settle)
        if len(self._settlers) == 1:
            process.groups.unsettled[self] = None
            assert self.done.callbacks is not None
            self.done.callbacks.append(lambda _: process.completions.add(self._settle_all))
        if _current_graph_task_id() != -1:
            process.groups.backward.append(self)
            if len(process.groups.backward) == 1:
                _execution_engine.queue_callback(lambda: drain_backward(process))

    def _settle_all(self) -> None:
        settlers, self._settlers = self._settlers, []
        if settlers and self.clock:
            meet_clock(current_task(), self.clock)
        for settle in settlers:
            settle()
        if settlers:
            del self.process.groups.unsettled[self]
            self._was_waited_for()

    def fail(self, error: BaseException) -> None:
        """End the call with *error*; called by the scheduler."""
        if not self.done.triggered:
            self._error = self._error or error
            self.record.state = State.FAILED
            self.record.error = message(error)
            self.done.succeed()


class CallFuture(Future[Any]):
    """Future of `get_future`: done when the call of *work* is done or has timed out."""

    def __init__(self, work: SimWork) -> None:
        super().__init__()
        self.work: SimWork | None = work
        self.why = CallWait(work.record)

    def settle(self, value: object, error: BaseException | None) -> None:
        self.work = None  # it has the future
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)


def drain_backward(process: SimProcess) -> None:
    """Wait in virtual time for pending calls at the end of backward, before DDP's finalizer runs."""
    works: list[SimWork | InBackward] = process.groups.backward
    process.groups.backward = []
    for work in works:
        work.wait()
    process.completions.carry_out()


class _Message(SimWork):
    """Handle of gloo's send or receive, which ends in its first wait() and only there."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        super().wait(timeout)
        self._awaited = self.process.port.event()  # for which a second wait() waits
        return True

    def is_completed(self) -> bool:
        if not self._is_over() and (task := current_task()) is not None:
            task.poll(self._why(), task.looks_on(self.record))
        return self._is_over()

    def _is_over(self) -> bool:
        return self._awaited is not self.done or self._error is not None

    def _why(self) -> Wait:
        if self._is_over():
            return second_wait(self.record)
        return HostWait(NEVER_COMPLETED) if self.done.processed else super()._why()


class _Scattered(SimWork):
    """Handle of gloo's reduce_scatter, which supports only `wait`."""

    def is_completed(self) -> bool:
        super().is_completed()
        return False

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> Any:
        raise RuntimeError("result() not implemented.")

    def get_future(self) -> Future[Any]:
        raise RuntimeError("Work::getFuture not implemented.")


class _Gathered(SimWork):
    """gloo's of an all_gather into one tensor, which it takes for a list."""

    def _value(self) -> Any:
        return _shares(self._outputs[0], len(self.record.group.ranks))


class _GatheredMany(SimWork):
    """Handle of several all_gathers that gloo makes as one call."""

    def result(self) -> Any:
        super().result()
        raise RuntimeError("work result does not support list of lists, use .getFuture() and value()")

    def _value(self) -> Any:
        """Return the outputs by member, then by tensor."""
        size = len(self.record.group.ranks)
        if self.record.op == "all_gather_coalesced":
            count = len(self._outputs) // size
            return [list(self._outputs[i * count : (i + 1) * count]) for i in range(size)]
        return [list(of_one) for of_one in zip(*[_shares(output, size) for output in self._outputs], strict=True)]


def _shares(output: Tensor, size: int) -> list[Tensor]:
    return list(output.detach().chunk(size)) if output.dim() else [output]


_ON_GLOO: dict[str, type[SimWork]] = {
    "send": _Message,
    "recv": _Message,
    "reduce_scatter": _Scattered,
    "reduce_scatter_tensor": _Scattered,
    "reduce_scatter_tensor_coalesced": _Scattered,
    "all_gather_into_tensor": _Gathered,
    "all_gather_coalesced": _GatheredMany,
    "all_gather_into_tensor_coalesced": _GatheredMany,
}


def handle_of(op: str, flavour: str) -> type[SimWork]:
    """Return the kind of handle that a backend gives for *op* (read off gloo of torch 2.13)."""
    return _ON_GLOO.get(op, SimWork) if flavour == "gloo" else SimWork


_real_wait, _real_add = _Future.wait, _Future.add_done_callback


def _works(future: Any) -> list[SimWork]:
    """Return the unfinished calls behind *future*. A remote call has none."""
    return [work for one in calls_behind(future) if (work := getattr(one, "work", None)) is not None]


def _sleep(task: RankTask, future: Any) -> None:
    """Sleep until a completion falls due in the process that may settle *future*, or until a source call times out.

    The source then ends as if its handle had been waited for.
    """
    first = min(_works(future), key=lambda work: work.expires_s, default=None)
    event, why = task.process.completions.next(), why_it_waits(future)
    if first is None:
        task.wait(event, why)
    elif not task.wait_until(event, why, max(0.0, first.expires_s - task.now_s()), first.has_own_limit):
        first.give_up()


def _future_wait(self: Any) -> Any:
    task = current_task()
    if task is not None:
        process = task.process
        process.completions.carry_out()
        watched: Any = None
        while not is_done(self):
            first = next(calls_behind(self), self)
            if first is not watched:  # when that call is over, it is another that the rank is said to wait for
                for one in (first,) if first is self else (first, self):
                    _real_add(one, lambda _: process.completions.wake())
                watched = first
            _sleep(task, self)
    value = _real_wait(self)
    if task is not None:
        have_stream_wait(task, value)
        if self in plain_futures:
            meet_clock(task, plain_futures[self].clock)
    return value


def _future_done(self: Any) -> bool:
    task = current_task()
    if take_turn_at(self, "done", Access.READ):
        return bool(is_done(self))
    not_ordered("asks whether a future is done")
    if task is not None and not is_done(self):
        task.poll(why_it_waits(self), task.looks_on(self))
        for work in _works(self):
            work.give_up_if_late(task)
    return bool(is_done(self))


_real_delay_all_reduce: Any = DELAY_ALL_REDUCE.get()


def _delay_all_reduce(task: RankTask, self: Any) -> None:
    """Handle DDP's first step with static_graph, which reduces everything at the end of backward and waits in C++ at
    once.

    The futures must be done when DDP gets them.
    """
    task.process.groups.ddp_waits_in_cpp = True
    try:
        _real_delay_all_reduce(self)
    finally:
        task.process.groups.ddp_waits_in_cpp = False


def future_patches() -> list[tuple[Any, str, Any]]:
    """Return the patches of functions that block in C++ and would keep the baton."""
    waits = (_Future, "wait", _future_wait), (_Future, "done", _future_done)
    return [*waits, *name_for_ranks(DELAY_ALL_REDUCE, _delay_all_reduce), *callback_patches()]
