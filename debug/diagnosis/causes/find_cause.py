"""Find the cause of a diagnosis in the program: the first rule that the evidence supports.

The rules of other modules read the blocks and loops around the mismatched calls. The rules here find causes elsewhere:
a lock, a store's key, a mesh, a rank without a group, a loop of messages, and operands whose order differs between
processes, such as sets of strings and listings of folders.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence
from dataclasses import replace

from distsim.debug.diagnosis.causes.blocks import (
    guard_by_rank,
    guard_decision,
    guarded_call,
    no_sync_block,
)
from distsim.debug.diagnosis.causes.circumstances import duty
from distsim.debug.diagnosis.causes.loops import (
    generation,
    header_cause,
    left_loop,
    loop_cause,
    resumed_elsewhere,
    skipped_round,
)
from distsim.debug.diagnosis.causes.program_text import TAKES_LOCK, ProgramText, holds, shortened, words_of
from distsim.debug.diagnosis.context import Case, Cause, Sides, meeting_of, met_calls, sides_of
from distsim.debug.diagnosis.waits.keys import names_key, setting_lines
from distsim.debug.divergence.divergence import HORIZON, signature
from distsim.debug.divergence.source_order import RANK, last_word
from distsim.debug.messages import ONLY_IN_WAIT, are, group_text, ranks_text, site_text
from distsim.debug.records import CallRecord, CallWait, HostWait, Phase, Site, StoreWait
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

LOST = frozenset(
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
UNLOCK = re.compile(r"LOCK_UN|\.release\(")
LOST_STORE = re.compile(
    r"DistNetworkError: (?:[Ff]ailed to recv|Broken pipe|Connection reset|.* while trying to connect to \(.*, (\d+)\))"
)
"""Errors of a TCPStore's client whose server has ended; the port if there was never a connection."""
CONNECTS = "the store's server"
"""Purpose of a wait for a connection to a TCPStore."""
OVER = frozenset({Phase.FINISHED, Phase.EXITED, Phase.RAISED, Phase.KILLED})
FUNCTIONAL = re.compile(r"_c10d_functional|_functional_collectives")
HANDLE = re.compile(r"async_op|isend\(|irecv\(")
"""Words of a call that returns a handle."""
SET_METHODS = frozenset({"union", "intersection", "difference", "symmetric_difference"})
KEEPS_ORDER = frozenset({"list", "tuple", "enumerate", "iter", "reversed", "zip", "map", "filter", "fromkeys", "copy"})
LISTINGS = frozenset({"listdir", "scandir", "glob", "iglob", "rglob", "iterdir", "walk"})
DEEPEST = 6


