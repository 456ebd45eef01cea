"""What a monitor says: which diagnoses are news, which hold still, and how a line is said."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from typing import Any

from distsim.debug.diagnosis.pairs.suspected_messages import ends
from distsim.debug.records.diagnosis import Diagnosis
from distsim.text.untrusted_input import printable

__all__ = ["news_key", "say", "still"]


def news_key(diagnosis: Diagnosis) -> tuple[Any, ...]:
    """What makes it news: who, what, in which call, and whether it is a warning, or ends the job, by now."""
    of_message = ends(diagnosis)
    if of_message is not None:
        return of_message  # two lines that do not fit do so again and again
    call = diagnosis.call
    return (
        diagnosis.kind,
        diagnosis.culprits,
        diagnosis.group.name if diagnosis.group else None,
        (call.op, call.seq) if call else None,
        diagnosis.provisional,
        diagnosis.ends_job,
    )


def still(told: Diagnosis, now: Diagnosis) -> bool:
    """What was told still holds, maybe of more ranks."""
    return told.kind is now.kind and set(told.culprits) <= set(now.culprits) and told.call == now.call


def say(note: str) -> None:
    """One line on stderr, wrapped on a terminal as the reports are; whole in a log, where it is looked for."""
    said, width = f"distsim: {printable(note)}", 0
    with contextlib.suppress(OSError, ValueError):
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    if width:
        words = textwrap.TextWrapper(max(width, 20), "", "  ", break_long_words=False, break_on_hyphens=False)
        said = words.fill(said)
    with contextlib.suppress(OSError):
        print(said, file=sys.stderr, flush=True)
