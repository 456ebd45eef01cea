"""One rank in a random program: its groups, what is under way, and how a call is made and asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.random_programs.draw import Draw, bits, said, tensor

__all__ = ["Answer", "Call", "Stage", "ask", "op_name", "run", "settle"]

ASKED = (
    "is_completed",
    "is_success",
    "exception",
    "result",
    "source_rank",
    "_source_rank",
    "synchronize",
    "get_future_result",
    "get_future",
    "wait",
    "boxed",
    "block_current_stream",
)


WAITS = ("wait", "synchronize", "block_current_stream", "is_completed", "is_success")


Answer = dict[str, Any]


class Stage:
    """One rank's place in a program."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.groups: list[tuple[Any, list[int]]] = [(None, list(range(size)))]
        self.pending: list[tuple[str, Any, Any]] = []
        self.found: dict[str, Any] = {}

    def group(self, draw: Draw) -> tuple[Any, list[int]]:
        return draw.choice(self.groups)


def ask(work: Any, draw: Draw, answer: dict[str, Any], *, message: bool = False) -> None:
    """What a handle says of itself, once it was waited for; a *message*'s, on gloo, can be waited for once only. What
    a call that failed has written nobody knows."""
    answer["wait"] = said(work.wait)
    skip = WAITS if message else ("result",) if answer["wait"] is not True else ()
    for name in draw.sample([name for name in ASKED if name not in skip], 5):
        value = said(getattr(work, name))
        answer[name] = value if name != "get_future_result" else str(value)


def settle(stage: Stage, draw: Draw) -> None:
    """Wait for what is under way, in some order."""
    draw.shuffle(stage.pending)
    for name, work, tensors in stage.pending:
        answer = stage.found[name]
        later = answer["later"] = {}
        if isinstance(work, torch._C.Future):
            later["future"] = said(work.wait)
        else:
            ask(work, Draw(name), later)
        if later.get("wait", True) is True:
            later["tensors"] = bits(tensors)
    stage.pending.clear()


def run(
    stage: Stage, draw: Draw, answer: dict[str, Any], call: Callable[..., Any], tensors: Any, **kwargs: Any
) -> None:
    """Make the call: at once, or with a handle that is waited for at once, later, or through its future."""
    asynchronous = draw.coin(0.5)
    how = draw.choice(("now", "now", "later", "future", "then"))
    answer["how"] = how if asynchronous else "sync"
    if asynchronous:
        kwargs["async_op"] = True
    try:
        work = call(**kwargs)
    except Exception as error:
        answer["raised"] = bits(error)
        return
    if isinstance(work, torch._C.Future):  # of the coalesced ones
        answer["future"] = said(work.wait)
        answer["tensors"] = bits(tensors)
        return
    answer["returns"] = isinstance(work, dist.Work) or bits(work)
    if not asynchronous or work is None:
        answer["tensors"] = bits(tensors)
        return
    if how == "later" and tensors is not None:
        stage.pending.append((next(reversed(stage.found)), work, tensors))
        return
    if how in ("future", "then") and tensors is not None:
        try:
            future = work.get_future()
        except Exception as error:
            answer["get_future"] = bits(error)
        else:
            if how == "then":
                future = future.then(lambda done: (bits(done.value()), "then"))
            answer["future"] = said(future.wait)
            answer["future done"] = future.done()
            answer["value"] = said(future.value)
    if tensors is None:  # of another rank's reduce: what gloo leaves there is half a sum
        answer["wait"] = said(work.wait)
        return
    ask(work, draw, answer)
    if answer["wait"] is True:  # else nobody knows how far it came
        answer["tensors"] = bits(tensors)


class Call:
    """What most steps draw first."""

    def __init__(self, stage: Stage, draw: Draw, answer: dict[str, Any]) -> None:
        self.group, self.ranks = stage.group(draw)
        self.dtype, self.shape, self.layout, self.salt = draw.dtype(), draw.shape(), draw.layout(), draw.randrange(7)
        self.rank, self.n = stage.rank, len(self.ranks)
        self.inside = stage.rank in self.ranks
        self.place = self.ranks.index(stage.rank) if self.inside else -1
        self.root = draw.choice(self.ranks) if self.ranks else 0
        if self.dtype is torch.bool:  # gloo adds up bytes, and only some copies make them bools again
            self.layout = "plain"
        self.op = draw.op(self.dtype)
        answer["drawn"] = f"{self.dtype} {self.shape} {self.layout} of {self.ranks}"

    def one(
        self, salt: int = 0, *, shape: tuple[int, ...] | None = None, layout: str | None = None, rank: int | None = None
    ) -> torch.Tensor:
        shape = self.shape if shape is None else shape
        return tensor(self.rank, self.salt + salt, shape, self.dtype, layout or self.layout)

    def zeros(self, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return torch.zeros(self.shape if shape is None else shape, dtype=self.dtype)


def op_name(op: Any) -> str:
    return str(op) if isinstance(op, dist.ReduceOp.RedOpType) else "premul"
