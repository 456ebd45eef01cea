"""Matches the calls of a group: members agree, the transfer runs, and the outputs are written."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from distsim.cluster import Slot
from distsim.collectives import SYMMETRIC
from distsim.debug.matching.agreement import check_meeting, check_pair
from distsim.debug.records import CallRecord, CallWait, Group, Phase, State
from distsim.sim.c10d.gpu_values import OneEach, compute
from distsim.sim.c10d.operations import OPERATIONS, DataFunction, Reduction, copy_into, nothing
from distsim.sim.c10d.work import Arrival, CallMembers, SimWork
from distsim.sim.isolation.process import SimProcess, require_task
from distsim.sim.kernel.clocks import START, joined
from distsim.sim.kernel.port import RankPort
from distsim.sim.kernel.scheduler import Event
from distsim.sim.kernel.turns import meet_clock
from distsim.sim.orders.mailbox import ChoiceMailbox, Mailbox

# -- monitored_barrier: rank 0 waits for everyone and names who did not come.


class MonitoredBarrier:
    """The n-th monitored barrier of a group: the ranks that have arrived, and the event that releases them."""

    def __init__(self, port: RankPort, size: int) -> None:
        self.size = size
        self.records: dict[int, CallRecord] = {}
        self.complete = port.event()
        self.released = port.event()
        self.failed = False
        self.clock = START
        """In an exploration, what happens before it is complete."""

    def arrive(self, group_rank: int, record: CallRecord) -> None:
        self.records[group_rank] = record
        if len(self.records) == self.size and not self.complete.triggered:
            self.complete.succeed()


def monitored_barrier(
    record: CallRecord,
    meetings: dict[int, MonitoredBarrier],
    me: int,
    size: int,
    timeout: timedelta,
    wait_all_ranks: bool,
) -> None:
    """Run a monitored barrier with the semantics and texts of ProcessGroupGloo::monitoredBarrier in torch 2.13.

    Rank 0 raises and names the first missing rank (all missing ranks with *wait_all_ranks*); the others learn that
    rank 0 failed. *record* is the call of the calling member, number *me* of *size*; *meetings* are those of its
    group.
    """
    task = require_task()
    meeting = meetings.setdefault(record.seq, MonitoredBarrier(task.port, size))
    meeting.clock = joined(meeting.clock, task.clock)
    meeting.arrive(me, record)
    limit_s = timeout.total_seconds()
    milliseconds = int(limit_s * 1000)
    if me == 0 and limit_s <= 0 and not wait_all_ranks and size > 1:  # gloo has no time left for the first
        record.state = State.FAILED
        record.error = f"[Rank 0]: Rank 1 failed to pass monitoredBarrier in {milliseconds} ms"
        meeting.failed = True
        meeting.released.succeed()
        raise RuntimeError(
            f"{record.error}\n Original exception: \nRank 0 timed out in monitoredBarrier after {milliseconds} ms.\n"
            "No ranks successfully processed in monitoredBarrier."
        )
    if me == 0:
        in_time = task.wait_until(meeting.complete, CallWait(record), limit_s)
        if in_time:
            meeting.released.succeed()
    else:
        # the others outlive rank 0's own timeout, as in torch, where rank 0's verdict ends them
        in_time = task.wait_until(meeting.released, CallWait(record), None if 0 in meeting.records else limit_s)
    if not in_time:
        record.state = State.FAILED
        missing = [rank for rank in range(size) if rank not in meeting.records]
        if me != 0:
            raise RuntimeError(_others(me, milliseconds))
        meeting.failed = True
        meeting.released.succeed()
        named = missing if wait_all_ranks else missing[:1]
        if wait_all_ranks:
            text = f"[Rank 0]: Ranks {', '.join(map(str, named))} failed to pass monitoredBarrier in {milliseconds} ms"
        else:
            text = f"[Rank 0]: Rank {named[0]} failed to pass monitoredBarrier in {milliseconds} ms"
        raise RuntimeError(text)
    if meeting.failed:
        record.state = State.FAILED
        raise RuntimeError(_others(me, milliseconds))
    meet_clock(task, meeting.clock)
    record.started_s = record.completed_s = task.now_s()
    record.state = State.COMPLETED
    record.waited = True


def _others(rank: int, milliseconds: int) -> str:
    return (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
        f"rank 0. Please check rank 0 logs for faulty rank. (timeout {milliseconds} ms)"
    )


# -- Where the calls of a group meet: the n-th collective of every member, and sends with receives.

UNEVEN = 1.1
"""Ratio of rows from which members of an all-to-all are distinguished: less than that is a remainder."""
_DEAD = (Phase.KILLED, Phase.EXITED)


class GroupPort(RankPort, Protocol):
    """What a group's meeting of calls asks of its world, beyond what a rank may ask."""

    def slot_of(self, rank: int) -> Slot: ...

    def stop_for_mismatch(self, met: Sequence[Any]) -> None:
        """Stop the world because calls met that contradict each other, before any data move."""
        ...


