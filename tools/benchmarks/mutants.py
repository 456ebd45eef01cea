"""Mutants that the tests kill: one change of the code at a time, and the share of changes that some test notices.

    python -m tools.benchmarks.mutants [FOLDER ...] [--sample N] [--seed N] [--only PATTERN]

Peer: none. Aim: 85 % killed in each folder.

A change is made in memory: a comparison turned round or moved by one, an operator exchanged, `and` for `or`, `min` for
`max`, a `not` or a minus left out, a number one more. For each the tests that pass over its statement are run, those
of few lines first, in a process that has collected all tests already and has a limit of time and memory; where no test
passes, the change survives. A change of what runs at import needs a process that imports anew. Without --sample every
change is tried, which takes hours. What no test notices is printed with its line.

Scores of 2026-11-28, random samples, each mutant with at most 6 to 15 seconds of tests and no goldens of whole
programs, without changes at import, so that these are lower bounds: debug/diagnosis 85 of 99 (--seed 51),
debug/matching 105 of 119 (31), distsim/kernels 56 of 62 (21), distsim/collectives 83 of 93 (41),
distsim/sim/device/allocator 52 of 61 (61).
"""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from tools.benchmarks.arguments import Arguments, count, known

__all__ = ["FOLDERS", "Mutant", "main", "mutants_of", "mutated"]

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "debug/diagnosis": "tests/debug tests/silent",
    "debug/divergence": "tests/debug",
    "debug/matching": "tests/debug tests/realexec/test_compare.py tests/realexec/test_compare_p2p.py",
    "distsim/kernels": "tests/kernels",
    "distsim/collectives": "tests/collectives tests/calibration/test_predictions.py "
    "tests/calibration/test_step_intervals.py",
    "distsim/sim/device/allocator": "tests/device/test_allocator.py tests/device/test_ledger.py "
    "tests/device/test_claims.py tests/device/test_host_memory.py tests/device/test_memory_history.py "
    "tests/device/test_memory_of_calls.py tests/sim/test_training.py",
}
"""The code, and the tests that are to notice its changes."""
CPU_S, BYTES = 120, 8 << 30
"""What a mutant may take before it counts as killed; --timeout ends one that only waits."""
PYTEST = "-q -x -n 0 --dist no --timeout 30 -p no:cacheprovider --no-header -r f --tb no -m".split()  # noqa: SIM905
PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    (ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot),
    (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.USub, ast.UAdd),
]  # fmt: skip
EXCHANGED: dict[Any, Any] = {**dict(PAIRS), **{right: left for left, right in PAIRS}, ast.FloorDiv: ast.Mult}
MOVED: dict[Any, Any] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
Change = tuple[str, ast.AST, str, Any]
"""In words; whose attribute, its name and its new value."""


class Mutant(NamedTuple):
    """The change number *index* of a file."""

    path: Path
    index: int
    first: int
    """Line in which its statement begins."""
    line: int
    text: str


def _changes(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        op, right = type(node.ops[0]), node.comparators[0]
        is_whole = isinstance(right, ast.Constant) and type(right.value) is int
        for new in [EXCHANGED[op], *([MOVED[op]] if op in MOVED and is_whole else [])]:
            yield f"{op.__name__} -> {new.__name__}", node, "ops", [new()]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node, "operand", ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign | ast.UnaryOp) and type(node.op) in EXCHANGED:
        yield type(node.op).__name__, node, "op", EXCHANGED[type(node.op)]()
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
        yield node.func.id, node.func, "id", NAMES[node.func.id]
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        yield str(node.value), node, "value", not node.value if type(node.value) is bool else int(node.value) + 1


def _changes_of(tree: ast.AST, first: int = 1) -> Iterator[tuple[int, int, Change]]:
    """Yield the changes of code that runs, with the first line of the statement and the line. Annotations, decorators,
    what is for type checkers, and the check of lengths in `zip(strict=True)` are left out."""
    first = tree.lineno if isinstance(tree, ast.stmt) else first
    for change in _changes(tree):
        yield first, getattr(tree, "lineno", first), change
    for name, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            for_checkers = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            for_checkers |= isinstance(child, ast.keyword) and child.arg == "strict"
            if isinstance(child, ast.AST) and not for_checkers and name not in ("annotation", "decorator_list"):
                yield from _changes_of(child, first)


