"""Why ranks go round a loop differently often.

What ends the loop or skips a round differs, it runs over a dict or a list that differs between ranks (one call for each
key or item), or the ranks count its rounds from different steps, as after loading different checkpoints.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from distsim.debug.diagnosis.causes.program_text import (
    FUNCTIONS,
    Decision,
    Loop,
    ProgramText,
    holds,
    shortened,
    words_of,
)
from distsim.debug.diagnosis.context import Cause, Sides
from distsim.debug.divergence.source_order import last_word
from distsim.debug.messages import ranks_text, site_text
from distsim.debug.records import Site

GENERATES = re.compile(r"generat|decod|sampl|rollout|beam|infer", re.IGNORECASE)
ENDS_ANSWER = re.compile(r"(^|_)eos|end_of|stop_(token|id)|max_new|(un)?finished|max_len", re.IGNORECASE)
CLOCKS = frozenset(
    {"time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns", "now", "elapsed"}
)
CALLS_TIME = re.compile(r"\btime\(")
MODEL = frozenset(
    {"parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children", "state_dict"}
)
FILES = frozenset({"exists", "isfile", "is_file", "stat", "listdir", "glob"})
BATCHES = re.compile(r"load|data|batch|sampl|iter|train|valid|(^|_)val(_|$)|test", re.IGNORECASE)
"""Names of loops over training or test data."""
METRICS = re.compile(r"metric|loss|stat|score|grad|param|meter|result|counter|histogram", re.IGNORECASE)
"""Names of collections whose content the program's text does not show."""
WRAPPERS = frozenset({"sorted", "list", "tuple", "enumerate", "reversed", "iter", "set"})
VIEWS = frozenset({"items", "keys", "values"})
DICTS = frozenset({"dict", "defaultdict", "OrderedDict", "Counter"})
DEEPEST = 4
"""Largest number of assignments and calls that are followed from a loop to the value over which it runs."""
STEPS = re.compile(r"start|begin|first|resum|step|epoch|iter|done|seen|global|checkpoint|ckpt|state", re.IGNORECASE)

RESUMES = re.compile(r"resum|restore|load|checkpoint|ckpt|latest", re.IGNORECASE)
"""Names of functions that set a counter from a checkpoint."""


def generation(text: ProgramText, sides: Sides) -> Cause | None:
    """Return the cause if one side is in a loop that makes an answer, token by token, and the other has left it."""
    for inside, outside in ((sides.others, sides.culprits), (sides.culprits, sides.others)):
        for site, loop in text.loops(inside, outside):
            function = next((n for n in text.around(site) if isinstance(n, FUNCTIONS)), None)
            name = site.function if function is None else getattr(function, "name", "")
            leaving = [d for d in text.decisions(site.file, loop, counted=True) if d.leaves]
            read = {d.site: (*d.words, *re.findall(r"\w+", text.line(d.site))) for d in leaving}
            ends = [d for d in leaving if any(map(ENDS_ANSWER.search, read[d.site]))]
            if not ends and not (GENERATES.search(name) and (leaving or not _fixed_length(loop))):
                continue
            return Cause(
                "Keep all ranks in the generation loop until the last is done: synced_gpus=True in generate(), or "
                "all_reduce every round whether any rank goes on; or gather the parameters once before it "
                "(summon_full_params, GatheredParameters).",
                f"The number of iterations of the loop at {site_text(Site(site.file, loop.lineno, ''))} differs.",
                tuple(d.site for d in (ends or leaving)[:1]),
            )
        below = next((f.through for f in inside if f.through is not None), None)
        if below is not None and "generation" in below.file:
            return Cause("Pass synced_gpus=True to generate(): all ranks go on until the longest answer is done.")
    return None


FSDP = re.compile(r"\bfully_shard\b|FullyShardedDataParallel|\bFSDP\b")
"""Names of FSDP, which has no join()."""


def _fixed_length(loop: Loop) -> bool:
    """Return whether a loop has the same number of iterations on every rank, such as `for _ in range(3)`."""
    over = None if isinstance(loop, ast.While) else loop.iter
    is_range = isinstance(over, ast.Call) and words_of(over.func) == {"range"}
    return is_range and isinstance(over, ast.Call) and all(isinstance(a, ast.Constant) for a in over.args)


