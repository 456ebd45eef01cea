"""What a job that still makes calls may be ended for: nothing that is only long, unless the user has set how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distsim.debug.diagnosis.waits.proof import Proof
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.settings import Settings

__all__ = ["among_moving", "without_guesses"]

GOES_ON_S = 10.0
"""A job goes on where some rank has made or ended a call in so long."""
BY_THE_LIMIT = (
    "Other ranks still make calls, so this is not proof that it never comes: it is a hang by the limit you set "
    "(--hang-after)."
)


def without_guesses(found: Sequence[Diagnosis], settings: Settings, still_s: float) -> list[Diagnosis]:
    """*found*, where no rank has made or ended a call for *still_s*. Without a limit of the user's, a wait that is only
    long ends no job in which some rank has made a call in that time, for torch's own timeout may be longer than our
    default: it is left out, and a warning where calls go on."""
    if settings.hang_after_s is not None or still_s >= settings.patience_s:
        return list(found)
    if still_s > GOES_ON_S:
        return [d for d in found if d.proof is not Proof.PATIENCE]
    return [replace(d, proof=Proof.NOT_YET) if d.proof is Proof.PATIENCE else d for d in found]


def among_moving(found: Sequence[Diagnosis], settings: Settings) -> list[Diagnosis]:
    """What holds though calls were made while it was looked at: only waits that have lasted too long. They end the job
    where the user has set how long that is."""
    long = [d for d in found if (d.detected_after_s or 0.0) >= settings.patience_s]
    if settings.hang_after_s is None:
        return [replace(d, proof=Proof.NOT_YET) for d in long]
    return [replace(d, explanation=f"{d.explanation} {BY_THE_LIMIT}") for d in long]
