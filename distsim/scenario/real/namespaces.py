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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.errors import UsageError
from distsim.scenario.file.load import cut_off
from distsim.sim.faults.link_faults import NetworkRule
from distsim.sim.faults.links import CUTS

if TYPE_CHECKING:
    from distsim.scenario.file.load import Scenario

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
        """Disconnect one host from the network."""
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
    """Create *number* network namespaces with addresses 10.77.0.1, ... on one bridge; raise `UsageError` if that is
    not permitted.
    """
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


MEETING_S = 1.0
"""Seconds that monitors take to connect once they know each other's address; they try several times a second."""
LONGEST_MEETING_S = 10.0
"""Maximum seconds to wait until the monitors are connected; in a job without a process group they never are."""
monotonic = time.monotonic


def spans_hosts(scenario: Scenario) -> bool:
    """Return whether a real run of *scenario* needs a network namespace for each host."""
    return any(fault.what in CUTS for fault in scenario.spec.faults)


@dataclass(slots=True)
class _Cut:
    """One rule: which hosts, and how far it is."""

    number: int
    hosts: tuple[int, ...]
    at_call: bool
    after_s: float
    for_s: float | None
    due_s: float | None = None
    mends_s: float | None = None
    struck: bool = False


@dataclass(slots=True)
class Cuts:
    """Disconnects hosts while a job runs.

    Ranks and this class communicate by files in *folder*. A rank creates `begun.RANK` when it starts, and
    `strike.NUMBER` at the call at which rule NUMBER applies; it then waits for `struck.NUMBER`.
    """

    folder: Path
    job: Hosts
    num_ranks: int
    cuts: list[_Cut] = field(default_factory=list)
    begun_s: float | None = None
    met_s: float | None = None
    """Time at which the hosts' monitors knew each other; before that, no monitor can report a lost host."""

    @classmethod
    def of(cls, scenario: Scenario, folder: Path, job: Hosts) -> Cuts:
        result = cls(folder, job, scenario.world_size)
        for number, rule in enumerate(scenario.rules):
            if isinstance(rule, NetworkRule):
                when, cut_hosts = rule.when, cut_off(scenario.cluster, rule, len(job.names))
                after_s = when.after_s if when.call is not None else when.start_s
                result.cuts.append(_Cut(number, cut_hosts, when.call is not None, after_s, when.for_s))
        return result

    def tick(self) -> None:
        """Apply the faults that are due.

        Times count from the call, or from the start of the last rank; in both cases not before the monitors know each
        other.
        """
        now_s = monotonic()
        ready = self._ready(now_s)
        for cut in self.cuts:
            called = ready and (not cut.at_call or (self.folder / f"strike.{cut.number}").exists())
            if cut.due_s is None and called:
                cut.due_s = now_s + cut.after_s
            if not cut.struck and cut.due_s is not None and now_s >= cut.due_s:
                cut.struck = True
                for host in cut.hosts:
                    self.job.cut(host)
                (self.folder / f"struck.{cut.number}").touch()
                cut.mends_s = None if cut.for_s is None else now_s + cut.for_s
            if cut.mends_s is not None and now_s >= cut.mends_s:
                cut.mends_s = None
                for host in cut.hosts:
                    self.job.mend(host)

    def _ready(self, now_s: float) -> bool:
        if self.begun_s is None and sum(1 for _ in self.folder.glob("begun.*")) >= self.num_ranks:
            self.begun_s = now_s
        if self.met_s is None:
            followers = [self.folder / f"rings{node}" / "follow.json" for node in range(1, len(self.job.names))]
            if all(path.exists() for path in followers):
                self.met_s = now_s
        if self.begun_s is None:
            return False
        met = self.met_s is not None and now_s >= self.met_s + MEETING_S
        return met or now_s >= self.begun_s + LONGEST_MEETING_S

    @property
    def struck(self) -> Sequence[int]:
        """Return numbers of the rules that have pulled a plug."""
        return [cut.number for cut in self.cuts if cut.struck]

    @property
    def hosts_cut(self) -> Sequence[int]:
        """Return the hosts that are connected by those plugs."""
        return sorted({host for cut in self.cuts if cut.struck for host in cut.hosts})
