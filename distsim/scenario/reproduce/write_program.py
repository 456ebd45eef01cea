"""Writes a readable script that repeats the calls of a run, for `distsim scenario run`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from distsim.scenario.reproduce.calls import Calls, ReproducedCall
from distsim.text.untrusted_input import digits

Test = Callable[[Sequence[int]], str]
Cells = Mapping[tuple[int, int], bool]
"""(rank, step) -> whether a line of the body is called there. Unknown cells are missing."""


def looped(
    texts: Mapping[int, Sequence[str]],
    stuck: Collection[int],
    members: Mapping[str, Collection[int]],
    number: Mapping[int, int],
    count: Callable[[Mapping[int, int]], str],
    test: Test,
    after: bool = False,
) -> list[str] | None:
    """Return the lines *texts* of each rank as one loop; None if no rank repeats a line.

    Ranks in *stuck* wait in their last line: their next lines are unknown, except that only *members* of its group
    make a call. *number* maps ranks to those of the program; *count* writes the argument of `range`, *test* a
    condition on ranks. Lines after the last repeated line are in the loop, or *after* it, because calls alone do not
    decide that.
    """
    repeated = {text for lines_of in texts.values() for text in lines_of if lines_of.count(text) > 1}
    if not repeated:
        return None
    ahead: dict[int, Sequence[str]] = {}
    inside: dict[int, Sequence[str]] = {}
    behind: dict[int, Sequence[str]] = {}
    for rank, lines_of in texts.items():
        places = [index for index, text in enumerate(lines_of) if text in repeated] or [len(lines_of)]
        end = places[-1] + 1 if after else len(lines_of)
        ahead[rank], inside[rank], behind[rank] = lines_of[: places[0]], lines_of[places[0] : end], lines_of[end:]
    sets = [{text for lines_of in part.values() for text in lines_of} for part in (ahead, inside, behind)]
    if sets[0] & sets[1] or (sets[0] | sets[1]) & sets[2] or (after and not sets[2]):
        return None
    used = _by_first_use(inside.values())
    body = min((used, sorted(used, key=line_number)), key=lambda order: _num_steps(inside, order))
    steps = {rank: _steps(lines_of, body) for rank, lines_of in inside.items()}
    most = max(lines_of[-1] + 1 for lines_of in steps.values() if lines_of)
    there = [rank for rank in stuck if not behind[rank]]
    counts = {rank: most if rank in there else lines_of[-1] + 1 if lines_of else 0 for rank, lines_of in steps.items()}
    inner: list[str] = []
    for index, text in enumerate(body):
        cells: dict[tuple[int, int], bool] = {}
        for rank, lines_of in inside.items():
            called = {step for step, line in zip(steps[rank], lines_of, strict=True) if line == text}
            end_of = (steps[rank][-1], body.index(lines_of[-1])) if lines_of else (0, 0)
            for step in range(counts[rank]):
                if step in called or rank not in there or rank not in members[text] or (step, index) < end_of:
                    cells[number[rank], step] = step in called
        inner += _guarded(text, _guard(cells, lambda who: test([rank for rank in texts if number[rank] in who])))
    variable = "step" if any(line.startswith("if ") and "step" in line for line in inner) else "_"
    would = {text: [rank for rank in there if rank in members[text]] for text in sets[2]}
    head = f"for {variable} in range({count(counts)}):"
    return [*_once(ahead, {}, test), head, *(f"    {line}" for line in inner), *_once(behind, would, test)]


def _once(lines: Mapping[int, Sequence[str]], would: Mapping[str, Collection[int]], test: Test) -> list[str]:
    """Return lines before or after the loop; ranks that *would* make them count among those that do."""
    result: list[str] = []
    for text in _by_first_use(lines.values()):
        who = [rank for rank, own_lines in lines.items() if text in own_lines or rank in would.get(text, ())]
        result += _guarded(text, "" if len(who) == len(lines) else test(who))
    return result


def _guarded(text: str, guard: str) -> list[str]:
    return [guard, f"    {text}"] if guard else [text]


def _guard(cells: Cells, test: Test) -> str:
    """Return the `if` before a line; empty if no rank leaves the line out."""
    called_cells = [cell for cell, called in cells.items() if called]
    left_out = [cell for cell, called in cells.items() if not called]
    if not left_out:
        return ""
    callers, others = {rank for rank, _ in called_cells}, {rank for rank, _ in left_out}
    if not callers & others:
        return test(sorted(callers))
    at, not_at = {step for _, step in called_cells}, {step for _, step in left_out}
    if not at & not_at:
        return f"if step == {min(at)}:" if len(at) == 1 else f"if step in {tuple(sorted(at))}:"
    if len(called_cells) == 1:
        return f"if rank == {called_cells[0][0]} and step == {called_cells[0][1]}:"
    if len(left_out) == 1:
        return f"if rank != {left_out[0][0]} or step != {left_out[0][1]}:"
    few, word = (called_cells, "in") if len(called_cells) < len(left_out) else (left_out, "not in")
    return f"if (rank, step) {word} {tuple(sorted(few))}:"


def _by_first_use(sequences: Collection[Sequence[str]]) -> list[str]:
    """Return all lines, each after the line that precedes it at its first use."""
    order: list[str] = []
    for sequence in sorted(sequences, key=lambda texts: -len(set(texts))):
        behind = 0
        for text in sequence:
            if text not in order:
                order.insert(behind, text)
            behind = order.index(text) + 1
    return order


def _num_steps(inside: Mapping[int, Sequence[str]], order: Sequence[str]) -> int:
    return sum(steps[-1] for calls in inside.values() if (steps := _steps(calls, order)))


def _steps(calls: Sequence[str], order: Sequence[str]) -> list[int]:
    """Return the iteration in which each line is called: a line that is not after the previous one begins a new
    iteration.
    """
    result: list[int] = []
    step, last = 0, -1
    for text in calls:
        position = order.index(text)
        step += position <= last
        last = position
        result.append(step)
    return result


def line_number(text: str) -> int:
    """Return the line number in the comment after a call (`# train.py:12`); 0 if there is none."""
    return digits(text.rpartition("  # ")[2].rpartition(":")[2]) or 0


Step = tuple[object, str]
"""A call's key and its text: what ranks must share to make the same call at the same line."""


