"""`--pdb`: the frame in which a rank failed, or why there is none."""

from __future__ import annotations

import bdb
from collections.abc import Collection, Mapping
from types import TracebackType

import pytest
from _pytest.outcomes import Failed

from distsim.plugin.on_rank.report import pruned

__all__ = ["NoPrompt", "choose_frame", "traces_of", "wants_frames"]


class NoPrompt(Failed, bdb.BdbQuit):
    """A failure at which pytest opens no prompt: there is nothing to be seen in its frame."""

    __module__ = Failed.__module__


NoPrompt.__qualname__ = Failed.__qualname__  # in pytest's summary it is a failure like any other


def wants_frames(item: pytest.Item) -> bool:
    """Whether a debugger is to look at what failed."""
    return bool(item.config.getoption("usepdb", False))


def traces_of(ended: Mapping[int, BaseException]) -> dict[int, TracebackType]:
    """Of each rank that did not come to its end: its own frames, as far as they are the user's."""
    traces = {rank: pruned(error.__traceback__) for rank, error in ended.items()}
    return {rank: trace for rank, trace in traces.items() if trace is not None}


def choose_frame(
    traces: Mapping[int, TracebackType], failed: Collection[int], on: str
) -> tuple[TracebackType | None, str]:
    """Where the prompt is: in the first rank that failed, or else was ended; and what to say of it."""
    for rank in (*sorted(failed), *sorted(traces)):
        if rank in traces:
            return traces[rank], f"--pdb: in rank {rank}'s own frame, as it was when the rank ended"
    if on == "gloo":
        return None, "--pdb: a rank on gloo was a process, and its frames are gone with it; on='sim' stops in them"
    return None, "--pdb: no rank has left a frame of its own"
