"""Connection of the monitors of several hosts: the one beside rank 0 leads, and the others report to it.

It is a small TCP protocol of JSON lines; nothing received is executed. The address is in the job's store, the secret
is not (realexec/process/introduce_monitors.py). A link that sends invalid data is dropped with a note, and all
others continue.

Both ends of a link prove that they know the job's secret before either reads any data of the other: the leader sends
a random number A, the follower its own random number B with HMAC(secret, follower, A, B), and the leader answers
with HMAC(secret, leader, A, B). Then JSON lines follow, each behind an HMAC under a key of this connection alone (of
the secret, A and B) that also covers the direction and the line's number, so that no line can be replayed,
reordered, reflected or inserted. The data are not encrypted.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from distsim.debug.matching.comparer import MARK, GroupKey, Suspicion
from distsim.debug.rings.files import Process, write_private
from distsim.text.untrusted_input import MOST_RANKS, load_json, number, text, whole, wholes

__all__ = ["Follower", "Leader", "PeerLink", "sign"]

LOST_S = 2.0
"""Silence after which a host counts as cut off; its monitor speaks every `SPEAK_S`."""
SPEAK_S = 0.2
LOOK_S = 1.5
MEET_S = 5.0
"""A connection that has not proved anything after this long is dropped."""
MOST_UNKNOWN = 64
"""Connections that may be about to prove themselves; the oldest makes room for the next."""

Rows = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
LONGEST_LINE = 64 << 20
LONGEST_PROOF = 1024
"""Maximum bytes accepted from a peer that has not authenticated itself."""
MOST_WAITING = 256 << 20
"""Largest number of bytes that are queued for a peer that does not read."""
AT_ONCE = 16 << 20
"""Largest number of bytes that are read from one link before the other links are served."""
MAC = hashlib.sha256().digest_size * 2


class Leader:
    """Leader of the monitors, beside rank 0: it collects the evidence and judges the whole job."""

    def __init__(self, directory: Path, addresses: Sequence[str], secret: str, salt: str = "") -> None:
        """Listen on the first of *addresses* that belongs to this host, and publish it. Raises OSError if none does."""
        self.secret = secret
        self._server = _listen(addresses)
        self._server.setblocking(False)
        self.links: list[PeerLink] = []
        self.notes: list[str] = []
        """One line for each link that was closed because of the data that it sent."""
        self._answers: dict[int, dict[int, dict[str, Any]]] = {}
        self._number = 0
        self.held: list[tuple[int, GroupKey, Rows]] = []
        """Rows that arrived during `look`."""
        self.suspected: list[Suspicion] = []
        """Suspicions of other hosts' comparers."""
        address, port = self._server.getsockname()[:2]
        write_private(directory / "monitor.json", json.dumps({"address": address, "port": port, "salt": salt}))

    def step(self, feed: Callable[[int, GroupKey, Rows], None]) -> None:
        """Send and receive messages; pass received rows to *feed*."""
        self._accept()
        for link in list(self.links):
            if not link.open:
                continue
            try:
                link.flush()
                for message in link.receive():
                    self._hear(link, message, feed)
            except Exception as error:
                link.close()
                self.notes.append(f"the link to host {link.host} is dropped: its message is invalid ({error!r})")
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

    def _hear(self, link: PeerLink, message: dict[str, Any], feed: Callable[[int, GroupKey, Rows], None]) -> None:
        if "rows" in message:
            for rank, key, data in message["rows"]:
                rows = np.frombuffer(base64.b64decode(data), dtype="<u8").reshape(-1, 3)
                feed(whole(rank, "rank", 0, MOST_RANKS), group_key(key), rows)
        elif "looked" in message:
            number = whole(message["looked"], "looked")
            if number in self._answers:  # who comes too late is not waited for any longer
                self._answers[number][id(link)] = message["evidence"]
        elif "suspicion" in message:
            key, seq = group_key(message["suspicion"]), whole(message["seq"], "seq")
            self.suspected.append(Suspicion(key, seq, bool(message.get("lines"))))
        if "host" in message:
            link.host = text(message["host"], "host", 200)
        if "status" in message:
            link.status = _status(message["status"])
            for other in self.links:  # the host lost its link and has a new one
                if other is not link and other.known and _keys(other) & _keys(link):
                    other.close()
                    other.known = False

    def look(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Request the evidence of all hosts. Hosts that do not answer in time are left out."""
        self._number += 1
        number = self._number
        self._answers[number] = {}
        links = [link for link in self.links if link.open and link.known]
        for link in links:
            link.send({"look": number, **request})
        deadline = time.monotonic() + LOOK_S
        while time.monotonic() < deadline:
            waiting = [
                link
                for link in links
                if link.open and id(link) not in self._answers.get(number, {}) and link.silent_s < LOST_S
            ]
            if not waiting:
                break
            self.step(lambda rank, key, rows: self.held.append((rank, key, rows)))
            time.sleep(0.005)
        answers = self._answers.pop(number, {})
        return [answers[id(link)] for link in links if id(link) in answers]

    def tell(self, message: dict[str, Any]) -> None:
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
            if link.known and (not link.open or link.silent_s > LOST_S) and not link.status.get("over")
        ]


class Follower:
    """The monitor of every other host."""

    def __init__(self, address: str, port: int, secret: str, host: str) -> None:
        self._address, self._port, self._secret, self._host = address, port, secret, host
        self.link: PeerLink | None = None
        self._spoke = 0.0
        self._tried = 0.0
        self._introduced = False
        self.processes: list[Any] = []
        """Processes of this host, as JSON."""
        self.notes: list[str] = []
        """Why a link was dropped, one line each."""
        self.lost_since: float | None = None
        self.left = False
        """Whether the leader said goodbye because its ranks have ended."""

    def step(
        self,
        status: dict[str, Any],
        rows: list[tuple[int, GroupKey, Rows]],
        answer: Callable[[dict[str, Any]], Any],
    ) -> list[dict[str, Any]]:
        """Send new data, answer the leader's requests, and return its other messages."""
        now = time.monotonic()
        self.processes = status["processes"]
        if self.link is None or not self.link.open:
            if now - self._tried < 1.0:
                return []
            self._tried = now
            try:
                connection = socket.create_connection((self._address, self._port), timeout=1.0)
                self.link = PeerLink(connection, self._secret, leads=False)
                self._introduced = False
            except OSError:
                self.lost_since = self.lost_since or now
                return []
        link = self.link
        if not link.known and now - link.opened_s > MEET_S:
            link.close()
            return []
        messages = []
        try:
            for message in link.receive():
                if "look" in message:
                    link.send({"looked": whole(message["look"], "look"), "evidence": answer(message)})
                else:
                    messages.append(message)
        except Exception as error:
            link.close()
            self.notes.append(f"the connection to the monitor on rank 0's host was closed: {error!r}")
        if link.known and not self._introduced:
            self._introduced = True
            self.lost_since = None
            link.send({"host": self._host, "status": status})
        self.send_rows(rows)
        if link.known and now - self._spoke > SPEAK_S:
            self._spoke = now
            link.send({"status": status})
        link.flush()
        return messages

    def send_rows(self, rows: list[tuple[int, GroupKey, Rows]]) -> None:
        """Send new rows, if there is a leader."""
        if rows and self.link is not None and self.link.open and self.link.known:
            content = [[rank, list(key), base64.b64encode(r.tobytes()).decode()] for rank, key, r in rows]
            self.link.send({"rows": content})
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
            self.link.send({"suspicion": list(suspicion.key), "seq": suspicion.seq, "lines": suspicion.lines_only})


def group_key(content: Any) -> GroupKey:
    """Return the validated key of a group or message that was received over the network."""
    name, ranks, generation = content
    mark = MARK if str(name).startswith(MARK) else ""  # else what names a message would be made printable, too
    return (
        mark + text(name[len(mark) :] if mark else name, "name"),
        wholes(ranks, "ranks", 0, MOST_RANKS),
        whole(generation, "generation"),
    )


def _status(content: Any) -> dict[str, Any]:
    """Return a host's status, converted to the expected types."""
    status: dict[str, Any] = {"over": bool(content.get("over"))}
    for name in ("ended", "flagged"):
        if name in content:
            status[name] = whole(content[name], name)
    for name in ("oldest_wait_s", "quiet_s"):
        if name in content:
            status[name] = number(content[name], name)
    if "counts" in content:
        status["counts"] = wholes(content["counts"], "counts")
    processes = content.get("processes", [])
    if not isinstance(processes, list) or len(processes) > MOST_RANKS:
        raise ValueError("processes: expected a list")
    status["processes"] = [Process.from_json(one) for one in processes]
    return status


def _keys(link: PeerLink) -> set[object]:
    return {process.key for process in link.processes}


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
    status: dict[str, Any] = field(default_factory=dict)
    nonce: str = field(default_factory=lambda: secrets.token_hex(32))
    _key: bytes = b""
    _sent: int = 0
    _got: int = 0
    _searched: int = 0
    _in: bytearray = field(default_factory=bytearray)
    _out: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.socket.setblocking(False)
        if self.leads:
            self._say({"nonce": self.nonce})

    @property
    def processes(self) -> list[Process]:
        """Return the processes on the peer's host."""
        return list(self.status.get("processes", ()))

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message for an authenticated peer."""
        if not self.known:
            return
        body = json.dumps(message).encode()
        self._out += self._seal(self.leads, self._sent, body).encode() + b" " + body + b"\n"
        self._sent += 1
        if len(self._out) > MOST_WAITING:
            self.close()
        self.flush()

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

    def receive(self) -> list[dict[str, Any]]:
        """Return the complete messages received so far. Invalid data end the connection."""
        messages: list[dict[str, Any]] = []
        taken = 0
        try:
            while self.open and taken < AT_ONCE:
                data = self.socket.recv(1 << 20 if self.known else LONGEST_PROOF)
                if not data:
                    self.close()
                    break
                taken += len(data)
                self._in += data
                messages += self._lines()
        except BlockingIOError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self.close()
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.open = False
        with contextlib.suppress(OSError):
            self.socket.close()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard

    def _lines(self) -> list[dict[str, Any]]:
        messages = []
        while (end := self._in.find(b"\n", self._searched)) >= 0:
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            self._searched = 0
            if not self.known:
                self._meet(line)
            else:
                messages.append(self._opened(line))
        self._searched = len(self._in)
        if self._searched > (LONGEST_LINE if self.known else LONGEST_PROOF):
            raise ValueError("a line without an end")
        return messages

    def _opened(self, line: bytes) -> dict[str, Any]:
        seal, body = line[:MAC], line[MAC + 1 :]
        if not hmac.compare_digest(seal, self._seal(not self.leads, self._got, body).encode()):
            raise ValueError("a broken seal")
        self._got += 1
        self.heard = time.monotonic()
        message = load_json(body)
        if not isinstance(message, dict):
            raise ValueError("no message")
        return message

    def _meet(self, line: bytes) -> None:
        """Handle one line of the handshake."""
        if len(line) > LONGEST_PROOF:
            raise ValueError("the authentication message is too long")
        content = load_json(line)
        if self.leads:
            other_nonce = _hex(content["nonce"])
            self._check(content["proof"], "follower", self.nonce, other_nonce)
            self._say({"proof": sign(self.secret, "leader", self.nonce, other_nonce)})
            self._become_known(self.nonce, other_nonce)
        elif not self._key:
            self._first = _hex(content["nonce"])
            self._key = b"asked"
            self._say({"nonce": self.nonce, "proof": sign(self.secret, "follower", self._first, self.nonce)})
        else:
            self._check(content["proof"], "leader", self._first, self.nonce)
            self._become_known(self._first, self.nonce)

    def _check(self, proof: Any, *parts: str) -> None:
        if not hmac.compare_digest(_hex(proof), sign(self.secret, *parts)):
            raise ValueError("no proof")

    def _become_known(self, first: str, second: str) -> None:
        self._key = bytes.fromhex(sign(self.secret, "session", first, second))
        self.known = True
        self.heard = time.monotonic()

    def _say(self, message: dict[str, Any]) -> None:
        self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def _seal(self, from_leader: bool, number: int, body: bytes) -> str:
        head = f"{'leader' if from_leader else 'follower'} {number} ".encode()
        return hmac.new(self._key, head + body, hashlib.sha256).hexdigest()


def _hex(value: Any) -> str:
    """Return a nonce or proof if it is text of the right length; raise ValueError otherwise."""
    if not isinstance(value, str) or len(value) != MAC or not value.isascii():
        raise ValueError("no nonce and no proof")
    return value
