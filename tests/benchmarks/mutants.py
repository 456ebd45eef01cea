"""Mutants that the tests kill: one change of the code at a time, and the share of changes that some test notices.

    python -m tests.benchmarks.mutants [FOLDER ...] [--sample N] [--seed N] [--only PATTERN]

Peer: none. Aim: 85 % killed in each folder.

A change is made in memory: a comparison turned round or moved by one, an operator exchanged, `and` for `or`, `min` for
`max`, a `not` or a minus left out, a number one more. For each the tests that pass over its statement are run, in a
process that has imported torch already and has a limit of time and memory; where no test passes, the change survives.
Without --sample every change is tried, which takes hours. What no test notices is printed with its line.
"""

from __future__ import annotations

import ast
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.arguments import Arguments, count, known

__all__ = ["FOLDERS", "Mutant", "main", "mutants_of", "mutated"]

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "debug/diagnosis": "tests/debug tests/silent",
    "debug/divergence": "tests/debug",
    "debug/matching": "tests/debug tests/realexec/test_compare.py tests/realexec/test_compare_p2p.py",
    "distsim/kernels": "tests/kernels",
    "distsim/collectives": "tests/collectives",
    "distsim/sim/device/allocator": "tests/device/test_allocator.py tests/device/test_ledger.py "
    "tests/device/test_claims.py tests/device/test_host_memory.py tests/device/test_memory_history.py "
    "tests/device/test_memory_of_calls.py tests/sim/test_training.py",
}
"""The code, and the tests that are to notice its changes."""
CPU_S, BYTES = 120, 8 << 30
"""What a mutant may take before it counts as killed; --timeout ends one that only waits."""
PYTEST = "-q -x -n 0 --timeout 30 -p no:cacheprovider --no-header -r f --tb no -m".split()  # noqa: SIM905
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
    """Yield the changes of code that runs, with the first line of the statement and the line. Annotations, decorators
    and what is for type checkers are left out."""
    first = tree.lineno if isinstance(tree, ast.stmt) else first
    for change in _changes(tree):
        yield first, getattr(tree, "lineno", first), change
    for name, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            for_checkers = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
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


def _tests_by_line(folder: str) -> dict[str, dict[int, set[str]]]:
    """Return the tests that pass over each line of each file; none for a line that runs at import only."""
    import coverage

    with tempfile.TemporaryDirectory() as place:
        words = f"--timeout 600 --cov {folder} --cov-context test --cov-report= {FOLDERS[folder]}".split()
        environment = {**os.environ, "COVERAGE_FILE": f"{place}/data"}
        command = [sys.executable, "-m", "pytest", *PYTEST, "not soak", *words]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(f"{folder}: its tests fail as they are\n{result.stdout}")
        data = coverage.CoverageData(f"{place}/data")
        data.read()
        by_file = {os.path.realpath(file): data.contexts_by_lineno(file) for file in data.measured_files()}
    return {
        file: {line: {test.partition("|")[0] for test in tests if test} for line, tests in lines.items()}
        for file, lines in by_file.items()
    }


def _survives(mutant: Mutant, tests_by_line: dict[int, set[str]], nearest: list[str]) -> bool:
    """Whether the tests that pass over its statement (at import: the *nearest*) pass with the change, in a child that
    begins with what this process has imported."""
    lines = [tests_by_line[line] for line in range(mutant.first, mutant.line + 1) if line in tests_by_line]
    if not lines:
        return True
    tests = sorted(set().union(*lines)) or nearest
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    import pytest

    plain = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> Any:
        path = str(self.get_filename(name))
        if os.path.realpath(path) != str(mutant.path):
            return plain(self, name)
        return compile(mutated(self.get_data(path), mutant.index), path, "exec")

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    silent = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(silent, number)
    os.chdir(ROOT)
    os._exit(int(pytest.main([*PYTEST, "not soak", *tests])))


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
        tests = _tests_by_line(folder)
        mutants = [mutant for path in sorted((ROOT / folder).rglob("*.py")) for mutant in mutants_of(path.resolve())]
        mutants = [mutant for mutant in mutants if re.search(args.only, f"{mutant.path}:{mutant.line}")]
        mutants = sorted(random.Random(args.seed).sample(mutants, min(args.sample or len(mutants), len(mutants))))
        num_killed = len(mutants)
        for mutant in mutants:
            if _survives(mutant, tests.get(str(mutant.path), {}), FOLDERS[folder].split()):
                num_killed -= 1
                line = mutant.path.read_text("utf-8").splitlines()[mutant.line - 1].strip()
                print(f"  {mutant.path.relative_to(ROOT)}:{mutant.line}: {mutant.text}: {line}", flush=True)
        share = num_killed / max(1, len(mutants))
        print(f"{folder}: {num_killed} of {len(mutants)} killed ({share:.0%})", flush=True)


if __name__ == "__main__":
    main()
