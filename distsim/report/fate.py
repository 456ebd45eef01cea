"""Builds the outcome of a run that its watchdog had to end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Evidence, Phase, RankState, Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.frames import absolute, program_frames
from distsim.text.untrusted_input import read_text

if TYPE_CHECKING:
    from distsim.sim.outcome import Outcome
    from distsim.watchdog.shared_state import ProcessOutcome

RECURRING = 30
"""Number of equal lines among the innermost hundred frames that counts as an endless recursion. faulthandler prints
a hundred frames.
"""
_OTHERS = "The other ranks did not run meanwhile: a simulation runs one rank at a time."
_CRASHED = (
    "Look at the C code that it calls at that line (an extension, ctypes); under `python -X faulthandler`, without "
    "distsim, the crash is the same."
)
_KILLED = "SIGKILL comes from outside: from the kernel if memory is used up, or from kill -9. "
_ON_THE_CPU = (
    "Tensors on the CPU are real, and each rank has its own: make a model on its GPU (with torch.device('cuda')) or on "
    "meta, or simulate fewer ranks (--nproc-per-node)"
)
_TOO_DEEP = "Look at the call at that line: it recurses without end, and the recursion limit is high."


def fatal_outcome(fate: ProcessOutcome) -> Outcome:
    """Return the outcome of a run whose process crashed, or was ended because a rank held the interpreter.

    Of the other ranks nothing is known but that they stood still: a simulation lets one run at a time.
    """
    from distsim.sim.outcome import Outcome

    facts = fate.facts
    size = int(facts.get("world_size", 0))
    diagnoses, evidence = _judged(fate)
    notes = [_end(fate)]
    if fate.signal_name == "SIGKILL" and not (fate.reason and diagnoses):
        notes.append(_ON_THE_CPU if fate.reason else _KILLED + _ON_THE_CPU)
    return Outcome(
        world_size=size,
        cluster=str(facts.get("cluster", "?")),
        backend="",
        seed=int(facts.get("seed", 0)),
        program=str(facts.get("program", "?")),
        exit_code=1 if fate.signal_name else 3,
        virtual_time_s=fate.now_s,
        wall_time_s=fate.wall_s,
        events=fate.events,
        diagnoses=diagnoses,
        evidence=evidence,
        notes=notes,
    )


def fatal_text(fate: ProcessOutcome) -> str:
    """Return the report on a crashed process as text, for a process other than the command line's."""
    from distsim.debug.report.console import piped_width
    from distsim.debug.report.render import render_diagnoses

    diagnoses, evidence = _judged(fate)
    program = fate.facts.get("program", "a simulation")
    shown = render_diagnoses(diagnoses, evidence).plain(piped_width(120)) if diagnoses else ""
    return f"\n{shown}{program}: {_end(fate)}\n"


def _judged(fate: ProcessOutcome) -> tuple[list[Diagnosis], Evidence | None]:
    if fate.rank is None:
        return [], None
    evidence = _evidence(fate, max(int(fate.facts.get("world_size", 0)), fate.rank + 1))
    return [_with_advice(d, fate) for d in diagnose(evidence)], evidence


def _end(fate: ProcessOutcome) -> str:
    if fate.reason:
        return f"the simulating process was ended: {fate.reason}"
    if fate.signal_name:
        return f"the simulating process crashed ({fate.signal_name})"
    return f"the simulating process was ended after {fate.stuck_s:.1f} s in which nothing in it could move"


def _evidence(fate: ProcessOutcome, size: int) -> Evidence:
    assert fate.rank is not None
    stack = program_frames(fate.stack, depth=len(fate.stack))
    state = RankState(
        fate.rank,
        Phase.HOST_STUCK if fate.signal_name is None else Phase.KILLED,
        site=stack[0] if stack else None,
        stack=stack,
        signal=fate.signal_name,
        silent_s=fate.stuck_s if fate.signal_name is None else None,
        reason="it recurses without end" if _recurses(stack) else fate.reason or None,
    )
    ranks = {rank: RankState(rank) for rank in range(size)} | {fate.rank: state}
    return Evidence(size, ranks, now_s=fate.now_s, sources=_sources(stack))


def _recurses(stack: Sequence[Site]) -> bool:
    return any(times >= RECURRING for times in Counter(stack).values())


def _with_advice(diagnosis: Diagnosis, fate: ProcessOutcome) -> Diagnosis:
    diagnosis = replace(diagnosis, explanation=diagnosis.explanation.replace("No other rank waits for it.", _OTHERS))
    if fate.reason:
        return replace(diagnosis, suggestion=f"{_ON_THE_CPU}.")
    if _recurses([Site(*frame) for frame in fate.stack]):
        return replace(diagnosis, suggestion=_TOO_DEEP)
    return diagnosis if fate.signal_name in (None, "SIGKILL") else replace(diagnosis, suggestion=_CRASHED)


def _sources(stack: Sequence[Site]) -> dict[str, str]:
    result = {}
    for site in stack[:4]:
        with suppress(OSError):
            result[site.file] = read_text(absolute(site.file))
    return result
