"""Introduction of the monitors of several hosts to each other through the job's store.

The store holds the address of the leading monitor and a random salt, never the secret that authenticates monitors
(link.py). Each host derives the secret itself.

If DISTSIM_SECRET or DISTSIM_SECRET_FILE (a file of your own, mode 600, equal on all hosts) is set, the secret comes
from there, and only those who know it can connect.

Otherwise it is derived from the salt and the job's names (TORCHELASTIC_RUN_ID, SLURM_JOB_ID, SLURM_STEP_ID,
MASTER_PORT, WORLD_SIZE). This keeps out other jobs, port scanners, and anyone who cannot both reach the job's store
and learn these names. It does not keep out someone who can: torch's TCPStore has no authentication, so anyone who
can write to it can stop the job in any case. Set a secret if you do not trust the users of your network.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
from msgspec import Meta, Struct

from distsim.debug.monitor.protocol import sign
from distsim.debug.rings.files import write_private
from distsim.shelves import shelf
from distsim.text import original_print
from distsim.text.codec import decode, encode, read
from distsim.text.untrusted_input import read_bytes
from distsim.torch_compat import groups

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SIOCGIFADDR = 0x8915

KEY = "distsim/monitor"
PATIENCE_S = 60.0
POLL_S = 0.05
LEAVE_S = 2.0
LAST_S = 1.0
"""Seconds that a rank which ends at once stays for the introduction, so that its monitor can report."""


def introduce_monitors(directory: Path, rank: int, first: bool) -> None:
    """Publish the address of rank 0's monitor, the leader, or connect this host's monitor to it.

    The *first* rank of each other host connects. The introduction runs in a thread with its own connection, because
    the job's store may be in use by a rank that waits on it.
    """
    if rank != 0 and not first:
        return
    store = own_store()
    if store is None:
        return
    ended = threading.Event()
    target = _lead if rank == 0 else _follow
    thread = threading.Thread(target=target, args=(directory, store, ended), name="distsim-introduction", daemon=True)

    def leave() -> None:
        thread.join(LAST_S)
        # A thread that Python 3.11 finds inside the store's C++ when it ends takes the process down (SIGABRT).
        ended.set()
        thread.join(LEAVE_S)

    atexit.register(leave)
    thread.start()


def own_store() -> Any:
    """Return a new connection to the job's TCPStore, or the job's store itself if it is of another type.

    Jobs of MPI use MPI instead. Return None for jobs of RPC alone, which have no group with a store.
    """
    try:
        if dist.get_backend() == "mpi":
            return shelf("mpi library").introduction()
        base = groups.of_default_group()
        if isinstance(base, dist.TCPStore):
            return dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False)
        return base
    except (RuntimeError, ValueError):
        return None


def _lead(directory: Path, store: Any, ended: threading.Event) -> None:
    monitor = _monitor(directory)
    if monitor is None:  # else a restart: the monitor leads already
        salt = secrets.token_hex(16)
        addresses = job_addresses(os.environ.get("MASTER_ADDR") or str(getattr(store, "host", "")), os.environ)
        secret = _secret(salt)
        if secret is None:
            return
        write_private(directory / "lead.json", json.dumps({"addresses": addresses, "secret": secret, "salt": salt}))
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        monitor = _monitor(directory)
        if monitor is not None:
            with contextlib.suppress(RuntimeError):  # a store that keeps nothing (FakeStore), or whose server has ended
                store.set(_key(), encode(monitor).decode())
            return
        if ended.wait(POLL_S):
            return


class Address(Struct):
    """Where the leading monitor listens, in its folder and in the job's store."""

    address: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    salt: str


def _monitor(directory: Path) -> Address | None:
    """Return the address of this host's monitor, or None until it listens."""
    try:
        return read(directory / "monitor.json", Address)
    except (OSError, ValueError):
        return None


def _follow(directory: Path, store: Any, ended: threading.Event) -> None:
    deadline = time.monotonic() + PATIENCE_S
    try:
        while not store.check([_key()]):
            if ended.wait(POLL_S) or time.monotonic() > deadline:
                return
        encoded = store.get(_key())
    except RuntimeError:  # no leader: this host's monitor judges by itself
        return
    try:
        leader = decode(encoded[:4096], Address)
    except ValueError:  # somebody else's: nothing is said that could be believed
        return
    secret = _secret(leader.salt)
    if secret is not None:
        follow = {"address": leader.address, "port": leader.port, "secret": secret}
        write_private(directory / "follow.json", json.dumps(follow))


def job_addresses(master: str, environ: Mapping[str, str]) -> list[str]:
    """Return the addresses in the job's network on which the leader may listen, the most likely first.

    They are the address of the interface that gloo or NCCL was told to use, that of *master* (the rendezvous host),
    and, if *master* resolves to loopback here (as with some /etc/hosts), the address of this host's default route.
    """
    addresses = [address for name in INTERFACES for address in _of_interface(environ.get(name, ""))]
    resolved: list[str] = []
    with contextlib.suppress(OSError, UnicodeError):
        resolved = [str(entry[4][0]) for entry in socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)]
    loopback = [address for address in resolved if address.startswith("127.") or address == "::1"]
    addresses += [address for address in resolved if address not in loopback]
    if master not in ("localhost", *loopback):
        addresses += _leading_out()
    return list(dict.fromkeys([*addresses, *loopback]))


def _of_interface(names_text: str) -> list[str]:
    """Return the IPv4 addresses of the interfaces in a variable such as GLOO_SOCKET_IFNAME."""
    result = []
    names = [] if names_text.startswith("^") else names_text.removeprefix("=").split(",")
    for name in filter(None, names):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, contextlib.suppress(OSError):
            answer = fcntl.ioctl(one.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            result.append(socket.inet_ntoa(answer[20:24]))
    return result


def _leading_out() -> list[str]:
    """Return this host's address on the route to other hosts; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))
            return [str(one.getsockname()[0])]
        except OSError:
            return []


def _secret(salt: str) -> str | None:
    """Return the secret of the job's monitors, or None, with one line printed, if the user's secret cannot be read."""
    given = os.environ.get("DISTSIM_SECRET", "")
    path = os.environ.get("DISTSIM_SECRET_FILE", "")
    if not given and path:
        try:
            given = _of_file(Path(path))
        except OSError as error:
            original_print(
                f"distsim: DISTSIM_SECRET_FILE {path}: {error.strerror}; the monitors of the hosts do not connect",
                file=sys.stderr,
            )
            return None
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_PORT", "WORLD_SIZE")
    return sign(given or json.dumps([os.environ.get(name, "") for name in names]), "job", salt)


def _of_file(path: Path) -> str:
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "expected a file that you own and that no other user may read (chmod 600)")
    secret = read_bytes(path, 1 << 16).strip()
    if len(secret) < 16:
        raise OSError(errno.EINVAL, f"expected a secret of at least 16 bytes, got {len(secret)}")
    return secret.decode("latin-1")


def _key() -> str:
    return f"{KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
