"""NCCL's RAS service (2.24 and later), queried over TCP for the communicators of a running job.

It answers in text, and since NCCL 2.28.7 also in JSON, which is requested first. Source of the format: the page "RAS"
of NCCL's documentation (docs.nvidia.com/deeplearning/nccl, troubleshooting), and the service's source, src/ras.
"""

from __future__ import annotations

import dataclasses
import re
import socket
from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from distsim.errors import UsageError
from distsim.text.codec import Rank, convert_foreign
from distsim.text.untrusted_input import MOST_RANKS, load_json

PORT = 28028
PROTOCOL = 2
CONNECT_S = 3.0
ANSWER_S = 12.0
"""The service waits up to 10 s for its peers."""
MOST_RAS_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RasMember:
    """A rank of a communicator as RAS describes it."""

    rank: int
    """Rank in the communicator."""
    pid: int | None = None
    host: str = ""
    why: str = ""
    """Reason why RAS has no data about the rank, such as `unresponsive` or `dead`."""


@dataclass(slots=True)
class RasCommunicator:
    """A communicator, and those of its members that differ from the others."""

    name: str
    """Hash of the communicator as in NCCL's log."""
    counts: dict[str, dict[int, int]] = dataclasses.field(default_factory=dict)
    """Number of launches by operation and rank. RAS's text output contains only operations whose numbers differ."""
    members: dict[int, RasMember] = dataclasses.field(default_factory=dict)

    def differing(self) -> dict[str, dict[int, int]]:
        """Return the operations whose number of launches differs between ranks."""
        return {op: counts for op, counts in self.counts.items() if len(set(counts.values())) > 1}

    def behind(self) -> dict[int, str]:
        """Return ranks that launched fewer operations than others, and the text about it; empty if the surplus of
        another operation explains it."""
        differing = self.differing()
        ranks = {rank for counts in differing.values() for rank in counts}
        # In text only outliers are listed by their numbers: who is not listed for an operation is one of the others.
        others = {op: next((n for rank, n in counts.items() if rank < 0), 0) for op, counts in differing.items()}
        totals = {rank: sum(counts.get(rank, others[op]) for op, counts in differing.items()) for rank in ranks}
        most = max(totals.values(), default=0)
        result = {}
        for rank in sorted(rank for rank, total in totals.items() if rank >= 0 and total < most):
            ops = [(op, counts.get(rank, others[op]), max(counts.values())) for op, counts in differing.items()]
            result[rank] = ", ".join(f"{count} of {top} {op}" for op, count, top in ops if count < top)
        return result


@dataclass(slots=True)
class RasStatus:
    """RAS status of a job."""

    version: str = ""
    communicators: list[RasCommunicator] = dataclasses.field(default_factory=list)
    processes: list[RasMember] = dataclasses.field(default_factory=list)
    """Processes of any communicator that do not answer RAS or that RAS considers dead."""


def ask_ras(address: str, timeout_s: float = ANSWER_S) -> RasStatus:
    """Query the RAS service at HOST or HOST:PORT.

    Raises:
        UsageError: The port is closed, or another service answers.
    """
    host, port = _address(address)
    try:
        with socket.create_connection((host, port), CONNECT_S) as link:
            link.settimeout(timeout_s)
            lines = link.makefile("rb")
            greeting = _exchange(link, lines, f"CLIENT PROTOCOL {PROTOCOL}")
            if not greeting.upper().startswith("SERVER PROTOCOL "):
                raise UsageError(f"--ras {address}: expected NCCL's RAS service, got {greeting[:40]!r} as its greeting")
            _exchange(link, lines, "SET FORMAT json")  # an error before 2.28.7: it then answers in text
            link.sendall(b"VERBOSE STATUS\n")
            data = lines.read(MOST_RAS_BYTES)
    except OSError as error:
        raise UsageError(
            f"--ras {address}: no RAS service there ({error.strerror or error}); run it on a host of the job, with the "
            f"port of NCCL_RAS_ADDR (default {PORT}), NCCL 2.24 or later, and NCCL_RAS_ENABLE not 0"
        ) from None
    try:
        return read_status(data.decode(errors="replace"))
    except ValueError as error:
        raise UsageError(
            f"--ras {address}: its answer cannot be read ({error}); the output of ncclras -v helps"
        ) from None


def read_status(answer: str) -> RasStatus:
    """Parse the answer, which is JSON or text. Raises ValueError if it is neither."""
    if answer.lstrip().startswith("{"):
        try:
            data = load_json(answer)
        except ValueError:  # src/ras/client_support.cc of 2.28.7 to 2.28.9, jsonWriteMissingRank
            data = load_json(_WITHOUT_COMMA.sub(r"\1,\2", answer))
        return _from_json(data)
    if "Communicators..." not in answer and "Job summary" not in answer:
        raise ValueError(f"expected the status of a job, got {answer.strip()[:60]!r}")
    return _from_text(answer)


