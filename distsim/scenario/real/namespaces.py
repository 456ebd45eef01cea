"""Hosts on one machine for real runs with network faults: network namespaces on a bridge, each with its own host name.

Needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN) and the command `ip` of iproute2. Every job has a bridge of its own
without an address, so parallel jobs may use the same addresses, and none reaches the outside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from distsim.errors import UsageError

__all__ = ["Hosts", "hosts", "missing"]


BECOME = """\
import os, socket, subprocess, sys
name, table, *command = sys.argv[1:]
socket.sethostname(name)
subprocess.run(["mount", "--bind", table, "/etc/hosts"], stderr=subprocess.DEVNULL)
os.execvp(command[0], command)
"""
"""`ip netns exec` gives a command its own mounts, `unshare --uts` its own host name. Without the table of
names all works as well, with a warning of torch's."""


@dataclass(frozen=True)
class Hosts:
    """The namespaces of a job, their addresses, and the interface that each has."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    table: str = "/etc/hosts"
    """File in the format of /etc/hosts with the names of all hosts, so that no name server is asked."""

    def enter(self, host: int) -> list[str]:
        """Return the command prefix that runs a command on one host, named n0, n1, ... as on clusters."""
        inside = ["ip", "netns", "exec", self.names[host], "unshare", "--uts"]
        return [*inside, sys.executable, "-c", BECOME, f"n{host}", self.table]

    def interface(self, host: int) -> str:
        return f"{self.names[host]}a"

    def cut(self, host: int) -> None:
        """Pull the plug of one host."""
        _ip("link", "set", f"{self.names[host]}b", "down")

    def mend(self, host: int) -> None:
        """Reconnect the host to the network."""
        _ip("link", "set", f"{self.names[host]}b", "up")


def missing() -> str | None:
    """Return what this machine lacks for network namespaces; None if they can be created."""
    name = f"dsp{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except UsageError as error:
        return str(error)
    try:
        _ip("-n", name, "link", "add", "probe", "type", "veth", "peer", "name", "other")
    except UsageError as error:
        return str(error)
    finally:
        _forget("netns", "del", name)
    return None if shutil.which("unshare") else "`unshare` is not installed (package util-linux)"


@contextmanager
def hosts(number: int) -> Iterator[Hosts]:
    """*number* namespaces with addresses 10.77.0.1, ... on one bridge; `UsageError` where that is not permitted."""
    tag = f"ds{os.getpid()}"  # names of interfaces have 15 characters at most
    bridge = f"{tag}br"
    names = tuple(f"{tag}{chr(ord('g') + i // 10)}{i % 10}" for i in range(number))
    addresses = tuple(f"10.77.{(i + 1) // 256}.{(i + 1) % 256}" for i in range(number))
    _take_down(bridge, names)  # what a process of this number left that was killed long ago
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for name, address in zip(names, addresses, strict=True):
            _ip("netns", "add", name)
            _ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
            _ip("link", "set", f"{name}a", "netns", name)
            _ip("link", "set", f"{name}b", "master", bridge)
            _ip("link", "set", f"{name}b", "up")
            _ip("-n", name, "addr", "add", f"{address}/16", "dev", f"{name}a")
            _ip("-n", name, "link", "set", f"{name}a", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        with tempfile.NamedTemporaryFile("w", prefix="distsim-hosts-") as table:
            table.write("127.0.0.1 localhost\n")
            # Connections of IPv6 sockets to IPv4 addresses are looked up by the latter, mapped.
            table.writelines(f"{a} n{host}\n::ffff:{a} n{host}\n" for host, a in enumerate(addresses))
            table.flush()
            os.chmod(table.name, 0o644)
            yield Hosts(names, addresses, table.name)
    finally:
        _take_down(bridge, names)


def _take_down(bridge: str, names: Sequence[str]) -> None:
    for name in names:
        _forget("link", "del", f"{name}b")
        _forget("netns", "del", name)
    _forget("link", "del", bridge)


def _ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError("`ip` is not installed (package iproute2)") from None
    except subprocess.CalledProcessError as error:
        errors = (error.stderr or error.stdout).strip().splitlines() or [f"exit code {error.returncode}"]
        why = "it takes root" if os.geteuid() else "this container may not make network namespaces"
        raise UsageError(f"`ip {' '.join(words)}` failed ({errors[-1]}): {why}") from None


def _forget(*words: str) -> None:
    subprocess.run(["ip", *words], check=False, capture_output=True)
