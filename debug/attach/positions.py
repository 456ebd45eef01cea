"""Reads a rank's stack as a position: its call of torch.distributed or other activity, and its turn of a loop."""

from __future__ import annotations

import ast
import contextlib
import enum
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distsim.debug.attach.ranks import Frame, StackSample, Thread, environment_of
from distsim.debug.records import COLLECTIVES, P2P, RankThread, Site
from distsim.debug.records.frames import Owner, owner, program_frames
from distsim.text.codec import Integer, Rank, Whole
from distsim.text.untrusted_input import digits, source_line


class Doing(enum.Enum):
    """Activity of a rank at its position."""

    CALL = "waits in a call of torch.distributed"
    MEETING = "waits for others to join"
    TORCH = "waits in torch, for a device or a reduction of gradients"
    HOST = "waits on the host"
    RUNS = "computes"
    STARTING = "imports modules"
    ENDING = "has finished its program"
    STOPPED = "stopped (SIGSTOP)"
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
RPC_END = frozenset({"shutdown", "_wait_all_workers", "_barrier", "_all_gather"})
"""Functions of torch's rpc/api.py in which a worker waits for all others."""
STORE = re.compile(r"\b\w*store\w*(?:\(\))?\.(get|wait|multi_get)\(", re.IGNORECASE)
"""A line of the program that waits for a key of a store."""
ROOTS = {
    **dict.fromkeys(("broadcast", "scatter", "broadcast_object_list", "scatter_object_list"), ("src", "group_src")),
    **dict.fromkeys(("reduce", "gather", "gather_object"), ("dst", "group_dst")),
}
BACKWARD = "_engine_run_backward"
ENDS = {
    "_shutdown": "/threading.py",
    **dict.fromkeys(("_exit_function", "_run_finalizers"), "/multiprocessing/util.py"),
}
"""Functions in which Python waits for the threads and child processes of a program that has ended, and their files."""
RECORDS = "DISTSIM_DIR"
"""Variable with the folder of a job's records, which distsim's launcher sets."""
COUNTED_FRAMES = 3


@dataclass(frozen=True, slots=True)
class Position:
    """Location and activity of one rank."""

    rank: Rank
    pid: Whole
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
    keys: tuple[str, ...] = ()
    """Keys of a store for which it waits, where its line and its variables show them."""
    threads: tuple[RankThread, ...] = ()
    """Its Python threads with frames of the program, the main thread first."""
    worker: Whole = 0
    """Process of the rank's that its main thread waits for, such as a data loader's worker."""
    worker_stack: tuple[Site, ...] = ()
    """The user's frames of that process, innermost first."""
    records: str = ""
    """Folder of its records, if it runs under distsim's guard."""
    counters: dict[str, Integer] = field(default_factory=dict)
    """Whole numbers among the variables of the outer frames, by `function.variable`."""
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

    @property
    def idle(self) -> bool:
        """Return whether it neither moved nor computed between the samples."""
        return not self.moved and not self.busy


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
        calls = (_place(rank, pid, thread, thread.name) for thread in others)
        position = next((one for one in calls if one.doing in (Doing.CALL, Doing.MEETING)), position)
    if sample.stopped:
        position = replace(position, doing=Doing.STOPPED, op=Doing.STOPPED.value)
    threads = tuple(RankThread(thread.name, False, stack) for thread in sample.threads if (stack := _stack(thread)))
    position = replace(position, threads=threads, records=environment_of(pid).get(RECORDS, ""))
    for child in sample.children:
        stack = _stack(child.threads[0]) if child.threads and not position.thread else ()
        if stack:  # a worker without frames of the program waits for work
            moves = any(thread.moved or thread.busy for thread in child.threads)
            return replace(position, worker=child.process.pid, worker_stack=stack, moved=position.moved or moves)
    return position