class Communicator:
    """State shared by all members of one group. It stands on the world's side of `RankPort`."""

    def __init__(self, world: GroupPort, group: Group, flavour: str) -> None:
        self.world = world
        self.group = group
        self.flavour = flavour
        self.key = zlib.crc32(repr((group.name, group.ranks)).encode())
        self.broken: str | None = None
        self.places: dict[int, int] | None = None
        """Global rank -> place, as torch has it: one for all members."""
        self._meetings: dict[int, dict[int, Arrival]] = {}
        """Arrivals of collectives that have not begun, by number of the call, then by place."""
        self._mailboxes: dict[tuple[int, int | None], Mailbox] = {}
        """Messages by the receiving member and tag."""
        self.monitored: dict[int, MonitoredBarrier] = {}
        self.stand_in: list[int] | None = world.traced.standing_for(group)
        """For each member the index of the member that arrives on its behalf; None if every rank is traced."""
        self._awaited = self._who_comes()
        self.has_messages = False
        """Whether members have exchanged messages, or unequal numbers of rows."""
        self.skew = 1.0
        """Rows that one member receives at most in an all-to-all, relative to the mean member."""
        self.gpus = OneEach()
        self.moving: dict[Event, None] = {}
        """Transfers of collectives on CPU tensors that have started and not ended."""
        self.is_revocable = False
        """Whether a call of NCCL that times out closes the group instead of its process."""
        self.buffers_sends = False
        """Whether a send ends at once, as a signal does."""
        self._breaks_with: list[Any] = []
        """Processes whose death breaks the group."""
        self._stranded: list[Arrival] = []
        """Members of calls that a dead member will never complete."""

    def _who_comes(self) -> Sequence[int]:
        """Return the indices of the members that must arrive before a collective starts."""
        return range(len(self.group.ranks)) if self.stand_in is None else list(dict.fromkeys(self.stand_in))

    @functools.cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.world.slot_of(rank).device for rank in self.group.ranks)

    @functools.cached_property
    def _crosses_nodes(self) -> bool:
        return len({self.world.slot_of(rank).host for rank in self.group.ranks}) > 1

    @property
    def channels(self) -> int:
        """Return the number of SMs that NCCL's kernels take for collectives, one per channel."""
        return 16 if self._crosses_nodes else 24

    @functools.cached_property
    def rate_bytes_per_s(self) -> float:
        """Return the maximum rate of one GPU in bytes/s: its NVLinks or PCIe; between nodes the NICs of its node."""
        node = self.world.facts.cluster.node
        inside = float(node.nvlink_bytes_per_s or node.pcie_bytes_per_s)
        if not self._crosses_nodes:
            return inside
        local = max(Counter(self.world.slot_of(rank).host for rank in self.group.ranks).values())
        return (
            min(inside, node.nic_bytes_per_s * max(1, min(local, node.num_nics))) if local > 1 else node.nic_bytes_per_s
        )

    def belongs_to(self, group: Group) -> None:
        """Use the numbers of *group* from now on, because its members have met."""
        if group.ranks != self.group.ranks:
            self.group = group
            for worked_out in ("devices", "_crosses_nodes", "rate_bytes_per_s"):
                self.__dict__.pop(worked_out, None)

    @property
    def is_symmetric(self) -> bool:
        """Return whether its calls are kernels on symmetric memory, which have no library and no timeout."""
        return self.flavour in SYMMETRIC

    def beside(self, kind: str, flavour: str) -> Communicator:
        """Return the communicator of the group's calls of another kind (`Group.beside`)."""
        other: Communicator = self.world.communicator((self, kind), self.group.beside(kind), flavour)
        return other

    def arrive(self, arrival: Arrival) -> None:
        """Match a call with those of the other members."""
        op = arrival.record.op
        if arrival.refusal is not None:
            arrival.work.fail(arrival.refusal)
        elif op == "send":
            self._send(arrival)
        elif op == "recv":
            self._recv(arrival)
        elif op in OPERATIONS:  # a monitored barrier is carried out by its callers
            self.meet(arrival.record.seq, arrival)

    # -- collectives

    def meet(self, number: int, arrival: Arrival) -> None:
        """Add a member to collective *number*; the last member starts it."""
        if self.world.has_failed:
            return
        group_rank = arrival.member.group_rank
        if self.stand_in is not None and self.stand_in[group_rank] != group_rank:
            return  # of a rank that is traced no more
        arrivals = self._meetings.setdefault(number, {})
        arrivals[group_rank] = arrival
        if len(arrivals) >= len(self._awaited):
            self._begin(number)

    def _begin(self, number: int) -> None:
        """Start collective *number* if all members have arrived."""
        arrivals = self._meetings[number]
        if len(arrivals) < len(self._awaited):
            return
        if not all(index in arrivals for index in self._awaited):  # somebody has come who is traced no more
            return
        order = self._awaited if self.stand_in is None else [index for index in arrivals if index in self._awaited]
        members = CallMembers({index: arrivals[index] for index in order}, self.stand_in or self._awaited)
        came = list(members.came.values())
        del self._meetings[number]
        if members[0].record.op == "scatter" and members[0].record.root not in [m.record.rank for m in came]:
            self.world.traced.split_by(self.group)  # what it sends nobody else has
            return
        if members[0].record.input_splits and len({len(m.record.input_splits or ()) for m in came}) == 1:
            received = [sum(column) for column in zip(*(m.record.input_splits or () for m in came), strict=True)]
            self.skew = max(self.skew, max(received) * len(received) / max(1, sum(received)))
        if check_meeting([m.record for m in came]) is not None:
            self.world.stop_for_mismatch([m.work for m in came])
            return
        if came[0].host_side is not None and (finding := self.gpus.connect(came)) is not None:
            self.world.report(finding, stops=True)
            return
        now_s = self.world.now_s
        for member in came:
            member.start(now_s)
        if self.world.faults.are_planted:
            self.world.faults.on_start(came)
        operation = OPERATIONS.get(members[0].record.op)
        if operation is None:  # the group itself is created, for which nothing moves
            moved: Event = self.world.timer(0.0)
            data: DataFunction = nothing
        else:
            moved = self.world.facts.network.collective(operation.transfer(members, self.devices, self.key))
            data = operation.data
        assert moved.callbacks is not None
        if members[0].host_side is None:
            self.moving[moved] = None
            moved.callbacks.append(self.moving.pop)
        moved.callbacks.append(lambda _: self._finish(members, data))

    def _finish(self, members: CallMembers, data: DataFunction) -> None:
        """Write the results of a call."""
        came = list(members.came.values())
        if any(m.record.state is State.FAILED for m in came):
            return
        if not _all_there(came, lambda: self._finish(members, data)):
            self._stranded += came
            self._fail_stranded()
            return
        on_gpu = members[0].host_side is not None
        folded: list[Tensor] = []
        if isinstance(data, Reduction) and not on_gpu:
            with contextlib.suppress(Exception):  # torch refuses it again below
                folded = data.fold(members)
        self.world.guards.on_finish(came, folded)
        try:
            if on_gpu:
                compute(members, data)
            elif folded and isinstance(data, Reduction):
                data.write(members, folded)
            else:
                data(members)
        except Exception as error:  # what torch refuses to compute is every member's error
            for member in came:
                member.work.fail(error)
            return
        if self.world.faults.are_planted:
            self.world.faults.after_data(came)
        if self.world.facts.turns is not None:
            self._join_clocks(came)
        now_s = self.world.now_s
        for member in came:
            member.record.completed_s, member.record.state = now_s, State.COMPLETED
            if not member.work.done.triggered:
                member.work.done.succeed()

    def _join_clocks(self, came: Sequence[Arrival]) -> None:
        """Let what all members did before the call happen before the end of the call; a buffered send has ended."""
        clock = functools.reduce(joined, (member.clock for member in came))
        for member in came:
            if not (member.record.op == "send" and self._is_buffered):
                member.work.clock = clock

    def fewer_traced(self) -> None:
        """Continue with fewer traced ranks, for which others arrive."""
        if not any(rank in self.world.traced for rank in self.group.ranks):
            return
        self.stand_in = self.world.traced.standing_for(self.group)
        self._awaited = self._who_comes()
        for number in list(self._meetings):
            self._begin(number)

    # -- point to point

    def _send(self, send: Arrival) -> None:
        if self.world.has_failed:
            return
        if self._is_buffered:
            send.inputs = [tensor.detach().clone() for tensor in send.inputs]
            send.work.done.succeed()
        assert send.peer is not None
        recv = self._mailbox(send.peer, send.record.tag).post_send(send)
        if recv is not None:
            self._transmit(send, recv)

    def _recv(self, recv: Arrival) -> None:
        if self.world.has_failed:
            return
        send = self._mailbox(recv.member.group_rank, recv.record.tag).post_recv(recv)
        if send is not None:
            self._transmit(send, recv)

    @property
    def _is_buffered(self) -> bool:
        """Return whether a send ends at once."""
        turns = self.world.facts.turns
        return self.buffers_sends or (turns is not None and turns.orders.buffered)

    def _mailbox(self, to: int, tag: int | None) -> Mailbox:
        mailbox = self._mailboxes.get((to, tag))
        if mailbox is None:
            turns = self.world.facts.turns
            mailbox = Mailbox() if turns is None else ChoiceMailbox(turns, self._transmit)
            self._mailboxes[to, tag] = mailbox
        return mailbox

    def sends_to(self, index: int) -> None:
        """Note a message to or from the member at *index*, which must then be traced itself."""
        self.has_messages = True
        if self.stand_in is not None and self.stand_in[index] != index:
            self.world.traced.split_by(self.group)

    def sends_rows(self, splits: Sequence[int]) -> None:
        """Note how many rows a member sends to each in an all-to-all. If they are unequal, as in a mixture of experts,
        each member receives another number of them, and must be traced itself.
        """
        if not splits or max(splits) <= UNEVEN * min(splits):
            return
        self.has_messages = True
        if self.stand_in is not None and len(self._awaited) < len(self.group.ranks):
            self.world.traced.split_by(self.group, "exchange unequal numbers of rows")

    def message_channels(self, source: int, destination: int, nbytes: int) -> int:
        """Return the number of SMs of a message of *nbytes* between two places, one per channel."""
        ends = self.devices[source], self.devices[destination]
        return self.world.facts.network.send_channels(*ends, nbytes, self.flavour, self._flow_key(source, destination))

    def _flow_key(self, source: int, destination: int) -> int:
        return self.key ^ (source * 65_537 + destination)

    def _transmit(self, send: Arrival, recv: Arrival) -> None:
        if check_pair(send.record, recv.record) is not None:
            self.world.stop_for_mismatch([send.work, recv.work])
            return
        source, destination = send.member.group_rank, recv.member.group_rank
        recv.work.sender = source
        now_s = self.world.now_s
        ends = [send, recv]
        for end in ends:
            end.start(now_s)
        if recv.record.peer is None:
            recv.record.peer = self.group.ranks[source]
        if self.world.faults.are_planted:
            self.world.faults.on_start(ends)
        moved: Event = self.world.facts.network.send(
            self.devices[source],
            self.devices[destination],
            send.record.nbytes,
            self.flavour,
            self._flow_key(source, destination),
        )

        assert moved.callbacks is not None
        moved.callbacks.append(lambda _: self._finish(CallMembers(dict(enumerate(ends)), range(2)), _deliver))

    # -- the end

    def breaks_with(self, processes: Sequence[SimProcess]) -> None:
        """Close the group's connections when one of *processes*, its members, dies."""
        watched, self._breaks_with = self._breaks_with, list(processes)
        for process in () if watched else processes:
            if process.ended.callbacks is not None:
                process.ended.callbacks.append(partial(self._member_ended, process))

    def _member_ended(self, process: SimProcess, _: Event) -> None:
        if process.ending.exit_code and not self.world.has_failed:
            self._break(f"rank {process.rank} of group {self.group.label} ended", None)

    def _fail_stranded(self) -> None:
        """End calls that a dead member will never complete, if the group's connections are closed."""
        if self.broken is not None:
            stranded, self._stranded = self._stranded, []
            for arrival in stranded:
                arrival.work.fail(RuntimeError(self.broken))

    def break_up(self, error: BaseException, culprit: SimWork) -> None:
        """Close the group's connections because a member gave up on a call, as gloo does.

        Every member that waits or calls later fails.
        """
        self._break(f"a member of group {self.group.label} timed out: {error}", culprit)

    def revoke(self) -> None:
        """End all calls that have not started, because a member aborts the group."""
        self._break(f"group {self.group.label} was aborted", None)

    def _break(self, why: str, culprit: SimWork | None) -> None:
        if self.broken is None:
            of_nccl = "NCCL communicator was aborted"
            of_gloo = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
            self.broken = f"{of_nccl if self.flavour == 'nccl' else of_gloo} (simulated; {why})"
        self._fail_stranded()
        waiting = [arrival for arrivals in self._meetings.values() for arrival in arrivals.values()]
        self._meetings.clear()
        for mailbox in self._mailboxes.values():
            waiting += mailbox.clear()
        for arrival in waiting:
            if arrival.work is not culprit:
                arrival.work.fail(RuntimeError(self.broken))


def _deliver(ends: CallMembers) -> None:
    """Write the sender's data into the receiver's memory."""
    send, recv = ends
    for source, target in zip(send.inputs, recv.outputs, strict=True):
        copy_into(target, source)


def _all_there(members: Sequence[Arrival], again: Callable[[], None]) -> bool:
    """Return whether a call whose bytes have arrived completes now.

    It never completes once a member is dead; if a member is stopped, *again* is called when that member continues.
    """
    for member in members:
        process = member.process
        if process.phase in _DEAD and process.ending.exit_code:
            return False
        if process.thaw is not None and process.thaw.callbacks is not None:
            process.thaw.callbacks.append(lambda _: again())
            return False
    return True
