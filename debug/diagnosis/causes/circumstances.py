"""Causes that the circumstances of a call prove.

It was made in a signal handler, at the end of the program, in a backward pass or in a recomputation, which the other
ranks did not have.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distsim.debug.diagnosis.causes.blocks import guard_decision
from distsim.debug.diagnosis.causes.program_text import FUNCTIONS, Loop, ProgramText
from distsim.debug.diagnosis.context import Case, Cause, met_calls
from distsim.debug.divergence.source_order import block_at
from distsim.debug.messages import are, capital, ranks_text, site_text
from distsim.debug.records import CallRecord, Site
from distsim.debug.records.circumstances import (
    BACKWARD,
    DDP,
    EXIT_HANDLER,
    FINALIZER,
    HANDLER,
    JOIN,
    MESH,
    OBJECT_LIST,
    RECOMPUTATION,
    circumstances,
)
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.records.obligations import OBLIGATIONS, obligation_of


def _calls(case: Case, d: Diagnosis) -> dict[int, CallRecord]:
    """Return the call in which each rank is: that with the diagnosed number, else the one that it waits in."""
    met = met_calls(case, d)
    calls = {rank: waits[0] for rank in (*d.culprits, *d.victims) if (waits := case.index.call_waits(rank))}
    return calls | {rank: call for rank, call in met.items() if rank in (*d.culprits, *d.victims)}


def _sides(case: Case, d: Diagnosis, name: str) -> tuple[dict[int, CallRecord], list[int]]:
    """Return the calls of *d* that were made in circumstances of this *name*, and the ranks whose call was not."""
    calls = _calls(case, d)
    inside = {
        rank: call
        for rank, call in calls.items()
        if any(labels == name or labels.startswith(f"{name} ") for labels in circumstances(call.way))
    }
    over = [r for r in (() if d.group is None else d.group.ranks) if case.is_over(r)]  # they ended without the call
    return inside, [rank for rank in dict.fromkeys((*d.culprits, *d.victims, *over)) if rank not in inside]


def _elsewhere(case: Case, inside: Mapping[int, CallRecord], others: Sequence[int]) -> list[int]:
    """Return those of *others* that are over, or in another call of the same group: of one that merely computes, it is
    not known that it will not come there too.
    """
    groups = [call.group for call in inside.values()]
    return [
        rank
        for rank in others
        if case.is_over(rank) or any(call.group in groups for call in case.index.call_waits(rank))
    ]


def signal_handler(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if some of the calls are made in a signal handler, which the other ranks are not in."""
    inside, others = _sides(case, d, HANDLER)
    if not inside or not _elsewhere(case, inside, others):
        return None
    call = next(iter(inside.values()))
    name, interrupted = next((n, s) for n, s in circumstances(call.way).items() if n.startswith(HANDLER))
    signal, at, ranks = name.rpartition(" ")[2], site_text(call.site), list(inside)
    return Cause(
        f"Make no collective in a signal handler: let the handler of {signal} only set a flag, all_reduce (MAX) the "
        f"flag once a step, and make {call.op} at {at} there when any rank has it. A signal reaches each rank at "
        "another line.",
        f"{capital(ranks_text(ranks))} made {call.op} at {at} in the handler of {signal}, which interrupted "
        f"{site_text(interrupted)}; {ranks_text(others)} {are(others, 'is', 'are')} not in it.",
        (interrupted,),
        leads=True,
    )