def write_program(calls: Calls, teaches: str, style: str = "merged") -> str:
    """Return a script that makes *calls* on ranks numbered from 0; *teaches* becomes its docstring."""
    return _Program(calls).text(teaches, style)


class _Program:
    """Turns one run into the text of a program."""

    def __init__(self, calls: Calls) -> None:
        self.ranks, self.calls, self.endings, self.absent = calls.ranks, calls.calls, calls.endings, calls.absent
        self.is_stuck = calls.is_stuck
        self._new = {rank: number for number, rank in enumerate(calls.ranks)}
        """Original rank -> its number in the program."""

    def text(self, teaches: str, style: str) -> str:
        """Return the script.

        *style* is `merged` (one body, with the ranks of each call as its condition), `exact` (without ranks that were
        stuck earlier), `looped` (one loop around repeated calls), `looped, and after` (with the last calls after the
        loop), or `apart` (a body for each rank).
        """
        groups: dict[str, str] = {}
        prologue: list[str] = []
        makes_groups = any(c.op == "new_group" for own_calls in self.calls.values() for c in own_calls)
        for rank in self.ranks:
            for call in self.calls[rank]:
                if call.group and call.group not in groups and call.op != "new_group":
                    name = groups[call.group] = f"group_{len(groups)}"
                    if not makes_groups:
                        inside = [self._new[r] for r in call.members]
                        prologue.append(f"{name} = dist.new_group({inside}, group_desc={call.label or name!r})")
        texts = {rank: self._texts(rank, groups) for rank in self.ranks}
        body = None
        if style.startswith("looped"):
            stuck = [rank for rank in self.ranks if self.is_stuck(rank)]
            members: dict[str, set[int]] = {}
            for rank in self.ranks:
                for call, text in zip(self.calls[rank], texts[rank], strict=True):
                    members.setdefault(text, set()).update(call.members)
            body = looped(
                texts,
                stuck,
                members,
                self._new,
                self._count,
                lambda who: self._test("if", who),
                after=style == "looped, and after",
            )
        elif style != "apart":
            body = self._merged(texts, extend=style == "merged")
        body = self._by_rank(texts) if body is None else body
        modules = [m for m in ("os", "signal", "threading", "time") if any(f"{m}." in e for e in self.endings.values())]
        lines = [f'"""{teaches}"""', ""]
        lines += [f"import {m}" for m in sorted({*modules, *(("os",) if self.absent else ())})]
        lines += ["import torch", "import torch.distributed as dist", ""]
        head, lines = lines, ['dist.init_process_group("gloo")', "rank = dist.get_rank()", *prologue]
        waits = any("works.append" in line for line in body)
        lines += ["works = []", *body, "for work in works:", "    work.wait()"] if waits else body
        endings: dict[str, list[int]] = {}
        for rank in self.ranks:
            if rank in self.endings:
                endings.setdefault(self.endings[rank], []).append(rank)
        for ending, those in endings.items():
            lines += [ending] if len(those) == len(self.ranks) else [self._test("if", those), f"    {ending}"]
        if self.absent:  # they come to their end, and leave the program nowhere
            who = ", ".join(f'"{self._new[rank]}"' for rank in self.absent)
            lines = [f'if os.environ["RANK"] not in ({who},):', *(f"    {line}" for line in lines)]
        return "\n".join([*head, *lines]) + "\n"

    def _merged(self, texts: Mapping[int, list[str]], extend: bool) -> list[str] | None:
        """Return one body for all ranks, as the original must have been. None if the orders contradict."""
        steps: dict[Step, dict[int, int]] = {}
        for rank in self.ranks:
            for number, (call, text) in enumerate(zip(self.calls[rank], texts[rank], strict=True)):
                steps.setdefault((call.key, text), {})[rank] = number
        order = _topological(steps)
        if order is None:
            return None
        done = dict.fromkeys(self.ranks, 0)
        guarded: list[tuple[str, list[int]]] = []
        for step in order:
            callers = steps[step]
            call = next(self.calls[rank][number] for rank, number in callers.items())
            # Who is stuck before this line would have come to it, too.
            would = [r for r in self.ranks if extend and self.is_stuck(r) and done[r] == len(self.calls[r])]
            more = [] if call.op in ("send", "recv") else [r for r in would if r in call.members]
            guarded.append((step[1], [r for r in self.ranks if r in callers or r in more]))
            for rank in callers:
                done[rank] += 1
        lines: list[str] = []
        before: list[int] = list(self.ranks)
        for text, run in itertools.groupby(guarded, key=lambda pair: pair[0]):
            guards = [guard for _, guard in run]
            if len(guards) > 1:
                counts = {rank: sum(rank in guard for guard in guards) for rank in self.ranks}
                lines += [f"for _ in range({self._count(counts)}):", f"    {text}"]
                before = list(self.ranks)
                continue
            if guards[0] != before and len(guards[0]) < len(self.ranks):
                lines.append(self._test("if", guards[0]))
            lines.append(text if len(guards[0]) == len(self.ranks) else f"    {text}")
            before = guards[0]
        return lines

    def _count(self, counts: Mapping[int, int]) -> str:
        by_count: dict[int, list[int]] = {}
        for rank, count in counts.items():
            by_count.setdefault(count, []).append(rank)
        if len(by_count) == 1:
            return str(next(iter(by_count)))
        if len(by_count) == 2:
            (rare, who), (usual, _) = sorted(by_count.items(), key=lambda item: len(item[1]))
            return f"{rare} {self._test('if', who).removesuffix(':')} else {usual}"
        return f"{[counts[rank] for rank in self.ranks]}[rank]"

    def _test(self, word: str, ranks: Sequence[int]) -> str:
        inside = tuple(self._new[r] for r in ranks)
        outside = [self._new[r] for r in self.ranks if r not in ranks]
        if len(inside) == 1:
            return f"{word} rank == {inside[0]}:"
        if len(outside) == 1:
            return f"{word} rank != {outside[0]}:"
        return f"{word} rank in {inside}:"

    def _by_rank(self, texts: Mapping[int, list[str]]) -> list[str]:
        """Return a body for each rank, equal ones merged."""
        bodies: dict[tuple[str, ...], list[int]] = {}
        for rank in self.ranks:
            bodies.setdefault(tuple(texts[rank]), []).append(rank)
        lines: list[str] = []
        some = [body for body in bodies if body]
        for body in some:
            rest = bool(lines) and body is some[-1] and len(some) == len(bodies)
            word = "elif" if lines else "if"
            lines += ["else:" if rest else self._test(word, bodies[body]), *(f"    {line}" for line in body)]
        return lines

    def _texts(self, rank: int, groups: Mapping[str, str]) -> list[str]:
        lines = []
        for call in self.calls[rank]:
            name = groups.get(call.group, "")
            here = replace(
                call,
                members=tuple(self._new[r] for r in call.members if r in self._new),
                root=None if call.root is None else self._new.get(call.root),
                peer=None if call.peer is None else self._new.get(call.peer),
            )
            text = _line(here, name)
            if call.op == "new_group":
                variable = next(
                    (groups[c.group] for c in self.calls[rank] if c.group in groups and c.members == call.members),
                    None,
                )
                text = text if variable is None else f"{variable} = {text}"
            if call.is_async and (call.waited or call.blocked):
                text = f"works.append({text})"
            lines.append(f"{text}  # {call.site}" if call.site else text)
        return lines


