"""Reads a rank's stack as a position: its call of torch.distributed or other activity, and its turn of a loop."""

from __future__ import annotations

import ast
import enum
import linecache
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distsim.debug.attach.ranks import Frame, StackSample, Thread
from distsim.debug.records import COLLECTIVES, P2P, Site
from distsim.debug.records.frames import Owner, absolute, owner, program_frames

__all__ = ["Doing", "Position", "position_of"]


class Doing(enum.Enum):
    """Activity of a rank at its position."""

    CALL = "waits in a call of torch.distributed"
    MEETING = "waits for others to join"
    TORCH = "waits in torch, for a device or a reduction of gradients"
    HOST = "waits on the host"
    RUNS = "computes"
    UNKNOWN = "could not be read"


OBJECT_CALLS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
CALLS = frozenset(COLLECTIVES | P2P | {*OBJECT_CALLS, "isend", "irecv", "batch_isend_irecv", "monitored_barrier"})
PEERS = {
    "recv": ("src", "group_src"),
    "irecv": ("src", "group_src"),
    "send": ("dst", "group_dst"),
    "isend": ("dst", "group_dst"),
}
MEETINGS = (
    *(
        "init_process_group",
        "new_group",
        "split_group",
        "new_subgroups",
        "rendezvous",
        "_store_based_barrier",
        "init_rpc",
    ),
)
DEVICE = re.compile(r"\.(item|tolist|cpu|synchronize)\(")
REMOTE = re.compile(r"\b(to_here|rpc_sync)\(")
ON_HOST = ("/torch/utils/data/", "/torch/multiprocessing/")
"""Parts of torch that wait for other processes of the rank's own host."""
RPC_END = frozenset({"shutdown", "_wait_all_workers", "_barrier", "_all_gather"})
"""Functions of torch's rpc/api.py in which a worker waits for all others."""
STORE = re.compile(r"\b\w*store\w*(?:\(\))?\.(get|wait|multi_get)\(", re.IGNORECASE)
"""A line of the program that waits for a key of a store."""
ROOTS = {
    **dict.fromkeys(("broadcast", "scatter", "broadcast_object_list", "scatter_object_list"), ("src", "group_src")),
    **dict.fromkeys(("reduce", "gather", "gather_object"), ("dst", "group_dst")),
}
BACKWARD = "_engine_run_backward"
COUNTED_FRAMES = 3


@dataclass(frozen=True, slots=True)
class Position:
    """Location and activity of one rank."""

    rank: int
    pid: int
    doing: Doing
    op: str = ""
    """Name of the call in torch.distributed, or a description if it has none."""
    site: Site | None = None
    stack: tuple[Site, ...] = ()
    """The user's frames, innermost first."""
    peer: int | None = None
    """Rank that sends or receives the message."""
    root: int | None = None
    """The root of a collective that has one."""
    on_group: bool = False
    """The program gave the call a group."""
    members: str = ""
    """Ranks passed to new_group, as Python prints them."""
    blocks: tuple[str, ...] | None = ()
    """The blocks of the program that its line is in, from their lines; None: the file cannot be read."""
    counters: dict[tuple[str, str], int] = field(default_factory=dict)
    """Whole numbers among the variables of the outer frames: (function, variable)."""
    thread: str = ""
    """Name of the thread that waits in the call, if it is not the main thread."""
    busy: bool = False
    moved: bool = False
    why: str = ""
    """Why it could not be read."""

    @property
    def waits(self) -> bool:
        """Return whether it waits for other ranks, as far as its stack shows."""
        return self.doing in (Doing.CALL, Doing.MEETING, Doing.TORCH)

    @property
    def key(self) -> tuple[str, str]:
        """Return a key that is equal for ranks at the same position."""
        return self.op or self.doing.value, str(self.site)


def position_of(sample: StackSample) -> Position | None:
    """Return the position of a rank; None for a process that is not a rank or has ended."""
    rank = sample.process.rank
    if rank is None:
        rank = _spawned(sample.threads)
    if rank is None or sample.ended:
        return None
    pid = sample.process.pid
    if not sample.threads:
        return Position(rank, pid, Doing.UNKNOWN, why=sample.why)
    main, *others = sample.threads
    position = _place(rank, pid, main)
    if position.doing in (Doing.HOST, Doing.UNKNOWN):  # the main thread waits for another one, which may be in a call
        for thread in others:
            there = _place(rank, pid, thread, thread.name)
            if there.doing in (Doing.CALL, Doing.MEETING):
                return there
    if sample.stopped:
        return Position(
            rank, pid, Doing.HOST, "stopped (SIGSTOP)", position.site, position.stack, counters=position.counters
        )
    return position


