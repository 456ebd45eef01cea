"""What comes from outside is read through distsim/text/untrusted_input; other reads are listed with a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.tree import CODE, ROOT, nodes_of, python_files

pytestmark = pytest.mark.xdist_group("syntax trees")  # which every process would parse for itself

DOOR = ROOT / "distsim/text/untrusted_input.py"
METHODS = {"read_text", "read_bytes"}
PARSERS = {
    *("json.load", "json.loads", "tomllib.load", "tomllib.loads", "pickle.load", "pickle.loads", "np.load"),
    *("linecache.getline", "linecache.getlines", "tokenize.open", "gzip.open", "os.open"),
}
OF_THE_SYSTEM = ("'/proc/", "'/sys/", "Path('/proc", "os.devnull")


def reads(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, function and source of every call that opens or parses what may come from outside."""
    inside = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and _reads(node):
            around = [one for one in inside if one.lineno <= node.lineno <= (one.end_lineno or 0)]
            yield node.lineno, max(around, key=lambda one: one.lineno).name if around else "", ast.unparse(node)


def _reads(call: ast.Call) -> bool:
    name, source = ast.unparse(call.func), ast.unparse(call)
    if any(part in source for part in OF_THE_SYSTEM):
        return False
    if name == "os.open":
        return "O_WRONLY" not in source and "O_RDWR" not in source
    if name in PARSERS:
        return True
    if isinstance(call.func, ast.Attribute) and call.func.attr in METHODS:
        return True
    if name == "open" or (isinstance(call.func, ast.Attribute) and call.func.attr == "open"):
        texts = [
            part.value for part in ast.walk(call) if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        return not any(set(text) <= set("wabx+") and set(text) & set("wax") for text in texts)
    return False


PACKAGE = "data of distsim's package"
OWN = "written by this process or its child, in a folder or a pipe of their own"
PROGRAM = "a file of the program that runs in this process"
SYSTEM = "/proc"
JOB = "sent by a rank of the same job, or set in its environment by distsim"
NO_FILE = "opens no file for reading"
ELSEWHERE = {
    "debug/attach/joined.py:find_debug_server": SYSTEM,
    "debug/attach/ranks.py:_spent": SYSTEM,
    "debug/attach/ranks.py:_table": SYSTEM,
    "debug/evidence/processes.py:children_of": SYSTEM,
    "debug/evidence/processes.py:py_spy_threads": OWN,
    "debug/monitor/__main__.py:watch_series": OWN,
    "debug/report/news.py:_write": NO_FILE,
    "debug/rings/files.py:_open": NO_FILE,
    "debug/rings/files.py:append_private": NO_FILE,
    "distsim/calibration/live.py:measure_gloo": OWN,
    "distsim/calibration/logs/output.py:cluster_file": OWN,
    "distsim/calibration/predictions.py:_cases": PACKAGE,
    "distsim/cluster/files/load.py:_preset_data": PACKAGE,
    "distsim/cluster/files/load.py:preset_text": PACKAGE,
    "distsim/collectives/constants.py:read_constants": PACKAGE,
    "distsim/collectives/uncertainty.py:_spreads": PACKAGE,
    "distsim/collectives/uncertainty.py:_training_errors": PACKAGE,
    "distsim/deprecated/in_torch.py:_hear": JOB,
    "distsim/plugin/run_gloo.py:_collect": OWN,
    "distsim/plugin/run_gloo.py:_print_output": OWN,
    "distsim/plugin/run_gloo.py:take_in": OWN,
    "distsim/report/html/page.py:_text": PACKAGE,
    "distsim/planning/equal/child.py:main": OWN,
    "distsim/planning/equal/record.py:read_run": OWN,
    "distsim/planning/memory.py:measure": OWN,
    "distsim/scenario/real/inject.py:main": OWN,
    "distsim/scenario/real/real.py:_output": OWN,
    "distsim/scenario/real/real.py:_said": OWN,
    "distsim/scenario/real/real.py:descendants": SYSTEM,
    "distsim/scenario/apart.py:run_forked": OWN,
    "distsim/scenario/explore/workers.py:_received": OWN,
    "distsim/sim/device/nvidia_smi.py:main": JOB,
    "distsim/sim/orders/files.py:_stays_open": PROGRAM,
    "distsim/sim/device/operators/reading.py:_tested": PROGRAM,
    "distsim/sim/device/operators/reading.py:_tests": PROGRAM,
    "distsim/sim/device/operators/reading.py:_told": PROGRAM,
    "distsim/sim/isolation/modules/modules.py:_needed": PROGRAM,
    "distsim/libraries/importing.py:_guarded_lines": PROGRAM,
    "distsim/sim/observe/evidence.py:__getitem__": PROGRAM,
    "distsim/sim/observe/training.py:_memory_site": PROGRAM,
    "distsim/sim/observe/training.py:_reads": PROGRAM,
    "distsim/sim/processes/ipc.py:__getitem__": PROGRAM,
    "distsim/sim/processes/ipc.py:get": PROGRAM,
    "distsim/sim/processes/ipc.py:recv": PROGRAM,
    "distsim/sim/processes/lifetime.py:code": PROGRAM,
    "distsim/sim/processes/spawn.py:program": PROGRAM,
    "distsim/sim/run.py:_attempt": NO_FILE,
    "distsim/text/output_files.py:open_output": NO_FILE,
    "distsim/watchdog/process.py:_stat": SYSTEM,
    "distsim/watchdog/process.py:_text": SYSTEM,
    "distsim/watchdog/process.py:group_memory": SYSTEM,
    "distsim/watchdog/shared_state.py:facts": OWN,
    "realexec/guard/handle.py:_gloo_threads": SYSTEM,
    "realexec/install.py:_open": NO_FILE,
}
"""Functions that read beside the door, and why they may."""


def test_a_users_file_is_read_through_the_door() -> None:
    """So that no pipe blocks a command, no device fills the memory, and no nesting overflows the stack."""
    found = {
        f"{path.relative_to(ROOT)}:{function}": f"line {line}: {source}"
        for path in python_files(*CODE)
        if path != DOOR
        for line, function, source in reads(path)
    }
    beside = {place: source for place, source in found.items() if place not in ELSEWHERE}
    assert beside == {}, "use read_bytes, read_text, read_json or load_toml of distsim/text/untrusted_input.py"
    assert set(ELSEWHERE) - set(found) == set(), "no longer there: take them out of the list"


@pytest.mark.parametrize(
    "text",
    [
        *("open(path)", "open(path, 'rb')", "path.open()", "path.read_text()", "json.load(file)", "json.loads(text)"),
        *("tomllib.load(file)", "os.open(path, os.O_RDONLY)", "gzip.open(path)", "np.load(path)", "open(path, 'r+')"),
    ],
)
def test_a_read_beside_the_door_is_seen(text: str, tmp_path: Path) -> None:
    """By each way to open or parse a file."""
    (tmp_path / "planted.py").write_text(f"def f(path, file, text):\n    return {text}\n")
    assert [function for _, function, _ in reads(tmp_path / "planted.py")] == ["f"]


@pytest.mark.parametrize(
    "text",
    [
        "open(path, 'w')",
        "path.open('ab')",
        "Path('/proc/1/stat').read_text()",
        "read_text(path)",
        "os.open(p, os.O_WRONLY)",
    ],
)
def test_writing_and_the_system_are_no_reads(text: str, tmp_path: Path) -> None:
    """Nor is the door itself."""
    (tmp_path / "planted.py").write_text(f"x = {text}\n")
    assert list(reads(tmp_path / "planted.py")) == []
