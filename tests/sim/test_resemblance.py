"""What stands in for Python's and torch's functions during a simulation looks like them."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
from sim.running import HEAD, Scripts

from distsim.sim.isolation.modules.patch_table import MISSING, attribute_of
from distsim.sim.patches import all_patches

NAMES = ("__name__", "__qualname__", "__module__", "__doc__")


def looks(value: Any) -> dict[str, Any]:
    """What a program that asks a function for its looks is told."""
    value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    found: dict[str, Any] = {name: getattr(value, name, None) for name in NAMES}
    try:
        found["signature"] = inspect.signature(value)
    except (TypeError, ValueError):
        found["signature"] = None
    return found


ALL = list(all_patches())
PATCHES: dict[str, list[tuple[str, Any, Any]]] = {}
"""Of each module or class that is patched: a name, what it is, and what stands in its place."""
for _holder, _name, _value in ALL:
    _of = PATCHES.setdefault(getattr(_holder, "__name__", type(_holder).__name__), [])
    _of.append((_name, attribute_of(_holder, _name), _value))


@pytest.mark.parametrize("holder", PATCHES)
def test_a_patch_looks_like_what_it_replaces(holder: str) -> None:
    """Signature, name, qualified name, module and doc are those of the function that it stands for."""
    for name, real, replacement in PATCHES[holder]:
        if real is not MISSING:  # of torch with CUDA only
            looks_alike(name, real, replacement)


def looks_alike(name: str, real: Any, replacement: Any) -> None:
    if not callable(getattr(real, "__func__", real)):
        assert not inspect.isroutine(replacement), f"{name} was no function"
        return
    expected, found = looks(real), looks(replacement)
    if expected["signature"] is None:  # compiled, and does not tell
        del expected["signature"], found["signature"]
    assert found == expected, name
    if inspect.isclass(real):
        assert inspect.isclass(replacement), f"{name} is a class, and programs subclass it"
    elif inspect.isfunction(plain := getattr(replacement, "__func__", replacement)):
        assert callable(plain.__wrapped__), name  # torch._dynamo unwraps some at import


@pytest.mark.parametrize(
    "body",
    [
        "import torch\nclass Group:\n    pool: torch.cuda.MemPool | None = None\n"
        "assert not isinstance(1, torch.cuda.MemPool)\n",
        "from multiprocessing import queues\nclass Q(queues.Queue): pass\n"
        "import multiprocessing\nq = Q(ctx=multiprocessing.get_context())\nq.put(1)\nassert q.get() == 1\n"
        "assert isinstance(multiprocessing.JoinableQueue(), queues.Queue)\n",
        "from multiprocessing import synchronize, managers\nclass E(synchronize.Event): pass\nE().set()\n"
        "class M(managers.SyncManager): pass\n",
    ],
    ids=["MemPool", "Queue", "Event"],
)
def test_a_program_subclasses_and_annotates(script: Scripts, body: str) -> None:
    """A class that stands for one of Python's or torch's can be subclassed, named in an annotation, and asked for."""
    assert script(body + "print('done')").of(0) == ["done"]


def test_the_walk_meets_every_module_that_patches() -> None:
    """The list holds patches of each of the simulator's parts, so the test above is about them all."""
    met = {f"{getattr(holder, '__module__', None) or ''}.{getattr(holder, '__name__', '')}" for holder, *_ in ALL}
    for part in ("time", "threading", "os", "signal", "random", "multiprocessing.connection"):
        assert any(name.endswith(part) for name in met), part
    assert len(ALL) > 150


def test_a_loader_rebuilt_by_its_signature(script: Scripts) -> None:
    """Who makes a data loader anew from the parameters of its constructor (Lightning does) keeps its batch size."""
    ran = script(
        HEAD
        + """
import inspect
from torch.utils.data import DataLoader
loader = DataLoader(list(range(8)), batch_size=4)
given = {n: getattr(loader, n) for n in inspect.signature(DataLoader.__init__).parameters if n in vars(loader)}
print(DataLoader(**{n: given[n] for n in ("dataset", "batch_size")}).batch_size, len(given) > 5)
"""
    )
    assert ran.of(0) == ran.of(1) == ["4 True"]


def test_a_patched_function_crosses_by_its_name(script: Scripts) -> None:
    """A clock that is pickled in a rank names Python's own module, not the simulator's."""
    ran = script(HEAD + "import pickle\nprint(b'distsim' in pickle.dumps(time.sleep), pickle.dumps(time.time)[:1])\n")
    assert ran.of(0) == ["False b'\\x80'"]
    assert pickle.PROTO == b"\x80"