def _place(rank: int, pid: int, thread: Thread, name: str = "") -> Position:
    stack = program_frames(((frame.file, frame.line, frame.function) for frame in thread.frames), abroad=True)
    site = stack[0] if stack else None
    doing, op, call = _doing(thread)
    peer, root = (None, None) if call is None else (_number(call, PEERS), _number(call, ROOTS))
    return Position(
        rank, pid, doing, op, site, stack, peer, root, _has_group(thread), _members(thread), _blocks(site),
        _counters(thread.frames), name, thread.busy, thread.moved,
    )  # fmt: skip


def _doing(thread: Thread) -> tuple[Doing, str, Frame | None]:
    """Return what the thread does, the name of its call, and its frame."""
    call = next((frame for frame in reversed(thread.frames) if _is_call(frame)), None)
    if call is not None and call.file.endswith("/rpc/api.py"):
        return Doing.CALL, "rpc.shutdown", None
    if call is not None and call.function in MEETINGS:
        return Doing.MEETING, call.function.lstrip("_"), None
    if call is not None:
        return Doing.CALL, call.function, call
    innermost = thread.frames[0]
    text = linecache.getline(innermost.file, innermost.line).strip()
    if DEVICE.search(text):  # the host spins while it waits for a GPU
        return Doing.TORCH, text, None
    if thread.busy:
        return Doing.RUNS, "", None
    if any(frame.function == BACKWARD for frame in thread.frames):
        return Doing.TORCH, "backward", None
    if ".wait()" in text or "wait_tensor" in (innermost.function, text):
        return Doing.CALL, "wait() of an async call", None
    if DEVICE.search(text):
        return Doing.TORCH, text, None
    if remote := REMOTE.search(text):
        return Doing.CALL, remote[1], None
    if (store := STORE.search(text)) and owner(innermost.file, abroad=True) is Owner.USER:
        return Doing.CALL, f"store.{store[1]}", None
    if (
        "/torch/" in innermost.file
        and "/torch/utils/data/" not in innermost.file
        and "/torch/multiprocessing/" not in innermost.file
    ):
        return Doing.TORCH, innermost.function, None
    return Doing.HOST, "", None


def _is_call(frame: Frame) -> bool:
    if frame.file.endswith("/rpc/api.py"):
        return frame.function in RPC_END
    if not frame.file.endswith(
        ("distributed_c10d.py", "_functional_collectives.py", "/rendezvous.py", "/rpc/__init__.py")
    ):
        return False
    return frame.function in CALLS or frame.function in MEETINGS or "_functional_collectives" in frame.file


def _has_group(thread: Thread) -> bool:
    """Return whether a process group is among the arguments of the call, which torch's wrapper around each call
    shows.
    """
    wrapper = next((frame for frame in thread.frames if frame.file.endswith("c10d_logger.py")), None)
    given = "" if wrapper is None else f"{wrapper.variable('args')} {wrapper.variable('kwargs')}"
    return "ProcessGroup at 0x" in given


def _members(thread: Thread) -> str:
    frame = next((frame for frame in thread.frames if frame.function == "new_group"), None)
    return "" if frame is None else frame.variable("ranks") or ""


def _blocks(site: Site | None) -> tuple[str, ...] | None:
    if site is None:
        return None
    try:
        tree = ast.parse(Path(absolute(site.file)).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    blocks = []
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(node, name, None)
            lineno = getattr(node, "lineno", None)
            if lineno and isinstance(inner, list) and inner and inner[0].lineno <= site.line <= inner[-1].end_lineno:
                blocks.append(f"{type(node).__name__} {lineno} {name}")
    return tuple(blocks)


def _number(frame: Frame, variables: Mapping[str, Sequence[str]]) -> int | None:
    """Return the first local variable in the call's frame that holds a rank."""
    texts = (frame.variable(name) for name in variables.get(frame.function, ()))
    return next((int(text) for text in texts if text is not None and text.isdigit()), None)


def _counters(frames: Iterable[Frame]) -> dict[tuple[str, str], int]:
    """Return loop counters of the program's outermost frames."""
    program = [frame for frame in frames if owner(frame.file, abroad=True) is Owner.USER]
    counters = {}
    for frame in reversed(program[-COUNTED_FRAMES:]):
        for name, text in frame.variables:
            if text.lstrip("-").isdigit() and len(text) < 12:
                counters[frame.function, name] = int(text)
    return counters


def _spawned(threads: Iterable[Thread]) -> int | None:
    """Return the rank that torch.multiprocessing.spawn passed to this process."""
    for thread in threads:
        for frame in thread.frames:
            if frame.function == "_wrap" and frame.file.endswith("torch/multiprocessing/spawn.py"):
                text = frame.variable("i")
                return int(text) if text is not None and text.isdigit() else None
    return None
