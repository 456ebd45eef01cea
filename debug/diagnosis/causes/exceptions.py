"""Causes that the facts of an exception or of a crash prove.

These are ranks that its text names, memory that grew, and a call under way.
"""

from __future__ import annotations

import re

from distsim.debug.diagnosis.causes.program_text import ProgramText
from distsim.debug.diagnosis.context import Case, Cause
from distsim.debug.messages import are, capital, one_line, ranks_text, site_text
from distsim.debug.records.diagnosis import Diagnosis
from distsim.text.units import format_bytes

GATHERED = re.compile(r"CheckpointException ranks:dict_keys\(\[([\d, ]+)\]\)")
MISSING_KEY = re.compile(r"^RuntimeError: Missing key in checkpoint state_dict: (\S+?)\.?$", re.MULTILINE)
OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory"
RECOMPUTED = re.compile(r"CheckpointError\b.*(?:[Rr]ecomputed|different number of tensors|unpack)", re.DOTALL)
CRASHES = frozenset({"SIGABRT", "SIGSEGV", "SIGBUS"})
MOST_NAMED = 3
STEPS = 3
"""Steps in which memory must have grown by like amounts."""


def gathered(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if every rank raised what torch.distributed.checkpoint gathered: its text names the ranks.

    Their numbers are those of the checkpoint's process group, which are the job's only where all ranks are in it.
    """
    errors = [case.index.states[rank].exception or "" for rank in d.culprits]
    match = GATHERED.search(errors[0])
    if match is None or len(errors) != case.index.evidence.world_size:
        return None
    if any((other := GATHERED.search(error)) is None or other[0] != match[0] for error in errors):
        return None
    ranks = tuple(sorted({int(rank) for rank in match[1].split(",") if rank.strip()}))
    if not ranks or not set(ranks) <= set(d.culprits):
        return None
    tracebacks = (case.index.states[rank].traceback or "" for rank in d.culprits)  # the errors in rings are cut
    whole = "\n".join((errors[0], *tracebacks))
    who, keys = ranks_text(ranks), list(dict.fromkeys(MISSING_KEY.findall(whole)))
    says = f"Only {who} failed; torch.distributed.checkpoint gathers exceptions, so that every rank raises."
    if keys:
        shown = ", ".join(keys[:MOST_NAMED]) + (f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else "")
        return Cause(
            f"Resume with keys for {who} (as many ranks as at the save, or a state that is resharded), or load "
            f"only on ranks that have one: {shown} {are(keys, 'is', 'are')} missing in the checkpoint.",
            f"{says} The checkpoint holds no {shown}.",
            leads=True,
            culprits=ranks,
        )
    last = errors[0].strip().splitlines()[-1]
    return Cause(f"Fix what {who} raised first: {one_line(last)}", says, leads=True, culprits=ranks)


def recomputed_otherwise(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if activation checkpointing found that a block did not repeat itself."""
    if not all(RECOMPUTED.search(case.index.states[rank].exception or "") for rank in d.culprits):
        return None
    return Cause(
        "Let the checkpointed block repeat itself in backward: the same inputs, random state and routing in both runs "
        "(preserve_rng_state=True; keep the routing and autocast of the first run; change nothing that it reads) on "
        f"{ranks_text(d.culprits)}."
    )


def grows_each_step(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if the memory of a rank that has no more of it rose by like amounts in its last steps."""
    rank = d.culprits[0]
    state = case.index.states[rank]
    if OUT_OF_MEMORY not in (state.exception or "") or len(state.memory) <= STEPS:
        return None
    steps = [b - a for a, b in zip(state.memory, state.memory[1:], strict=False)][-STEPS:]
    if min(steps) <= 0 or max(steps) > 1.5 * min(steps) or sum(steps) * 20 < state.memory[-1]:
        return None
    by = format_bytes(sum(steps) / len(steps))
    return Cause(
        "Free what each step keeps (torch.no_grad() in evaluation, .detach() or .item() of what is stored): the memory "
        f"of {ranks_text(d.culprits)} grows by {by} a step, and ran out at {site_text(case.site(rank))}.",
        f"Its memory has grown by {by} in each of its last {STEPS} steps and was never freed.",
        tuple(site for site in (case.site(rank),) if site is not None),
    )


def call_under_way(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return what a process that crashed had under way: a backend reads and writes the tensors of such a call."""
    state = case.index.states[d.culprits[0]]
    under_way = [r for r in case.index.records(state.rank) if r.is_async and not r.done and r.site is not None]
    if state.signal not in CRASHES or state.over or not under_way:
        return None
    call = under_way[0]
    op = f"i{call.op}" if call.is_p2p else call.op
    return Cause(
        f"Keep the tensor of {op} at {site_text(call.site)} as it is until its wait() has returned (no write, no .data "
        f"=, no resize, no del): {d.suggestion[:1].lower()}{d.suggestion[1:]}",
        f"{capital(op)} at {site_text(call.site)} was under way: its memory is read or written until then.",
        tuple(site for site in (call.site,) if site is not None),
    )
