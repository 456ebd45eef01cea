"""Describes a failing order in words: pairs of operations, receives and limits."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from distsim.sim.kernel.steps import NextOperation, Step, Trace, dependent

_Name = tuple[str, int, str]
"""Actor, number among its operations, label: the same operation in two runs."""
MOST_LINES = 12
"""Lines that describe one order."""


def differences(usual: Trace, other: Trace, main_file: str = "") -> list[str]:
    """Return the lines that tell the run *other* from the *usual* one.

    Pairs of dependent operations that have the other order, without those that follow from another pair by the order
    within the two actors; receives that take the message of another sender; limits that strike.

    Args:
        usual: The run in the usual order.
        other: Another run of the same program.
        main_file: The file whose name is left out, as in `line 12`.
    """
    lines = [
        f"{_words(first.offer, main_file)}  before  {_words(second.offer, main_file)}"
        for first, second in _minimal(_reversed(usual, other))
    ]
    takes = {_receive(step): step for step in usual.steps if "<" in step.offer.id}
    for step in other.steps:
        if "<" in step.offer.id:
            before = takes.get(_receive(step))
            if before is not None and _sender(before) != _sender(step):
                where = location(step.offer.line, main_file)
                receive, _, sender = step.offer.label.partition(" takes ")
                lines.append(f"{receive}{where} takes {sender} (usually rank {_sender(before)})")
        elif step.offer.expires:
            lines.append(_words(step.offer, main_file))
    if not lines:
        lines = [
            f"{_words(step.offer, main_file)}  earlier than usual"
            for step in other.steps
            if step.offer.id != step.usual
        ]
    unique = list(dict.fromkeys(lines))
    if len(unique) > MOST_LINES:
        unique[MOST_LINES:] = [f"and {len(unique) - MOST_LINES} more differences"]
    return unique


def _receive(step: Step) -> tuple[str, int]:
    return step.offer.actor, step.number


def _sender(step: Step) -> str:
    return step.offer.id.partition("<")[2].partition("#")[0]


def _name(step: Step) -> _Name:
    return step.offer.actor, step.number, step.offer.label


def _reversed(usual: Trace, other: Trace) -> list[tuple[Step, Step]]:
    """Return the pairs of dependent operations whose order in *other* is not that in *usual*."""
    at = {_name(step): step.index for step in usual.steps if "<" not in step.offer.id}
    known = [step for step in [*other.steps, *_never_reached(other)] if _name(step) in at]
    return [
        (first, second)
        for position, second in enumerate(known)
        for first in known[:position]
        if at[_name(first)] > at[_name(second)]
        and first.offer.actor != second.offer.actor
        and dependent(first.offer, second.offer)
    ]


def _never_reached(trace: Trace) -> list[Step]:
    """Return the operations that tasks were about to do when the run ended, as if they came last."""
    numbers = Counter(step.offer.actor for step in trace.steps)
    return [
        Step(len(trace.steps), offer, numbers[offer.actor] + 1, offer.clock, offer.id, []) for offer in trace.pending
    ]


def _minimal(pairs: Sequence[tuple[Step, Step]]) -> list[tuple[Step, Step]]:
    """Leave out the pairs that follow from another one."""

    def follows(pair: tuple[Step, Step], other: tuple[Step, Step]) -> bool:
        (first, second), (later, earlier) = pair, other
        return (
            pair is not other
            and first.offer.actor == later.offer.actor
            and second.offer.actor == earlier.offer.actor
            and first.number <= later.number
            and earlier.number <= second.number
        )

    return [pair for pair in pairs if not any(follows(pair, other) for other in pairs)]


def who(offer: NextOperation) -> str:
    """Return the task of an operation: `rank 1`, with its number if it is not the main thread."""
    rank, _, thread = offer.actor.partition(".")
    if "<" in offer.actor:
        return f"rank {offer.rank}"
    if rank.startswith("p") and "#" in thread:
        return f"process {offer.actor.split('#')[-2]} of rank {offer.rank[1:]}"
    if "@" in offer.actor:
        caller = offer.actor.rpartition("@")[2].partition(".")[0]
        return f"rank {offer.rank}, a job" if caller == offer.rank else f"rank {offer.rank}, for rank {caller}"
    process = f"process {rank[1:]}" if rank.startswith("p") else f"rank {rank}"
    return process if thread in ("", "0") else f"{process}, thread {thread}"


def _words(offer: NextOperation, main_file: str) -> str:
    return f"{who(offer)}: {offer.label}{location(offer.line, main_file)}"


def location(line: str, main_file: str) -> str:
    """Return where an operation is, in brackets."""
    file, _, number = line.rpartition(":")
    if not file:
        return f" ({line})" if line else ""
    is_main = bool(main_file) and os.path.basename(file) == os.path.basename(main_file)
    return f" (line {number})" if is_main else f" ({line})"