def mutants_of(path: Path) -> list[Mutant]:
    """Every change of a file."""
    changes = _changes_of(ast.parse(path.read_text("utf-8")))
    return [Mutant(path, index, first, line, change[0]) for index, (first, line, change) in enumerate(changes)]


def mutated(data: bytes | str, index: int) -> ast.Module:
    """The code *data* with its change number *index*."""
    tree = ast.parse(data)
    _, owner, name, value = list(_changes_of(tree))[index][2]
    setattr(owner, name, value)
    return ast.fix_missing_locations(tree)


def _functions(code: CodeType, inside: str = "") -> dict[tuple[str, int], CodeType]:
    """Return the outermost functions of a module's or a class's code, by name and line."""
    functions: dict[tuple[str, int], CodeType] = {}
    for part in code.co_consts:
        if isinstance(part, CodeType):
            is_class = "__module__" in part.co_names and "__qualname__" in part.co_names
            functions |= _functions(part) if is_class else {(part.co_qualname, part.co_firstlineno): part}
    return functions


def changed_function(mutant: Mutant) -> tuple[tuple[str, int], CodeType] | None:
    """Return name and line, and the changed code, of the one function that a change is in; None at import."""
    data, path = mutant.path.read_bytes(), str(mutant.path)
    old, new = (_functions(compile(tree, path, "exec")) for tree in (ast.parse(data), mutated(data, mutant.index)))
    changed = [key for key in new if old.get(key) != new[key]]
    begins = {key[1] for key in new}
    return (changed[0], new[changed[0]]) if len(changed) == 1 and len(begins) == len(new) else None


class _Coverage:
    """The tests that pass over each line of each file; none for a line that runs at import only."""

    def __init__(self, tests: dict[str, dict[int, set[str]]]) -> None:
        self._tests = tests
        self._num_lines = Counter(test for lines in tests.values() for several in lines.values() for test in several)

    def of(self, mutant: Mutant, nearest: list[str]) -> list[str]:
        """Return the tests that pass over a statement, those of few lines first; *nearest* for one at import."""
        tests_by_line = self._tests.get(str(mutant.path), {})
        lines = [tests_by_line[line] for line in range(mutant.first, mutant.line + 1) if line in tests_by_line]
        tests = sorted(set().union(*lines), key=lambda test: (self._num_lines[test], test))
        return tests or (nearest if lines else [])


def _coverage_of(folder: str) -> _Coverage:
    """Run the tests of a folder as they are."""
    import coverage

    with tempfile.TemporaryDirectory() as place:
        words = f"--timeout 600 --cov {folder} --cov-context test --cov-report= {FOLDERS[folder]}"
        environment = {**os.environ, "COVERAGE_FILE": f"{place}/data"}
        command = [sys.executable, "-m", "pytest", *PYTEST, "not soak", *words.split()]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(f"{folder}: its tests fail as they are\n{result.stdout}")
        data = coverage.CoverageData(f"{place}/data")
        data.read()
        by_file = {os.path.realpath(file): data.contexts_by_lineno(file) for file in data.measured_files()}
    return _Coverage(
        {
            file: {line: {test.partition("|")[0] for test in tests if test} for line, tests in lines.items()}
            for file, lines in by_file.items()
        }
    )


