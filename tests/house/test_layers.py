"""Imports point inward (docs/architecture.md), read out of the syntax trees; a name in a string is one as well."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house.tree import ROOT, imports_of, modules

pytestmark = pytest.mark.xdist_group("syntax trees")  # which every process would parse for itself

MAY_IMPORT: dict[str, set[str]] = {
    "errors": {"text"},
    "watchdog": {"watchdog", "report"},  # the report of a run that cannot tell, when there is one
    "text": {"text", "errors"},
    "torch_compat": {"torch_compat", "errors", "text"},
    "debug": {"debug", "shelves", "errors", "text", "torch_compat"},
    "deprecated": {"deprecated", "sim", "errors", "text", "torch_compat"},
    "mpi": {"mpi", "realexec", "debug", "errors", "text", "torch_compat"},
    "realexec": {"realexec", "debug", "shelves", "errors", "text", "torch_compat"},
    "cluster": {"cluster", "errors", "text"},
    "collectives": {"collectives", "cluster", "errors", "text"},
    "kernels": {"kernels", "cluster", "errors", "text"},
    "options": {"options", "errors", "text", "cluster"},  # the cluster for type checkers only
    "network": {"network", "collectives", "cluster", "errors", "text"},
    "calibration": {
        "torch_compat",
        "calibration",
        "kernels",
        "network",
        "collectives",
        "cluster",
        "errors",
        "text",
    },
    "sim": {
        *("sim", "network", "collectives", "kernels", "cluster", "debug", "errors", "text", "watchdog"),
        *("torch_compat", "options", "shelves"),
    },
    "libraries": {"libraries", "sim", "debug", "kernels", "errors", "text", "torch_compat"},
    "remote_calls": {"remote_calls", "sim", "realexec", "debug", "errors", "text", "torch_compat"},
    "shelves": set(),
    "report": {"report", "collectives", "sim", "debug", "errors", "text", "__version__", "watchdog"},
}
"""Which parts of distsim a part may import. Parts that are not here (the command line, the Python
API, the pytest plugin, the scenario runner) see everything."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    # The bench is an idle network by itself, and somebody has to hold its clock.
    "simpy": (
        "distsim.sim.kernel",
        "distsim.sim.device.timeline",
        "distsim.network",
    ),
    "networkx": (
        "distsim.cluster",
        "distsim.debug.diagnosis.waits.wait_graph",
        "distsim.report.html.draw",  # where boxes stand
    ),
    "jinja2": ("distsim.report.html.page",),
    "markupsafe": ("distsim.report.html.page",),
    "plotly": ("distsim.report.html.page", "distsim.report.image"),
    "mcp": ("distsim.cli.agents.mcp",),
    "pydantic": (
        "distsim.text.file_tables",
        "distsim.cluster.files",
        "distsim.kernels.gpu_file",
        "distsim.scenario",
        "distsim.cli.agents.schema",
    ),
    "msgspec": ("distsim.text.codec", "distsim.debug", "distsim.realexec", "distsim.remote_calls"),
    "rich": (
        "distsim.report",
        "distsim.cli",
        "distsim.debug.report.console",
        "distsim.debug.report.console",
        "distsim.debug.report.render",
        "distsim.debug.monitor",  # prints what render makes
        "distsim.debug.report.live",  # the table of `distsim watch`
        "distsim.cluster.show",
        "distsim.planning",
        "distsim.scenario",
    ),
    "numpy": ("distsim.",),
}
"""Third-party packages and the only modules that may import them."""

NO_TORCH = ("distsim.cluster", "distsim.collectives", "distsim.network", "distsim.report")
"""Parts that never import torch."""

EXCEPTIONS: set[tuple[str, str]] = {
    ("distsim.debug", "realexec"),  # guard() is the door to it, in the package that users import
    ("distsim.debug.__main__", "realexec"),  # as is python -m distsim.debug
    ("distsim.deprecated.launch", "cli"),  # of all parts the command line lies furthest out
    ("distsim.errors", "sim"),  # the type of RankFailure.failures, for type checkers only
    ("distsim.debug.monitor.start", ""),  # the package's own place, for the processes it starts
}
"""(module, imported part) pairs that break a rule for a reason written beside them."""


def _part(module: str) -> str:
    """`distsim.sim.kernel.task` is of part `sim`; the package itself has none."""
    return module.partition(".")[2].split(".")[0]


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_a_part_imports_only_what_lies_further_in(part: str) -> None:
    """No part knows who uses it: debug neither simulator nor launcher, neither of these the other."""
    wrong = []
    for module, path in modules().items():
        if not module.startswith("distsim.") or _part(module) != part:
            continue
        for imported, line, _ in imports_of(path):
            target = _part(imported)
            if imported.split(".")[0] != "distsim" or target in MAY_IMPORT[part]:
                continue
            if (module, target) not in EXCEPTIONS:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert wrong == []


