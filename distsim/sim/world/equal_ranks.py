"""Selection of ranks that represent others, by the lines of the program that distinguish ranks."""

from __future__ import annotations

import ast
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch

from distsim.debug.records import P2P, CallRecord
from distsim.debug.records.frames import Owner, owner, shown
from distsim.text.untrusted_input import LARGEST_SOURCE, read_bytes

# -- Lines of a program that use a rank's number, and the ranks that its tests tell apart.
#
# The program's own files are read, not run. A name that may hold a rank's number anywhere is taken to hold one
# everywhere. A test that only asks for ranks, sizes of the job and constants is evaluated for every rank. The scan sees
# neither libraries nor what differs by other ways (data, files, time), so it finds differences and proves nothing.

LONGEST = 60
"""Characters of an expression that are shown."""
_ALIASES = {
    "SLURM_PROCID": "RANK", "PMI_RANK": "RANK", "OMPI_COMM_WORLD_RANK": "RANK", "SLURM_LOCALID": "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK", "SLURM_NODEID": "GROUP_RANK", "NODE_RANK": "GROUP_RANK",
}  # fmt: skip
_RANKS = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK"})
_SIZES = frozenset({"WORLD_SIZE", "LOCAL_WORLD_SIZE"})
_ASK = {"get_rank": "RANK", "get_node_local_rank": "LOCAL_RANK", "get_world_size": "WORLD_SIZE"}
_ASK_IN_GROUP = frozenset({"get_rank", "get_local_rank", "get_coordinate", "get_group_rank", "rank"})
"""Called with arguments, or of an object: a number in a group, which is not evaluated."""
_KEEPS = frozenset({"int", "abs", "str", "divmod", "tuple", "list", "float", "sum"})
"""Functions whose result still depends on the rank that they are given."""
_CHOOSES = frozenset({"min", "max"})
"""Functions of that kind that compare their arguments."""
_HARMLESS = frozenset(
    {"print", "debug", "info", "warning", "error", "critical", "exception", "log", "basicConfig", "getLogger", "format",
     "set_device", "device", "to", "cuda", "manual_seed", "manual_seed_all", "seed", "set_seed", "seed_everything",
     "init_process_group", "init_device_mesh", "DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP",
     "DistributedSampler", "synchronize", "get_device_properties", "add_scalar", "set_description", "set_postfix"}
)  # fmt: skip
"""Calls that get a rank, or a device by its number, in every job: what they do with it is not worth a line."""
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip
Place = Mapping[str, int]
"""torchrun's variables of a rank: RANK, LOCAL_RANK, GROUP_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE."""


class Unknown(Exception):
    """Raised if the scan cannot determine the value of an expression."""


@dataclass(frozen=True, slots=True)
class RankUse:
    """A line that uses a rank's number, or a number made from it."""

    where: str
    """file:line"""
    text: str
    """The expression."""
    how: str
    """Kind of use: a test, an index, an argument of NAME, text."""
    outcomes: tuple[bool, ...] | None = None
    """For a test: its outcomes by rank; None if they are not known."""

    def tells_apart(self, ranks: frozenset[int]) -> bool:
        """Return whether the test has another outcome on some rank than on all of *ranks*."""
        return self.outcomes is not None and len({self.outcomes[r] for r in ranks}) < len(set(self.outcomes))


def rank_uses(files: Sequence[str], places: Sequence[Place]) -> list[RankUse]:
    """Return the lines in *files* that use the rank, in order.

    Args:
        files: Paths of the program's own source. A file that cannot be read or parsed is left out.
        places: Rank, local rank and similar numbers of each rank.
    """
    scan = _Scan(places)
    trees = {}
    for file in files:
        try:
            trees[file] = ast.parse(read_bytes(file, LARGEST_SOURCE))
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        scan.define(trees[file])
    scan.spread()
    return [use for file, tree in trees.items() for use in scan.uses(shown(file), tree)]


def own_files(main: ModuleType) -> list[str]:
    """Return the user's own files that *main* holds functions, classes or modules of, its own first."""
    files: dict[str, None] = {}
    todo: list[Any] = [main.__dict__]
    while todo:
        names = todo.pop()
        file = names.get("__file__")
        if not isinstance(file, str) or file in files or owner(file) is not Owner.USER:
            continue
        files[file] = None
        for value in list(names.values()):
            if isinstance(value, ModuleType):
                todo.append(value.__dict__)
            elif isinstance(value, type):
                todo.extend(f.__globals__ for f in list(vars(value).values()) if isinstance(f, FunctionType))
            elif isinstance(value, FunctionType):
                todo.append(value.__globals__)
    return list(files)


