"""torch's own RPC, distributed autograd and distributed optimizer tests, simulated or on real TensorPipe.

    python -m tests.rpc.torch_classes [--real] [--why] [--tensorpipe FILE] [PATTERN ...]

One line a test: how it ended. With --tensorpipe FILE (what --real printed), the last line says how many of those that
pass there pass simulated. A real test is forked from this process (no import), a simulated one runs in it.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.util
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
    stand_in = types.ModuleType("expecttest")  # torch's test base names it; these classes never use it
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in

HOME = types.ModuleType("torch_rpc_cases")
"""Where pickles find the classes: in a rank, `__main__` is the program's."""
sys.modules[HOME.__name__] = HOME

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
LIMIT_S = 100.0


BODIES = "torch.testing._internal.distributed"


def modules() -> dict[str, str]:
    """Name -> module of each test class of torch's test_tensorpipe_agent.py."""
    utils = importlib.import_module(f"{BODIES}.rpc_utils")
    cases = (*utils.GENERIC_TESTS, *utils.TENSORPIPE_TESTS)
    return {case.__name__: case.__module__ for case in cases}


def made(kind: str, module: str) -> Any:
    """The test class *kind* with its agent. Imports only what it needs: each rank does."""
    fixtures = importlib.import_module(f"{BODIES}.rpc.tensorpipe_rpc_agent_test_fixture")
    fixture = fixtures.TensorPipeRpcAgentTestFixture
    base = importlib.import_module("torch.testing._internal.common_distributed").MultiProcessTestCase
    case = type(kind, (getattr(importlib.import_module(module), kind), fixture, base), {"__module__": HOME.__name__})
    setattr(HOME, kind, case)
    return case


def cases(patterns: list[str]) -> Iterator[tuple[str, int, str]]:
    """`Class.test_name`, number of ranks and module of every test that no GPU is needed for."""
    loader = unittest.TestLoader()
    for kind, module in modules().items():
        case = made(kind, module)
        for name in loader.getTestCaseNames(case):
            full = f"{kind}.{name}"
            if not patterns or any(fnmatch.fnmatch(full, f"*{pattern}*") for pattern in patterns):
                yield full, int(case(name).world_size), module


def run_rank(name: str, module: str, rank: int, file_name: str) -> str:
    """What one rank does."""
    kind, _, method = name.partition(".")
    case = made(kind, module)(method)
    case.rank, case.file_name = rank, file_name
    try:
        getattr(case, method)()
    except unittest.SkipTest:
        return SKIPPED
    except SystemExit as end:  # torch's skip decorators end the process
        return SKIPPED if end.code else PASSED
    return PASSED


def simulated(name: str, size: int, module: str) -> tuple[str, str]:
    """How it ended, and why."""
    import distsim

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = str(Path(folder) / "store")
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                outcome = distsim.simulate(
                    _simulated_rank, on=f"ethernet-cpu:{size}", nproc_per_node=1, args=(name, module, path), check=False
                )
            except BaseException:  # ours
                return FAILED, traceback.format_exc()
    results = outcome.results
    if outcome.exit_code == 0 and all(results):
        return (SKIPPED if SKIPPED in results else PASSED), ""
    why = "\n".join(failure.traceback for failure in outcome.failures)
    why += "\n".join(str(diagnosis.explanation) for diagnosis in outcome.diagnoses)
    return FAILED, why


def _simulated_rank(name: str, module: str, path: str) -> str:
    return run_rank(name, module, int(os.environ["RANK"]), path)


def real(name: str, size: int, module: str) -> tuple[str, str]:
    """The same in forked processes."""
    with tempfile.TemporaryDirectory() as folder:
        path, log = str(Path(folder) / "store"), Path(folder) / "log"
        children = [_forked(name, module, rank, path, log) for rank in range(size)]
        codes: dict[int, int] = {}
        give_up = time.monotonic() + LIMIT_S
        while len(codes) < len(children) and time.monotonic() < give_up:
            for child in children:
                if child not in codes:
                    pid, status = os.waitpid(child, os.WNOHANG)
                    if pid:
                        codes[child] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        for child in children:
            if child not in codes:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[child] = -9
        ended = set(codes.values())
        if ended == {0}:
            return PASSED, ""
        return (SKIPPED, "") if ended == {77} else (FAILED, f"{codes}\n{log.read_text()[-3000:]}")


def _forked(name: str, module: str, rank: int, path: str, log: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = 77 if run_rank(name, module, rank, path) == SKIPPED else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rpc.torch_classes")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--list", action="store_true", help="names and world sizes")
    parser.add_argument("--why", action="store_true", help="also print tracebacks")
    parser.add_argument("--tensorpipe", type=Path)
    parser.add_argument("patterns", nargs="*")
    asked = parser.parse_args(argv)
    ended: dict[str, str] = {}
    if asked.list or asked.real:
        found = list(cases(asked.patterns))
    else:  # in a process of their own: here each rank imports them for itself
        told_there = [sys.executable, "-m", "tests.rpc.torch_classes", "--list", *asked.patterns]
        listed = subprocess.run(told_there, capture_output=True, text=True, check=True).stdout.split()
        found = [(name, int(size), module) for name, size, module in zip(*[iter(listed)] * 3, strict=True)]
    if asked.list:
        print("\n".join(f"{name} {size} {module}" for name, size, module in found))
        return 0
    for name, size, module in found:
        begun = time.monotonic()
        how, why = (real if asked.real else simulated)(name, size, module)
        ended[name] = how
        print(f"{how:8}{name}  {time.monotonic() - begun:.1f} s", flush=True)
        if asked.why and why:
            print(why, flush=True)
    told = {how: sum(value == how for value in ended.values()) for how in (PASSED, FAILED, SKIPPED)}
    print(", ".join(f"{number} {how}" for how, number in told.items()))
    if asked.tensorpipe is not None:
        lines = [line.split() for line in asked.tensorpipe.read_text().splitlines()]
        there = [line[1] for line in lines if line and line[0] == PASSED and line[1] in ended]
        here = [name for name in there if ended[name] == PASSED]
        share = f" ({100 * len(here) / len(there):.1f} %)" if there else ""
        print(f"{len(here)} of {len(there)} that pass on TensorPipe pass simulated{share}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