def text_cause(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return why ranks made other calls, as the lines around these show it, and who owes the calls."""
    state = case.index.states.get(d.culprits[0])
    if d.kind is Kind.MISSING_RANK and state is not None and state.phase is Phase.RUNNING and not state.leaving:
        return None  # it has only not arrived yet, so that the question is what it is doing now
    ways = {record.way for rank in case.index.states for record in case.index.records(rank)}
    called = frozenset((frame.file, frame.line) for way in ways for frame in way)
    cause = _cause(case, d, ProgramText(case.index.evidence.sources, called))
    return None if cause is None else replace(cause, suggestion=f"{cause.suggestion}{duty(case, d)}")


def _cause(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    if d.kind in (Kind.MISSING_RANK, Kind.EXTRA_COLLECTIVE) and (cause := other_group(case, d)) is not None:
        return cause
    if d.kind is Kind.MISSING_RANK and (cause := awaited_key(case, d, text)) is not None:
        return cause
    sides = sides_of(case, d)
    if d.kind in REORDERED and (cause := unordered_operands(case, d, text, sides)) is not None:
        return cause
    one_sided = d.kind in (Kind.EXTRA_COLLECTIVE, Kind.MISSING_RANK)
    if d.kind is Kind.MISSING_RANK and not (sides.culprits and sides.others):
        last = case.index.last(d.culprits[0])
        if last is not None and (cause := left_loop(text, last.way)) is not None:
            return cause
    both = bool(sides.culprits) or len({call.site for call in meeting_of(case, d).values()}) == 1
    if one_sided and both and (cause := guard_by_rank(text, sides, d)) is not None:
        return cause
    uneven = d.kind is Kind.UNEVEN_ITERATIONS
    if uneven or one_sided or d.kind in REORDERED:
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
    if _is_around(text, guard.lines[0], sides):
        return loop
    rest = f"{loop.suggestion[:1].lower()}{loop.suggestion[1:]}"
    return Cause(f"{guard.suggestion} If it is not: {rest}", lines=guard.lines + loop.lines)


def _is_around(text: ProgramText, guard: Site, sides: Sides) -> bool:
    """Return whether *guard* is around the loop in which both sides were just before, so that both have passed it."""
    for frame, loop in text.loops(sides.others, sides.culprits):
        if holds(loop, frame, sides.before):
            rounds = [node for _, node in text.loops([guard])]
            if rounds and not holds(rounds[0], guard, sides.culprits):
                return False  # both passed it in an earlier round
            below = sides.others[: sides.others.index(frame)]
            within = guard.function == frame.function and loop.lineno < guard.line and holds(loop, frame, [guard])
            return not within and (guard.file, guard.function) not in {(site.file, site.function) for site in below}
    return False


def _one_sided(case: Case, d: Diagnosis, text: ProgramText, sides: Sides) -> Cause | None:
    """Return why only some ranks make a call: a condition, a skipped iteration, or an early exit of the loop."""
    if sides.culprits and sides.others and (cause := guarded_call(text, sides, d)) is not None:
        return cause
    if d.kind is Kind.EXTRA_COLLECTIVE:
        return None
    if (cause := skipped_round(text, sides)) is not None:
        return cause
    return loop_cause(text, sides, d.culprits) if text.loops(sides.others, sides.culprits) else None


def _of_another_round(d: Diagnosis, text: ProgramText, sides: Sides) -> Cause | None:
    """Return the cause if the ranks are at one line with two shapes, in a loop whose rounds some of them may skip."""
    if sides.culprits[:1] != sides.others[:1] or (skip := skipped_round(text, sides)) is None:
        return None
    return replace(skip, suggestion=f"{skip.suggestion} If it is not: {d.suggestion[:1].lower()}{d.suggestion[1:]}")


def polled_message(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if the culprit polls a message, which gloo ends only in wait()."""
    site = d.sites.get(d.culprits[0])
    polled = [r for r in case.index.records(d.culprits[0]) if r.is_p2p and r.is_async and not r.waited and not r.done]
    loop = next((n for n in text.around(site) if isinstance(n, ast.While)), None) if site is not None else None
    if not polled or loop is None or "is_completed" not in ast.unparse(loop):
        return None
    return Cause(f"Call wait() on the handle of {polled[-1].op} at {site_text(polled[-1].site)}: {ONLY_IN_WAIT}")


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
    keys_set = list(setting_lines(text))
    lines = [site for site, name in keys_set if names_key(name, first.keys[0])]
    if not lines:
        return None if first.purpose else _unset_key(case, d, key, keys_set)
    line = max(lines, key=lambda site: site.line)
    at = next((site_text(d.sites[r]) for r in d.victims if r in d.sites), d.call.op)
    return Cause(
        f"Set the key '{key}' ({site_text(line)} does) before {d.call.op} at {at}: {ranks_text(d.culprits)} cannot "
        "get there without it, and the rank that should set it may already wait there.",
        lines=(line,),
    )


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
    if not sides.others or case.index.evidence.unseen.issuperset(d.culprits):
        return None  # no process of theirs has run the program, as far as is known
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


def lost_store(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if the culprits lost, or never reached, a store whose server has ended."""
    states, first = case.index.states, d.culprits[0]
    waits = case.index.waits(first)
    used = [key for w in waits if isinstance(w, StoreWait) and w.purpose == CONNECTS for key in w.keys]
    if (lost := LOST_STORE.search(states[first].exception or "")) is not None:
        used = list(states[first].stores) if lost[1] is None else [lost[1]]
    ports = {address.rpartition(":")[2] for address in used}
    over = [s for s in states.values() if s.phase in OVER or s.leaving]
    served = [(at, s.rank) for s in over for at, is_served in s.stores.items() if is_served]
    servers = {at: rank for at, rank in served if at.rpartition(":")[2] in ports and rank not in d.culprits}
    if len(set(servers.values())) != 1:
        return None
    address, rank = servers.popitem()
    store = " and ".join([f"the store at {address}", *servers])
    says = f"Rank {rank}, which served {store}, has ended."
    if states[rank].exit_code or states[rank].phase in (Phase.RAISED, Phase.KILLED):
        return Cause(f"Find out why rank {rank} ended before the ranks that use its store.", says, leads=True)
    return Cause(
        f"Keep rank {rank} until no rank uses the store that it serves: call dist.barrier() on every rank before the "
        "program ends.",
        says,
        leads=True,
    )


def functional_call(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cure if the call is a functional collective, which gives a tensor and no handle."""
    sites = d.causes or tuple(dict.fromkeys(d.sites.values()))
    if not sites or FUNCTIONAL.search(case.index.evidence.sources.get(sites[0].file, "")) is None:
        return None
    statement = next(iter(text.around(sites[0])), None)
    if statement is None or HANDLE.search(ast.unparse(statement)) is not None:
        return None
    return Cause(
        f"Call wait_tensor() on what the functional collective at {site_text(sites[0])} returns, before it is read.",
        lines=d.causes,
    )


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


OWN_VALUES = {
    "hash": "hash() of a string is another number in each process (hash randomisation, PYTHONHASHSEED): take the index "
    "in a sorted list, or zlib.crc32",
    "id": "id() is an address, and another one in each process: take a name or an index",
    "getpid": "each process has another pid: take the rank",
    "uuid4": "each process draws another UUID: draw it on rank 0 and broadcast it",
    "urandom": "each process draws other bytes: draw them on rank 0 and broadcast them",
}
"""Functions whose results differ between processes, and what to take instead."""


def own_values(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if the root of the call comes from a function that answers each process otherwise."""
    site = next((call.site for call in met_calls(case, d).values() if call.rank in d.culprits), None)
    statement = None if site is None else next(iter(text.around(site)), None)
    if site is None or statement is None:
        return None
    calls = (call for call in ast.walk(statement) if isinstance(call, ast.Call))
    named = ("src", "dst", "group_src", "group_dst")
    values = [
        (site, value)
        for call in calls
        if d.call is not None and d.call.op in ast.unparse(call.func)
        for value in (*call.args[1:2], *(k.value for k in call.keywords if k.arg in named))
    ]
    for _ in range(DEEPEST):
        for at, value in values:
            tests = {id(n) for test in ast.walk(value) if isinstance(test, ast.IfExp) for n in ast.walk(test.test)}
            for part in (node for node in ast.walk(value) if isinstance(node, ast.Call) and id(node) not in tests):
                if (name := last_word(part.func)) in OWN_VALUES:
                    line = Site(at.file, part.lineno, "")
                    return Cause(f"Mend {site_text(line)}: {OWN_VALUES[name]}.", lines=(line,))
        values = [
            origin
            for at, value in values
            for name in sorted(words_of(value))
            for origin in (
                *((Site(at.file, line, ""), one) for line, one in text.assignments(at, name)),
                *text.returns(at, name),
            )
        ]
    return None


MEMBERSHIP = re.compile(r"\bin\b")


def members_only(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if a condition above new_group keeps the ranks that are no members from calling it."""
    calls = [call for call in met_calls(case, d).values() if call.op == "new_group" and call.site is not None]
    listed = sorted({call.new_ranks or () for call in calls})
    if len(listed) < 2 or any(call.rank not in (call.new_ranks or ()) for call in calls):
        return None  # some rank makes a group that it is no member of
    decisions = [d for site, loop in text.loops(calls[0].way) for d in text.decisions(site.file, loop, counted=True)]
    decisions = [decision for decision in decisions if not decision.leaves]
    if (guard := guard_decision(text, calls[0].way, ())) is not None:
        decisions.insert(0, guard)
    asks = next((one for one in decisions if RANK.search(one.text) and MEMBERSHIP.search(one.text)), None)
    if asks is None:
        return None
    return Cause(
        f"Call new_group on every rank for every group, in one order, also where the rank is no member "
        f"({', '.join(f'{list(ranks)}' for ranks in listed[:4])}), or pass use_local_synchronization=True: "
        f"`{shortened(asks.text)}` at {site_text(asks.site)} leaves it out on the ranks that are not in it.",
        lines=(asks.site,),
    )


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
    parts: Sequence[tuple[Site, ast.expr]] = ()
    match value:
        case _ if depth == 0:
            return None
        case ast.Set() | ast.SetComp():
            return value.lineno, True
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.Sub() | ast.BitXor()):
            for side in (value.left, value.right):
                if isinstance(side, ast.Call) and getattr(side.func, "attr", "") in ("keys", "items"):
                    return side.lineno, True
            parts = [(site, value.left), (site, value.right)]
        case ast.Call():
            name = last_word(value.func)
            if name in LISTINGS or name in ("set", "frozenset") or name in SET_METHODS:
                return value.lineno, name not in LISTINGS
            parts = [(site, a) for a in value.args] if name in KEEPS_ORDER else text.returns(site, name)
        case ast.ListComp() | ast.GeneratorExp() | ast.DictComp():
            parts = [(site, value.generators[0].iter)]
        case ast.Starred():
            parts = [(site, value.value)]
        case ast.List() | ast.Tuple():
            parts = [(site, e) for e in value.elts]
        case ast.Name() | ast.Attribute():
            name = last_word(value)
            values = text.assignments(site, name)
            if not _sorted(text, site, name, values):
                parts = [(site, v) for _, v in values] or text.arguments(site, name)
    return next((origin for at, v in parts if (origin := _origin(text, at, v, depth - 1))), None)


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
        and last_word(node.func.value) == name
    ]
    return any(not any(isinstance(n, ast.If) for n in text.around(Site(site.file, line, ""))) for line in lines)