def at_the_end(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if some of the calls are made by an exit handler or a finalizer."""
    for name, cure, where in (
        (
            FINALIZER,
            "Make no collective in `__del__`: call {op} by a method that every rank calls at one line (close(), a with "
            "block). When Python frees an object differs from rank to rank.",
            "in a finalizer (`__del__`), which runs when Python frees the object",
        ),
        (
            EXIT_HANDLER,
            "Make {op} before the program ends, on every rank, and not in an exit handler (atexit): ranks that end "
            "otherwise, or earlier, do not come there.",
            "in an exit handler (atexit), after its program had ended",
        ),
    ):
        inside, others = _sides(case, d, name)
        left_well = d.kind is Kind.RANK_EXITED and not any(case.index.states[rank].exit_code for rank in d.culprits)
        if inside and (left_well or _elsewhere(case, inside, others)):
            call = next(iter(inside.values()))
            says = f"{capital(ranks_text(inside))} made {call.op} at {site_text(call.site)} {where}."
            cause = Cause(cure.format(op=f"{call.op} at {site_text(call.site)}"), says, leads=True)
            if name == EXIT_HANDLER or len(inside) > len(others):
                return cause
            return replace(cause, kind=Kind.EXTRA_COLLECTIVE, culprits=tuple(inside))
    return None


def recomputation(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if calls are made in a recomputation that other ranks, which went through the same backward,
    do not have.
    """
    inside, lacking = _sides(case, d, RECOMPUTATION)
    if not inside or not (lacking := _passed_backward(case, inside, lacking, text)):
        return None
    call = next(iter(inside.values()))
    at, back = site_text(call.site), site_text(_line_of(call, BACKWARD))
    return Cause(
        "Let the loss of every rank depend on the checkpointed block (loss + 0 * its output.sum() where a rank has "
        f"nothing to add), or move {call.op} at {at} out of it: a block is recomputed only where backward at {back} "
        "reaches it.",
        f"{capital(call.op)} at {at} is made again in the backward pass of {back}, where activation checkpointing "
        f"recomputes the block; the loss of {ranks_text(lacking)} does not reach that block, so it is not recomputed "
        "there.",
        (_line_of(call, BACKWARD),),
        leads=True,
        kind=Kind.MISSING_RANK,
        culprits=tuple(lacking),
    )


def backward(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if calls are made in a backward pass that other ranks went through without them."""
    inside, lacking = _sides(case, d, BACKWARD)
    if inside and (lacking := _passed_backward(case, inside, lacking, text)):
        return _no_gradient(case, inside, lacking, Kind.MISSING_RANK)
    if lacking or len(inside) < 2:
        return None
    odd = [rank for rank in d.culprits if rank in inside]  # both in one pass, with one call before it
    rest = {rank: call for rank, call in inside.items() if rank not in odd}
    if not odd or not rest:
        return None
    mine, other = inside[odd[0]], next(iter(rest.values()))
    before = _alike_before(case, odd[0], other)
    if (
        before is None
        or not _within_pass(before, other)
        or (mine.op, mine.input_shapes) == (other.op, other.input_shapes)
    ):
        return None
    return _no_gradient(case, rest, odd, None)


def _no_gradient(case: Case, inside: Mapping[int, CallRecord], lacking: Sequence[int], kind: Kind | None) -> Cause:
    call = next(iter(inside.values()))
    labels = circumstances(call.way)
    back = site_text(labels[BACKWARD])
    if "fsdp" in labels:
        cure = (
            f"Let the output of every sharded module enter the loss on every rank (loss + 0 * output.sum() where "
            f"{ranks_text(lacking)} {are(lacking, 'does', 'do')} not need it): FSDP communicates in backward only for "
            "modules that get a gradient."
        )
    elif DDP in labels:
        cure = (
            "Use every parameter in the loss on every rank, or pass find_unused_parameters=True to DDP: its buckets "
            "are reduced only when all of their gradients are there."
        )
    else:
        cure = (
            f"Let what {call.op} at {site_text(call.site)} belongs to enter the loss on every rank (loss + 0 * "
            "output.sum() where a rank has nothing to add): a backward function runs only where a gradient arrives."
        )
    return Cause(
        cure,
        f"{capital(ranks_text(inside))} {are(inside, 'makes', 'make')} {call.op} in the backward pass of {back}; "
        f"{ranks_text(lacking)} went through that line without it: no gradient arrives there.",
        (labels[BACKWARD],),
        leads=kind is not None,
        kind=kind,
        culprits=tuple(lacking) if kind is not None else (),
    )


def _line_of(call: CallRecord, name: str) -> Site:
    """Return the user's line above the stretch of a circumstance, or the call's own."""
    labels = circumstances(call.way)
    return labels.get(name) or next(iter(labels.values()))


def _passed_backward(
    case: Case, inside: Mapping[int, CallRecord], others: Sequence[int], text: ProgramText
) -> list[int]:
    """Return those of *others* that have gone through the same backward pass without the call: the only proof that a
    gradient, and no decision of the program, makes the difference.

    They made the same call before that pass, and stand behind its line with no condition between: one that a rank has
    decided for itself may have led it to a call of its own, which *inside* have never made, with the pass complete.
    """
    call = next(iter(inside.values()))
    above = list(call.way)[[*call.way].index(_line_of(call, BACKWARD)) :]
    passed = []
    for rank in others:
        met = (own for own in case.index.records(rank) if own.group == call.group and own.seq == call.seq)
        calls = [*met, *case.index.call_waits(rank)]  # gloo lets unlike calls meet, and the rank goes on
        here = calls[0].way if calls else (case.index.states[rank].stack or ())
        before = _alike_before(case, rank, call)
        if before is None:
            continue
        site = calls[0].site if calls else None
        is_usual = any(own.site == site for one in inside for own in case.index.records(one)) if site else False
        behind = _behind(text, above, here, before) and (is_usual or guard_decision(text, here, call.way) is None)
        if behind or _within_pass(before, call):
            passed.append(rank)
    return passed


def _within_pass(before: CallRecord, call: CallRecord) -> bool:
    """Return whether the call before *call* was made in the same backward pass, and not in that of another round: FSDP
    gathers between two passes; other calls are known by their sizes.
    """
    labels = circumstances(before.way)
    if BACKWARD not in labels or _line_of(before, BACKWARD) != _line_of(call, BACKWARD):
        return False
    return "fsdp" in labels or (before.op, before.input_shapes) != (call.op, call.input_shapes)


def _behind(text: ProgramText, above: Sequence[Site], here: Sequence[Site], before: CallRecord) -> bool:
    """Return whether a rank at *here*, whose last call is *before*, has passed the line *above[0]* unconditionally: it
    is behind it in the same function, or in one of its callers.
    """
    for frame in above:
        own = next((site for site in here if (site.file, site.function) == (frame.file, frame.function)), None)
        for node in text.around(frame):
            block = block_at(node, frame.line)
            if block is not None and own is not None and block == block_at(node, own.line):
                continue
            if isinstance(node, ast.If | ast.Try | ast.Match) or (
                isinstance(node, Loop) and not _in_this_round(node, frame, before)
            ):
                return False  # whether it came to that line, a condition decides
            early = (n for n in ast.walk(node) if isinstance(n, ast.Return) and n.lineno < frame.line)
            if isinstance(node, FUNCTIONS) and own is None and any(early):
                return False
        if own is not None:
            return own.line > frame.line and _went_by(text, frame, own, here, before)
    return False


def _went_by(text: ProgramText, frame: Site, own: Site, here: Sequence[Site], before: CallRecord) -> bool:
    """Return whether a rank went by the line *frame* between *before* and the line *own* below it in its function."""
    line = next((one.line for one in before.way if (one.file, one.function) == (own.file, own.function)), None)
    if line != own.line:
        return line is None or not frame.line <= line < own.line
    around = [node for site in here[: [*here].index(own)] for node in text.around(site)]
    return not any(isinstance(node, Loop) for node in around)  # a loop further in may have made both


def _in_this_round(loop: Loop, frame: Site, before: CallRecord) -> bool:
    """Return whether *before* was made above *frame* in a round of *loop* that nothing leaves between the two."""
    lines = [site.line for site in before.way if site.file == frame.file and loop.lineno < site.line < frame.line]
    leaving = (n for n in ast.walk(loop) if isinstance(n, ast.Continue | ast.Break | ast.Return))
    return bool(lines) and not any(max(lines) <= n.lineno <= frame.line for n in leaving)


def _alike_before(case: Case, rank: int, call: CallRecord) -> CallRecord | None:
    """Return the call before *call*, if *rank* and the rank of *call* made the same one at its number."""
    mine, other = (
        next((r for r in case.index.records(one) if r.group == call.group and r.seq == call.seq - 1), None)
        for one in (rank, call.rank)
    )
    return mine if mine is not None and other is not None and (mine.op, mine.way) == (other.op, other.way) else None


def object_lists(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if the tensors that differ are the sizes of the objects in the ranks' lists."""
    inside, others = _sides(case, d, OBJECT_LIST)
    calls = list(inside.values())
    if others or not calls or any(call.op != "broadcast" for call in calls):
        return None
    at = " and ".join(dict.fromkeys(site_text(call.site) for call in calls))
    return Cause(
        f"Give broadcast_object_list at {at} a list of the same length on every rank: one entry for each object, None "
        "where it is received."
    )


def unlike_mesh(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if the groups that ranks create otherwise are those of a device mesh."""
    calls = _calls(case, d).values()
    if not calls or any(MESH not in circumstances(call.way) for call in calls):
        return None
    lines = tuple(dict.fromkeys(circumstances(call.way)[MESH] for call in calls))[:2]
    return Cause(
        f"Make the mesh at {' and '.join(map(site_text, lines))} with one shape, one order of dimensions and one list "
        f"of ranks on every rank: {ranks_text(d.culprits)} may have read another size from arguments or the "
        "environment.",
        lines=lines,
    )


def in_a_join(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if a rank that has joined met a call that the program itself made: join() repeats the model's
    calls alone.
    """
    meetings = [met for log in case.index.group_logs if log.group == d.group for met in log.meetings.values()]
    for met in reversed(meetings):
        joined = [call for call in met.values() if JOIN in circumstances(call.way)]
        own = next((call for call in met.values() if joined and not circumstances(call.way)), None)
        if own is not None and own.site is not None and _is_within(text, own, circumstances(joined[0].way)[JOIN]):
            return Cause(
                f"Move the call at {site_text(own.site, through=False)} out of join(): a rank that has joined makes "
                "only the model's own calls (or make it through a Joinable of yours).",
                lines=(own.site,),
            )
    return None


def _is_within(text: ProgramText, call: CallRecord, block: Site) -> bool:
    """Return whether *call* was made within the `with` at the line *block*."""
    around = (node for frame in call.way if frame.file == block.file for node in text.around(frame))
    return any(isinstance(node, ast.With) and node.lineno == block.line for node in around)


def unproven(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return what the circumstances of the calls of one side suggest, if nothing explains more."""
    for name in (RECOMPUTATION, *(entry.label for entry in OBLIGATIONS if entry.label)):
        inside, others = _sides(case, d, name)
        passes = {BACKWARD in circumstances(call.way) for call in inside.values()}
        if inside and (others or len(passes) > 1):
            call = next(iter(inside.values()))
            line = circumstances(call.way)[name]
            cure = "Let every rank recompute the same checkpointed blocks: their output must enter every rank's loss."
            if (entry := obligation_of([name])) is not None:
                cure = f"Run {entry.function} on every rank of {entry.parent}, or on none: {entry.note}."
            return Cause(f"{cure} It is {call.op} of {site_text(line)}.", lines=(line,))
    return None


def duty(case: Case, d: Diagnosis) -> str:
    """Return the sentence on what every rank of a parent group must run, if torch made the call in that; else empty."""
    calls = _calls(case, d).values() if d.kind in (Kind.MISSING_RANK, Kind.EXTRA_COLLECTIVE) else ()
    call = next((call for call in calls if d.call is not None and call.op == d.call.op), None)
    entry = None if call is None else obligation_of(circumstances(call.way))
    return "" if entry is None else f" Every rank of {entry.parent} must run {entry.function}: {entry.note}."
