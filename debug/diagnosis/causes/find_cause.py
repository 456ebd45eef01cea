"""Find the cause of a diagnosis in the program: the first rule that the evidence supports.

The rules of other modules read the blocks and loops around the mismatched calls. The rules here find causes elsewhere:
a lock, a store's key, a mesh, a rank without a group, a loop of messages, and operands whose order differs between
processes, such as sets of strings and listings of folders.
"""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import replace

from distsim.debug.diagnosis.causes.blocks import (
    caught_exception,
    guard_by_rank,
    guard_decision,
    guarded_call,
    join_block,
    no_sync_block,
    repeated_calls,
)
from distsim.debug.diagnosis.causes.loops import (
    generation,
    header_cause,
    left_loop,
    loop_cause,
    resumed_elsewhere,
    skipped_round,
)
from distsim.debug.diagnosis.causes.program_text import ProgramText, shortened, words_of
from distsim.debug.diagnosis.context import Case, Cause, Sides, met_calls, sides_of
from distsim.debug.divergence.divergence import HORIZON, signature
from distsim.debug.messages import are, group_text, one_line, ranks_text, site_text
from distsim.debug.records import CallRecord, CallWait, HostWait, Phase, Site, StoreWait
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

__all__ = ["with_cause"]

SHIFTED = frozenset(
    {
        Kind.MISSING_RANK,
        Kind.EXTRA_COLLECTIVE,
        Kind.UNEVEN_ITERATIONS,
        Kind.WRONG_ORDER,
        Kind.OP_MISMATCH,
        Kind.SHAPE_MISMATCH,
        Kind.DTYPE_MISMATCH,
        Kind.P2P_UNMATCHED,
        Kind.DEADLOCK_CYCLE,
    }
)
"""Kinds that follow from calls which some ranks left out, added or made in another order."""
REORDERED = frozenset({Kind.WRONG_ORDER, Kind.OP_MISMATCH, Kind.SHAPE_MISMATCH, Kind.DTYPE_MISMATCH})

FILE_LOCK = re.compile(r"\bflock\(|\blockf\(|FileLock|InterProcessLock|portalocker")
"""Locks that processes share, unlike those of `threading`."""
TAKES_LOCK = re.compile(r"\.acquire\(|with .*lock", re.IGNORECASE)
UNLOCK = re.compile(r"LOCK_UN|\.release\(")
OBJECT_LIST = re.compile(r"\b(broadcast_object_list)\(")
MESH = re.compile(r"\binit_device_mesh\(|\bDeviceMesh\(")
SET_METHODS = frozenset({"union", "intersection", "difference", "symmetric_difference"})
KEEPS_ORDER = frozenset({"list", "tuple", "enumerate", "iter", "reversed", "zip", "map", "filter", "fromkeys", "copy"})
LISTINGS = frozenset({"listdir", "scandir", "glob", "iglob", "rglob", "iterdir", "walk"})
DEEPEST = 6


def with_cause(case: Case, d: Diagnosis) -> Diagnosis:
    """Return the diagnosis, with advice that removes its cause if the evidence shows one."""
    known = d.kind in SHIFTED or d.kind in ELSEWHERE
    if not known or not d.culprits or _still_runs(case, d):
        return d
    if d.kind is Kind.NEVER_JOINED and case.index.evidence.unseen.issuperset(d.culprits):
        return d  # no process of theirs has run the program, as far as is known
    cause = _cause(case, d)
    if cause is None:
        return d
    says = f"{d.explanation} {cause.says}".strip()
    return replace(d, explanation=says, suggestion=cause.suggestion, causes=cause.lines)


def _cause(case: Case, d: Diagnosis) -> Cause | None:
    text = ProgramText(case.index.evidence.sources, _lines_called(case))
    if d.kind in ELSEWHERE:
        return ELSEWHERE[d.kind](case, d, text)
    if (cause := repeated_calls(case, d, text) or caught_exception(case, d, text)) is not None:
        return cause
    if d.kind in (Kind.MISSING_RANK, Kind.EXTRA_COLLECTIVE) and (cause := other_group(case, d)) is not None:
        return cause
    if d.kind is Kind.MISSING_RANK:
        if (cause := ended_thread(case, d, text) or awaited_key(case, d, text)) is not None:
            return cause
    sides = sides_of(case, d)
    if d.kind is Kind.SHAPE_MISMATCH and (cause := object_lists(text, sides)) is not None:
        return cause
    if (cause := join_block(case, d, text, sides)) is not None:
        return cause
    if d.kind in REORDERED and (cause := unordered_operands(case, d, text, sides)) is not None:
        return cause
    one_sided = d.kind in (Kind.EXTRA_COLLECTIVE, Kind.MISSING_RANK)
    if one_sided and not (sides.culprits and sides.others) and (cause := _after_last_call(case, d, text)) is not None:
        return cause
    both = bool(sides.culprits) or _at_one_line(case, d)
    if one_sided and both and (cause := guard_by_rank(text, sides, d)) is not None:
        return cause
    uneven = d.kind is Kind.UNEVEN_ITERATIONS
    if uneven or d.kind in (Kind.MISSING_RANK, Kind.EXTRA_COLLECTIVE, *REORDERED):
        cause = generation(text, sides) or no_sync_block(text, sides) or resumed_elsewhere(text, sides)
    if cause is not None:
        return cause
    if one_sided:
        return _one_sided(case, d, text, sides)
    if uneven:
        return _uneven(text, sides, d)
    return _of_another_round(d, text, sides) if d.kind is Kind.SHAPE_MISMATCH else None


