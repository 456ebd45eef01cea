"""What must not import torch (1.3 s), rich or networkx, does not; one fresh interpreter for all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

STAGES = {
    "distsim": "import distsim",
    "watchdog": "from distsim.watchdog import process",  # the watcher beside every simulation
    "records": "import distsim.debug.records.call",
    "help": "import contextlib, io\nfrom distsim.cli import main\n"
    "with contextlib.redirect_stdout(io.StringIO()):\n    code = main(['--help'])\nassert code == 0",
    "mistake": "with contextlib.redirect_stderr(io.StringIO()):\n    code = main(['rnu'])\nassert code == 2",
}
UNUSED = {
    *("networkx", "sympy", "plotly", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"),
    *("torch.distributed.fsdp", "distsim.realexec", "distsim.scenario", "distsim.plugin"),
}
HEAVY = ("torch", "numpy", "rich", "networkx", "simpy", "pydantic")


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Heavy packages that are loaded after each stage."""
    script = "import json, sys\nloaded = {}\n"
    for name, code in STAGES.items():
        script += f"{code}\nloaded[{name!r}] = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
    script += "print(json.dumps(loaded))\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    answer: dict[str, list[str]] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_nothing_heavy_is_imported(stage: str, loaded: dict[str, list[str]]) -> None:
    """`import distsim`, the call records, --help and a typing mistake cost milliseconds."""
    assert loaded[stage] == []


@pytest.mark.slow
def test_pages_pictures_and_diagnoses_do_without_torch() -> None:
    """Clusters, collectives and records are read where no torch is, or one that is not tested."""
    script = "import sys\nsys.modules['torch'] = None\nimport distsim.report.image, distsim.report.html.reports\n"
    script += "import distsim.debug.evidence.from_dumps\nfrom distsim.cli import main\n"
    script += "sys.exit(main(['topo', 'show', 'dgx-h100:2', '--json']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_simulation_imports_only_what_it_needs() -> None:
    """A run on a preset, and what it prints, does without what only a hang, a graph, a GPU or a real run needs:
    networkx alone takes 0.3 s, torch.distributed.tensor a second."""
    script = "import distsim, sys, distsim.report\n"
    script += "distsim.report.print_summary(distsim.simulate(lambda: None, nproc_per_node=2))\n"
    script += f"sys.exit(','.join({UNUSED!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "", done.stderr
    assert "2 ranks" in done.stdout
