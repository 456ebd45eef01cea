"""The processes of a job find each other at a multicast address.

Each says over and over who it is, on every network interface, until as many as there are ranks have heard of each
other; the first of them, by host and identifier, has the store that all connect to, and nobody leaves before all have.
Packets go one hop: to this host and its network.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distsim.deprecated.ranks import Meeting, assigned

__all__ = ["meet"]

EVERY_S = 0.05
_LARGEST = 65_507


@dataclass(frozen=True, order=True)
class Member:
    """A process that has said who it is. Sorted, the ranks of a host follow each other."""

    host: str
    pid: int
    identifier: str
    rank: int = field(compare=False)
    address: str = field(compare=False)
    port: int = field(compare=False)


def meet(meeting: Meeting, timeout: timedelta) -> tuple[Any, int]:
    """The store of the job, and this process's rank. Raises DistNetworkError where not all come within *timeout*, or
    nothing can be sent to the address."""
    give_up_s = time.monotonic() + timeout.total_seconds()
    with _Voice(meeting) as voice:
        members = voice.all_members(give_up_s, timeout)
        own = next(i for i, one in enumerate(members) if one.identifier == voice.identifier)
        voice.wait_for(members, members[0], give_up_s, timeout)
        store = _store_of(members[0], voice, timeout)
        store.add("distsim/here", 1)
        while int(store.add("distsim/here", 0)) < meeting.world_size:
            voice.speak(members)
            voice.listen(EVERY_S)
            if time.monotonic() > give_up_s:
                raise voice.nobody_came(timeout)
    return store, assigned(meeting, [one.rank for one in members])[own]  # all are here: what is wrong, all raise


def _store_of(first: Member, voice: _Voice, timeout: timedelta) -> Any:
    if first.identifier != voice.identifier:
        return dist.TCPStore(first.address, first.port, is_master=False, timeout=timeout)
    listener = voice.give_listener()
    return dist.TCPStore(
        first.address,
        first.port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


class _Voice:
    """Says who this process is, and hears the others."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.identifier = secrets.token_hex(8)
        self._members: dict[str, Member] = {}
        """By identifier: who still looks for others."""
        self._complete: dict[str, dict[str, Member]] = {}
        """By what they call their job: who has found all others. They may be of a job that is over."""
        self._found: set[tuple[str, str]] = set()
        """Identifiers of those, with what they call their job."""
        self._is_6 = ipaddress.ip_address(meeting.address).version == 6
        self._listener: socket.socket | None = socket.create_server(("", 0))
        self._port = int(self._listener.getsockname()[1])
        self._ears = self._open_ears()
        self._mouths = [mouth for index, _ in socket.if_nameindex() for mouth in self._open_mouth(index)]

    def __enter__(self) -> _Voice:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._ears, *self._mouths, *([self._listener] if self._listener else [])):
            one.close()

    def give_listener(self) -> int:
        """The socket of the store: the store's own from here on."""
        assert self._listener is not None
        listener, self._listener = self._listener, None
        return listener.detach()

    def all_members(self, give_up_s: float, timeout: timedelta) -> list[Member]:
        """All, sorted, once they are as many as there are ranks."""
        while True:
            self.speak(())
            self.listen(EVERY_S)
            for job, complete in (("", {}), *self._complete.items()):
                members = sorted({**complete, **self._members}.values())
                if len(members) == self.meeting.world_size and job in ("", _named(members)):
                    return members
            if time.monotonic() > give_up_s:
                raise self.nobody_came(timeout)

    def wait_for(self, members: list[Member], first: Member, give_up_s: float, timeout: timedelta) -> None:
        """Until *first*, which has the store, has found all members, too. Who waits speaks: connecting is silent."""
        while first.identifier != self.identifier and (first.identifier, _named(members)) not in self._found:
            self.speak(members)
            self.listen(EVERY_S)
            if time.monotonic() > give_up_s:
                raise self.nobody_came(timeout)

    def nobody_came(self, timeout: timedelta) -> Any:
        meeting, heard = self.meeting, {**self._members}
        for complete in self._complete.values():
            heard |= complete
        hosts = sorted({one.host for one in heard.values()})
        more = f"; give each job a group_name of its own (this one's is {meeting.group_name!r})"
        return dist.DistNetworkError(
            f"{len(heard)} of {meeting.world_size} processes came to {meeting.url} in {timeout.total_seconds():g} s, "
            f"on {', '.join(hosts)}" + (more if len(heard) > meeting.world_size else "")
        )

    def speak(self, members: Any) -> None:
        """Say who this process is; once it has found all *members*, that too."""
        said = {
            "distsim": 1,
            "group": self.meeting.group_name,
            "size": self.meeting.world_size,
            "id": self.identifier,
            "rank": self.meeting.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "port": self._port,
            "job": _named(members) if members else "",
        }
        heard, failure = False, None
        for mouth in self._mouths:
            try:
                mouth.sendto(json.dumps(said).encode(), (self.meeting.address, self.meeting.port))
                heard = True
            except OSError as error:
                failure = error
        if not heard:
            raise dist.DistNetworkError(
                f"nothing can be sent to the multicast address of {self.meeting.url} "
                f"({failure.strerror if failure else 'no network interface'}): give the address of rank 0's host and a "
                "rank to every process, or meet at a file:// that all see"
            )

    def listen(self, seconds: float) -> None:
        """Hear what others say, for *seconds*."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._ears], [], [], left)[0]:
                text, sender = self._ears.recvfrom(_LARGEST)
                self._hear(text, str(sender[0]))

    def _hear(self, text: bytes, address: str) -> None:
        try:
            said = json.loads(text)
            if said["distsim"] != 1 or said["group"] != self.meeting.group_name:
                return
            size, job = int(said["size"]), str(said["job"])
            member = Member(
                str(said["host"]), int(said["pid"]), str(said["id"]), int(said["rank"]), address, int(said["port"])
            )
        except (ValueError, TypeError, KeyError):
            return  # somebody else's
        if size != self.meeting.world_size:
            self.speak(())  # who has spoken listens: it is to know as well
            raise self.meeting.error(
                f"a process on {member.host} says world_size {size}, this one {self.meeting.world_size}: jobs at one "
                "address need a group_name each"
            )
        if job:
            self._found.add((member.identifier, job))
        if member.identifier in self._members:
            return
        if job:
            self._complete.setdefault(job, {}).setdefault(member.identifier, member)
        else:
            self._members[member.identifier] = member

    def _open_ears(self) -> socket.socket:
        ears = socket.socket(socket.AF_INET6 if self._is_6 else socket.AF_INET, socket.SOCK_DGRAM)
        ears.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            ears.bind((self.meeting.address if not self._is_6 else "", self.meeting.port))
        except OSError as error:
            ears.close()
            raise dist.DistNetworkError(f"cannot listen at {self.meeting.url}: {error.strerror}") from None
        for index, _ in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface that knows no multicast
                if self._is_6:
                    where = socket.inet_pton(socket.AF_INET6, self.meeting.address) + struct.pack("=i", index)
                    ears.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, where)
                else:
                    where = socket.inet_aton(self.meeting.address) + struct.pack("=4si", bytes(4), index)
                    ears.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, where)
        return ears

    def _open_mouth(self, index: int) -> Iterator[socket.socket]:
        mouth = socket.socket(socket.AF_INET6 if self._is_6 else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            if self._is_6:
                mouth.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
            else:
                mouth.setsockopt(
                    socket.IPPROTO_IP, socket.IP_MULTICAST_IF, struct.pack("=4s4si", bytes(4), bytes(4), index)
                )
        except OSError:
            mouth.close()
            return
        yield mouth


def _named(members: Any) -> str:
    """What those who have found each other call their job."""
    return hashlib.blake2b("|".join(sorted(one.identifier for one in members)).encode(), digest_size=8).hexdigest()