SHELVES = ("calibration", "deprecated", "libraries", "mpi", "planning", "remote_calls")
"""Parts that a reader of the core need not know: a registry of the core names them, and nothing imports them."""


@pytest.mark.parametrize("shelf", SHELVES)
def test_a_shelf_is_imported_by_nobody(shelf: str) -> None:
    """All of a subject is in one folder, which could go without the core noticing."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for module, path in modules().items()
        for imported, line, _ in imports_of(path)
        if _part(imported) == shelf and imported.startswith("distsim.") and _part(module) != shelf
    ]
    assert wrong == []


@pytest.mark.parametrize("package", sorted(ONLY_IN))
def test_a_third_party_package_is_imported_only_where_it_belongs(package: str) -> None:
    """simpy is that of time and flows, networkx topology's, pydantic validation's, rich rendering's."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for module, path in modules().items()
        for imported, line, typing_only in imports_of(path)
        if imported.split(".")[0] == package and not typing_only and not module.startswith(ONLY_IN[package])
    ]
    assert wrong == []


RANK_SIDE = (
    *(f"distsim.sim.{part}" for part in ("c10d", "device", "isolation", "processes")),
    "distsim.libraries",
    "distsim.remote_calls.simulated",
)
"""Code that runs in a simulated rank."""
WORLD_SIDE = {"distsim.sim.c10d.communicator", "distsim.sim.isolation.io_barrier"}
"""Modules among it that stand on the other side: where calls meet, and what holds back effects at the end."""
MOST_QUESTIONS = 40
"""Attributes and methods of `RankPort` today. It may only shrink."""


def test_a_rank_reaches_its_world_through_the_port_alone() -> None:
    """What a rank may ask of its world can be read in one file, and carried by something else than threads."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for module, path in modules().items()
        if module.startswith(RANK_SIDE) and module not in WORLD_SIDE
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "world")
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distsim.sim.world"))
    ]
    assert wrong == []


NOT_SEEN_FROM = {
    "distsim.sim.observe": ("c10d", "device", "faults", "isolation", "kernel", "processes", "world"),
    "distsim.sim.world": ("c10d", "device", "isolation", "kernel", "processes"),
    "distsim.sim.faults": ("c10d", "device", "isolation", "kernel", "observe", "processes"),
}
"""Parts of the simulator, and those that lie further in, which do not import them."""
ACROSS = {("distsim.sim.device.gpu", "distsim.sim.observe.metrics")}
"""Exceptions: a GPU's account of checkpoints (`Saved`) is a part of the report, which is read without torch."""


@pytest.mark.parametrize("part", sorted(NOT_SEEN_FROM))
def test_the_floors_of_the_simulator(part: str) -> None:
    """What runs does not know who observes it, what goes wrong, or the world that carries it."""
    inner = (*(f"distsim.sim.{name}." for name in NOT_SEEN_FROM[part]), "distsim.remote_calls.")
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for module, path in modules().items()
        if module.startswith(inner)
        for imported, line, _ in imports_of(path)
        if imported.startswith(part + ".") and (module, imported.rpartition(".")[0]) not in ACROSS
    ]
    assert wrong == []


def test_the_port_only_shrinks() -> None:
    """An interface of everything is none."""
    tree = ast.parse((ROOT / "distsim" / "sim" / "kernel" / "port.py").read_text())
    port = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "RankPort")
    names = [node for node in port.body if isinstance(node, ast.AnnAssign | ast.FunctionDef)]
    assert len(names) <= MOST_QUESTIONS


def test_the_network_and_the_reports_never_import_torch() -> None:
    """What computes times and draws tables works without torch."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for module, path in modules().items()
        for imported, line, typing_only in imports_of(path)
        if imported.split(".")[0] == "torch" and not typing_only and module.startswith(NO_TORCH)
    ]
    assert wrong == []


def test_the_rules_see_a_planted_breach(tmp_path: Path) -> None:
    """The reader of imports finds them in functions and behind `from`, and knows the typing-only ones."""
    path = tmp_path / "planted.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "def f():\n    from distsim import realexec\n    import simpy.events\n"
        "    return importlib.import_module('distsim.cli'), import_module(name)\n"
    )
    assert list(imports_of(path)) == [
        ("typing.TYPE_CHECKING", 1, False),
        ("torch", 3, True),
        ("distsim.realexec", 5, False),
        ("simpy.events", 6, False),
        ("distsim.cli", 7, False),
    ]
