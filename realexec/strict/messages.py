"""Sends and receives at level strict. They are compared with their other end and never held.

The end that arrives second sees the first and raises before it sends or receives, so no data move. The end that
arrived first raises in wait().
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any
from weakref import ref

import torch

from distsim.debug.matching.agreement import check_pair, payload_text
from distsim.debug.messages import site_text
from distsim.debug.records import CallRecord
from distsim.debug.records.arguments import MethodCall
from distsim.debug.records.kinds import Kind
from distsim.debug.rings import layout as rings
from distsim.errors import CollectiveMismatch
from distsim.realexec.guard.handle import Handle, MessageHandle, watched
from distsim.realexec.guard.recorder import GroupLog, Recorder
from distsim.realexec.strict.deferred import Watched, look_out
from distsim.realexec.strict.peers import Neighbour, Peers, timeout_s
from distsim.text.ranks import of_ranks
from distsim.text.tracebacks import error_line

AT_ONCE = timedelta(milliseconds=1)


class _Line:
    """Messages from one rank to another with one tag."""

    __slots__ = ("any_here", "any_there", "guard", "mine", "neighbour", "own", "row", "theirs", "words")

    def __init__(
        self,
        mine: str,
        other_key: str,
        any_here: str | None,
        any_there: str | None,
        row: int,
        neighbour: Neighbour,
        own: Neighbour | None,
        guard: Any,
    ) -> None:
        self.mine = mine
        self.theirs = other_key
        self.any_here = any_here
        """Name under which this rank shows that it receives from any source, if it receives."""
        self.any_there = any_there
        """Whether the other end may receive from any rank, if this one sends."""
        self.row = row
        self.neighbour = neighbour
        self.own = own
        """This rank's row, which the other ranks read."""
        self.words = neighbour.words
        self.guard = ref(guard)

    def is_there(self, ordinal: int, print_: int) -> bool:
        """Return whether the other end of a message is there and matches."""
        row = self.neighbour.rows.get(self.theirs)
        if row is None:
            return False
        words, word = self.words, row + 1 + ordinal % rings.MEETING_WINDOW * 3
        return words[word] == ordinal and words[word + 1] == print_ and words[word] == ordinal

    def timeout_s(self) -> float:
        """Return the group's timeout in seconds."""
        guard = self.guard()
        return math.inf if guard is None else timeout_s(guard)

    def late(self, limit_s: float) -> str:
        """Return the error text for a message whose other end did not arrive in time."""
        # Programs look for gloo's words, with a space before and after.
        _, op, _, tag = self.theirs.rsplit("/", 3)
        peer = self.neighbour.rank
        return f"[distsim] Timed out waiting {limit_s * 1000:.0f}ms for rank {peer} to {op} with tag {tag}"


class LooksOut(MessageHandle):
    """Handle of a message whose other end was missing: its wait() polls for the other end."""

    __slots__ = ("_messages", "_shown")
    _messages: HeldMessages
    _shown: tuple[_Line, int, int]

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._wait_by(partial(self._messages.wait, self._inner.wait, *self._shown, self._index), timeout)


