"""NCCL's watchdog: a process whose call on a GPU takes longer than its group's timeout is taken down.

Source of the rules and of the texts: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (2.13). The time of a call counts
from when the host made it (`workStartTime_`), wherever its kernel is in its stream.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from distsim.debug.records import CallRecord, CallWait, State
from distsim.sim.device.timeline.items import NEVER, Comm
from distsim.sim.observe.user_stack import user_stack
from distsim.text.ranks import of_ranks

if TYPE_CHECKING:
    from distsim.sim.device.gpu import Device
    from distsim.sim.isolation.process import SimProcess

__all__ = ["Watchdog", "blocking_wait", "timeout_error", "tolerant", "waited_too_long"]

_TYPES = {
    "all_reduce": "ALLREDUCE",
    "all_gather": "ALLGATHER",
    "all_gather_into_tensor": "_ALLGATHER_BASE",
    "reduce_scatter_tensor": "_REDUCE_SCATTER_BASE",
    "all_to_all": "ALLTOALL",
    "all_to_all_single": "ALLTOALL_BASE",
    "barrier": "BARRIER",
}
"""c10d::opTypeToString, where it is not the name in capitals (ProcessGroup.cpp)."""
_SLACK_S = 1e-9
LOOKS_EVERY_S = 0.1
"""torchrun's --monitor-interval."""
KILLS_AFTER_S = 30.0
"""`PContext.close(timeout=30)` in torch/distributed/elastic/multiprocessing/api.py."""


def _is_set(name: str, default: str = "0") -> bool:
    return os.environ.get(name, default).lower() not in ("0", "false", "n", "no", "")


def blocking_wait() -> bool:
    """Whether `wait` keeps the host until the call has ended; then there is no watchdog."""
    return _is_set("TORCH_NCCL_BLOCKING_WAIT")


def tolerant() -> bool:
    """Whether a call may take longer than its timeout: the program has asked that nothing be done about it."""
    return blocking_wait() or not _is_set("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")


class Watchdog:
    """Looks after the calls on one GPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._at_s = NEVER
        """When it looks next."""

    def watch(self, comm: Comm) -> None:
        """A call was launched."""
        if comm.expires_s < self._at_s:
            self._at_s = comm.expires_s
            self._device.process.world.at_deadline(self._at_s, self)

    @property
    def explicit(self) -> bool:
        return any(comm.explicit for comm in self._device.comms)

    @property
    def over(self) -> bool:
        """Nothing is left to be looked after; the next call that is launched has it look again."""
        if self._device.comms and self._device.process.alive:
            return False
        self._at_s = NEVER
        return True

    def strike(self) -> None:
        process = self._device.process
        now_s = float(process.world.env.now)
        if not process.alive or now_s + _SLACK_S < self._at_s:  # it looks earlier than that moment, too
            return
        self._at_s = NEVER
        left = [c for c in self._device.comms if c.expires_s < NEVER and c.records[0].state is not State.FAILED]
        if not left:
            return
        first = min(left, key=lambda comm: comm.expires_s)
        if first.expires_s <= now_s + _SLACK_S:
            self._take_down(first.records[0], first.expires_s - first.records[0].issued_s)
        else:
            self.watch(first)

    def _take_down(self, record: CallRecord, limit_s: float) -> None:
        process = self._device.process
        world, rank = process.world, process.rank
        world.timed_out(CallWait(record))
        if process.stderr is not None:
            said = str(timeout_error(record, limit_s))
            here = f"[rank{rank}]:[E ProcessGroupNCCL.cpp] [Rank {rank}]"
            process.stderr.write(
                f"[rank{rank}]:[E ProcessGroupNCCL.cpp] {said}\n"
                f"{here} Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA "
                "kernels, subsequent GPU operations might run on corrupted/incomplete data.\n"
                f"{here} To avoid data inconsistency, we are taking the entire process down.\n"
                "terminate called after throwing an instance of 'c10::DistBackendError'\n"
                f"  what():  [PG ID {record.group.name} PG GUID {record.group.name} Rank {rank}] Process group "
                f"watchdog thread terminated with exception: {said}\n"
            )
        _end(process, signal.SIGABRT)
        if process.parent is None:
            _launcher_looks(process)


def _end(process: SimProcess, number: signal.Signals) -> None:
    frame = None if process.main_task is None else process.main_task.frame()
    if frame is not None:
        process.last_stack = user_stack(frame)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.finish()
            stream.muted = True
    process.world.kill_process(process, number.name, -number)


def _launcher_looks(dead: SimProcess) -> None:
    """torchrun's agent on that node sees it, and ends its other ranks: SIGTERM, and after a while SIGKILL for those
    with a handler of their own (torch/distributed/elastic/agent/server/local_elastic_agent.py, `_stop_workers`)."""
    world, host = dead.world, dead.slot.host

    def others() -> list[SimProcess]:
        known = world.rank_processes.values()
        return [other for other in known if other.alive and other.parent is None and other.slot.host == host]

    def end(left: list[SimProcess], number: signal.Signals) -> None:
        if left:
            world.note(
                f"torchrun ended {of_ranks(other.rank for other in left)} with {number.name}: NCCL's watchdog had "
                f"taken down rank {dead.rank} of the same node"
            )
        for other in left:
            _end(other, number)

    def later(seconds: float, call: Callable[[], None]) -> None:
        timer = world.env.timeout(seconds)
        timer.callbacks.append(lambda _: call())

    later(LOOKS_EVERY_S, lambda: end([p for p in others() if signal.SIGTERM not in p.signals], signal.SIGTERM))
    later(LOOKS_EVERY_S + KILLS_AFTER_S, lambda: end(others(), signal.SIGKILL))


def timeout_error(record: CallRecord, seconds: float) -> Exception:
    """What the watchdog says of a call that took longer than its timeout."""
    milliseconds = round(seconds * 1000)
    error: Exception = dist.DistBackendError(
        f"[Rank {record.rank}] Watchdog caught collective operation timeout: {_work(record, milliseconds)} ran for "
        f"{milliseconds} milliseconds before timing out."
    )
    return error


def waited_too_long(record: CallRecord, seconds: float) -> Exception:
    """What `wait` raises where it keeps the host for a time that the program has set."""
    error: Exception = dist.DistBackendError(
        f"[Rank {record.rank}] Work {_work(record, round(seconds * 1000))} timed out in blocking wait."
    )
    return error


def _work(record: CallRecord, milliseconds: int) -> str:
    kind = _TYPES.get(record.op, record.op.upper())
    sizes = [sum(map(_numel, shapes)) for shapes in (record.input_shapes, record.output_shapes)]
    numel_in, numel_out = (size or max(sizes) for size in sizes)
    return (
        f"WorkNCCL(SeqNum={record.seq}, OpType={kind}, NumelIn={numel_in}, NumelOut={numel_out}, "
        f"Timeout(ms)={milliseconds})"
    )


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product
