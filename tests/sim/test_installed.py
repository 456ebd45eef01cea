"""Installed packages: each rank has its own, unless they are compiled or torch stands on them."""

from __future__ import annotations

import importlib.machinery
import json
import os
import string
import subprocess
import sys
from pathlib import Path

import pytest
from sim.running import HEAD, Scripts

from distsim.debug.records.frames import installed_here
from distsim.sim.isolation.modules import modules

STATE = """\
class State:
    shared = {}
    def __init__(self):
        self.__dict__ = self.shared
class Item:
    pass
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for site-packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    for name in ("_SITE", "_SHARED"):
        monkeypatch.setattr(modules, name, (*getattr(modules, name), f"{folder}/"))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_state_in_a_class_is_the_ranks_own(script: Scripts, installed: Path) -> None:
    """A singleton kept in a class of an installed package (accelerate's PartialState) knows its own rank."""
    write(installed, {"single/__init__.py": "from .state import State\n", "single/state.py": STATE})
    ran = script(
        HEAD
        + """
from single import State
State().rank = rank
dist.barrier()
import single.state as again
print(State().rank, again.State is State, sys.modules["single"].State is State)
"""
    )
    assert [ran.of(rank) for rank in range(2)] == [["0 True True"], ["1 True True"]]
    assert not any(name.startswith("single") for name in sys.modules)


def test_a_module_that_replaces_itself(script: Scripts, installed: Path) -> None:
    """A package whose module in `sys.modules` is an object that loads on demand (transformers)."""
    package = """
import importlib, sys, types
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        if name != "State":
            raise AttributeError(name)
        return importlib.import_module(".part", self.__name__).State
module = Lazy(__name__)
module.__dict__.update(__path__=__path__, __file__=__file__, __spec__=__spec__)
sys.modules[__name__] = module
"""
    write(installed, {"lazy/__init__.py": package, "lazy/part.py": STATE})
    ran = script(
        HEAD
        + """
from lazy import State
import lazy
State().rank = rank
dist.barrier()
print(lazy.State().rank, type(lazy).__name__)
"""
    )
    assert [ran.of(rank) for rank in range(2)] == [["0 Lazy"], ["1 Lazy"]]


def test_an_object_arrives_as_the_receivers_class(script: Scripts, installed: Path) -> None:
    """What one rank pickles by its module's name is of the other's own class there."""
    write(installed, {"things.py": STATE})
    ran = script(
        HEAD
        + """
from things import Item
box = [Item() if rank == 0 else None]
dist.broadcast_object_list(box, src=0)
ids = [None, None]
dist.all_gather_object(ids, id(Item))
print(type(box[0]) is Item, ids[0] != ids[1])
"""
    )
    assert [ran.of(rank) for rank in range(2)] == [["True True"]] * 2


def test_what_can_be_entered_once_is_entered_once(script: Scripts, installed: Path) -> None:
    """A module that enters something into torch's registry of operators is imported by every rank; what
    follows that statement runs in each."""
    body = """
from __future__ import annotations
import torch
before = []
torch.library.define("distsim_test::twice", "(Tensor x) -> Tensor")
@torch.library.impl("distsim_test::twice", "CPU")
def twice(x):
    return x * 2
def own() -> list:
    return before
after = 1
"""
    write(installed, {"operators.py": body})
    ran = script(
        HEAD
        + """
import operators
operators.before.append(rank)
dist.barrier()
print(torch.ops.distsim_test.twice(torch.tensor(2.0)).item(), operators.own(), operators.after)
"""
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert [ran.of(rank) for rank in range(2)] == [["4.0 [0] 1"], ["4.0 [1] 1"]]


def test_a_class_of_python_is_wrapped_once(script: Scripts, installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that wraps a method of the standard library (configargparse) wraps its own wrapper neither in another
    rank nor in the next simulation."""
    wrapper = """
import string
string.Formatter.plain_format = string.Formatter.format
def format(self, text, *args):
    return f"<{self.plain_format(text, *args)}>"
string.Formatter.format = format
COUNT = 1
"""
    write(installed, {"wrapping.py": wrapper})
    monkeypatch.setattr(string.Formatter, "format", string.Formatter.format)
    for _ in range(2):
        ran = script(HEAD + "import string, wrapping; print(string.Formatter().format('{}', wrapping.COUNT))")
        assert [ran.of(rank) for rank in range(2)] == [["<1>"], ["<1>"]]
    del string.Formatter.plain_format  # type: ignore[attr-defined]


def test_an_error_in_a_modules_body_is_the_ranks(script: Scripts, installed: Path) -> None:
    """A module that fails in one rank for a reason of its own fails there."""
    body = "import os\nif os.environ['RANK'] == '1':\n    raise RuntimeError('no licence here')\n"
    write(installed, {"picky.py": body})
    ran = script(HEAD + "if rank == 0:\n    import picky\ndist.barrier()\nimport picky\nprint('imported')\n")
    assert ran.of(0) == ["imported"]
    assert [failure.ranks for failure in ran.outcome.failures] == [(1,)]
    assert "no licence here" in str(ran.outcome.failures[0])


def test_compiled_packages_are_shared(script: Scripts, installed: Path) -> None:
    """Where a package has an extension module, all its modules are there once: C code may hold its classes."""
    compiled = f"fast/_core{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    write(installed, {"fast/__init__.py": "", "fast/state.py": "found = []\n", compiled: ""})
    ran = script(
        HEAD
        + """
if rank == 0:
    import fast.state
dist.barrier()
import fast.state
fast.state.found.append(rank)
dist.barrier()
print(fast.state.found)
"""
    )
    assert [ran.of(rank) for rank in range(2)] == [["[0, 1]"]] * 2
    for name in ("fast.state", "fast"):
        sys.modules.pop(name, None)


def forget(*packages: str) -> None:
    """Take *packages*, which a simulation shared, out of the host's `sys.modules`."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


def test_a_namespace_is_shared_with_its_compiled_part(script: Scripts, installed: Path) -> None:
    """A package without `__init__` of which one part is an extension module (google._upb beside google.protobuf) is
    there once as a whole, and its parts are attributes of it on every rank."""
    files = {f"wide/_core/_message{SUFFIX}": "", "wide/plain/__init__.py": "", "wide/plain/state.py": "seen = []\n"}
    write(installed, files)
    ran = script(
        HEAD
        + """
if rank == 0:
    import wide.plain.state
dist.barrier()
import wide.plain.state
wide.plain.state.seen.append(rank)
dist.barrier()
print(wide.plain.state.seen)
"""
    )
    assert [ran.of(rank) for rank in range(2)] == [["[0, 1]"]] * 2, ran.outcome.failures
    forget("wide")


def test_what_a_shared_module_imports_is_shared(script: Scripts, installed: Path) -> None:
    """The body of a shared module runs on one rank: what it enters into `sys.modules`, by import or itself, is there on
    the others (grain, torch.distributed._tensor); a user's module that it imports is not."""
    body = "import sys, types, plain\nsys.modules['fast.alias'] = types.ModuleType('fast.alias')\n"
    body += "from fast.inner import options\ntry:\n    import addon\nexcept ImportError:\n    pass\n"
    write(
        installed,
        {
            f"fast/_core{SUFFIX}": "",
            "fast/__init__.py": body,
            "fast/inner/options.py": "",
            "plain/__init__.py": "",
            "plain/late.py": "seen = []\n",
        },
    )
    ran = script(
        HEAD
        + """
if rank == 0:
    import fast
dist.barrier()
import fast
import fast.alias
import plain.late
plain.late.seen.append(rank)
dist.barrier()
print([n for n in ("fast.inner", "fast.inner.options") if n not in sys.modules], fast.plain is plain)
print(plain.late.seen, "addon" in sys.modules)
""",
        files={"addon.py": ""},
    )
    assert ran.of(0) == ["[] True", "[0, 1] True"], ran.outcome.failures
    assert ran.of(1) == ["[] True", "[0, 1] False"]
    assert "addon" not in sys.modules
    forget("fast", "plain")


@pytest.mark.parametrize("first", ["import plain\nimport fast", "if rank == 0:\n    import plain\nimport fast, plain"])
def test_shared_parts_are_attributes_of_each_ranks_package(script: Scripts, installed: Path, first: str) -> None:
    """A shared module imports a part of a package that the rank imported itself, as `packaging`: on the other ranks,
    whose package is their own, the part is an attribute, too."""
    write(
        installed,
        {
            f"fast/_core{SUFFIX}": "",
            "fast/__init__.py": "import plain.late\n",
            "plain/__init__.py": "",
            "plain/late.py": "",
        },
    )
    ran = script(HEAD + first + "\ndist.barrier()\nprint(plain.late.__name__)\n")
    assert [ran.of(rank) for rank in range(2)] == [["plain.late"]] * 2, ran.outcome.failures
    forget("fast", "plain")


def test_the_standard_library_is_shared(script: Scripts) -> None:
    """A module of Python's own that one rank is the first to import is the same in all."""
    ran = script(
        HEAD
        + """
if rank == 1:
    import stringprep
dist.barrier()
import stringprep
ids = [None, None]
dist.all_gather_object(ids, id(stringprep))
print(len(set(ids)), "stringprep" in sys.modules)
"""
    )
    assert [ran.of(rank) for rank in range(2)] == [["1 True"]] * 2


def test_sys_modules_is_the_ranks_own(script: Scripts) -> None:
    """What a rank puts into `sys.modules`, or takes out, no other rank and not the host sees."""
    ran = script(
        HEAD
        + """
import types
if rank == 0:
    sys.modules["made_up"] = types.ModuleType("made_up")
    sys.modules["json"] = None
dist.barrier()
def known(name):
    try:
        __import__(name)
        return True
    except ImportError:
        return False
print(known("made_up"), known("json"))
"""
    )
    assert [ran.of(rank) for rank in range(2)] == [["True False"], ["False True"]]
    assert sys.modules["json"] is not None
    assert "made_up" not in sys.modules


def test_attributes_of_shared_modules_are_the_ranks_own(script: Scripts) -> None:
    """A function of Python's or numpy's that every rank replaces is replaced once in each, and what one rank
    adds no other sees."""
    dumps = json.dumps
    ran = script(
        HEAD
        + """
import json, numpy, string
calls = []
real = json.dumps
def counted(value):
    calls.append(value)
    return real(value)
json.dumps = counted
if rank == 1:
    numpy.house, string.digits = "mine", "01"
dist.barrier()
json.dumps(1)
dist.barrier()
print(calls, hasattr(numpy, "house"), string.digits, numpy.float32(2))
"""
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert ran.of(0) == ["[1] False 0123456789 2.0"]
    assert ran.of(1) == ["[1] True 01 2.0"]
    assert json.dumps is dumps
    assert string.digits == "0123456789"


def test_a_module_made_by_hand_is_an_ordinary_one(script: Scripts) -> None:
    """Modules that import, or a program by `type(os)`, makes while the shared ones are watched keep what they hold
    when another rank runs and when a torch package is imported for all."""
    ran = script(
        HEAD
        + """
made = type(os)("made")
made.value = rank
import torch.distributed.tensor.experimental
dist.barrier()
print(made.value, torch.distributed.tensor.__path__ != [], type(sys) is type(type(sys)("x")))
"""
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert [ran.of(rank) for rank in range(2)] == [["0 True True"], ["1 True True"]]


def test_what_the_operating_system_says_is_no_word_of_a_registry(
    script: Scripts, installed: Path, tmp_path: Path
) -> None:
    """A package that makes its folder when it is imported fails on the second rank with `File exists`, as it would on
    machines with one disk: the rank's own exception, not passed over."""
    write(installed, {"cached/__init__.py": f"import os\nos.mkdir({str(tmp_path / 'cache')!r})\nMADE = True\n"})
    ran = script(HEAD + "dist.barrier()\nimport cached\n")
    assert ran.outcome.exit_code == 1
    assert [(failure.ranks, failure.type) for failure in ran.outcome.failures] == [((1,), "FileExistsError")]


def test_multiprocess_is_multiprocessing(script: Scripts, installed: Path) -> None:
    """A copy of multiprocessing with another pickle, by which datasets maps with num_proc, is simulated."""
    write(installed, {"multiprocess/__init__.py": "raise ImportError", "multiprocess/pool.py": ""})
    ran = script(
        HEAD
        + """
import multiprocess
from multiprocess.pool import Pool
with multiprocess.Pool(2) as pool:
    print(pool.map(str, range(2)), isinstance(pool, Pool))
import multiprocessing
print(multiprocessing.__spec__.name)
"""
    )
    assert ran.of(0) == ["['0', '1'] True", "multiprocessing"]


def test_folders_of_pip_install_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on PYTHONPATH in which pip has noted a package holds installed packages, one of sources does not."""
    (tmp_path / "deps/pillow-9.5.0.dist-info").mkdir(parents=True)
    (tmp_path / "src/mine.egg-info").mkdir(parents=True)
    for folder in ("deps", "src"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    folders = installed_here.__wrapped__()
    assert f"{tmp_path}/deps/" in folders
    assert f"{tmp_path}/src/" not in folders
    monkeypatch.chdir(tmp_path / "deps")
    assert f"{tmp_path}/deps/" not in installed_here.__wrapped__()


@pytest.mark.soak
@pytest.mark.slow
def test_packages_that_another_folder_brings(tmp_path: Path) -> None:
    """Packages of `pip install --target`, of a layered environment, of a build tool: torch, numpy and pytest lie where
    this Python installs nothing, and are shared all the same."""
    deps, house = tmp_path / "deps", Path(__file__).parents[2]
    deps.mkdir()
    for folder in installed_here():
        for entry in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if entry.name not in ("__pycache__", "distsim") and not (deps / entry.name).exists():
                (deps / entry.name).symlink_to(entry)
    body = "import torch, os\n@pytest.mark.ranks(2)\ndef test_sum(rank):\n    t = torch.tensor([rank + 1.0])\n"
    body = f"import pytest\nimport torch.distributed as dist\n{body}    dist.all_reduce(t)\n    assert t.item() == 3\n"
    (tmp_path / "test_one.py").write_text(body)
    ran = subprocess.run(
        [sys.executable, "-S", "-m", "pytest", "-q", "-n", "0", "-p", "distsim.pytest_plugin", "test_one.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{deps}:{house}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_locks_of_files_are_each_ranks(script: Scripts) -> None:
    """filelock releases what another pid has locked: it takes its own process for a forked child."""
    text = HEAD + (
        "import filelock, tempfile\n"
        "with filelock.FileLock(f'{tempfile.mkdtemp()}/lock'):\n"
        "    dist.barrier()\n"
        "print('released')\n"
    )
    result = script(text, 2)
    assert result.outcome.exit_code == 0, result.err
    assert result.out.count("released") == 2