class _Scan:
    """Possible values of names in all files."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._values: dict[str, list[ast.expr | None]] = {}
        """Name, attribute or `function()` -> all that is assigned to it; None: something else."""
        self._functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        self._calls: list[ast.Call] = []
        self._tainted: set[str] = set()

    def define(self, tree: ast.Module) -> None:
        _name_scopes(tree, [])
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                self._assign(node.target, node.value)
            elif isinstance(node, ast.AugAssign):
                self._assign(node.target, node.value, None)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
                self._assign(node.target, None)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._functions.setdefault(node.name, []).append(node)
                for each in ast.walk(node):
                    if isinstance(each, ast.Return) and each.value is not None:
                        self._values.setdefault(f"{node.name}()", []).append(each.value)
            elif isinstance(node, ast.ClassDef):
                starts = [e for e in node.body if isinstance(e, ast.FunctionDef) and e.name == "__init__"]
                self._functions.setdefault(node.name, []).extend(starts)
            elif isinstance(node, ast.Call):
                self._calls.append(node)

    def _assign(self, target: ast.expr, *values: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            whole = values[0]
            parts = whole.elts if isinstance(whole, ast.Tuple | ast.List) else []
            for i, part in enumerate(target.elts):
                self._assign(part, *([parts[i]] if len(parts) == len(target.elts) else [whole, None]))
        elif isinstance(target, ast.Subscript):
            self._assign(target.value, *values, None)
        elif (key := _key(target)) is not None:
            self._values.setdefault(key, []).extend(values)

    def spread(self) -> None:
        """Find all names that may contain a rank's number."""
        for call in self._calls:
            for function in self._functions.get(_called(call), ()):
                self._give(function, call)
        grows = True
        while grows:
            new = {
                key
                for key, values in self._values.items()
                if key not in self._tainted and any(v is not None and self._holds(v) for v in values)
            }
            self._tainted |= new
            grows = bool(new)

    def _give(self, function: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call) -> None:
        """Pass the arguments of *call* to the parameters of *function*, and the defaults to the others."""
        parameters = [*function.args.posonlyargs, *function.args.args]
        defaults: list[ast.expr | None] = [None] * (len(parameters) - len(function.args.defaults))
        given = dict(zip((p.arg for p in parameters), [*defaults, *function.args.defaults], strict=True))
        given |= zip((p.arg for p in function.args.kwonlyargs), function.args.kw_defaults, strict=True)
        names = [name for name in given if name not in ("self", "cls")]
        given |= dict(zip(names, call.args, strict=False))
        given |= {word.arg: word.value for word in call.keywords if word.arg in given}
        for name, value in given.items():
            self._values.setdefault(f"{_scope(function)}{name}", []).append(value)

    # -- what holds a rank

    def _holds(self, node: ast.expr) -> bool:
        """Return whether the value of *node* may depend on the rank.

        The result of a comparison does not count, because the comparison has its own line.
        """
        if _source(node) in _RANKS or _in_group(node):
            return True
        if isinstance(node, ast.Name | ast.Attribute):
            return _key(node) in self._tainted
        if isinstance(node, ast.BinOp):
            return self._holds(node.left) or self._holds(node.right)
        if isinstance(node, ast.UnaryOp):
            return not isinstance(node.op, ast.Not) and self._holds(node.operand)
        if isinstance(node, ast.IfExp):
            return self._holds(node.body) or self._holds(node.orelse)
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return any(self._holds(part) for part in node.elts)
        if isinstance(node, ast.Starred | ast.NamedExpr | ast.Subscript):
            return self._holds(node.value)
        if isinstance(node, ast.Call):
            name = _called(node)
            if name in _KEEPS or name in _CHOOSES:
                return any(self._holds(value) for value in _arguments(node))
            return f"{name}()" in self._tainted
        return False

    def uses(self, file: str, tree: ast.Module) -> Iterator[RankUse]:
        lines: set[tuple[int, str]] = set()
        for node, how in self._places_of_use(tree):
            if (node.lineno, how) in lines:
                continue
            lines.add((node.lineno, how))
            text = " ".join(ast.unparse(node).split())
            text = text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
            outcomes = self._outcomes(node) if how == "a test" else None
            if outcomes is None or len(set(outcomes)) > 1:
                yield RankUse(f"{file}:{node.lineno}", text, how, outcomes)

    def _places_of_use(self, node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _called(node) in _HARMLESS):
            return
        yield from self._uses_of(node)
        for child in ast.iter_child_nodes(node):
            yield from self._places_of_use(child)

    def _uses_of(self, node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
        if isinstance(node, ast.Call):
            name = _called(node)
            if name in _CHOOSES and self._holds(node):
                yield node, "a test"
            elif name not in _KEEPS and name not in self._functions and any(map(self._holds, _arguments(node))):
                yield node, f"an argument of {name or 'a call'}"
        elif isinstance(node, ast.Compare):
            if any(map(self._holds, (node.left, *node.comparators))):
                yield node, "a test"
        elif isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield from self._truths(node.test)
        elif isinstance(node, ast.comprehension | ast.BoolOp):
            for test in node.ifs if isinstance(node, ast.comprehension) else node.values:
                yield from self._truths(test)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _source(node) is None:
            if any(self._holds(part) for part in ast.walk(node.slice) if isinstance(part, ast.expr)):
                yield node, "an index"
        elif isinstance(node, ast.JoinedStr | ast.BinOp) and self._writes(node):
            yield node, "text"

    def _writes(self, node: ast.JoinedStr | ast.BinOp) -> bool:
        """Return whether *node* formats a rank as text that is not the name of a device."""
        if isinstance(node, ast.BinOp):
            is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
            return is_text and isinstance(node.op, ast.Mod) and self._holds(node.right)
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and str(first.value).startswith("cuda"):
            return False
        return any(self._holds(part.value) for part in node.values if isinstance(part, ast.FormattedValue))

    def _truths(self, test: ast.expr) -> Iterator[tuple[ast.expr, str]]:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield from self._truths(test.operand)
        elif not isinstance(test, ast.Compare | ast.BoolOp) and self._holds(test):
            yield test, "a test"

    # -- what a test says on each rank

    def _outcomes(self, test: ast.expr) -> tuple[bool, ...] | None:
        try:
            return tuple(bool(self._value(test, position, 0)) for position in self._places)
        except Exception:  # whatever the program's own expression may raise
            return None

    def _value(self, node: ast.expr, position: Place, depth: int) -> Any:
        source = _source(node)
        if source is not None:
            return position[source]
        if depth > 40:
            raise Unknown
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return [self._value(part, position, depth + 1) for part in node.elts]
        if isinstance(node, ast.Name | ast.Attribute):
            return self._only(_key(node) or "", position, depth)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            left, right = (self._value(part, position, depth + 1) for part in (node.left, node.right))
            return _BINARY[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp):
            value = self._value(node.operand, position, depth + 1)
            return not value if isinstance(node.op, ast.Not) else -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.Compare):
            values = [self._value(part, position, depth + 1) for part in (node.left, *node.comparators)]
            return all(_BINARY[type(o)](a, b) for o, a, b in zip(node.ops, values, values[1:], strict=False))
        if isinstance(node, ast.Call) and not _in_group(node):
            name = _called(node)
            if name == "int" and len(node.args) == 1:
                return int(self._value(node.args[0], position, depth + 1))
            if name in self._functions and not _arguments(node):
                return self._only(f"{name}()", position, depth)
        raise Unknown

    def _only(self, key: str, position: Place, depth: int) -> Any:
        """Return the value of the name *key* if all its assignments agree."""
        values = self._values.get(key, [])
        if not values or len(values) > 8 or any(value is None for value in values):
            raise Unknown
        values_found = [self._value(value, position, depth + 1) for value in values if value is not None]
        if any(value != values_found[0] for value in values_found):
            raise Unknown
        return values_found[0]


