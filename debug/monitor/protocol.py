"""Connection of the monitors of several hosts: the one beside rank 0 leads, and the others report to it.

It is a small TCP protocol of typed messages, each behind its length in four bytes; nothing received is executed. The
address is in the job's store, the secret is not (realexec/process/introduce_monitors.py). A link that sends invalid
data is dropped with a note, and all others continue.

Both ends of a link prove that they know the job's secret before either reads any data of the other: the leader sends
a random number A, the follower its own random number B with HMAC(secret, follower, A, B), and the leader answers
with HMAC(secret, leader, A, B). Then messages follow, each behind an HMAC under a key of this connection alone (of
the secret, A and B) that also covers the direction and the message's number, so that none can be replayed,
reordered, reflected or inserted. The data are not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from distsim.debug.evidence.processes import Numbering
from distsim.debug.matching.comparer import GroupKey, Suspicion
from distsim.debug.monitor.sent_calls import HostClock, SentCalls
from distsim.debug.monitor.sent_evidence import SentEvidence
from distsim.debug.rings.files import Process, write_private
from distsim.text.codec import Rank, Unfit, Whole, pack, unpack

LOST_S = 2.0
"""Silence after which a host counts as cut off; its monitor speaks every `SPEAK_S`."""
SPEAK_S = 0.2
LOOK_S = 1.5
CLOCK_S = 60.0
"""Seconds between two comparisons of the clocks of two hosts."""
PINGS = 8
PONG_S = 0.15
"""Longest wait for the answer of a monitor, which polls every 0.1 s; while clocks are compared it answers at once."""
MEET_S = 5.0
"""A connection that has not proved anything after this long is dropped."""
MOST_UNKNOWN = 64
"""Connections that may be about to prove themselves; the oldest makes room for the next."""

Rows = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
Feed = Callable[[int, GroupKey, Rows], None]
LONGEST = 64 << 20
"""Largest number of bytes in one message."""
LONGEST_PROOF = 1024
"""Maximum bytes accepted from a peer that has not authenticated itself."""
MOST_WAITING = 256 << 20
"""Largest number of bytes that are queued for a peer that does not read."""
AT_ONCE = 16 << 20
"""Largest number of bytes that are read from one link before the other links are served."""
LENGTH = 4
MAC = hashlib.sha256().digest_size
Proof = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * MAC}}}\Z")]


class Hello(Struct, omit_defaults=True):
    """A message of the handshake."""

    nonce: Proof | None = None
    proof: Proof | None = None


class Status(Struct, omit_defaults=True):
    """State of one host's ranks."""

    processes: Sequence[Process] = ()
    counts: Sequence[Whole] = ()
    """Calls of every rank so far."""
    oldest_wait_s: float = 0.0
    quiet_s: float = math.inf
    ended: bool = False
    """Whether a rank has ended."""
    flagged: Whole = 0
    over: bool = False
    """Whether all ranks have ended."""


class Look(Struct):
    """The leader's request for the evidence of a host."""

    numbering: Numbering
    stacks: bool
    origin: int
    focus: dict[GroupKey, Whole]
    number: int = 0
    calls_since: Mapping[Rank, Whole] | None = None
    """The request is for the calls only: from this number on of each rank."""


class Message(Struct, omit_defaults=True):
    """One message between monitors that know each other."""

    host: str = ""
    status: Status | None = None
    rows: Sequence[tuple[Rank, GroupKey, bytes]] = ()
    suspicion: Suspicion | None = None
    look: Look | None = None
    looked: int = 0
    """Number of the request that `evidence` answers."""
    evidence: SentEvidence | None = None
    calls: SentCalls | None = None
    verdict: dict[str, Any] | None = None
    beat: bool = False
    ping_ns: int = 0
    """Leader's monotonic clock. The follower answers with its own."""
    pong_ns: int = 0
    abort: bool = False
    bye: bool = False


