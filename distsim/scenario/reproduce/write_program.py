"""A run as its calls: what each rank called, how it ended, and the program that does the same again."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from distsim.debug.records import CallRecord, CallWait, Evidence, HostWait, Phase, RankState
from distsim.scenario.reproduce.loops import line_number, looped

__all__ = ["Call", "Calls", "calls_of"]

MAX_ELEMENTS = 1 << 16
"""Larger tensors are exchanged for small ones: a reproduction has to run in a moment."""

Step = tuple[object, str]
"""A call's key and its text: what ranks must share to make the same call at the same line."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Flight Recorder does not say the root: the first member does as well, it is the same for all."""
LEFT_OUT = ("init_process_group", "destroy_process_group", "monitored_barrier")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one rank. *key* is the same for the calls that belong together."""

    key: tuple[object, ...]
    op: str
    members: tuple[int, ...]
    """Global ranks of its group, in group order."""
    group: str
    """Name of the group; empty for the world."""
    label: str = ""
    """What people call it."""
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    dtype: str = "float32"
    reduce_op: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    is_async: bool = False
    waited: bool = True
    blocked: bool = False
    """Its rank waits for it at the end."""
    place: str = ""
    prompt: bool = False
    """It was over, or is what its rank waits for, before the rank's next call: it may have been one that blocks."""

    def code(self, world: Sequence[int], name: str) -> str:
        """The call as a line of a program; *name* is its group's variable."""
        n, group = len(self.members), f", group={name}" if name else ""
        op = f", op=dist.ReduceOp.{self.reduce_op}" if self.reduce_op not in (None, "SUM") else ""
        later = ", async_op=True" if self.is_async else ""
        end = f"{op}{group}{later})"
        given, taken = self._tensors(self.inputs), self._tensors(self.outputs)
        one, out = given[0] if given else "torch.zeros(1)", taken[0] if taken else "torch.zeros(1)"
        whole = f"[{one}] * {n}"
        base = self.op.removesuffix("_coalesced")
        match base:
            case "all_reduce":
                return f"dist.all_reduce({one}{end}"
            case "broadcast" | "reduce":
                which = "src" if base == "broadcast" else "dst"
                return f"dist.{base}({one}, {which}={self.root}{end}"
            case "all_gather":
                return f"dist.all_gather({whole}, {one}{group}{later})"
            case "all_gather_into_tensor":
                return f"dist.all_gather_into_tensor({out}, {one}{group}{later})"
            case "gather":
                return f"dist.gather({one}, {whole} if rank == {self.root} else None, dst={self.root}{group}{later})"
            case "scatter":
                lists = f"[{out}] * {n} if rank == {self.root} else None"
                return f"dist.scatter({out}, {lists}, src={self.root}{group}{later})"
            case "reduce_scatter":
                return f"dist.reduce_scatter({out}, [{out}] * {n}{end}"
            case "reduce_scatter_tensor":
                return f"dist.reduce_scatter_tensor({out}, {one}{end}"
            case "all_to_all_single":
                sent, received = self.splits or ((), ())
                splits = f", {list(received)}, {list(sent)}" if sent and len(set(sent + received)) > 1 else ""
                return f"dist.all_to_all_single({out}, {one}{splits}{group}{later})"
            case "all_to_all":
                return f"dist.all_to_all([{', '.join(taken)}], [{', '.join(given)}]{group}{later})"
            case "send" | "recv":
                verb = f"i{base}" if self.is_async else base
                peer = "" if self.peer is None else f", {'dst' if base == 'send' else 'src'}={self.peer}"
                tag = f", tag={self.tag}" if self.tag else ""
                return f"dist.{verb}({one if base == 'send' else out}{peer}{group}{tag})"
            case "new_group":
                return f"dist.new_group({list(self.members)})"
            case _:
                return f"dist.{base}({group.removeprefix(', ')}{later if group else later.removeprefix(', ')})"

    def _tensors(self, shapes: Iterable[tuple[int, ...]]) -> list[str]:
        dtype = "" if self.dtype == "float32" else f", dtype=torch.{self.dtype}"
        found = []
        for shape in shapes:
            sizes = ", ".join(map(str, shape)) if shape else "()"
            found.append(f"torch.zeros({sizes}{dtype})")
        return found