def _name_scopes(node: ast.AST, scopes: list[tuple[str, set[str]]]) -> None:
    """Mark the local names of each function in *node*; `_key` reads the marks."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        arguments = node.args
        own = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        shared: set[str] = set()
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                own.add(each.id)
            elif isinstance(each, ast.Global | ast.Nonlocal):
                shared.update(each.names)
        scopes = [*scopes, (_scope(node), own - shared)]
    elif isinstance(node, ast.Name):
        node.scope = next((mark for mark, own in reversed(scopes) if node.id in own), "")  # type: ignore[attr-defined]
    for child in ast.iter_child_nodes(node):
        _name_scopes(child, scopes)


def _scope(function: ast.AST) -> str:
    return f"{id(function)}."


def _key(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return getattr(node, "scope", "") + node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) else None


def _called(call: ast.Call) -> str:
    return _last(call.func)


def _last(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(word.value for word in call.keywords)]


def _source(node: ast.expr) -> str | None:
    """Return the variable of torchrun that *node* asks for: `dist.get_rank()`, `os.environ["RANK"]`,
    `os.getenv("RANK")`.
    """
    name: Any = None
    if isinstance(node, ast.Call):
        called = _called(node)
        if called in _ASK and not _arguments(node):
            return _ASK[called]
        if (called == "getenv" or (called == "get" and _is_environ(node.func))) and node.args:
            name = node.args[0]
    elif isinstance(node, ast.Subscript) and _is_environ(node):
        name = node.slice
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return None
    known = _ALIASES.get(name.value, name.value)
    return known if known in _RANKS or known in _SIZES else None


def _is_environ(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript | ast.Attribute) and _last(node.value) == "environ"


def _in_group(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _called(node) in _ASK_IN_GROUP and _source(node) is None


# -- Which ranks of a job stand for the others, once it is too large to trace every one.
#
# A training job's ranks differ in their data, not in what they do with it. A sample is traced: the first and the last
# of each kind, and of a single kind one from its middle, so that there are two against one where they differ. In a
# collective the first of a kind arrives for those of its kind that are not traced. Nothing is known of these, and
# nothing is said of them (`Traced.not_traced`): that they would do the same is an assumption of the figures, not of
# the verdict. Ranks that send to each other are kinds by their places in their groups (pipeline stages).


class StartAgain(BaseException):
    """Raised to restart the run with another sample of its ranks."""

    def __init__(self, sample: Sample, why: str) -> None:
        super().__init__(why)
        self.sample = sample
        self.why = why


class Unlike(Exception):
    """Raised if no traced member of a group is of the same kind as some other member."""


@dataclass(slots=True)
class RankTrace:
    """History of a rank as numbers, which are equal for ranks that did the same."""

    operators: int = 0
    everything: int = 0
    """Checksum of its operators and calls."""
    calls: int = 0
    """Checksum of its calls alone."""
    values: list[int] = field(default_factory=list)
    """Checksums of the known values that the rank passed to its collectives."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Both checksums at the end of each optimizer step."""

    def add_operator(self, number: int | None) -> None:
        self.operators += 1
        if number is not None:
            self.everything = hash((self.everything, number))

    def add_call(self, record: CallRecord, inputs: Sequence[torch.Tensor] | None) -> None:
        """Add a call to the checksum. *inputs* are its values, if they are known."""
        call = record.op, record.nbytes, len(record.group.ranks)
        self.everything, self.calls = hash((self.everything, call)), hash((self.calls, call))
        if not inputs or record.op in P2P:
            return
        total = 0
        for tensor in inputs:
            total = zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
        self.values.append(total)

    def end_step(self) -> None:
        self.steps.append((self.everything, self.calls))


