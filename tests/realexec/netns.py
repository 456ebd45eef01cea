"""Four hosts on one machine: network namespaces on a bridge."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """Names of the namespaces and their addresses."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def cut(self, host: int) -> None:
        """Pull the plug of one host."""
        ip("link", "set", f"{self.names[host]}b", "down")


def ip(*words: str) -> None:
    """Run `ip`; raises where it is not permitted."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def permitted() -> bool:
    """Whether namespaces can be made here."""
    try:
        ip("netns", "add", "distsim-probe")
        ip("netns", "del", "distsim-probe")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@contextmanager
def hosts(number: int, tag: str) -> Iterator[Hosts]:
    """Namespaces `ds<tag>0`, ... with addresses 10.77.0.1, ... on one bridge."""
    bridge = f"ds{tag}br"
    names = tuple(f"ds{tag}{i}" for i in range(number))
    addresses = tuple(f"10.77.0.{i + 1}" for i in range(number))
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for name, address in zip(names, addresses, strict=True):
            ip("netns", "add", name)
            ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
            ip("link", "set", f"{name}a", "netns", name)
            ip("link", "set", f"{name}b", "master", bridge)
            ip("link", "set", f"{name}b", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"{name}a")
            ip("-n", name, "link", "set", f"{name}a", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(names, addresses)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", f"{name}b"], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)