def _passes(check: Callable[..., bool], *args: Any) -> bool:
    """Return whether *check(*args)* holds in a child, which begins with what this process has imported."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    used_s = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + CPU_S, used_s + CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    silent = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(silent, number)
    os.chdir(ROOT)
    try:
        os._exit(0 if check(*args) else 1)
    finally:
        os._exit(2)


def _passes_anew(mutant: Mutant, tests: list[str]) -> bool:
    """Return whether *tests* pass where the changed file is imported."""
    import pytest

    plain = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> Any:
        path = str(self.get_filename(name))
        if os.path.realpath(path) != str(mutant.path):
            return plain(self, name)
        return compile(mutated(self.get_data(path), mutant.index), path, "exec")

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
    for name in [name for name in sys.modules if name.startswith(("distsim", "tests.", "tools."))]:
        del sys.modules[name]
    return pytest.main([*PYTEST, "not soak", *tests]) == 0


class _Loop:
    """Plugin of pytest that runs, for each change of a function, some of the collected tests."""

    def __init__(self, tests_of: dict[Mutant, list[str]]) -> None:
        self._tests_of = tests_of
        self.survivors: list[Mutant] = []

    def pytest_runtestloop(self, session: Any) -> bool:
        items = {item.nodeid: item for item in session.items}
        live: dict[tuple[str, tuple[str, int]], list[FunctionType]] = {}
        for function in gc.get_objects():
            if type(function) is FunctionType:
                code = function.__code__
                live.setdefault((code.co_filename, (code.co_qualname, code.co_firstlineno)), []).append(function)
        files = {name: os.path.realpath(name) for name, _ in live}
        gc.freeze()
        for mutant, tests in self._tests_of.items():
            key, code = changed_function(mutant) or (("", 0), None)
            functions = [
                one
                for (name, its_key), several in live.items()
                if its_key == key and files[name] == str(mutant.path)
                for one in several
            ]
            if _passes(self._run, functions, code, [items[test] for test in tests if test in items]):
                self.survivors.append(mutant)
        return True

    @staticmethod
    def _run(functions: list[FunctionType], code: Any, items: list[Any]) -> bool:
        from _pytest.runner import runtestprotocol

        for function in functions:
            function.__code__ = code
        pairs = zip(items, [*items[1:], None], strict=True)
        return all(not r.failed for item, after in pairs for r in runtestprotocol(item, log=False, nextitem=after))


def main() -> None:
    """Print the score of each folder."""
    parser = Arguments(__doc__)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", type=known(FOLDERS), help="default: all")
    parser.add_argument("--sample", type=count, metavar="N", help="so many changes of each folder, by chance")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only changes whose FILE:LINE it matches")
    args = parser.parse_args()
    import networkx, numpy, pydantic, pytest, rich, simpy, torch.distributed  # noqa: E401, F401, I001 - for all children

    for folder in args.folders or FOLDERS:
        nearest, coverage = FOLDERS[folder].split(), _coverage_of(folder)
        mutants = [mutant for path in sorted((ROOT / folder).rglob("*.py")) for mutant in mutants_of(path.resolve())]
        mutants = [mutant for mutant in mutants if re.search(args.only, f"{mutant.path}:{mutant.line}")]
        mutants = sorted(random.Random(args.seed).sample(mutants, min(args.sample or len(mutants), len(mutants))))
        tests_of = {mutant: coverage.of(mutant, nearest) for mutant in mutants}
        survivors = [mutant for mutant, tests in tests_of.items() if not tests]
        at_import = [mutant for mutant in mutants if tests_of[mutant] and changed_function(mutant) is None]
        survivors += [mutant for mutant in at_import if _passes(_passes_anew, mutant, tests_of[mutant])]
        loop = _Loop({mutant: tests for mutant, tests in tests_of.items() if tests and mutant not in at_import})
        with open(os.devnull, "w") as silent, contextlib.redirect_stdout(silent):
            pytest.main([*PYTEST, "not soak", *nearest], plugins=[loop])
        for mutant in sorted([*survivors, *loop.survivors]):
            line = mutant.path.read_text("utf-8").splitlines()[mutant.line - 1].strip()
            print(f"  {mutant.path.relative_to(ROOT)}:{mutant.line}: {mutant.text}: {line}", flush=True)
        num_killed = len(mutants) - len(survivors) - len(loop.survivors)
        share = num_killed / max(1, len(mutants))
        print(f"{folder}: {num_killed} of {len(mutants)} killed ({share:.0%})", flush=True)


if __name__ == "__main__":
    main()