def loop_cause(text: ProgramText, sides: Sides, ranks: Sequence[int]) -> Cause | None:
    """Return the cause if each rank may decide its number of iterations by itself. *ranks* are the culprits."""
    loops, longer = text.loops(sides.others, sides.culprits), False
    if not loops:
        loops, longer = text.loops(sides.culprits, sides.others), True
    apart = bool(loops)
    loops = loops or text.loops(sides.others) or text.loops(sides.culprits)
    decisions = [d for site, loop in loops for d in text.decisions(site.file, loop)]
    flags = signal_flags(text)
    for decision in decisions:
        flag = next((word for word in sorted(decision.words) if word in flags), None)
        if flag is not None:
            return Cause(
                f"Agree on `{flag}` every step: all_reduce (MAX) it, and leave when any rank has it. A signal handler "
                f"sets it on each rank by itself, and {site_text(decision.site)} ends the loop by it.",
                lines=(decision.site, flags[flag]),
            )
    for decision in decisions:
        if (cause := by_itself(text, decision)) is not None:
            return cause
    for site, loop in loops:
        alone = all((d.site.file, d.site.line) == (site.file, loop.lineno) for d in decisions)
        if alone and isinstance(loop, ast.While) and (start := _restored(text, site, loop)) is not None:
            return same_start(start, Site(site.file, loop.lineno, ""))
    header = None
    if apart:
        header = collection_loop(text, *loops[0], ranks, longer)
    if header is None:
        header = next((cause for site, loop in loops if (cause := header_cause(text, site, loop)) is not None), None)
    return _by_decision(decisions, header) if decisions else header


def _by_decision(decisions: Sequence[Decision], header: Cause | None) -> Cause:
    """Return the cause for conditions that no other rule explains: the text does not show that they differ between
    ranks.
    """
    first, *more = decisions
    shown, also = shortened(first.text), "".join(f", or `{shortened(d.text)}` at {site_text(d.site)}" for d in more[:1])
    if first.leaves:
        cure = (
            f"Agree on `{shown}` before any rank leaves the loop: all_reduce it, or let rank 0 decide and "
            f"broadcast. Each rank may decide it for itself at {site_text(first.site)}{also}."
        )
    else:
        cure = (
            f"Skip the round on all ranks or on none: all_reduce whether any rank does. `{shown}` at "
            f"{site_text(first.site)}{also} may be decided by each rank for itself."
        )
    lines = tuple(d.site for d in decisions[:2])
    if header is None or set(header.lines) <= set(lines):
        return Cause(cure, lines=lines)
    return Cause(
        f"{cure} If it is not: {header.suggestion[:1].lower()}{header.suggestion[1:]}", lines=lines + header.lines
    )


def skipped_round(text: ProgramText, sides: Sides) -> Cause | None:
    """Return the cause if a condition before the others' call may skip it in an iteration of their loop."""
    for site, loop in text.loops(sides.others):
        if not holds(loop, site, sides.culprits):
            continue
        skips = [d for d in text.decisions(site.file, loop) if not d.leaves and d.site.line < site.line]
        if skips:
            return by_itself(text, skips[-1]) or _by_decision(skips[-1:], None)
    return None


def left_loop(text: ProgramText, frames: Sequence[Site]) -> Cause | None:
    """Return the cause if a rank has ended after its last call, at *frames*: the condition by which it has left the
    loop around them.
    """
    leaving = [d for site, loop in text.loops(frames) for d in text.decisions(site.file, loop) if d.leaves]
    return _by_decision(leaving, None) if leaving else None


def by_itself(text: ProgramText, decision: Decision) -> Cause | None:
    """Return the cause if the condition reads a clock or looks for a file."""
    at = site_text(decision.site)
    clocks = decision.words & CLOCKS
    if clocks and (clocks != {"time"} or text.mentions(CALLS_TIME)):
        return Cause(
            f"Let rank 0 decide on the time limit and broadcast it: each rank reads a clock of its own at {at}.",
            lines=(decision.site,),
        )
    if decision.words & FILES:
        return Cause(
            f"Let rank 0 look for the file and broadcast the answer: each rank looks by itself at {at}, at another "
            "moment.",
            lines=(decision.site,),
        )
    return None


