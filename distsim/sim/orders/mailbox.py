"""Messages to one member with one tag: which receive takes which message."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from distsim.sim.kernel.clocks import START, Clock, includes, joined
from distsim.sim.kernel.steps import Access, Alternative, NextOperation, Step

if TYPE_CHECKING:
    from distsim.sim.c10d.work import Arrival
    from distsim.sim.kernel.chooser import Orders
    from distsim.sim.kernel.turns import TurnQueue


def _fit(send: Arrival, recv: Arrival) -> bool:
    """Return whether *recv* takes a message of the sender of *send*."""
    return recv.peer in (None, send.member.group_rank)


class Mailbox:
    """Messages and receives of one member and tag that are not matched, in the order in which they were posted."""

    def __init__(self) -> None:
        self.sends: list[Arrival] = []
        self.recvs: deque[Arrival] = deque()

    def post_send(self, send: Arrival) -> Arrival | None:
        """Return the receive that takes *send*, or keep it until there is one."""
        for recv in self.recvs:
            if _fit(send, recv):
                self.recvs.remove(recv)
                return recv
        self.sends.append(send)
        return None

    def post_recv(self, recv: Arrival) -> Arrival | None:
        """Return the message that *recv* takes, the first that came, or keep it until there is one."""
        for send in self.sends:
            if _fit(send, recv):
                self.sends.remove(send)
                return send
        self.recvs.append(recv)
        return None

    def clear(self) -> list[Arrival]:
        """Remove and return everything that is not matched."""
        left = [*self.sends, *self.recvs]
        self.sends.clear()
        self.recvs.clear()
        return left


class _Receive:
    """A receive of an exploration."""

    def __init__(self, arrival: Arrival, number: int) -> None:
        self.arrival = arrival
        self.number = number
        """Number among the receives of its rank from any source, from 1."""
        self.message: _Message | None = None
        self.step: Step | None = None
        """The step that chose its message; None for a receive from a given source."""


class _Message:
    """A message of an exploration."""

    def __init__(self, arrival: Arrival, number: int, position: int) -> None:
        self.arrival = arrival
        self.position = position
        """Number among the messages of its mailbox."""
        self.number = number
        """Number among the messages of its sender to its receiver, with all tags."""
        self.sender = arrival.process.rank
        self.clock: Clock = arrival.clock
        self.receive: _Receive | None = None


class ChoiceMailbox(Mailbox):
    """Mailbox of an exploration: which message a receive from any source takes is a choice.

    A message may be taken by the first receive that fits it. A receive from a given source takes it at once; if the
    first one takes any, the match waits until nothing else can happen.

    Args:
        turns: The operations of the run.
        transmit: Carries out a match.
    """

    def __init__(self, turns: TurnQueue, transmit: Callable[[Arrival, Arrival], None]) -> None:
        super().__init__()
        self._turns = turns
        self._transmit = transmit
        self._receives: list[_Receive] = []
        self._messages: dict[int, list[_Message]] = {}
        self._num_messages = 0
        self._clock: Clock = START
        """Clock of the last match that was chosen."""

    def post_send(self, send: Arrival) -> Arrival | None:
        """Keep *send*, and carry out the match if no other is possible."""
        assert send.peer is not None
        to = send.record.group.ranks[send.peer]
        number = self._turns.number("message", str(send.process.rank), str(to))
        self._num_messages += 1
        message = _Message(send, number, self._num_messages)
        self._messages.setdefault(send.process.rank, []).append(message)
        self.sends.append(send)
        self._settle()
        return None

    def post_recv(self, recv: Arrival) -> Arrival | None:
        """Keep *recv*, and carry out the match if no other is possible."""
        number = 0
        if recv.peer is None:
            self._turns.sources[self] = None
            number = self._turns.number("receive", str(recv.process.rank))
        self._receives.append(_Receive(recv, number))
        self.recvs.append(recv)
        self._settle()
        return None

    def clear(self) -> list[Arrival]:
        """Remove and return everything that is not matched."""
        self._receives = [receive for receive in self._receives if receive.message is not None]
        self._messages = {
            sender: [one for one in messages if one.receive is not None] for sender, messages in self._messages.items()
        }
        return super().clear()

    def _pairs(self) -> Iterator[tuple[_Message, _Receive]]:
        """Yield the first message of each sender with the first receive that fits it."""
        for messages in self._messages.values():
            message = next((one for one in messages if one.receive is None), None)
            if message is None:
                continue
            for receive in self._receives:
                if receive.message is None and _fit(message.arrival, receive.arrival):
                    yield message, receive
                    break

    def _settle(self) -> None:
        """Match receives from a given source."""
        while pair := next(((m, r) for m, r in self._pairs() if r.arrival.peer is not None), None):
            self._match(*pair)

    def _match(self, message: _Message, receive: _Receive) -> None:
        message.receive, receive.message = receive, message
        self.sends.remove(message.arrival)
        self.recvs.remove(receive.arrival)
        self._transmit(message.arrival, receive.arrival)

    # -- as a source of choices

    def offers(self) -> Iterator[tuple[NextOperation, Callable[[Step], None]]]:
        """Yield each match that may be next."""
        for message, receive in self._pairs():
            yield self._offer(message, receive), functools.partial(self._choose, message, receive)

    def _offer(self, message: _Message, receive: _Receive) -> NextOperation:
        recv = receive.arrival
        to, group, tag = recv.process.rank, recv.record.group.name, recv.record.tag
        site = recv.record.site
        clock = joined(joined(recv.clock, message.clock), self._clock)
        return NextOperation(
            self._id(message, receive),
            f"{to}<{group}:{tag}",
            {
                ("receive", to, group, tag, receive.number): Access.WRITE,
                ("message", to, group, message.sender, message.number): Access.WRITE,
            },
            (1, to, message.position),
            f"receive {receive.number} of rank {to} takes the message of rank {message.sender}",
            "" if site is None else f"{site.file}:{site.line}",
            clock,
        )

    @staticmethod
    def _id(message: _Message, receive: _Receive) -> str:
        return f"{receive.arrival.process.rank}<{message.sender}#{message.number}"

    def _choose(self, message: _Message, receive: _Receive, step: Step) -> None:
        receive.step = step
        self._clock = receive.arrival.clock = step.clock
        self._match(message, receive)
        self._settle()

    def close(self, orders: Orders) -> None:
        """Add the messages that its receives could have taken instead."""
        for receive in self._receives:
            if receive.step is None or receive.message is None:
                continue
            for sender, messages in self._messages.items():
                if sender != receive.message.sender:
                    self._alternative(orders, receive, receive.step, messages)

    def _alternative(self, orders: Orders, receive: _Receive, step: Step, messages: list[_Message]) -> None:
        """Add the message of another sender that *receive* could have taken."""
        owed = 0  # messages that earlier receives take
        for earlier in itertools.takewhile(lambda one: one is not receive, self._receives):
            taken = earlier.message is not None and earlier.message.sender == messages[0].sender
            owed += taken or (earlier.message is None and _fit(messages[0].arrival, earlier.arrival))
        if owed >= len(messages):
            return
        message = messages[owed]
        if includes(message.clock, step.offer.actor, step.number):
            return
        name = self._id(message, receive)
        orders.trace.alternatives.append(Alternative(step.index, name, message.clock))