class Leader:
    """Leader of the monitors, beside rank 0: it collects the evidence and judges the whole job."""

    def __init__(
        self, directory: Path, addresses: Sequence[str], secret: str, salt: str, feed: Feed, notes: list[str]
    ) -> None:
        """Listen on the first of *addresses* that belongs to this host, and publish it. Raises OSError if none does.

        *feed* takes the rows that arrive, and *notes* one line for each link that was closed because of the data that
        it sent.
        """
        self.secret = secret
        self._feed = feed
        self._notes = notes
        self._server = _listen(addresses)
        self._server.setblocking(False)
        self.links: list[PeerLink] = []
        self._answers: dict[int, dict[int, Message]] = {}
        self._number = 0
        self.suspected: list[Suspicion] = []
        """Suspicions of other hosts' comparers."""
        address, port = self._server.getsockname()[:2]
        write_private(directory / "monitor.json", json.dumps({"address": address, "port": port, "salt": salt}))

    def step(self) -> None:
        """Send and receive messages."""
        self._accept()
        for link in list(self.links):
            if not link.open:
                continue
            try:
                link.flush()
                for message in link.receive():
                    self._hear(link, message)
            except Exception as error:
                link.close()
                self._notes.append(f"the link to host {link.host} is dropped: its message is invalid ({error!r})")
        self.links = [link for link in self.links if link.open or link.known]

    def _accept(self) -> None:
        """Accept connections; unproven ones are dropped if they are slow, or the oldest if there are too many."""
        for _ in range(MOST_UNKNOWN):
            try:
                connection, _ = self._server.accept()
            except OSError:  # nobody more; or no descriptor left: the next step tries again
                break
            self.links.append(PeerLink(connection, self.secret, leads=True))
        unknown = [link for link in self.links if not link.known and link.open]
        now = time.monotonic()
        for index, link in enumerate(unknown):
            if now - link.opened_s > MEET_S or index < len(unknown) - MOST_UNKNOWN:
                link.close()

    def _hear(self, link: PeerLink, message: Message) -> None:
        for rank, key, data in message.rows:
            self._feed(rank, key, np.frombuffer(data, dtype="<u8").reshape(-1, 3))
        if message.looked in self._answers:  # who comes too late is not waited for
            self._answers[message.looked][id(link)] = message
        if message.suspicion is not None:
            self.suspected.append(message.suspicion)
        link.host = message.host or link.host
        if message.status is not None:
            link.status = message.status
            keys = {process.key for process in link.processes}
            for other in self.links:  # the host lost its link and has a new one
                if other is not link and other.known and not keys.isdisjoint(one.key for one in other.processes):
                    other.close()
                    other.known = False

    def look(self, request: Look) -> list[tuple[PeerLink, Message]]:
        """Request the evidence, or the calls, of all hosts. Hosts that do not answer in time are left out."""
        self._number += 1
        number = self._number
        self._answers[number] = {}
        links = [link for link in self.links if link.open and link.known]
        for link in links:
            link.send(Message(look=msgspec.structs.replace(request, number=number)))
        deadline = time.monotonic() + LOOK_S
        while time.monotonic() < deadline:
            waiting = [
                link
                for link in links
                if link.open and id(link) not in self._answers.get(number, {}) and link.silent_s < LOST_S
            ]
            if not waiting:
                break
            self.step()
            time.sleep(0.005)
        answers = self._answers.pop(number, {})
        return [(link, answers[id(link)]) for link in links if id(link) in answers]

    def compare_clocks(self) -> None:
        """Compare the clock of one host with this one's, of the one that was compared least recently.

        Of some messages and answers the quickest counts, with half of the time that it took as the error (NTP's way,
        RFC 5905 section 8). Monotonic clocks never jump; what they drift between two comparisons is added to the error.
        """
        known = [link for link in self.links if link.open and link.known]
        link = min(known, key=lambda one: one.clock_at_s, default=None)
        if link is None or time.monotonic() - link.clock_at_s < CLOCK_S:
            return
        link.clock_at_s = time.monotonic()
        samples: list[tuple[int, int]] = []
        for _ in range(PINGS):
            link.send(Message(ping_ns=time.monotonic_ns()))
            deadline = time.monotonic() + PONG_S
            before = len(samples)
            while len(samples) == before and link.open and (left_s := deadline - time.monotonic()) > 0.0:
                select.select([link.socket], [], [], left_s)
                for message in link.receive():
                    now_ns = time.monotonic_ns()
                    if message.pong_ns:
                        took_ns = now_ns - message.ping_ns
                        samples.append((took_ns, message.pong_ns - message.ping_ns - took_ns // 2))
                    else:
                        self._hear(link, message)
            if len(samples) == before:
                link.clock_at_s -= 0.9 * CLOCK_S  # it is busy: again in a while
                return
        took_ns, ahead_ns = min(samples)
        ahead_s = ahead_ns / 1e9
        drift_s = 0.0 if link.clock is None else abs(ahead_s - link.clock.ahead_s)
        link.clock = HostClock(ahead_s, took_ns / 2e9 + drift_s)

    def tell(self, message: Message) -> None:
        """Send to all hosts."""
        for link in self.links:
            if link.open and link.known:
                link.send(message)

    def close(self) -> None:
        """Close all connections."""
        for link in self.links:
            link.close()
        self._server.close()

    @property
    def lost(self) -> list[PeerLink]:
        """Return hosts that were there and are silent, though their ranks had not all ended."""
        return [
            link
            for link in self.links
            if link.known and (not link.open or link.silent_s > LOST_S) and not link.status.over
        ]


class Follower:
    """The monitor of every other host."""

    def __init__(self, address: str, port: int, secret: str, host: str, notes: list[str]) -> None:
        self._address, self._port, self._secret, self._host = address, port, secret, host
        self.link: PeerLink | None = None
        self._spoke = 0.0
        self._tried = 0.0
        self._introduced = False
        self.processes: Sequence[Process] = ()
        """Processes of this host."""
        self._notes = notes
        """Why a link was dropped, one line each."""
        self.left = False
        """Whether the leader said goodbye because its ranks have ended."""

    def step(
        self,
        status: Status,
        rows: list[tuple[int, GroupKey, Rows]],
        answer: Callable[[Look], Message],
    ) -> list[Message]:
        """Send new data, answer the leader's requests, and return its other messages."""
        now = time.monotonic()
        self.processes = status.processes
        if self.link is None or not self.link.open:
            if now - self._tried < 1.0:
                return []
            self._tried = now
            try:
                connection = socket.create_connection((self._address, self._port), timeout=1.0)
                self.link = PeerLink(connection, self._secret, leads=False)
                self._introduced = False
            except OSError:
                return []
        link = self.link
        if not link.known and now - link.opened_s > MEET_S:
            link.close()
            return []
        messages = []
        try:
            for message in link.receive():
                messages += self._taken(link, message, answer)
        except Exception as error:
            link.close()
            self._notes.append(f"the connection to the monitor on rank 0's host was closed: {error!r}")
        if link.known and not self._introduced:
            self._introduced = True
            link.send(Message(self._host, status))
        self.send_rows(rows)
        if link.known and now - self._spoke > SPEAK_S:
            self._spoke = now
            link.send(Message(status=status))
        link.flush()
        return messages

    def _taken(self, link: PeerLink, message: Message, answer: Callable[[Look], Message]) -> list[Message]:
        """Answer a request of the leader's; return its other messages."""
        if message.look is not None:
            link.send(msgspec.structs.replace(answer(message.look), looked=message.look.number))
            return []
        others: list[Message] = []
        if not message.ping_ns:
            return [message]
        link.send(Message(ping_ns=message.ping_ns, pong_ns=time.monotonic_ns()))
        for _ in range(PINGS - 1):  # the next ones are answered without a delay
            if not select.select([link.socket], [], [], PONG_S / PINGS)[0]:
                break
            for further in link.receive():
                if further.ping_ns:
                    link.send(Message(ping_ns=further.ping_ns, pong_ns=time.monotonic_ns()))
                else:
                    others += self._taken(link, further, answer)
        return others

    def send_rows(self, rows: list[tuple[int, GroupKey, Rows]]) -> None:
        """Send new rows, if there is a leader."""
        if rows and self.link is not None and self.link.open and self.link.known:
            self.link.send(Message(rows=[(rank, key, block.tobytes()) for rank, key, block in rows]))
            rows.clear()

    @property
    def connected(self) -> bool:
        return self.link is not None and self.link.open and self.link.known and self.link.silent_s < LOST_S * 2

    def close(self) -> None:
        """Close the connection."""
        if self.link is not None:
            self.link.close()

    def suspect(self, suspicion: Suspicion) -> None:
        """Ask the leader to examine a call."""
        if self.link is not None and self.link.open:
            self.link.send(Message(suspicion=suspicion))


def _listen(addresses: Sequence[str]) -> socket.socket:
    reasons = []
    for address in addresses:
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, 0), family=family, backlog=128)
        except OSError as error:
            reasons.append(f"{address}: {error.strerror}")
    raise OSError(f"none of the job's addresses is this host's ({'; '.join(reasons)})")