def _topological(steps: Mapping[Step, Mapping[int, int]]) -> list[Step] | None:
    """Return the steps in an order that agrees with every rank's own.

    If two steps may be in either order, the one further up in the original file comes first, or else the one of more
    ranks.
    """
    sequences: dict[int, list[Step]] = {}
    for step, callers in steps.items():
        for rank in callers:
            sequences.setdefault(rank, []).append(step)
    before: dict[Step, set[Step]] = {step: set() for step in steps}
    for rank, sequence in sequences.items():
        sequence.sort(key=lambda step: steps[step][rank])
        for first, second in itertools.pairwise(sequence):
            before[second].add(first)
    sorter = TopologicalSorter(before)
    try:
        sorter.prepare()
    except CycleError:
        return None
    order: list[Step] = []
    ready: list[Step] = []
    while sorter.is_active():
        ready += sorter.get_ready()
        one_file = len({step[1].rpartition("  # ")[2].partition(":")[0] for step in ready}) == 1
        chosen = min(
            ready,
            key=lambda step: (
                sum(steps[step].values()) / len(steps[step]),
                line_number(step[1]) if one_file else 0,
                -len(steps[step]),
                min(steps[step]),
            ),
        )
        ready.remove(chosen)
        order.append(chosen)
        sorter.done(chosen)
    return order