class Sample:
    """The ranks that are traced, by the *kinds* of all: ranks of one kind are assumed to do the same."""

    def __init__(self, kinds: Sequence[int], reasons: Sequence[str] = ()) -> None:
        self.kinds = list(kinds)
        self.reasons = list(reasons)
        """Reasons why the ranks are of several kinds."""
        members: dict[int, list[int]] = {}
        for rank, kind in enumerate(kinds):
            members.setdefault(kind, []).append(rank)
        self.by_kind: dict[int, list[int]] = {}
        """Traced ranks of each kind. The first one represents the ranks of the kind that are not traced."""
        for kind, ranks in members.items():
            chosen = [ranks[0], ranks[-1]] if len(members) > 1 else [ranks[0], ranks[len(ranks) // 2], ranks[-1]]
            self.by_kind[kind] = list(dict.fromkeys(chosen))
        self.sizes = {kind: len(ranks) for kind, ranks in members.items()}
        """Number of ranks of each kind."""
        self.traced = frozenset(rank for ranks in self.by_kind.values() for rank in ranks)

    def split(self, places: dict[int, int], why: str) -> Sample:
        """Return a sample in which ranks with different *places* are of different kinds.

        A place is the index of a rank in a group, or -1 outside it.
        """
        pairs = [(kind, places.get(rank, -1)) for rank, kind in enumerate(self.kinds)]
        return Sample(_numbered(pairs), [*self.reasons, why])

    def leave_middle_out(self) -> None:
        """Trace the first and the last rank of a single kind only, as for a few steps that compare many layouts: the
        third decides which of two ranks that differ is the usual one, and costs as much as each of them.
        """
        for kind, ranks in self.by_kind.items():
            self.by_kind[kind] = [ranks[0], ranks[-1]] if len(ranks) > 2 else ranks
        self.traced = frozenset(rank for ranks in self.by_kind.values() for rank in ranks)

    def add(self, ranks: Sequence[int]) -> None:
        """Trace *ranks*, too."""
        for rank in ranks:
            if rank not in self.by_kind[self.kinds[rank]]:
                self.by_kind[self.kinds[rank]].append(rank)
        self.traced |= frozenset(ranks)

    def leave_to(self, kind: int, leader: int) -> None:
        """Let *leader* represent the ranks of *kind* that are not traced."""
        ranks = self.by_kind[kind]
        ranks.remove(leader)
        ranks.insert(0, leader)

    def standing_for(self, members: Sequence[int]) -> list[int]:
        """Return for each member of a group the index of the member that arrives for it: itself or a traced member of
        its kind. Raises Unlike with the first member without one."""
        places = {rank: position for position, rank in enumerate(members)}
        by_kind: dict[int, int] = {}
        for kind, ranks in self.by_kind.items():
            position = next((places[rank] for rank in ranks if rank in places), None)
            if position is not None:
                by_kind[kind] = position
        stands = []
        for position, rank in enumerate(members):
            if rank in self.traced:
                stands.append(position)
            elif self.kinds[rank] in by_kind:
                stands.append(by_kind[self.kinds[rank]])
            else:
                raise Unlike(rank)
        return stands

    def stands_for(self, rank: int) -> list[int]:
        """Return the ranks that *rank* represents, including itself."""
        others = self.by_kind[self.kinds[rank]]
        if rank != others[0]:
            return [rank]
        kind = self.kinds[rank]
        return [r for r, its in enumerate(self.kinds) if r == rank or (its == kind and r not in self.traced)]

    def complete(self, groups: Sequence[Sequence[int]], sending: Sequence[Sequence[int]]) -> None:
        """Trace who is needed in *groups* that have a traced member: all of those whose members send to each other,
        and in others a rank of each kind."""
        grows = True
        while grows:
            before = len(self.traced)
            for members in groups:
                if self.traced.isdisjoint(members):
                    continue
                here = {self.kinds[rank] for rank in members if rank in self.traced}
                self.add([rank for rank in members if self.kinds[rank] not in here])
            for members in sending:
                if not self.traced.isdisjoint(members):
                    self.add(members)
            grows = len(self.traced) > before


def kinds_by_place(world_size: int, sending: Sequence[tuple[tuple[int, ...], str]]) -> Sample:
    """Return the sample of a job in which the members of each group of *sending* (ranks, label) send to each other."""
    sample = Sample([0] * world_size)
    for family in families([ranks for ranks, _ in sending]):
        label = next(label for ranks, label in sending if ranks == family[0])
        places = {rank: position for ranks in family for position, rank in enumerate(ranks)}
        sample = sample.split(places, f"its position in groups such as {label}")
    return sample


def families(groups: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Return *groups* in sets of one size without common ranks (all pipelines, all data-parallel groups of a job).

    Groups of several sizes may take turns, as where a program makes the groups of a pipeline and then those of the
    next one.
    """
    result: list[list[tuple[int, ...]]] = []
    latest: dict[int, tuple[list[tuple[int, ...]], set[int]]] = {}
    for group in groups:
        family, used = latest.get(len(group), ([], set(group)))
        if not used.isdisjoint(group):
            family, used = [], set()
            latest[len(group)] = family, used
            result.append(family)
        family.append(group)
        used.update(group)
    return result


def _numbered(pairs: Sequence[tuple[int, int]]) -> list[int]:
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault(pair, len(numbers)) for pair in pairs]