@dataclass(frozen=True, slots=True)
class Calls:
    """All ranks' calls and endings. *ranks* are those of the original run; the program numbers them anew."""

    ranks: tuple[int, ...]
    calls: Mapping[int, tuple[Call, ...]]
    endings: Mapping[int, str]
    """How a rank ends after its calls: a line of code, or empty."""
    absent: tuple[int, ...] = ()
    """Ranks that never joined."""

    @property
    def keys(self) -> list[tuple[object, ...]]:
        """Everything that can be left out, in the order in which it was called."""
        found: dict[tuple[object, ...], None] = {}
        longest = max((len(calls) for calls in self.calls.values()), default=0)
        for place in range(longest):
            for rank in self.ranks:
                if place < len(self.calls[rank]):
                    found[self.calls[rank][place].key] = None
        return list(found)

    def only(self, keys: Iterable[tuple[object, ...]]) -> Calls:
        """Without the calls whose key is not among *keys*."""
        kept = set(keys)
        calls = {rank: tuple(c for c in made if c.key in kept) for rank, made in self.calls.items()}
        return replace(self, calls=calls)

    def blocking(self) -> Calls:
        """With `send` for `isend` where no record contradicts: not every record tells them apart."""

        def sync(call: Call) -> Call:
            return replace(call, is_async=False) if call.op in ("send", "recv") and call.prompt else call

        return replace(self, calls={rank: tuple(map(sync, made)) for rank, made in self.calls.items()})

    def without(self, rank: int) -> Calls:
        """Without one rank: groups are smaller, what it sent and received is gone."""
        calls = {}
        for other in self.ranks:
            if other != rank:
                kept = [c for c in self.calls[other] if rank not in (c.peer, c.root) or c.op == "all_reduce"]
                calls[other] = tuple(_leave_out(c, rank) for c in kept)
        ranks = tuple(r for r in self.ranks if r != rank)
        endings = {r: e for r, e in self.endings.items() if r != rank}
        return Calls(ranks, calls, endings, tuple(r for r in self.absent if r != rank))

    def program(self, teaches: str, style: str = "merged") -> str:
        """The script, ranks numbered from 0. *style*: `merged`, one body with the ranks of each call before it,
        and whoever is stuck earlier among them; `exact`, without those; `looped`, one loop around what is
        called again and again; `looped, and after`, with what comes last behind it; `apart`, a body for each rank."""
        new = {rank: number for number, rank in enumerate(self.ranks)}
        groups: dict[str, str] = {}
        prologue: list[str] = []
        told = any(c.op == "new_group" for made in self.calls.values() for c in made)
        for rank in self.ranks:
            for call in self.calls[rank]:
                if call.group and call.group not in groups and call.op != "new_group":
                    name = groups[call.group] = f"group_{len(groups)}"
                    if not told:
                        inside = [new[r] for r in call.members]
                        prologue.append(f"{name} = dist.new_group({inside}, group_desc={call.label or name!r})")
        texts = {rank: self._texts(rank, groups, new) for rank in self.ranks}
        body = None
        if style.startswith("looped"):
            stuck = [rank for rank in self.ranks if self._is_stuck(rank)]
            members: dict[str, set[int]] = {}
            for rank in self.ranks:
                for call, text in zip(self.calls[rank], texts[rank], strict=True):
                    members.setdefault(text, set()).update(call.members)
            body = looped(
                texts,
                stuck,
                members,
                new,
                lambda n: self._count(n, new),
                lambda who: self._test("if", who, new),
                after=style == "looped, and after",
            )
        elif style != "apart":
            body = self._merged(texts, new, extend=style == "merged")
        body = self._by_rank(texts, new) if body is None else body
        modules = [m for m in ("os", "signal", "threading", "time") if any(f"{m}." in e for e in self.endings.values())]
        lines = [f'"""{teaches}"""', ""]
        lines += [f"import {m}" for m in sorted({*modules, *(("os",) if self.absent else ())})]
        lines += ["import torch", "import torch.distributed as dist", ""]
        if self.absent:
            who = ", ".join(f'"{new[rank]}"' for rank in self.absent)
            lines += [f'if os.environ["RANK"] in ({who},):', "    raise SystemExit"]
        lines += ['dist.init_process_group("gloo")', "rank = dist.get_rank()", *prologue]
        waits = any("works.append" in line for line in body)
        lines += ["works = []", *body, "for work in works:", "    work.wait()"] if waits else body
        endings: dict[str, list[int]] = {}
        for rank in self.ranks:
            if rank in self.endings:
                endings.setdefault(self.endings[rank], []).append(rank)
        for ending, those in endings.items():
            lines += [ending] if len(those) == len(self.ranks) else [self._test("if", those, new), f"    {ending}"]
        return "\n".join(lines) + "\n"

    def _merged(self, texts: Mapping[int, list[str]], new: Mapping[int, int], extend: bool) -> list[str] | None:
        """One body for all ranks, as the original must have been. None where the orders contradict."""
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
            would = [r for r in self.ranks if extend and self._is_stuck(r) and done[r] == len(self.calls[r])]
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
                lines += [f"for _ in range({self._count(counts, new)}):", f"    {text}"]
                before = list(self.ranks)
                continue
            if guards[0] != before and len(guards[0]) < len(self.ranks):
                lines.append(self._test("if", guards[0], new))
            lines.append(text if len(guards[0]) == len(self.ranks) else f"    {text}")
            before = guards[0]
        return lines

    def _count(self, counts: Mapping[int, int], new: Mapping[int, int]) -> str:
        by_count: dict[int, list[int]] = {}
        for rank, count in counts.items():
            by_count.setdefault(count, []).append(rank)
        if len(by_count) == 1:
            return str(next(iter(by_count)))
        if len(by_count) == 2:
            (rare, who), (usual, _) = sorted(by_count.items(), key=lambda item: len(item[1]))
            return f"{rare} {self._test('if', who, new).removesuffix(':')} else {usual}"
        return f"{[counts[rank] for rank in self.ranks]}[rank]"

    def _is_stuck(self, rank: int) -> bool:
        return rank not in self.endings and any(call.blocked for call in self.calls[rank][-1:])

    def _test(self, word: str, ranks: Sequence[int], new: Mapping[int, int]) -> str:
        inside = tuple(new[r] for r in ranks)
        outside = [new[r] for r in self.ranks if r not in ranks]
        if len(inside) == 1:
            return f"{word} rank == {inside[0]}:"
        if len(outside) == 1:
            return f"{word} rank != {outside[0]}:"
        return f"{word} rank in {inside}:"

    def _by_rank(self, texts: Mapping[int, list[str]], new: Mapping[int, int]) -> list[str]:
        """A body for each rank, equal ones merged."""
        bodies: dict[tuple[str, ...], list[int]] = {}
        for rank in self.ranks:
            bodies.setdefault(tuple(texts[rank]), []).append(rank)
        lines: list[str] = []
        some = [body for body in bodies if body]
        for body in some:
            rest = bool(lines) and body is some[-1] and len(some) == len(bodies)
            word = "elif" if lines else "if"
            lines += ["else:" if rest else self._test(word, bodies[body], new), *(f"    {line}" for line in body)]
        return lines

    def _texts(self, rank: int, groups: Mapping[str, str], new: Mapping[int, int]) -> list[str]:
        lines = []
        for call in self.calls[rank]:
            name = groups.get(call.group, "")
            here = replace(
                call,
                members=tuple(new[r] for r in call.members if r in new),
                root=None if call.root is None else new.get(call.root),
                peer=None if call.peer is None else new.get(call.peer),
            )
            text = here.code(self.ranks, name)
            if call.op == "new_group":
                made = next(
                    (groups[c.group] for c in self.calls[rank] if c.group in groups and c.members == call.members),
                    None,
                )
                text = text if made is None else f"{made} = {text}"
            if call.is_async and (call.waited or call.blocked):
                text = f"works.append({text})"
            lines.append(f"{text}  # {call.place}" if call.place else text)
        return lines


