"""Which diagnoses say the same: what a monitor has told already, and what of it still holds."""

from __future__ import annotations

from typing import Any

from distsim.debug.diagnosis.pairs.suspected_messages import ends
from distsim.debug.records.diagnosis import Diagnosis

__all__ = ["news_key", "still"]


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