def header_cause(text: ProgramText, site: Site, loop: Loop) -> Cause | None:
    """Return the iterable of the loop as a cause, if nothing inside it decides the number of iterations."""
    header = Site(site.file, loop.lineno, "")
    at = site_text(header)
    if (start := first_step(text, site, loop)) is not None:
        return same_start(start, header)
    if isinstance(loop, ast.While):
        shown = shortened(ast.unparse(loop.test))
        return Cause(f"Make `while {shown}` at {at} end in the same round on every rank.", lines=(header,))
    over = ast.unparse(loop.iter)
    shown = shortened(over)
    bound = loop.iter if isinstance(loop.iter, ast.Call) and words_of(loop.iter.func) == {"range"} else None
    names = words_of(loop.iter) - {"range", "enumerate", "zip", "len"}
    if not names:
        return None
    if names & MODEL:
        return Cause(
            f"Build the same model on every rank: `{shown}` at {at} has more parts on some ranks.", lines=(header,)
        )
    if bound is not None and not any(map(BATCHES.search, names)):
        return Cause(
            f"Give `{shown}` at {at} the same bound on every rank: all_reduce it (MIN or MAX) before the loop.",
            lines=(header,),
        )
    even = "drop_last=True, an even sampler"
    if any("micro" in name for name in names):
        even = "all_reduce (MAX) their number before the loop, and add empty ones"
    join = "" if text.mentions(FSDP) else ", or use DDP's join()"
    return Cause(f"Give every rank the same number of batches in `{shown}` ({even}){join}.", lines=(header,))


def signal_flags(text: ProgramText) -> dict[str, Site]:
    """Return names that signal handlers of the program set, with the line that registers the handler."""
    flags: dict[str, Site] = {}
    for file, tree in text.trees():
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or len(call.args) < 2:
                continue
            if last_word(call.func) not in ("signal", "add_signal_handler"):
                continue
            for name in _set_by(tree, call.args[1]):
                flags[name] = Site(file, call.lineno, "")
    return flags


def _set_by(tree: ast.Module, handler: ast.expr) -> Iterator[str]:
    bodies: list[ast.AST] = [handler]
    name = getattr(handler, "attr", getattr(handler, "id", None))
    bodies += [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]
    for node in (part for body in bodies for part in ast.walk(body)):
        targets: list[ast.expr] = []
        match node:
            case ast.Assign():
                targets = node.targets
            case ast.AugAssign():
                targets = [node.target]
            case ast.Call(func=ast.Attribute(attr="set" | "append" | "put" | "fill_" | "update", value=owner)):
                targets = [owner]
        for target in targets:
            key = target.slice if isinstance(target, ast.Subscript) else None
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value
            base = target.value if isinstance(target, ast.Subscript) else target
            word = getattr(base, "attr", getattr(base, "id", None))
            if word is not None:
                yield word


def collection_loop(text: ProgramText, site: Site, loop: Loop, ranks: Sequence[int], longer: bool) -> Cause | None:
    """Return the cause if *ranks* iterate over *loop*'s dict or list a different number of times (more if *longer*)."""
    if isinstance(loop, ast.While):
        return None
    value = _unwrapped(loop.iter)
    if isinstance(value, ast.Call | ast.Constant):
        return None
    keyed = isinstance(loop.iter, ast.Call) and value is not loop.iter and _view(loop.iter)
    keyed = keyed or _subscripted(loop, value) or _is_a(text, site, value, ast.Dict | ast.DictComp, DICTS)
    named = " ".join(words_of(value))
    listed = not BATCHES.search(named) and (
        METRICS.search(named) is not None
        or _is_a(text, site, value, ast.List | ast.ListComp | ast.Tuple, frozenset({"list", "tuple"}))
    )
    if not keyed and not listed:
        return None
    noun = "keys" if keyed else "items"
    header, goes = Site(site.file, loop.lineno, ""), "goes" if len(ranks) == 1 else "go"
    return Cause(
        f"Make the {noun} of `{ast.unparse(value)}` the same on every rank (gather them first, or fill the missing "
        f"with a neutral value): {ranks_text(ranks)} {goes} {'more' if longer else 'less'} often through the loop at "
        f"{site_text(header)} than the others.",
        lines=(header,),
    )


def _unwrapped(value: ast.expr) -> ast.expr:
    """Return the collection itself: `m` of `sorted(m.items())`."""
    while isinstance(value, ast.Call):
        match value.func:
            case ast.Name(id=name) if name in WRAPPERS and value.args:
                value = value.args[0]
            case ast.Attribute(attr=name, value=owner) if name in VIEWS and not value.args:
                value = owner
            case _:
                break
    return value


def _view(value: ast.expr) -> bool:
    """Return whether *value* is a view of a dict such as `m.items()`, possibly within `sorted()`."""
    calls = (part for part in ast.walk(value) if isinstance(part, ast.Call))
    return any(isinstance(call.func, ast.Attribute) and call.func.attr in VIEWS for call in calls)