def _line(call: ReproducedCall, name: str) -> str:
    """Return the call as a line of a program; *name* is its group's variable."""
    n, group = len(call.members), f", group={name}" if name else ""
    op = f", op=dist.ReduceOp.{call.reduce_op}" if call.reduce_op not in (None, "SUM") else ""
    later = ", async_op=True" if call.is_async else ""
    end = f"{op}{group}{later})"
    given, taken = _tensors(call, call.inputs), _tensors(call, call.outputs)
    one, out = given[0] if given else "torch.zeros(1)", taken[0] if taken else "torch.zeros(1)"
    whole = f"[{one}] * {n}"
    base = call.op.removesuffix("_coalesced")
    match base:
        case "all_reduce":
            return f"dist.all_reduce({one}{end}"
        case "broadcast" | "reduce":
            which = "src" if base == "broadcast" else "dst"
            return f"dist.{base}({one}, {which}={call.root}{end}"
        case "all_gather":
            return f"dist.all_gather({whole}, {one}{group}{later})"
        case "all_gather_into_tensor":
            return f"dist.all_gather_into_tensor({out}, {one}{group}{later})"
        case "gather":
            return f"dist.gather({one}, {whole} if rank == {call.root} else None, dst={call.root}{group}{later})"
        case "scatter":
            lists = f"[{out}] * {n} if rank == {call.root} else None"
            return f"dist.scatter({out}, {lists}, src={call.root}{group}{later})"
        case "reduce_scatter":
            return f"dist.reduce_scatter({out}, [{out}] * {n}{end}"
        case "reduce_scatter_tensor":
            return f"dist.reduce_scatter_tensor({out}, {one}{end}"
        case "all_to_all_single":
            sent, received = call.splits or ((), ())
            splits = f", {list(received)}, {list(sent)}" if sent and len(set(sent + received)) > 1 else ""
            return f"dist.all_to_all_single({out}, {one}{splits}{group}{later})"
        case "all_to_all":
            return f"dist.all_to_all([{', '.join(taken)}], [{', '.join(given)}]{group}{later})"
        case "send" | "recv":
            verb = f"i{base}" if call.is_async else base
            peer = "" if call.peer is None else f", {'dst' if base == 'send' else 'src'}={call.peer}"
            tag = f", tag={call.tag}" if call.tag else ""
            return f"dist.{verb}({one if base == 'send' else out}{peer}{group}{tag})"
        case "new_group":
            return f"dist.new_group({list(call.members)})"
        case _:
            return f"dist.{base}({group.removeprefix(', ')}{later if group else later.removeprefix(', ')})"


def _tensors(call: ReproducedCall, shapes: Iterable[tuple[int, ...]]) -> list[str]:
    dtype = "" if call.dtype == "float32" else f", dtype=torch.{call.dtype}"
    result = []
    for shape in shapes:
        sizes = ", ".join(map(str, shape)) if shape else "()"
        result.append(f"torch.zeros({sizes}{dtype})")
    return result
