"""Restores removed parts of torch.distributed during a simulation and under the guard.

Programs call torch's own names, so these are replaced: the backend `tcp`, `init_process_group` without ranks, the
collectives of several devices per rank.

Up to 1.0, torch.distributed documented that "ranks can be assigned automatically", with `file://` and with a multicast
`tcp://` address, and that `group_name` lets several jobs share a file or an address. At a multicast address, each
process announces itself repeatedly on every network interface until as many processes as there are ranks know each
other. The first process, sorted by host and identifier, has the store to which all connect. No process leaves before
all have connected. Packets travel one hop only: to this host and its network.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from distsim.deprecated import multigpu
from distsim.torch_compat.groups import PLUGINS

EVERY_S = 0.05
_LARGEST = 65_507


@dataclass(frozen=True)
class OldMeeting:
    """One process's side of a meeting."""

    url: str
    """URL as the program wrote it, without the part after `?`."""
    world_size: int
    rank: int
    """Rank; -1 if the rendezvous assigns it."""
    group_name: str
    address: str = ""
    """The multicast address; empty: a file."""
    port: int = 0
    path: str = ""

    @property
    def name(self) -> str:
        """Return the name that distinguishes this job from others."""
        return f"{self.url} group_name={self.group_name}"

    def error(self, text: str) -> ValueError:
        """Return an error with the message of torch's rendezvous."""
        kind = "tcp" if self.address else "file"
        return ValueError(f"Error initializing torch.distributed using {kind}:// rendezvous: {text}")


def meeting_at(init_method: object, rank: int, world_size: int, group_name: str) -> OldMeeting | None:
    """Return the meeting for processes of which some have no rank; None if torch handles the address itself.

    A launcher that starts as many processes as there are ranks gives each its rank in RANK. Raises ValueError if the
    number of processes is unknown, a rank does not fit it, or a port is missing.
    """
    if not isinstance(init_method, str) or not init_method.startswith(("file://", "tcp://")):
        return None
    parts = urlsplit(init_method)
    query = dict(parse_qsl(parts.query))
    rank = int(query.get("rank", -1)) if rank < 0 else rank
    world_size = int(query.get("world_size", -1)) if world_size < 0 else world_size
    multicast = parts.scheme == "tcp" and _is_multicast(parts.hostname or "")
    if not multicast and (rank >= 0 or parts.scheme == "tcp" or not parts.path):
        return None
    url = init_method.partition("?")[0]
    if not multicast:
        meeting = OldMeeting(url, world_size, rank, group_name, path=parts.path)
    else:
        meeting = OldMeeting(url, world_size, rank, group_name, str(parts.hostname), parts.port or 0)
        if not parts.port:
            raise meeting.error("port number missing")
    if world_size <= 0:
        raise meeting.error(f"world size parameter missing: ranks are given to world_size processes, got {world_size}")
    if rank < 0 and os.environ.get("WORLD_SIZE") == str(world_size) and os.environ.get("RANK", "").isdigit():
        rank = int(os.environ["RANK"])
    if rank >= world_size:
        raise meeting.error(f"rank {rank} of {world_size} processes: expected 0 to {world_size - 1}")
    return OldMeeting(url, world_size, rank, group_name, meeting.address, meeting.port, meeting.path)


