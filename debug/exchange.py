"""Monitors of several hosts as one: the one beside rank 0 leads, the others tell it what they see.

A small TCP protocol of JSON lines. Who connects must show that it knows the job's secret (an HMAC of a
number it is sent); nothing received is executed. The address and the secret travel in the job's store.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from distsim.debug.compare import LaneKey

__all__ = ["Follower", "Leader", "Link"]

LOST_S = 2.0
"""Silence after which a host counts as cut off; its monitor speaks every `SPEAK_S`."""
SPEAK_S = 0.2
LOOK_S = 1.5
LONGEST_LINE = 64 << 20

Rows = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


@dataclass
class Link:
    """One connection, never blocking: whole lines come out, bytes go in as the network takes them."""

    socket: socket.socket
    host: str = "?"
    ranks: tuple[int, ...] = ()
    known: bool = False
    nonce: str = ""
    heard: float = field(default_factory=time.monotonic)
    open: bool = True
    status: dict[str, Any] = field(default_factory=dict)
    _in: bytearray = field(default_factory=bytearray)
    _out: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.socket.setblocking(False)

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message."""
        self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                while self._out:
                    sent = self.socket.send(self._out[: 1 << 20])
                    del self._out[:sent]
            except BlockingIOError:
                raise
            except OSError:
                self.close()

    def receive(self) -> list[dict[str, Any]]:
        """Messages that have come in whole."""
        try:
            while True:
                data = self.socket.recv(1 << 20)
                if not data:
                    self.close()
                    break
                self._in += data
                self.heard = time.monotonic()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        messages = []
        while (end := self._in.find(b"\n")) >= 0:
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            try:
                message = json.loads(line)
            except ValueError:
                self.close()
                break
            if isinstance(message, dict):
                messages.append(message)
        if len(self._in) > (LONGEST_LINE if self.known else 4096):
            self.close()
        return messages

    def close(self) -> None:
        self.open = False
        with contextlib.suppress(OSError):
            self.socket.close()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard


def sign(secret: str, nonce: str) -> str:
    """Proof of knowing the secret."""
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()


class Leader:
    """Beside rank 0: collects, so that one monitor judges the whole job."""

    def __init__(self, directory: Path) -> None:
        self.secret = secrets.token_hex(16)
        self._server = socket.create_server(("", 0), family=socket.AF_INET, backlog=128)
        self._server.setblocking(False)
        self.links: list[Link] = []
        self._answers: dict[int, dict[int, dict[str, Any]]] = {}
        self._number = 0
        self.held: list[tuple[int, LaneKey, Rows]] = []
        """Rows that came in during `look`."""
        port = self._server.getsockname()[1]
        scratch = directory / "monitor.new"
        scratch.touch(0o600)
        scratch.write_text(json.dumps({"port": port, "secret": self.secret}))
        scratch.rename(directory / "monitor.json")

    def step(self, feed: Callable[[int, LaneKey, Rows], None]) -> list[dict[str, Any]]:
        """Move messages; rows go to *feed*, suspicions come back."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._server.accept()
                link = Link(connection, nonce=secrets.token_hex(16))
                link.send({"nonce": link.nonce})
                self.links.append(link)
        suspicions = []
        for link in self.links:
            if not link.open:
                continue
            link.flush()
            for message in link.receive():
                if not link.known:
                    self._welcome(link, message)
                elif "rows" in message:
                    for rank, key, data in message["rows"]:
                        rows = np.frombuffer(base64.b64decode(data), dtype="<u8").reshape(-1, 3)
                        feed(int(rank), lane_key(key), rows)
                elif "looked" in message:
                    self._answers.setdefault(int(message["looked"]), {})[id(link)] = message["evidence"]
                elif "suspicion" in message:
                    suspicions.append(message)
                if "status" in message:
                    link.status = message["status"]
                    link.ranks = tuple(message["status"].get("ranks", link.ranks))
        self.links = [link for link in self.links if link.open or link.known]
        return suspicions

    def _welcome(self, link: Link, message: dict[str, Any]) -> None:
        if not hmac.compare_digest(str(message.get("proof", "")), sign(self.secret, link.nonce)):
            link.close()
            return
        link.known = True
        link.host = str(message.get("host", "?"))
        link.ranks = tuple(int(rank) for rank in message.get("ranks", ()))

    def look(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask all hosts for their evidence; those that do not answer in time are left out."""
        self._number += 1
        number = self._number
        asked = [link for link in self.links if link.open and link.known]
        for link in asked:
            link.send({"look": number, **request})
        deadline = time.monotonic() + LOOK_S
        held: list[tuple[int, LaneKey, Rows]] = []
        while time.monotonic() < deadline:
            waiting = [
                link
                for link in asked
                if link.open and id(link) not in self._answers.get(number, {}) and link.silent_s < LOST_S
            ]
            if not waiting:
                break
            self.step(lambda rank, key, rows: held.append((rank, key, rows)))
            time.sleep(0.005)
        self.held = held
        answers = self._answers.pop(number, {})
        return [answers[id(link)] for link in asked if id(link) in answers]

    def tell(self, message: dict[str, Any]) -> None:
        """Send to all hosts."""
        for link in self.links:
            if link.open and link.known:
                link.send(message)

    def close(self) -> None:
        """Hang up."""
        for link in self.links:
            link.close()
        self._server.close()

    @property
    def lost(self) -> list[Link]:
        """Hosts that were there and are silent, though their ranks had not all ended."""
        return [
            link
            for link in self.links
            if link.known and (not link.open or link.silent_s > LOST_S) and not link.status.get("over")
        ]