def _topological(steps: Mapping[Step, Mapping[int, int]]) -> list[Step] | None:
    """The steps in an order that is every rank's own; of two that may be either way, the one further up in the
    original file, else that of more ranks."""
    sequences: dict[int, list[Step]] = {}
    for step, callers in steps.items():
        for rank in callers:
            sequences.setdefault(rank, []).append(step)
    for rank, sequence in sequences.items():
        sequence.sort(key=lambda step: steps[step][rank])
    place = dict.fromkeys(sequences, 0)
    order: list[Step] = []
    while len(order) < len(steps):
        ready: dict[Step, None] = {}
        for rank, sequence in sequences.items():
            if place[rank] < len(sequence):
                step = sequence[place[rank]]
                if all(sequences[r][place[r] : place[r] + 1] == [step] for r in steps[step]):
                    ready[step] = None
        if not ready:
            return None
        one_file = len({step[1].rpartition("  # ")[2].partition(":")[0] for step in ready}) == 1
        chosen = min(
            ready,
            key=lambda step: (
                sum(steps[step].values()) / len(steps[step]),
                line_number(step[1]) if one_file else 0,
                -len(steps[step]),
            ),
        )
        order.append(chosen)
        for rank in steps[chosen]:
            place[rank] += 1
    return order


def calls_of(evidence: Evidence, new_groups: bool = False) -> Calls:
    """The calls of a run, from its records; with *new_groups* also those that make groups, which are
    otherwise made by all ranks at the start."""
    ranks = tuple(range(evidence.world_size))
    sizes = [_elements(r) for records in evidence.records.values() for r in records]
    small = max(sizes, default=0) > MAX_ELEMENTS
    calls = {}
    for rank in ranks:
        state = evidence.ranks.get(rank)
        waits = [w.record for w in state.waits if isinstance(w, CallWait)] if state is not None else []
        numbers: dict[tuple[object, ...], int] = {}
        made = []
        records = evidence.records.get(rank, ())
        for record, after in itertools.zip_longest(records, records[1:]):
            if record.op in LEFT_OUT or (record.op == "new_group" and not new_groups):
                continue
            call = _call(record, numbers, any(w is record for w in waits), small)
            over = after is None or (record.completed_s is not None and record.completed_s <= after.issued_s)
            made.append(replace(call, prompt=over))
        calls[rank] = tuple(made)
    endings = {r: e for r in ranks if (e := _ending(evidence.ranks.get(r)))}
    absent = tuple(
        r
        for r in ranks
        if (s := evidence.ranks.get(r)) is not None
        and (s.phase is Phase.ABSENT or (s.phase is Phase.FINISHED and not evidence.records.get(r)))
    )
    return Calls(ranks, calls, endings, absent)