def _is_multicast(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_multicast
    except ValueError:
        return False  # a name: the machine of rank 0


def assigned(meeting: OldMeeting, wishes: Sequence[int]) -> list[int]:
    """Return the rank of each process: the one it requests in *wishes*, or (for -1) the next free one.

    Raises ValueError if two processes request one rank, or if a rank is too large.
    """
    named = [rank for rank in wishes if rank >= 0]
    twice = sorted({rank for rank in named if named.count(rank) > 1})
    if twice:
        raise meeting.error(f"rank {twice[0]} was given to {named.count(twice[0])} of {len(wishes)} processes")
    beyond = [rank for rank in named if rank >= len(wishes)]
    if beyond:
        raise meeting.error(f"rank {beyond[0]} of {len(wishes)} processes: expected 0 to {len(wishes) - 1}")
    free = iter(sorted({*range(len(wishes))} - {*named}))
    return [rank if rank >= 0 else next(free) for rank in wishes]


def take_place(meeting: OldMeeting, store: Any) -> tuple[int, Any]:
    """Return this process's number of arrival in *store*, and its job's part of the store; other jobs at the same
    address, or with another `group_name`, have other parts."""
    count = int(dist.PrefixStore(f"distsim/{meeting.group_name}", store).add("came", 1)) - 1
    turn, rank = divmod(count, meeting.world_size)
    return rank, dist.PrefixStore(f"{meeting.group_name}/{turn}", store)


@dataclass(frozen=True, order=True)
class RendezvousMember:
    """A process that has announced itself. In sorted order, the ranks of a host are consecutive."""

    host: str
    pid: int
    identifier: str
    rank: int = field(compare=False)
    address: str = field(compare=False)
    port: int = field(compare=False)


def meet(meeting: OldMeeting, timeout: timedelta) -> tuple[Any, int]:
    """Return the store of the job, and this process's rank. Raises DistNetworkError where not all come within
    *timeout*, or nothing can be sent to the address.
    """
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


def _store_of(first: RendezvousMember, voice: _Voice, timeout: timedelta) -> Any:
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
    """Announces this process, and listens to the others."""

    def __init__(self, meeting: OldMeeting) -> None:
        self.meeting = meeting
        self.identifier = secrets.token_hex(8)
        self._members: dict[str, RendezvousMember] = {}
        """Processes that still look for others, by identifier."""
        self._complete: dict[str, dict[str, RendezvousMember]] = {}
        """Processes that have found all others, by the name of their job, which may be over."""
        self._found: set[tuple[str, str]] = set()
        """Identifiers of those, with the name that each uses for its job."""
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
        """Return the socket of the store: the store's own from here on."""
        assert self._listener is not None
        listener, self._listener = self._listener, None
        return listener.detach()

    def all_members(self, give_up_s: float, timeout: timedelta) -> list[RendezvousMember]:
        """Wait until there are as many members as ranks, and return them sorted."""
        while True:
            self.speak(())
            self.listen(EVERY_S)
            for job, complete in (("", {}), *self._complete.items()):
                members = sorted({**complete, **self._members}.values())
                if len(members) == self.meeting.world_size and job in ("", _named(members)):
                    return members
            if time.monotonic() > give_up_s:
                raise self.nobody_came(timeout)

    def wait_for(
        self, members: list[RendezvousMember], first: RendezvousMember, give_up_s: float, timeout: timedelta
    ) -> None:
        """Wait until *first*, which has the store, has met all members; announce this process meanwhile."""
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
            f"{len(heard)} of {meeting.world_size} processes reached {meeting.url} within "
            f"{timeout.total_seconds():g} s, on {', '.join(hosts)}" + (more if len(heard) > meeting.world_size else "")
        )

    def speak(self, members: Any) -> None:
        """Announce this process, and whether it has found all *members*."""
        message = {
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
                mouth.sendto(json.dumps(message).encode(), (self.meeting.address, self.meeting.port))
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
        """Receive announcements of other processes for *seconds*."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._ears], [], [], left)[0]:
                text, sender = self._ears.recvfrom(_LARGEST)
                self._hear(text, str(sender[0]))

    def _hear(self, text: bytes, address: str) -> None:
        try:
            message = json.loads(text)
            if message["distsim"] != 1 or message["group"] != self.meeting.group_name:
                return
            size, job = int(message["size"]), str(message["job"])
            member = RendezvousMember(
                str(message["host"]),
                int(message["pid"]),
                str(message["id"]),
                int(message["rank"]),
                address,
                int(message["port"]),
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
    """Return the name of the job of the processes that met."""
    return hashlib.blake2b("|".join(sorted(one.identifier for one in members)).encode(), digest_size=8).hexdigest()


GLOO_FOR_TCP = "backend 'tcp', which torch has dropped, is served by gloo"


def note(text: str) -> None:
    """Warn the user, at the calling line, about a difference from the program's request; a simulation adds the warning
    to its report."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "distsim.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def begins(meeting: OldMeeting, rank: int) -> None:
    """Note that this process now has a rank and is about to join, so that the guard creates its flight record."""


def on_backend_requested(backend: Any) -> None:
    """Note on which backend the program requests its default group; a simulation replaces this function."""


def known_backend(backend: Any) -> Any:
    """Return *backend*, or gloo if it is `tcp`."""
    if isinstance(backend, str) and backend.lower() == "tcp" and "tcp" not in PLUGINS.get():
        note(GLOO_FOR_TCP)
        return c10d.Backend.GLOO
    return backend


def with_ranks(
    backend: Any, init_method: Any, timeout: timedelta | None, world_size: int, rank: int, group_name: str
) -> dict[str, Any]:
    """Return additional arguments for torch's init_process_group: where the processes meet, and the rank of this
    one.

    The result is empty if torch finds out by itself. MPI assigns its own ranks. At a multicast address this waits
    for the others.
    """
    if isinstance(backend, str) and backend.lower() == "mpi":
        return {}
    meeting = meeting_at(init_method, rank, world_size, group_name)
    if meeting is None:
        return {}
    if meeting.address:
        store, rank = meet(meeting, timeout or c10d.default_pg_timeout)
    else:
        turn_rank, store = take_place(meeting, dist.FileStore(meeting.path, meeting.world_size))
        rank = turn_rank if meeting.rank < 0 else meeting.rank
    begins(meeting, rank)
    return {"init_method": None, "store": store, "rank": rank, "world_size": meeting.world_size}


def torch_patches() -> list[tuple[Any, str, Any]]:
    """Return (holder, attribute, replacement) of everything that is patched.

    The public init_process_group stays the same object, for modules that have imported it; the function within its
    decorator is exchanged.
    """
    patches: list[tuple[Any, str, Any]] = [(c10d.Backend, "__new__", _backend(c10d.Backend.__new__))]
    public = c10d.init_process_group
    cells = dict(zip(public.__code__.co_freevars, public.__closure__ or (), strict=True))
    if "func" in cells:
        patches.append((cells["func"], "cell_contents", _init(cells["func"].cell_contents)))
    for name in multigpu.__all__:
        if not hasattr(c10d, name):  # torch before 2.2
            patches += [(holder, name, getattr(multigpu, name)) for holder in (c10d, dist)]
    return patches


def _backend(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def new(cls: type, name: Any) -> Any:
        return original(cls, known_backend(name))

    return staticmethod(new)


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        keywords: dict[str, Any] = {
            "init_method": init_method,
            "timeout": timeout,
            "world_size": world_size,
            "rank": rank,
            "store": store,
            "group_name": group_name,
        }
        on_backend_requested(backend)
        if store is None and c10d.GroupMember.WORLD is None:
            keywords |= with_ranks(backend, init_method, timeout, world_size, rank, group_name)
        original(backend, *keywords.values(), *args, **kwargs)

    return init_process_group