class HeldMessages:
    """Comparison of both ends of each message between ranks of this host."""

    def __init__(self, recorder: Recorder, peers: Peers) -> None:
        self._recorder = recorder
        self._peers = peers
        self._rows: dict[str | None, int | None] = {}
        self._lines: dict[tuple[str, str, int, int], _Line] = {}

    def hold(self, guard: Any, call: MethodCall, index: int, is_async: bool, issue: Callable[[], Any]) -> Handle | None:
        """Return None if the call may be made now, or the handle of a call that was made and polls for its other
        end.
        """
        peer, tag, op = call.peer, call.tag, call.key[0]
        log: GroupLog = guard.group_log
        if peer < 0:
            if op == "recv":  # from any source: a sender must not look out for a partner of its own
                any_row = self._row(f"{log.key}/any>{log.world.rank}/{tag}")
                if any_row is not None:
                    self._recorder.ring.publish(any_row, 1, 0, index)
            return None  # or to a rank that the group has not: the backend refuses it
        payload = payload_print((call.key[1] or call.key[2])[0], call.key[3])
        end, ordinal = (op, peer, tag), log.ordinals[op, peer, tag][0]
        return self.meet(guard, end, ordinal, payload, index, is_async, call.key[8].type == "cpu", issue)

    def meet(
        self,
        guard: Any,
        end: tuple[str, int, int],
        ordinal: int,
        print_: int,
        index: int,
        is_async: bool,
        on_host: bool,
        issue: Callable[[], Any],
    ) -> Handle | None:
        """Do the same as `hold` for message number *ordinal* of an operation, peer and tag (*end*)."""
        line = self.line(guard, end)
        if line is None or not self.first(line, ordinal, print_, index):
            return None
        return self.watched(issue(), guard.group_log, index, (line, ordinal, print_), is_async, on_host)

    def watched(
        self,
        work: Any,
        log: GroupLog,
        index: int,
        shown: tuple[_Line, int, int],
        is_async: bool = True,
        on_host: bool = True,
    ) -> Watched:
        """Return a handle, as C++ takes it, of a message whose other end has not arrived."""
        return Watched((work, self._recorder, log, index, is_async, on_host), partial(self._wait, shown, index))

    def _wait(self, shown: tuple[_Line, int, int], index: int, wait: Any, timeout: timedelta | None) -> bool:
        return self.wait(wait, *shown, index, timeout)

    def line(self, guard: Any, end: tuple[str, int, int]) -> _Line | None:
        """Return the comparison of messages with an operation, peer and tag; None if the peer is not on this host."""
        return self._lines.get((guard.group_log.key, *end)) or self._find(guard, end)

    def first(self, line: _Line, ordinal: int, print_: int, index: int) -> bool:
        """Show a message, and return whether its other end has not arrived yet. Raise as `check` does."""
        if line.any_here is not None and line.any_here in self._rows:
            return False  # messages of this tag went to receives from any source, too: nobody knows which
        self._recorder.ring.publish(line.row, ordinal, print_, index)
        return not line.is_there(ordinal, print_) and not self.check(line, ordinal, print_, index)

    def check(self, line: _Line, ordinal: int, print_: int, index: int) -> bool:
        """Return whether the other end of a message has arrived; raise if its size or dtype differs."""
        neighbour, other_key = line.neighbour, line.theirs
        answer = neighbour.shown_call(other_key, ordinal)
        if answer is None and neighbour.passed(other_key, ordinal):
            return True  # it ran far ahead, and what it said of this one is overwritten
        if line.any_there is not None and neighbour.shown_call(line.any_there, 1) is not None:
            return True
        if answer is None:
            return False
        if answer[0] != print_:
            own = line.own
            error = _disagreement(
                None if own is None else own.record(line.mine, ordinal, index),
                neighbour.record(other_key, ordinal, answer[1]),
                ordinal,
                line.mine.rsplit("/", 2)[1].replace(">", " to rank "),
            )
            self._recorder.ring.fail(index, error_line(error))
            self._recorder.ring.mark(index, rings.WAITED)  # who has no handle cannot wait, and has been told
            raise error
        return True

    def again(
        self, guard: Any, seen: Any, ordinal: int, index: int, tensor: torch.Tensor
    ) -> tuple[_Line, int, int] | None:
        """Do the same as `first` for a message like the cached one, *seen*.

        Return None if the message can be waited for like any other.
        """
        line = seen.line
        if line is None:
            line = seen.line = self.line(guard, seen.end)
            seen.payload = payload_print(tensor.shape, tensor.dtype)
            if line is None:
                return None
        return (line, ordinal, seen.payload) if self.first(line, ordinal, seen.payload, index) else None

    def handle(
        self, work: Any, log: GroupLog, index: int, shown: tuple[_Line, int, int], owned: bool, by_public: bool
    ) -> Any:
        """Return the handle of a message whose partner has not arrived; only Python gets that of a public function."""
        if not by_public:
            handle = self.watched(work, log, index, shown)
            handle._touched = not owned
            return handle
        looks_out = watched(LooksOut, work, log, index, owned)
        looks_out._messages, looks_out._shown = self, shown
        return looks_out

    def wait(
        self,
        wait: Callable[..., Any],
        line: _Line,
        ordinal: int,
        print_: int,
        index: int,
        timeout: timedelta | None = None,
    ) -> bool:
        """Wait until the other end of a message arrives or can no longer arrive, and then for the message by *wait*."""
        if not line.is_there(ordinal, print_):
            limit_s = line.timeout_s() if timeout is None else timeout.total_seconds()
            if not look_out(partial(self.check, line, ordinal, print_, index), line.neighbour.gone, limit_s):
                try:
                    return bool(wait(AT_ONCE))  # a small message has been sent, though nobody receives it
                except RuntimeError:
                    raise RuntimeError(line.late(limit_s)) from None
        return bool(wait() if timeout is None else wait(timeout))

    def _find(self, guard: Any, end: tuple[str, int, int]) -> _Line | None:
        """Return the comparison for this peer and tag, or None."""
        log: GroupLog = guard.group_log
        op, peer, tag = end
        sending = op == "send"
        rank = log.world.rank
        if peer == rank or not self._peers.here(log.world, peer):
            return None
        any_here = None if sending else f"{log.key}/any>{rank}/{tag}"
        if any_here in self._rows:
            return None
        ends = (rank, peer) if sending else (peer, rank)
        mine = f"{log.key}/{op}/{ends[0]}>{ends[1]}/{tag}"
        other_key = f"{log.key}/{'recv' if sending else 'send'}/{ends[0]}>{ends[1]}/{tag}"
        row = self._row(mine)
        neighbour = self._peers.neighbour(log.world, peer)
        own = self._peers.neighbour(log.world, rank)
        if row is None or neighbour is None:
            return None
        any_there = f"{log.key}/any>{peer}/{tag}" if sending else None
        line = self._lines[log.key, *end] = _Line(mine, other_key, any_here, any_there, row, neighbour, own, guard)
        return line

    def _row(self, name: str) -> int | None:
        row = self._rows.get(name)
        if row is None and name not in self._rows:
            row = self._rows[name] = self._recorder.ring.meeting_row(name)
        return row


