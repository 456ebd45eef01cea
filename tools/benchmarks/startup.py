"""How long the first word takes, and what a simulation costs whatever it simulates.

    python -m tools.benchmarks.startup [REPEATS]

Peer: a bare interpreter, import torch, pytest without distsim. Aim: the limit in each line.

Prints medians in CPU seconds (user and system, with children), all in one run, one after the other in turns, and exits
with 1 where one is over its limit. Modules are compiled beforehand, as an installed package's are.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.benchmarks.arguments import Arguments, count

REPEATS = 5
SCRIPT = """\
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""
LOOP = """\
import statistics, sys, time
import torch.distributed as dist
import distsim
def group():
    dist.init_process_group("gloo")
    dist.destroy_process_group()
for body in (lambda: None, group):
    for ranks in (2, 8):
        spent = []
        for _ in range(20):
            begin = time.process_time()
            distsim.simulate(body, nproc_per_node=ranks)
            spent.append(time.process_time() - begin)
        print(f"  {body.__name__:<8} {ranks} ranks   first {spent[0] * 1e3:6.1f} ms   "
              f"2nd to 20th {statistics.median(spent[1:]) * 1e3:6.1f} ms")
"""
TESTS = """\
import pytest
@pytest.mark.parametrize("number", range(100))
@pytest.mark.ranks(8)
def test_rank(rank, number):
    assert 0 <= rank < 8
"""
PYTHON = sys.executable
PYTEST = [PYTHON, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
COMMANDS = {
    "bare interpreter": [PYTHON, "-c", "pass"],
    "import distsim": [PYTHON, "-c", "import distsim"],
    "distsim --help": [PYTHON, "-m", "distsim", "--help"],
    "distsim topo list": [PYTHON, "-m", "distsim", "topo", "list"],
    "import torch": [PYTHON, "-c", "import torch"],
    "import torch.distributed": [PYTHON, "-c", "import torch, torch.distributed"],
    "distsim run, 2 ranks": [PYTHON, "-m", "distsim", "run", "--nproc-per-node", "2", "script.py"],
    "pytest, nothing to test": [*PYTEST, "--collect-only", "empty"],
    "the same without distsim": [*PYTEST, "--collect-only", "-p", "no:distsim.pytest_plugin", "empty"],
    "pytest, 1 test of 8 ranks": [*PYTEST, "test_ranks.py::test_rank[0]"],
    "pytest, 100 tests of 8 ranks": [*PYTEST, "test_ranks.py"],
}
LIMITS_S = (
    ("import distsim", "bare interpreter", 0.050),
    ("distsim --help", "bare interpreter", 0.300),
    ("distsim run, 2 ranks", "import torch", 0.400),
    ("pytest, nothing to test", "the same without distsim", 0.200),
)
"""The first may cost that much more than the second."""


def cpu_s(command: list[str], folder: Path, environ: dict[str, str]) -> float:
    """CPU seconds of a command and all that it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 5):  # 5: pytest found no test
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Print one line a figure; exit code 1 where one is over its limit."""
    parser = Arguments(__doc__)
    parser.add_argument("repeats", nargs="?", metavar="REPEATS", type=count, default=REPEATS)
    repeats = parser.parse_args().repeats
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        (folder / "test_ranks.py").write_text(TESTS)
        (folder / "empty").mkdir()
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environ.update(PYTHONPYCACHEPREFIX=str(folder / "compiled"), PYTHONPATH=str(root), OMP_NUM_THREADS="1")
        spent: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for turn in range(repeats + 1):
            for name, command in COMMANDS.items():
                took_s = cpu_s(command, folder, environ)
                if turn:  # the first one compiles
                    spent[name].append(took_s)
        medians = {name: statistics.median(times) for name, times in spent.items()}
        torch_s = medians["import torch"]
        for name, took_s in medians.items():
            print(f"{name:<30} {took_s:7.3f} s   {took_s / torch_s:5.2f} of import torch")
        one, many = medians["pytest, 1 test of 8 ranks"], medians["pytest, 100 tests of 8 ranks"]
        print(f"{'a test of 8 ranks':<30} {(many - one) / 99:7.3f} s")
        print("simulations of one process:", flush=True)
        subprocess.run([PYTHON, "-c", LOOP], cwd=folder, env=environ, check=True)
    slow = False
    for name, than, limit_s in LIMITS_S:
        more_s = medians[name] - medians[than]
        slow |= more_s > limit_s
        print(f"{name}: {more_s:+.3f} s to {than} (limit {limit_s:.3f} s)")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