def _call(record: CallRecord, numbers: dict[tuple[object, ...], int], blocked: bool, small: bool) -> Call:
    members = record.group.ranks
    if record.is_p2p:
        ends = (record.rank, record.peer) if record.op == "send" else (record.peer, record.rank)
        pair: tuple[object, ...] = (record.op, members, ends, record.tag)
        numbers[pair] = numbers.get(pair, 0) + 1
        key: tuple[object, ...] = ("p2p", members, ends, record.tag, numbers[pair])
    elif record.new_ranks is not None:
        members = record.new_ranks
        numbers[members] = numbers.get(members, 0) + 1
        key = ("new_group", members, numbers[members])
    else:
        key = (record.group.name, members, record.seq)
    inputs, outputs = record.input_shapes, record.output_shapes
    if small:
        inputs, outputs = _small(record, inputs), _small(record, outputs)
    splits = None
    if record.input_splits is not None and record.output_splits is not None:
        splits = (record.input_splits, record.output_splits)
    site = record.site
    return Call(
        key,
        record.op,
        members,
        "" if record.group.description == "default_pg" or record.group.name == "0" else record.group.name,
        "" if record.group.description == "undefined" else record.group.label,
        inputs,
        outputs,
        record.dtypes[0] if record.dtypes else "float32",
        record.reduce_op,
        members[0] if record.root is None and record.op in ROOTED else record.root,
        record.peer,
        record.tag or 0,
        splits,
        record.is_async,
        record.waited or record.done,
        blocked,
        "" if site is None else f"{os.path.basename(site.file)}:{site.line}",
    )


def _elements(record: CallRecord) -> int:
    total = 0
    for shape in (*record.input_shapes, *record.output_shapes):
        count = 1
        for size in shape:
            count *= size
        total = max(total, count)
    return total


def _small(record: CallRecord, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Shapes of a few elements that fit each other as those of the operation must."""
    n = len(record.group.ranks)
    wide = shapes is record.output_shapes if record.op.startswith("all_gather_into") else shapes is record.input_shapes
    several = record.op.startswith(("all_gather_into", "reduce_scatter_tensor")) and wide
    size = 4 * n if several or record.op == "all_to_all_single" else 4
    return tuple((size,) for _ in shapes)


def _leave_out(call: Call, rank: int) -> Call:
    if rank not in call.members:
        return call
    n = len(call.members)
    members = tuple(r for r in call.members if r != rank)

    def cut(shapes: tuple[tuple[int, ...], ...], whole: bool) -> tuple[tuple[int, ...], ...]:
        if not whole or (call.splits is not None and len(set(call.splits[0])) > 1):
            return shapes
        return tuple((s[0] // n * (n - 1), *s[1:]) if s else s for s in shapes)

    gathers = call.op.startswith("all_gather_into")
    scatters = call.op.startswith("reduce_scatter_tensor")
    both = call.op == "all_to_all_single"
    splits = call.splits
    if splits is not None:
        at = call.members.index(rank)
        splits = tuple(s[:at] + s[at + 1 :] for s in splits)  # type: ignore[assignment]
    return replace(
        call,
        members=members,
        inputs=cut(call.inputs, scatters or both),
        outputs=cut(call.outputs, gathers or both),
        splits=splits,
    )


def _ending(state: RankState | None) -> str:
    """The line of code with which a rank does what it did at the end."""
    if state is None:
        return ""
    match state.phase:
        case Phase.RAISED:
            return f"raise RuntimeError({(state.exception or 'raised')[:120]!r})"
        case Phase.KILLED:
            return f"os.kill(os.getpid(), signal.{state.signal or 'SIGKILL'})"
        case Phase.EXITED:
            return f"os._exit({state.exit_code or 0})"
        case Phase.HOST_STUCK:
            return "while True: pass  # it never came back from here"
        case Phase.FROZEN:
            return "time.sleep(1e4)  # stopped here (see [[faults]])"
        case Phase.BLOCKED if any(isinstance(wait, HostWait) for wait in state.waits):
            return "threading.Event().wait()  # it waited on the host"
        case _:
            return ""