def _disagreement(mine: CallRecord | None, other: CallRecord | None, ordinal: int, ends: str) -> CollectiveMismatch:
    if mine is None or other is None:  # thousands of calls ago: their records are overwritten
        return CollectiveMismatch(
            f"message number {ordinal} from rank {ends} differs in size or dtype between its two ends: make them equal"
        )
    send, recv = (mine, other) if mine.op == "send" else (other, mine)
    mismatch = check_pair(send, recv)
    kind = mismatch.kind if mismatch is not None else Kind.P2P_SIZE_MISMATCH
    return CollectiveMismatch(
        f"{kind.value}: message number {ordinal} from rank {send.rank} to rank {recv.rank} (tag {send.tag or 0}, "
        f"group {send.group.label}) did not go out: rank {send.rank} sends {_text(send)}; "
        f"rank {recv.rank} receives {_text(recv)}. Make {of_ranks((send.rank, recv.rank))} agree.",
        (send, recv),
    )


def _text(record: CallRecord) -> str:
    return f"{payload_text(record)} ({record.nbytes} bytes) at {site_text(record.site)}"


@lru_cache(4096)
def payload_print(shape: torch.Size, dtype: torch.dtype) -> int:
    """Return a hash of the size and dtype, which both ends of a message must share. The shapes of the views may
    differ.
    """
    return rings.fingerprint([shape.numel() * dtype.itemsize, str(dtype)], False)