def _subscripted(loop: ast.For | ast.AsyncFor, value: ast.expr) -> bool:
    """Return whether the loop reads `m[k]` of the *value* `m` by its own target `k`."""
    return any(
        isinstance(part, ast.Subscript)
        and ast.unparse(part.value) == ast.unparse(value)
        and isinstance(part.slice, ast.Name)
        and part.slice.id in words_of(loop.target)
        for statement in loop.body
        for part in ast.walk(statement)
    )


def _is_a(
    text: ProgramText, site: Site, value: ast.expr, display: type | object, makers: frozenset[str], depth: int = DEEPEST
) -> bool:
    """Return whether *value* is a *display* or made by one of *makers*, through assignments and arguments of the
    same file.
    """
    if isinstance(value, display):  # type: ignore[arg-type]
        return True
    if depth == 0:
        return False
    if isinstance(value, ast.Call):
        name = last_word(value.func)
        return name in makers or any(
            _is_a(text, at, v, display, makers, depth - 1) for at, v in text.returns(site, name)
        )
    if not isinstance(value, ast.Name | ast.Attribute):
        return False
    name = last_word(value)
    origins = text.arguments(site, name) or [(site, v) for _, v in text.assignments(site, name)]
    return any(_is_a(text, at, v, display, makers, depth - 1) for at, v in origins)


def resumed_elsewhere(text: ProgramText, sides: Sides) -> Cause | None:
    """Return the cause if one side is in a call of every n-th step of their common loop, whose first step is a
    variable.
    """
    for inside, outside in ((sides.others, sides.culprits), (sides.culprits, sides.others)):
        for site in inside:
            for node in text.around(site):
                if not isinstance(node, ast.If) or not any(isinstance(p, ast.Mod) for p in ast.walk(node.test)):
                    continue
                shared = [loop for at, loop in text.loops([site]) if holds(loop, at, outside)]
                for loop in shared:
                    start = first_step(text, site, loop, named=False)
                    if start is None or not words_of(node.test) & _counter(loop):
                        continue
                    return same_start(start, Site(site.file, loop.lineno, ""), (Site(site.file, node.lineno, ""),))
    return None


def same_start(start: str, header: Site, lines: tuple[Site, ...] = ()) -> Cause:
    """Return the cause: ranks may begin the loop at *header* with different values of *start*."""
    return Cause(
        f"Begin at the same step on every rank: load the same checkpoint everywhere, or broadcast `{start}` from rank "
        f"0 before the loop at {site_text(header)}. Each rank may have a value of its own.",
        lines=(*lines, header),
    )


def first_step(text: ProgramText, site: Site, loop: Loop, named: bool = True) -> str | None:
    """Return the variable at which *loop* begins to count; None if all ranks begin at a number of the program's
    text. With *named*, only a variable that is called like a step.
    """
    match loop:
        case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[start, _])):
            words = words_of(start)
            return ast.unparse(start) if words and (not named or any(map(STEPS.search, words))) else None
        case ast.While():
            for name in sorted(_counter(loop) & words_of(loop.test)):
                before = [value for line, value in text.assignments(site, name) if line < loop.lineno]
                if before and not all(isinstance(value, ast.Constant) for value in before):
                    return name
            return _restored(text, site, loop)
    return None


def _restored(text: ProgramText, site: Site, loop: ast.While) -> str | None:
    """Return the counter that the condition of *loop* reads, and that a function which loads a checkpoint sets."""
    tree = text.tree(site.file)
    targets = (node.target for node in (() if tree is None else ast.walk(tree)) if isinstance(node, ast.AugAssign))
    counted = {getattr(target, "attr", getattr(target, "id", "")) for target in targets}
    for name in sorted(counted & words_of(loop.test)):
        lines = [line for line, value in text.assignments(site, name) if not isinstance(value, ast.Constant)]
        around = (node for line in lines for node in text.around(Site(site.file, line, "")))
        if any(isinstance(node, ast.FunctionDef) and RESUMES.search(node.name) for node in around):
            return name
    return None


def _counter(loop: Loop) -> frozenset[str]:
    if not isinstance(loop, ast.While):
        return words_of(loop.target)
    grown = (node.target for node in loop.body if isinstance(node, ast.AugAssign))
    return frozenset(word for target in grown for word in words_of(target))
