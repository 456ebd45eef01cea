"""One connection between two monitors: who is at the other end has proved it, and every line is sealed.

Both ends show that they know the job's secret before either hears a word of the other: the leader sends a random
number A, the follower one of its own, B, with HMAC(secret, follower, A, B); the leader answers with HMAC(secret,
leader, A, B). What follows is JSON lines, each behind an HMAC under a key of this connection alone (of the secret, A
and B) that also covers the direction and the line's number: nothing can be replayed, reordered, turned around or put
in. It is not encrypted: who can listen can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from distsim.debug.rings.world import Process
from distsim.text.untrusted_input import load_json

__all__ = ["Link", "sign"]

LONGEST_LINE = 64 << 20
LONGEST_PROOF = 1024
"""Bytes that somebody may send who has not proved anything."""
MOST_WAITING = 256 << 20
"""Bytes for an end that does not read."""
AT_ONCE = 16 << 20
"""Bytes taken in one step: the other links have their turn."""
MAC = hashlib.sha256().digest_size * 2


def sign(secret: str, *parts: str) -> str:
    """Proof of knowing the secret, bound to *parts*."""
    return hmac.new(secret.encode(), json.dumps(parts).encode(), hashlib.sha256).hexdigest()


@dataclass
class Link:
    """Never blocking: whole messages come out, bytes go in as the network takes them."""

    socket: socket.socket
    secret: str
    leads: bool
    """Which end this is: the leader's speaks first."""
    host: str = "?"
    known: bool = False
    """The other end has proved that it knows the secret."""
    heard: float = field(default_factory=time.monotonic)
    made: float = field(default_factory=time.monotonic)
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
        """Those of the other end's host."""
        return list(self.status.get("processes", ()))

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message, for an end that is known."""
        if not self.known:
            return
        body = json.dumps(message).encode()
        self._out += self._seal(self.leads, self._sent, body).encode() + b" " + body + b"\n"
        self._sent += 1
        if len(self._out) > MOST_WAITING:
            self.close()
        self.flush()

    def flush(self) -> None:
        """Send what the network takes."""
        try:
            while self._out:
                sent = self.socket.send(self._out[: 1 << 20])
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def receive(self) -> list[dict[str, Any]]:
        """Messages that have come in whole; whatever is not as it should be ends the connection."""
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
        """Hang up."""
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
        """One line of the introduction."""
        if len(line) > LONGEST_PROOF:
            raise ValueError("no proof is so long")
        said = load_json(line)
        if self.leads:
            theirs = _hex(said["nonce"])
            self._check(said["proof"], "follower", self.nonce, theirs)
            self._say({"proof": sign(self.secret, "leader", self.nonce, theirs)})
            self._become_known(self.nonce, theirs)
        elif not self._key:
            self._first = _hex(said["nonce"])
            self._key = b"asked"
            self._say({"nonce": self.nonce, "proof": sign(self.secret, "follower", self._first, self.nonce)})
        else:
            self._check(said["proof"], "leader", self._first, self.nonce)
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
    """64 hexadecimal digits, as nonces and proofs are."""
    if not isinstance(value, str) or len(value) != MAC or not value.isascii():
        raise ValueError("no nonce and no proof")
    return value
