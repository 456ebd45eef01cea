"""Every rank imports the user's modules for itself, and is `__main__` for itself."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from sim.running import HEAD, Scripts

from distsim.sim.isolation.torch_state.distributed import SharedRules

COUNTER = "count = 0\ndef bump():\n    global count\n    count += 1\n"


def test_helper_module_counts_per_rank(script: Scripts) -> None:
    """A global counter in an imported module belongs to the rank that imported it."""
    ran = script(
        HEAD
        + """
import helper
for _ in range(rank + 1):
    helper.bump()
dist.barrier()
print(helper.count, sys.modules["helper"] is helper)
""",
        files={"helper.py": COUNTER},
    )
    assert ran.of(0) == ["1 True"]
    assert ran.of(1) == ["2 True"]
    assert "helper" not in sys.modules


def test_main_is_the_script_itself(script: Scripts) -> None:
    """`__name__`, `sys.argv` and `sys.modules["__main__"]` are as under python."""
    before = sys.modules["__main__"]
    ran = script(
        HEAD
        + """
value = rank
dist.barrier()
import __main__
print(__name__, sys.argv[1:], os.path.basename(sys.argv[0]), __main__.value, __main__.__file__ == __file__)
if __name__ == "__main__":
    print("main")
""",
        args=("--lr", "0.1"),
    )
    for rank in range(2):
        assert ran.of(rank) == [f"__main__ ['--lr', '0.1'] program.py {rank} True", "main"]
    assert sys.modules["__main__"] is before


def test_packages_and_relative_imports(script: Scripts) -> None:
    """A package with submodules, relative imports and an import inside a function."""
    ran = script(
        HEAD
        + """
import pkg.sub.deep
dist.barrier()
pkg.state.append(rank)
def late():
    from pkg.late import WHO
    return WHO
dist.barrier()
print(pkg.sub.deep.who(), pkg.state, late())
""",
        files={
            "pkg/__init__.py": "from .base import state\n",
            "pkg/base.py": "state = []\n",
            "pkg/late.py": "import os\nWHO = os.environ['RANK']\n",
            "pkg/sub/__init__.py": "",
            "pkg/sub/deep.py": "import os\nfrom ..base import state\ndef who():\n    return os.environ['RANK']\n",
        },
    )
    assert ran.of(0) == ["0 [0] 0"]
    assert ran.of(1) == ["1 [1] 1"]


def test_reload_is_the_ranks_own(script: Scripts) -> None:
    """importlib.reload runs the module again in one rank only."""
    ran = script(
        HEAD
        + """
import helper, importlib
helper.count = 10 + rank
dist.barrier()
if rank == 0:
    importlib.reload(helper)
dist.barrier()
print(helper.count)
""",
        files={"helper.py": COUNTER},
    )
    assert ran.of(0) == ["0"]
    assert ran.of(1) == ["11"]


def test_a_module_may_call_collectives_while_it_is_imported(script: Scripts) -> None:
    """No import lock of one rank keeps another rank out of the same import."""
    ran = script(
        HEAD + "import meets\nprint(meets.total)\n",
        num_ranks=3,
        files={
            "meets.py": "import torch, torch.distributed as dist\ndist.barrier()\nimport inner\n"
            "t = torch.ones(1)\ndist.all_reduce(t)\ntotal = t.item()\n",
            "inner.py": "import torch.distributed as dist\ndist.barrier()\n",
        },
    )
    assert [ran.of(rank) for rank in range(3)] == [["3.0"]] * 3


def test_what_looks_into_sys_modules(script: Scripts) -> None:
    """pickle, dataclasses, enum and object collectives find a rank's own classes."""
    ran = script(
        HEAD
        + """
from __future__ import annotations
import dataclasses, enum, pickle, typing
from shapes import Point

@dataclasses.dataclass
class Mine:
    x: int
    y: dataclasses.InitVar[int] = 0

class Colour(enum.Enum):
    RED = 1

dist.barrier()
assert typing.get_type_hints(Mine)["x"] is int
for thing in (Mine(rank), Colour.RED, Point(rank)):
    dist.barrier()
    assert type(pickle.loads(pickle.dumps(thing))) is type(thing)
found = [None] * size
dist.all_gather_object(found, Point(rank))
assert all(type(p) is Point for p in found)
print([p.x for p in found])
""".replace("from __future__ import annotations\n", ""),
        files={"shapes.py": "import dataclasses\n@dataclasses.dataclass\nclass Point:\n    x: int\n"},
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert ran.of(0) == ran.of(1) == ["[0, 1]"]


def test_zip_and_namespace_packages(script: Scripts, tmp_path: Path) -> None:
    """Modules out of a zip file and of a package without __init__ are the user's too."""
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        archive.writestr("zipped.py", "count = 0\n")
    ran = script(
        HEAD
        + """
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib.zip"))
import zipped, spaces.one
zipped.count += 1
spaces.one.count += 1
dist.barrier()
print(zipped.count, spaces.one.count)
""",
        files={"spaces/one.py": "count = 0\n"},
    )
    assert ran.of(0) == ran.of(1) == ["1 1"]
    assert not [name for name in sys.modules if name.split(".")[0] in ("zipped", "spaces")]


def test_run_as_module(script: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-m package` runs `package/__main__.py` with its package, per rank."""
    monkeypatch.chdir(tmp_path)
    ran = script(
        "",
        program="job",
        module=True,
        args=("x",),
        files={
            "job/__init__.py": "",
            "job/state.py": "count = 0\n",
            "job/__main__.py": HEAD
            + "from . import state\nstate.count += 1\ndist.barrier()\n"
            + "print(__name__, __package__, state.count, sys.argv[1:])\n",
        },
    )
    assert ran.of(0) == ran.of(1) == ["__main__ job 1 ['x']"]


def test_a_script_that_fails_at_import(script: Scripts) -> None:
    """An ImportError or SyntaxError is every rank's failure, told once."""
    ran = script("import not_there\n", num_ranks=3)
    assert ran.outcome.exit_code == 1
    (failure,) = ran.outcome.failures
    assert failure.ranks == (0, 1, 2)
    assert failure.type == "ModuleNotFoundError"
    ran = script("def (:\n")
    assert ran.outcome.failures[0].type == "SyntaxError"
    assert "program.py" in ran.outcome.failures[0].traceback


def test_rules_end_without_their_module() -> None:
    """An import that fails takes DTensor's module out of sys.modules: the run's error is told, not that."""
    module = ModuleType("rules")
    module.ShardingPropagator = type("ShardingPropagator", (), {"propagate_op_sharding_non_cached": len})  # type: ignore[attr-defined]
    rules = SharedRules()
    rules.begin(module)
    assert module.ShardingPropagator.propagate_op_sharding_non_cached is not len
    rules.end()
    assert module.ShardingPropagator.propagate_op_sharding_non_cached is len