def _uneven(text: ProgramText, sides: Sides, d: Diagnosis) -> Cause | None:
    """Return what decides the number of iterations of a rank, or whether an iteration makes the call."""
    loop = loop_cause(text, sides, d.culprits)
    headers = {(site.file, node.lineno) for site, node in text.loops(sides.others) + text.loops(sides.culprits)}
    if loop is not None and any((site.file, site.line) not in headers for site in loop.lines):
        return loop
    guard = guard_by_rank(text, sides, d) or guarded_call(text, sides, d)
    if loop is None or guard is None:
        return loop or guard
    rest = f"{loop.suggestion[:1].lower()}{loop.suggestion[1:]}"
    return Cause(f"{guard.suggestion} If it is not: {rest}", lines=guard.lines + loop.lines)


def _one_sided(case: Case, d: Diagnosis, text: ProgramText, sides: Sides) -> Cause | None:
    """Return why only some ranks make a call: a condition, a skipped iteration, or an early exit of the loop."""
    if sides.culprits and sides.others and (cause := guarded_call(text, sides, d)) is not None:
        return cause
    if d.kind is Kind.EXTRA_COLLECTIVE:
        return None
    if (cause := skipped_round(text, sides)) is not None:
        return cause
    return loop_cause(text, sides, d.culprits) if text.loops(sides.others, sides.culprits) else None