_WITHOUT_COMMA = re.compile(r'("nvml_dev": -?\d+)(\s*"status":)')
"""A field of a missing rank, and the next one, which NCCL 2.28.7 to 2.28.9 do not separate."""


def _address(address: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]+))(?::(\d{1,5}))?", address)
    if match is None or not 0 < (port := int(match[3] or PORT)) < 65536:
        raise UsageError(f"--ras: expected HOST or HOST:PORT, got {address!r}")
    return match[1] or match[2], port


def _exchange(link: socket.socket, lines: Any, request: str) -> str:
    link.sendall(f"{request}\n".encode())
    return str(lines.readline(4096).decode(errors="replace")).strip()


# -- JSON, since NCCL 2.28.7


class _Rank(Struct):
    """A rank of a communicator, as the service describes it."""

    rank: Annotated[int, Meta(ge=0, le=MOST_RANKS)]
    pid: Annotated[int, Meta(ge=-1)]
    host: str
    status: dict[str, bool | int]
    collective_counts: dict[str, Annotated[int, Meta(ge=0, le=1 << 62)]] = field(default_factory=dict)

    def member(self, why: str = "") -> RasMember:
        return RasMember(self.rank, self.pid if self.pid > 0 else None, self.host, why)


class _Communicator(Struct):
    hash: str | int
    ranks: list[_Rank]
    missing_ranks: list[_Rank]


class _Answer(Struct):
    nccl_version: str
    communicators: list[_Communicator]


def _from_json(data: Any) -> RasStatus:
    answer = convert_foreign(data, _Answer)
    status = RasStatus(answer.nccl_version)
    gone: dict[tuple[str, int | None], RasMember] = {}
    for one in answer.communicators:
        communicator = RasCommunicator(str(one.hash).removeprefix("0x"))
        for entry in one.ranks:
            communicator.members[entry.rank] = entry.member()
            for op, count in entry.collective_counts.items():
                communicator.counts.setdefault(op, {})[entry.rank] = count
        for entry in one.missing_ranks:
            if entry.status.get("considered_dead") or entry.status.get("unresponsive"):
                member = entry.member("dead" if entry.status.get("considered_dead") else "unresponsive")
                gone[member.host, member.pid] = member
        status.communicators.append(communicator)
    status.processes = list(gone.values())
    return status


# -- Text, of every release

_HEADING = re.compile(r"#\d+-\d+ \((?:0x)?([0-9a-f]+)\) \w+")
_RANK = re.compile(r"Rank (\d+)(?P<details>[^-]*)-- (?:.*?managed by process (?P<pid>\d+) on node (?P<host>\S+))?")
_PROCESS = re.compile(r"Process (\d+) on node (\S+) managing")
_COUNT = re.compile(r"launched up to operation (\d+)|not launched any operations")
_OPERATIONS = re.compile(r"different (\w+) operation counts")


def _from_text(answer: str) -> RasStatus:
    version = re.search(r"NCCL version ([\d.]+)", answer)
    status = RasStatus(version[1] if version else "")
    communicators: dict[str, RasCommunicator] = {}
    section, current, op, value = "", RasCommunicator(""), "", ""
    unlisted: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for line in map(str.strip, answer.splitlines()):
        if heading := _HEADING.match(line):
            current = communicators.setdefault(heading[1], RasCommunicator(heading[1]))
            section = op = value = ""
        elif line in ("INCOMPLETE", "DEAD", "TIMEOUT"):
            section = line
        elif process := _PROCESS.match(line):
            why = "dead" if section == "DEAD" else "unresponsive"
            status.processes.append(RasMember(-1, int(process[1]), process[2], why))
        elif operations := _OPERATIONS.search(line):
            op, value = operations[1], ""
        elif several := re.match(r"(\d+) ranks have (.*)", line):
            value = several[2]
            if counted := _COUNT.search(value):
                unlisted[current.name, op].append((int(several[1]), int(counted[1] or 0)))
        elif rank := _RANK.match(line):
            number, pid = convert_foreign(rank[1], Rank), int(rank["pid"]) if rank["pid"] else None
            current.members.setdefault(number, RasMember(number, pid, rank["host"] or ""))
            if op and (counted := _COUNT.search(rank["details"].strip() or value)):
                current.counts.setdefault(op, {})[number] = int(counted[1] or 0)
    for (name, op), groups in unlisted.items():  # the text only counts these: they get numbers that no rank has
        counts = communicators[name].counts.setdefault(op, {})
        for times, count in groups:
            if list(counts.values()).count(count) < times:
                counts[-1 - len(counts)] = count
    status.communicators = list(communicators.values())
    return status