class Follower:
    """On every other host."""

    def __init__(self, address: str, port: int, secret: str, host: str) -> None:
        self._address, self._port, self._secret, self._host = address, port, secret, host
        self.link: Link | None = None
        self._spoke = 0.0
        self._tried = 0.0
        self.lost_since: float | None = None
        self.left = False
        """The leader said goodbye: its ranks have ended."""

    def step(
        self,
        status: dict[str, Any],
        rows: list[tuple[int, LaneKey, Rows]],
        answer: Callable[[dict[str, Any]], Any],
    ) -> list[dict[str, Any]]:
        """Tell what is new; answer the leader's looks; other messages come back."""
        now = time.monotonic()
        if self.link is None or not self.link.open:
            if now - self._tried < 1.0:
                return []
            self._tried = now
            try:
                self.link = Link(socket.create_connection((self._address, self._port), timeout=1.0))
            except OSError:
                self.lost_since = self.lost_since or now
                return []
        link = self.link
        messages = []
        for message in link.receive():
            if "nonce" in message:
                proof = sign(self._secret, str(message["nonce"]))
                link.send({"proof": proof, "host": self._host, "ranks": status["ranks"]})
                link.known = True
                self.lost_since = None
            elif "look" in message:
                link.send({"looked": message["look"], "evidence": answer(message)})
            else:
                messages.append(message)
        if link.known and rows:
            link.send({"rows": [[rank, list(key), base64.b64encode(r.tobytes()).decode()] for rank, key, r in rows]})
            rows.clear()
        if link.known and now - self._spoke > SPEAK_S:
            self._spoke = now
            link.send({"status": status})
        link.flush()
        return messages

    @property
    def connected(self) -> bool:
        return self.link is not None and self.link.open and self.link.known and self.link.silent_s < LOST_S * 2

    def close(self) -> None:
        """Hang up."""
        if self.link is not None:
            self.link.close()

    def suspect(self, key: LaneKey, seq: int) -> None:
        """Have the leader look at a call."""
        if self.link is not None and self.link.open:
            self.link.send({"suspicion": list(key), "seq": seq})


def lane_key(said: Any) -> LaneKey:
    """A group's key as it came over the wire."""
    name, ranks, generation = said
    return str(name), tuple(int(rank) for rank in ranks), int(generation)