def _after_last_call(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return why a culprit that has ended left the loop around its last call."""
    last = case.index.last(d.culprits[0]) if d.kind is Kind.MISSING_RANK else None
    return None if last is None else left_loop(text, last.way)


def _at_one_line(case: Case, d: Diagnosis) -> bool:
    """Return whether all ranks in the call are at one line, so that the code around it led them there."""
    log = None if d.call is None else next((log for log in case.index.group_logs if log.group == d.group), None)
    met = {} if log is None or d.call is None else log.meetings.get(d.call.seq, {})
    return len({call.site for call in met.values()}) == 1


def _of_another_round(d: Diagnosis, text: ProgramText, sides: Sides) -> Cause | None:
    """Return the cause if the ranks are at one line with two shapes, in a loop whose rounds some of them may skip."""
    if sides.culprits[:1] != sides.others[:1] or (skip := skipped_round(text, sides)) is None:
        return None
    return replace(skip, suggestion=f"{skip.suggestion} If it is not: {d.suggestion[:1].lower()}{d.suggestion[1:]}")


def _lines_called(case: Case) -> frozenset[tuple[str, int]]:
    """Return file and line of every frame on the records."""
    ways = {record.way for rank in case.index.states for record in case.index.records(rank)}
    return frozenset((frame.file, frame.line) for way in ways for frame in way)


def _still_runs(case: Case, d: Diagnosis) -> bool:
    """Return whether the culprit has only not arrived yet, so that the question is what it is doing now."""
    state = case.index.states.get(d.culprits[0])
    running = state is not None and state.phase is Phase.RUNNING and not state.leaving
    return running and d.kind is Kind.MISSING_RANK


def object_lists(text: ProgramText, sides: Sides) -> Cause | None:
    """Return the cause if the tensors that differ are the sizes of the objects in the ranks' lists."""
    lines = [frames[0] for frames in (sides.culprits, sides.others) if frames]
    calls = {match[1] for site in lines if (match := OBJECT_LIST.search(text.line(site))) is not None}
    if len(calls) != 1 or sides.op != "broadcast":
        return None
    at = " and ".join(dict.fromkeys(map(site_text, lines)))
    return Cause(
        f"Give {calls.pop()} at {at} a list of the same length on every rank: one entry for each object, None where it "
        "is received."
    )


def ended_thread(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if an exception has ended a thread of the culprits, and of no other rank."""
    states = case.index.states
    usual = {(c.site, c.kind) for rank, state in states.items() if rank not in d.culprits for c in state.caught}
    ended = [
        (rank, c) for rank in d.culprits for c in states[rank].caught if c.thread and (c.site, c.kind) not in usual
    ]
    if not ended:
        return None
    rank, last = ended[-1]
    at, error = site_text(last.site, function=True), one_line(last.error)
    return Cause(
        f"Fix the {last.kind.rpartition('.')[2]} at {site_text(last.site)} first: rank {rank} may wait for what its "
        f"thread {last.thread} would have brought. Let a thread hand its exception on (into the queue, or end the "
        "process).",
        f"An exception has ended thread {last.thread} of rank {rank}: {error} at {at}.",
        (last.site,),
    )


def stuck_rank(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return why a rank does not go on outside of calls: one of its threads has ended, or a lock is held."""
    return ended_thread(case, d, text) or held_lock(case, d, text)


def held_lock(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if the culprits are at a line that takes a lock, and a rank that has passed this line waits
    for them.
    """
    site = d.sites.get(d.culprits[0])
    if site is None or any(isinstance(w, HostWait) for r in d.culprits for w in case.index.waits(r)):
        return None
    line = text.line(site)
    if FILE_LOCK.search(line) is None and not (TAKES_LOCK.search(line) and text.mentions(FILE_LOCK)):
        return None
    for rank in d.victims:
        for wait in case.index.waits(rank):
            call = wait.record if isinstance(wait, CallWait) else None
            frames = () if call is None else call.way
            inside = next((f for f in frames if (f.file, f.function) == (site.file, site.function)), None)
            if call is None or inside is None or inside.line <= site.line or _unlocked(text, site, inside):
                continue
            return Cause(
                f"Leave the lock before {call.op} at {site_text(call.site)}: rank {rank} has passed {site_text(site)} "
                "and waits there, and may hold the lock that "
                f"{ranks_text(d.culprits)} {are(d.culprits, 'needs', 'need')}.",
                lines=(site, inside),
            )
    return None


def _unlocked(text: ProgramText, site: Site, inside: Site) -> bool:
    """Return whether the lock of *site* is given back before the line *inside*."""
    between = (text.line(Site(site.file, n, "")) for n in range(site.line + 1, inside.line))
    if any(UNLOCK.search(line) for line in between):
        return True
    blocks = [n for n in text.around(site) if isinstance(n, ast.With | ast.AsyncWith)]
    return any(inside.line > (block.end_lineno or 0) for block in blocks)


def awaited_key(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the culprits wait for a key of a store, which no rank has set."""
    waits = [next((w for w in case.index.waits(r) if isinstance(w, StoreWait)), None) for r in d.culprits]
    first = waits[0] if waits else None
    if first is None or not first.keys or any(w is None or w.keys != first.keys for w in waits) or d.call is None:
        return None
    key = first.keys[0].rpartition("/")[2]
    keys_set = _keys_set(text)
    setters = [site for site, name in keys_set if _names(name, key)]
    if not setters:
        return None if first.purpose else _unset_key(case, d, key, keys_set)
    setter = max(setters, key=lambda site: site.line)
    at = next((site_text(d.sites[r]) for r in d.victims if r in d.sites), d.call.op)
    return Cause(
        f"Set the key '{key}' ({site_text(setter)} does) before {d.call.op} at {at}: {ranks_text(d.culprits)} cannot "
        "get there without it, and the rank that should set it may already wait there.",
        lines=(setter,),
    )


def _keys_set(text: ProgramText) -> list[tuple[Site, ast.expr]]:
    """Return the lines of the program that set keys of a store, with the key."""
    return [
        (Site(file, call.lineno, ""), call.args[0])
        for file, tree in text.trees()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and getattr(call.func, "attr", "") in ("set", "add", "append", "compare_set")
        and len(call.args) > 1
    ]


def _names(name: ast.expr, key: str) -> bool:
    """Return whether *name* may be *key*: a text, or an f-string whose fixed parts fit."""
    if isinstance(name, ast.JoinedStr):
        parts = (re.escape(str(v.value)) if isinstance(v, ast.Constant) else ".*" for v in name.values)
        return re.fullmatch("".join(parts), key) is not None
    return isinstance(name, ast.Constant) and name.value == key


def _unset_key(case: Case, d: Diagnosis, key: str, keys_set: list[tuple[Site, ast.expr]]) -> Cause:
    """Return the advice about a key that no line of the program sets by this name."""
    waiting = f"{ranks_text(d.culprits)} {are(d.culprits, 'waits', 'wait')} for '{key}'"
    at = next((f" at {site_text(d.sites[r])}" for r in d.culprits if r in d.sites), "")
    texts = {str(n.value): site for site, n in keys_set if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    near = next(iter(difflib.get_close_matches(key, texts, 1, 0.7)), None)
    if near is None:
        return Cause(
            f"Set the key on a rank that does not wait for it, or wait for the name that is set: {waiting}{at}, and no "
            "rank has set it."
        )
    setter = texts[near]
    return Cause(
        f"Use one name for the key: {waiting}{at}, and {site_text(setter)} sets '{near}'. No rank has set '{key}'.",
        lines=(setter,),
    )


def other_group(case: Case, d: Diagnosis) -> Cause | None:
    """Return the cause if these ranks make a call for the first time and all other ranks have made it on a group
    without them."""
    met = met_calls(case, d)
    lacking = [rank for rank in (() if d.group is None else d.group.ranks) if case.index.last(rank) is not None]
    if d.kind is Kind.MISSING_RANK:
        inside, outside = [r for r in lacking if r not in d.culprits], list(d.culprits)
    else:
        inside, outside = list(d.culprits), [r for r in lacking if r not in d.culprits]
    mine = next((met[rank] for rank in inside if rank in met), None)
    if mine is None or mine.site is None or mine.is_p2p or not outside:
        return None

    def alike(rank: int) -> list[CallRecord]:
        return [r for r in case.index.records(rank) if r.op == mine.op and r.way == mine.way and r is not met.get(rank)]

    calls_outside = [alike(rank) for rank in outside]
    groups = {calls_of[-1].group for calls_of in calls_outside if calls_of}
    members = {rank for group in groups for rank in group.ranks}
    if not all(calls_outside) or any(alike(rank) for rank in inside) or not members.isdisjoint(inside):
        return None
    shown = next(iter(groups))
    return Cause(
        f"Pass the same group= on every rank at {site_text(mine.site)}, and make the call on its members alone: "
        f"{ranks_text(outside)} made it on {group_text(shown)}, {ranks_text(inside)} on {group_text(mine.group)}.",
    )


def skipped_init(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return a rank that was started and went past init_process_group: the condition around it."""
    states = [case.index.states[r] for r in d.culprits]
    sides = sides_of(case, d)
    if not sides.others:
        return None
    decision = guard_decision(text, sides.others, sides.culprits)
    if decision is None:
        return None
    passed = (
        f"{ranks_text(d.culprits)} may have gone past init_process_group by `{shortened(decision.text)}` at "
        f"{site_text(decision.site)}"
    )
    if any(s.site is None and s.exit_code is None for s in states):
        return Cause(f"{d.suggestion} Or {passed}.", lines=(decision.site,))
    return Cause(
        f"Call init_process_group at {site_text(sides.others[0])} on every rank: {passed}. Compare what that reads "
        "(the environment, arguments) with the other ranks.",
        lines=(decision.site,),
    )


def unlike_mesh(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if the groups are those of a mesh, which is made at one line."""
    sites = [d.sites[r] for r in (*d.culprits, *d.victims) if r in d.sites]
    if not sites or any(MESH.search(text.line(site)) is None for site in sites):
        return None
    at = " and ".join(dict.fromkeys(site_text(site) for site in sites))
    return Cause(
        f"Make the mesh at {at} with one shape, one order of dimensions and one list of ranks on every rank: "
        f"{ranks_text(d.culprits)} may have read another size from arguments or the environment.",
        lines=tuple(dict.fromkeys(sites))[:2],
    )


def message_loop(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if the messages are in a loop that one end has left, because the bounds differ."""
    waits = [wait.record for r in d.victims for wait in case.index.waits(r) if isinstance(wait, CallWait)]
    call = next((r for r in waits if r.is_p2p and r.peer in d.culprits), None)
    if call is None or call.peer is None:
        return None
    loops = text.loops(call.way, sides_of(case, d).culprits)
    met = any(r.is_p2p and r.peer == call.rank for r in case.index.records(call.peer))
    if not loops or not met or (header := header_cause(text, *loops[0])) is None:
        return None
    return Cause(f"{header.suggestion[:-1]}; or {d.suggestion[:1].lower()}{d.suggestion[1:]}", lines=header.lines)


ELSEWHERE = {
    Kind.NEVER_JOINED: skipped_init,
    Kind.HOST_STUCK: stuck_rank,
    Kind.STRAGGLER: stuck_rank,
    Kind.GROUP_CREATION_ORDER: unlike_mesh,
    Kind.P2P_UNMATCHED: message_loop,
}
"""Kinds for which a separate rule exists."""


def unordered_operands(case: Case, d: Diagnosis, text: ProgramText, sides: Sides) -> Cause | None:
    """Return the cause if a loop around the calls iterates over an unsorted set or listing of files."""
    for site, loop in text.loops((*sides.culprits, *sides.others)):
        if isinstance(loop, ast.While):
            continue
        origin = _origin(text, site, loop.iter, DEEPEST)
        if origin is None:
            continue
        line, is_set = origin
        at = Site(site.file, line, "")
        shown = ast.unparse(loop.iter)
        why = (
            "the order of a set of strings is another one in each process (hash randomisation, PYTHONHASHSEED)"
            if is_set
            else "the order of a listing of files is another one on each host"
        )
        says = "The ranks make the same calls in different orders." if _permuted(case, d) else ""
        return Cause(
            f"Sort what the loop runs over: `sorted({shown})` at {site_text(Site(site.file, loop.lineno, ''))}. It "
            f"comes from {site_text(at)}, and {why}.",
            says,
            (at, Site(site.file, loop.lineno, "")),
        )
    return None


def _permuted(case: Case, d: Diagnosis) -> bool:
    """Return whether the next calls of two sides are the same up to their order."""
    if d.group is None or d.call is None:
        return False
    for log in case.index.group_logs:
        if log.group != d.group:
            continue
        heads = [
            sorted(repr(signature(c)) for c in calls if c.seq >= d.call.seq)[:HORIZON] for calls in log.calls.values()
        ]
        return len(heads) > 1 and min(map(len, heads)) > 1 and all(head == heads[0] for head in heads)
    return False


def _origin(text: ProgramText, site: Site, value: ast.expr, depth: int) -> tuple[int, bool] | None:
    """Return the line at which *value* gets an order of its own, and whether it is a set; None if it is ordered."""
    if depth == 0:
        return None
    match value:
        case ast.Set() | ast.SetComp():
            return value.lineno, True
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.Sub() | ast.BitXor()):
            return _set_in(text, site, value.left, depth - 1) or _set_in(text, site, value.right, depth - 1)
        case ast.Call():
            name = getattr(value.func, "attr", getattr(value.func, "id", ""))
            if name in ("set", "frozenset") or name in SET_METHODS:
                return value.lineno, True
            if name in LISTINGS:
                return value.lineno, False
            if name in KEEPS_ORDER:
                return next((o for a in value.args if (o := _origin(text, site, a, depth - 1))), None)
            returns = text.returns(site, name)
            return next((o for at, v in returns if (o := _origin(text, at, v, depth - 1))), None)
        case ast.ListComp() | ast.GeneratorExp() | ast.DictComp():
            return _origin(text, site, value.generators[0].iter, depth - 1)
        case ast.Starred():
            return _origin(text, site, value.value, depth - 1)
        case ast.List() | ast.Tuple():
            return next((o for e in value.elts if (o := _origin(text, site, e, depth - 1))), None)
        case ast.Name() | ast.Attribute():
            name = value.id if isinstance(value, ast.Name) else value.attr
            values = text.assignments(site, name)
            if _sorted(text, site, name, values):
                return None
            if not values:
                arguments = text.arguments(site, name)
                return next((o for at, v in arguments if (o := _origin(text, at, v, depth - 1))), None)
            return next((o for _, v in values if (o := _origin(text, site, v, depth - 1))), None)
    return None


def _set_in(text: ProgramText, site: Site, value: ast.expr, depth: int) -> tuple[int, bool] | None:
    """Return an operand of `&`, `|` or `-` that is a set, or the keys of a dict."""
    if isinstance(value, ast.Call) and getattr(value.func, "attr", "") in ("keys", "items"):
        return value.lineno, True
    return _origin(text, site, value, depth)


def _sorted(text: ProgramText, site: Site, name: str, values: list[tuple[int, ast.expr]]) -> bool:
    """Return whether *name* is sorted unconditionally before its use: `name = sorted(...)` or `name.sort()`."""
    tree = text.tree(site.file)
    lines = [line for line, value in values if words_of(value) & {"sorted", "sort"}]
    lines += [
        node.lineno
        for node in (() if tree is None else ast.walk(tree))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "sort"
        and getattr(node.func.value, "id", getattr(node.func.value, "attr", None)) == name
    ]
    return any(not any(isinstance(n, ast.If) for n in text.around(Site(site.file, line, ""))) for line in lines)