def _stack(thread: Thread) -> tuple[Site, ...]:
    """Return the user's frames; of a forked process without those of its parent."""
    own = itertools.takewhile(
        lambda frame: not (frame.function.endswith("_bootstrap") and "/multiprocessing/" in frame.file), thread.frames
    )
    return program_frames(((frame.file, frame.line, frame.function) for frame in own), abroad=True)


def _place(rank: int, pid: int, thread: Thread, name: str = "") -> Position:
    stack = _stack(thread)
    site = stack[0] if stack else None
    doing, op, call = _doing(thread)
    peer, root = (None, None) if call is None else (_number(call, PEERS), _number(call, ROOTS))
    keys = _keys(thread.frames[0]) if op.startswith("store.") else ()
    return Position(
        rank, pid, doing, op, site, stack, peer, root, _has_group(thread), _members(thread), keys,
        counters=_counters(thread.frames), thread=name, busy=thread.busy, moved=thread.moved,
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
    if any(frame.file.endswith(ENDS.get(frame.function, ())) for frame in thread.frames):
        return Doing.ENDING, "", None
    if any(frame.function == "_find_and_load" for frame in thread.frames):
        return Doing.STARTING, "", None
    innermost = thread.frames[0]
    text = source_line(innermost.file, innermost.line).strip()
    if DEVICE.search(text):  # the host spins while it waits for a GPU
        return Doing.TORCH, text, None
    if thread.busy:
        return Doing.RUNS, "", None
    if any(frame.function == BACKWARD for frame in thread.frames):
        return Doing.TORCH, "backward", None
    if ".wait()" in text or "wait_tensor" in (innermost.function, text):
        return Doing.CALL, "wait() of an async call", None
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


def _keys(frame: Frame) -> tuple[str, ...]:
    """Return the keys in the program's line that waits for a store, if constants and local variables show them all."""
    text = source_line(frame.file, frame.line).strip()
    call = STORE.search(text)
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(text)):
            if call and isinstance(node, ast.Call) and getattr(node.func, "attr", "") == call[1] and node.args:
                listed = node.args[0].elts if isinstance(node.args[0], ast.List | ast.Tuple) else node.args[:1]
                keys = [_text(frame, key) for key in listed]
                return tuple(key for key in keys if key is not None) if None not in keys else ()
    return ()


def _text(frame: Frame, value: ast.expr) -> str | None:
    """Return the text that an expression of *frame* has; None if that is not known."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.FormattedValue) and value.format_spec is None:
        return _text(frame, value.value)
    if isinstance(value, ast.Name) and (shown := frame.variable(value.id)) is not None:
        return shown.strip("\"'") if shown[:1] in "\"'" or digits(shown) is not None else None
    if isinstance(value, ast.JoinedStr):
        parts = [_text(frame, part) for part in value.values]
        return None if None in parts else "".join(map(str, parts))
    return None


def _number(frame: Frame, variables: Mapping[str, Sequence[str]]) -> int | None:
    """Return the first local variable in the call's frame that holds a rank."""
    texts = (frame.variable(name) for name in variables.get(frame.function, ()))
    return next((number for text in texts if (number := digits(text or "")) is not None), None)


def _counters(frames: Iterable[Frame]) -> dict[str, int]:
    """Return loop counters of the program's outermost frames."""
    program = [frame for frame in frames if owner(frame.file, abroad=True) is Owner.USER]
    counters = {}
    for frame in reversed(program[-COUNTED_FRAMES:]):
        for name, text in frame.variables:
            if text.lstrip("-").isdigit() and len(text) < 12:
                counters[f"{frame.function}.{name}"] = int(text)
    return counters


def _spawned(threads: Iterable[Thread]) -> int | None:
    """Return the rank that torch.multiprocessing.spawn passed to this process."""
    for thread in threads:
        for frame in thread.frames:
            if frame.function == "_wrap" and frame.file.endswith("torch/multiprocessing/spawn.py"):
                text = frame.variable("i")
                return int(text) if text is not None and text.isdigit() else None
    return None
