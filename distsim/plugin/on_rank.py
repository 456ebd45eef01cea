"""Runs a test's body on one rank, and reports how it ended as pytest would for a single process."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import traceback
import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pytest

from distsim.debug.records.frames import is_ours
from distsim.plugin.fixtures import on_this_rank
from distsim.plugin.options import PluginOptions

_CALLS = (os.path.join("torch", "distributed", "c10d_logger.py"), os.path.join("distributed", "distributed_c10d.py"))
"""Files between the user's `dist.all_reduce(t)` and the group, which are equal for every error of every call."""


def rank_body(
    body: functools.partial[Any],
    kwargs: Mapping[str, Any],
    options: PluginOptions,
    instance: object = None,
    joined: Callable[[], object] = lambda: None,
) -> Callable[[], Any]:
    """Return the function that one rank runs as the test's body; *instance* is the `self` of a method.

    The rank calls *joined* when it has joined the others, before any of the test's code runs. The body returns what
    the test returns (the result of an `async` one) and raises what it raises, which `describe` then describes.
    """

    def run() -> Any:
        __tracebackhide__ = True
        import torch.distributed as dist

        if options.init and not dist.is_initialized():
            dist.init_process_group(options.backend)
            joined()
        with on_this_rank(body, options.values(dict(kwargs)), instance, share_memory=options.on == "sim") as mine:
            result = mine()
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        if dist.is_initialized():
            dist.destroy_process_group()
        return result

    return run


@dataclass(slots=True)
class RankReport:
    """Outcome of the body on one rank that did not pass."""

    kind: str
    """`failed`, `skipped`, `xfailed`."""
    text: str
    """The failure as pytest shows it, introspection included; the reason of a skip."""
    headline: str
    """Its last line: `AssertionError: assert 3 == 4`."""
    error: str = ""
    """The exception's type."""
    bases: tuple[str, ...] = ()
    """Full names of the exception's class and its bases."""
    frames: tuple[tuple[str, int], ...] = ()
    """File and line of the user's frames, outermost first."""


def describe(item: pytest.Function, body: Callable[..., Any], error: BaseException) -> RankReport:
    """Describe *error*, which *body* raised on one rank, with a traceback that starts at the test's own function."""
    frames = _frames(error)
    if isinstance(error, pytest.skip.Exception | unittest.SkipTest):
        return RankReport("skipped", str(getattr(error, "msg", None) or error), f"skipped: {error}", frames=frames)
    if isinstance(error, pytest.xfail.Exception):
        return RankReport("xfailed", str(error.msg or error), f"xfail: {error}", frames=frames)
    if not item.config.getoption("fulltrace", False):
        _without_ours(error, set())
    info = pytest.ExceptionInfo.from_exception(error)
    lines, frames = info.exconly().splitlines(), _frames(error)
    style, replaced = item.config.option.tbstyle, item.obj
    if style in ("line", "no"):  # these leave out what no other place tells: which rank, at which line
        item.config.option.tbstyle = "short"
    item.obj = getattr(body, "func", body)  # where pytest cuts the traceback
    try:
        text = str(item.repr_failure(info))
    finally:
        item.config.option.tbstyle, item.obj = style, replaced
    name = type(error).__name__
    return RankReport("failed", text, lines[0] if lines else name, name, full_names(type(error)), frames)


def _frames(error: BaseException) -> tuple[tuple[str, int], ...]:
    return tuple((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))


def full_names(kind: type) -> tuple[str, ...]:
    """Return a type and its bases, comparable over processes."""
    return tuple(f"{one.__module__}.{one.__qualname__}" for one in kind.__mro__)


def _without_ours(error: BaseException, seen: set[int]) -> None:
    """Remove frames of distsim, and those inside torch's call, from the tracebacks of *error* and its causes."""
    if id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = pruned(error.__traceback__)
    for other in (error.__cause__, error.__context__):
        if other is not None:
            _without_ours(other, seen)


def pruned(trace: TracebackType | None) -> TracebackType | None:
    """Return *trace* without frames of distsim, and without frames inside a call of torch."""
    kept: list[TracebackType] = []
    while trace is not None:
        if not is_ours(trace.tb_frame.f_code.co_filename):
            kept.append(trace)
        trace = trace.tb_next
    users = list(kept)
    while users and users[-1].tb_frame.f_code.co_filename.endswith(_CALLS):
        users.pop()
    result: TracebackType | None = None
    for one in reversed(users or kept[:1]):
        result = TracebackType(result, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return result
