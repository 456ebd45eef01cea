"""Writes calls as a loop: repeated calls are its body, and conditions say which ranks leave a line out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

__all__ = ["line_number", "looped"]

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
    """Lines before or after the loop; ranks that *would* make them count among those that do."""
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
    for sequence in sorted(sequences, key=lambda made: -len(set(made))):
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
    number = text.rpartition("  # ")[2].rpartition(":")[2]
    return int(number) if number.isdigit() else 0