def sign(secret: str, *parts: str) -> str:
    """Return a proof of knowing the secret, bound to *parts*."""
    return hmac.new(secret.encode(), json.dumps(parts).encode(), hashlib.sha256).hexdigest()


@dataclass
class PeerLink:
    """A connection that never blocks: it returns complete messages, and sends bytes as the network accepts them."""

    socket: socket.socket
    secret: str
    leads: bool
    """Whether this is the leader's end, which speaks first."""
    host: str = "?"
    known: bool = False
    """Whether the peer has proved that it knows the secret."""
    heard: float = field(default_factory=time.monotonic)
    opened_s: float = field(default_factory=time.monotonic)
    open: bool = True
    status: Status = field(default_factory=Status)
    clock: HostClock | None = None
    clock_at_s: float = -math.inf
    """When its clock was compared for the last time."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(MAC))
    _first: str = ""
    """The leader's nonce."""
    _key: bytes = b""
    _sent: int = 0
    _got: int = 0
    _in: bytearray = field(default_factory=bytearray)
    _out: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.socket.setblocking(False)
        if self.leads:
            self._first = self.nonce
            self._queue(pack(Hello(self.nonce)))

    @property
    def processes(self) -> Sequence[Process]:
        """Return the processes on the peer's host."""
        return self.status.processes

    def send(self, message: Message) -> None:
        """Queue a message for an authenticated peer."""
        if not self.known:
            return
        body = pack(message)
        self._queue(self._seal(self.leads, self._sent, body) + body)
        self._sent += 1
        if len(self._out) > MOST_WAITING:
            self.close()

    def flush(self) -> None:
        """Send as much as the network accepts now."""
        try:
            while self._out:
                sent = self.socket.send(self._out[: 1 << 20])
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def receive(self) -> list[Message]:
        """Return the complete messages received so far. Invalid data end the connection.

        Raises:
            Unfit: A message of an authenticated peer has another type.
        """
        messages: list[Message] = []
        taken = 0
        try:
            while self.open and taken < AT_ONCE:
                data = self.socket.recv(1 << 20 if self.known else LONGEST_PROOF)
                if not data:
                    self.close()
                    break
                taken += len(data)
                self._in += data
                messages += self._messages()
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:
            self.close()
            if self.known and isinstance(error, Unfit):
                raise
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.open = False
        with contextlib.suppress(OSError):
            self.socket.close()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard

    def _queue(self, frame: bytes) -> None:
        self._out += len(frame).to_bytes(LENGTH) + frame
        self.flush()

    def _messages(self) -> list[Message]:
        messages = []
        while len(self._in) >= LENGTH:
            end = LENGTH + int.from_bytes(self._in[:LENGTH])
            if end > (LONGEST if self.known else LONGEST_PROOF):
                raise ValueError("a message that is too long")
            if len(self._in) < end:
                break
            frame = bytes(self._in[LENGTH:end])
            del self._in[:end]
            if self.known:
                messages.append(self._opened(frame))
            else:
                self._meet(unpack(frame, Hello))
        return messages

    def _opened(self, frame: bytes) -> Message:
        seal, body = frame[:MAC], frame[MAC:]
        if not hmac.compare_digest(seal, self._seal(not self.leads, self._got, body)):
            raise ValueError("a broken seal")
        self._got += 1
        self.heard = time.monotonic()
        return unpack(body, Message)

    def _meet(self, hello: Hello) -> None:
        """Handle one message of the handshake."""
        if self.leads:
            second = hello.nonce or ""
            self._check(hello.proof, "follower", second)
            self._queue(pack(Hello(proof=sign(self.secret, "leader", self._first, second))))
            self._become_known(second)
        elif not self._first:
            self._first = hello.nonce or ""
            proof = sign(self.secret, "follower", self._first, self.nonce)
            self._queue(pack(Hello(self.nonce, proof)))
        else:
            self._check(hello.proof, "leader", self.nonce)
            self._become_known(self.nonce)

    def _check(self, proof: str | None, role: str, second: str) -> None:
        if not self._first or not hmac.compare_digest(proof or "", sign(self.secret, role, self._first, second)):
            raise ValueError("no proof")

    def _become_known(self, second: str) -> None:
        self._key = bytes.fromhex(sign(self.secret, "session", self._first, second))
        self.known = True
        self.heard = time.monotonic()

    def _seal(self, from_leader: bool, number: int, body: bytes) -> bytes:
        head = f"{'leader' if from_leader else 'follower'} {number} ".encode()
        return hmac.new(self._key, head + body, hashlib.sha256).digest()
