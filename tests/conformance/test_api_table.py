"""The table of every documented name: complete, proved line by line, and what docs/api_table.md says."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd
import torch.distributed.rpc as rpc
from conformance.api_modules import RELEASE, has_module, module_rows, public_names
from conformance.api_modules import resolved as resolved_in_module
from conformance.api_names import PAGE, ROOT, Row, page, rows
from conformance.test_torchs_own import SUITES
from sim.running import ranks
from torch.distributed.device_mesh import DeviceMesh

import distsim.deprecated as old
from distsim.debug.records.arguments import FIELDS, FIRST_CALLS
from distsim.debug.records.call import REMOTE_CALLS
from distsim.errors import NotSimulated, UsageError

MADE_OF = {
    "isend": "send",
    "irecv": "recv",
    "gather_single": "gather",
    "gather_into_tensor": "gather",
    "batch_isend_irecv": "send",
    "optim.ZeroRedundancyOptimizer": "broadcast",
    "broadcast_multigpu": "broadcast",
    "all_reduce_multigpu": "all_reduce",
    "reduce_multigpu": "reduce",
    "all_gather_multigpu": "all_gather",
    "reduce_scatter_multigpu": "reduce_scatter",
    "deprecated.isend": "send",
    "deprecated.irecv": "recv",
    "deprecated.gather": "gather",
    "deprecated.scatter": "scatter",
    "rpc.rpc_sync": "rpc_sync",
    "rpc.rpc_async": "rpc_async",
    "rpc.remote": "remote",
    "rpc.PyRRef.to_here": "to_here",
    "rpc.PyRRef.rpc_sync": "rpc_sync",
    "rpc.PyRRef.rpc_async": "rpc_async",
    "rpc.PyRRef.remote": "remote",
}
"""What the guard records of a call that is another."""
AROUND = {
    "_rendezvous": ("init_process_group", "tcp", "deprecated.init_process_group", "deprecated.launch"),
    "_new_group": ("new_group", "new_subgroups", "new_subgroups_by_enumeration", "deprecated.new_group"),
    "_split": ("split_group", "init_device_mesh"),
    "begin_init": ("deprecated.group_name",),
    "_waiting": ("Store.get", "Store.wait"),
    "Handle": ("Work.wait",),
    "_init_rpc": ("rpc.init_rpc",),
    "_shutdown": ("rpc.shutdown",),
}
"""Where the guard meets those that are no operation."""
MODULES: dict[str, Any] = {
    "rpc": rpc,
    "autograd": torch.distributed.autograd,
    "futures": torch.futures,
    "deprecated": old,
    "": dist,
}
NO_OBJECT = {"tcp", "deprecated.group_name", "deprecated.launch"}
"""A backend, an argument, a command."""
ROWS = [row for row in rows() if row.here]
TABLE = {row.name: row for row in ROWS}


def documented() -> set[str]:
    """What torch has: public names of its own, and the members of its documented classes."""
    found = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reduce_op
        for name in dir(dist):
            value = getattr(dist, name)
            module = str(getattr(value, "__module__", None) or "torch")
            if not name.startswith("_") and not isinstance(value, types.ModuleType) and module.startswith("torch"):
                found.add(name)
    classes = {
        "Store": dist.Store,
        "Work": dist.Work,
        "DeviceMesh": DeviceMesh,
        "rpc.PyRRef": rpc.PyRRef,
        "rpc.TensorPipeRpcBackendOptions": rpc.TensorPipeRpcBackendOptions,
        "rpc.WorkerInfo": rpc.WorkerInfo,
        "futures.Future": torch.futures.Future,
    }
    found |= {f"{name}.{one}" for name, kind in classes.items() for one in dir(kind) if not one.startswith("_")}
    found |= {f"ReduceOp.{name}" for name in dist.ReduceOp.RedOpType.__members__ if name != "UNUSED"}
    return found


def resolved(name: str) -> Any:
    """The object that a line of the table speaks of."""
    if name.startswith(("nn.", "optim.")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.distributed import optim
            from torch.distributed.nn.api import remote_module

        module, path = (remote_module if name.startswith("nn.") else optim), name.partition(".")[2]
    else:
        head, _, rest = name.partition(".")
        module, path = (MODULES[head], rest) if head in MODULES else (dist, name)
    if path.endswith("_multigpu"):
        module = old
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return functools.reduce(getattr, path.split("."), module)


@functools.cache
def used_in(file: str) -> frozenset[str]:
    """Names that the programs of a file of tests use."""
    found: set[str] = set()
    if file.endswith("test_torchs_own.py"):  # torch's programs
        specs = [importlib.util.find_spec(path.rpartition("_test.")[0] + "_test") for path, *_ in SUITES.values()]
        texts = [Path(str(spec.origin)).read_text(encoding="utf-8") for spec in specs if spec]
    else:
        texts = [(ROOT / "tests" / file).read_text(encoding="utf-8")]
    for node in ast.walk(ast.parse("\n".join(texts))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(node.value.split("."))
    return frozenset(found)


def imported_in(file: str) -> set[str]:
    """Names that a file of tests imports."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_no_name_is_left_out() -> None:
    """What torch has and the table lacks, by name; and each name once."""
    assert sorted(documented() - set(TABLE)) == []
    assert len({row.name for row in rows()}) == len(rows())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_line_is_shown(row: Row) -> None:
    """The name exists, a body of the file that is named uses it, and the guard's record is what is claimed."""
    assert row.simulated in ("yes", "same", "refused")
    if row.name not in NO_OBJECT:
        resolved(row.name)
    assert row.name.rpartition(".")[2] in used_in(row.shown), f"{row.shown} does not use it"
    op = MADE_OF.get(row.name, row.name)
    operations = {*FIELDS, *FIRST_CALLS, *REMOTE_CALLS}
    recorded = op in operations or any(row.name in names for names in AROUND.values())
    assert (row.guarded == "recorded") == recorded


def test_the_guard_meets_what_is_no_operation() -> None:
    """Where the table says so."""
    from distsim.realexec.guard import handle
    from distsim.realexec.process import hooks
    from distsim.remote_calls.guarded import hooks as remote

    text = "".join(inspect.getsource(module) for module in (hooks, handle, remote))
    assert [name for name in AROUND if name not in text] == []


def test_what_is_the_same_is_the_same() -> None:
    """In a rank, a name that needs nothing is torch's own object; another is there, too."""
    same = {row.name: resolved(row.name) for row in ROWS if row.simulated == "same"}
    there = [row.name for row in ROWS if row.simulated == "yes" and row.name not in NO_OBJECT]
    there = [name for name in there if "Store." not in name]  # what only an object of theirs has

    def body() -> list[str]:
        for name in there:
            resolved(name)
        return [name for name, value in same.items() if resolved(name) is not value]

    assert ranks(body, 1).results == [[]]


def test_what_is_refused_says_so() -> None:
    """By name, with what to do instead."""
    refused = {row.name for row in ROWS if row.simulated == "refused"}
    by_hand = {name for name in refused if name.startswith("ProcessGroup")}
    elsewhere = {"gather_single", "gather_into_tensor"} & refused  # sim/test_newer_torch.py
    assert refused - by_hand - elsewhere == {"deprecated.init_master_worker"}

    def body() -> None:
        for name in by_hand:
            with pytest.raises(NotSimulated, match=rf"{name}\(store, rank, size\) made by hand.*use"):
                getattr(dist, name)(dist.HashStore(), 0, 1)
        with pytest.raises(UsageError, match="use init_process_group"):
            old.init_master_worker("tcp")

    ranks(body, 1)


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith(RELEASE), reason="the table has the names of another release")
def test_no_name_of_a_submodule_is_left_out() -> None:
    """What torch has is in the table; in a rank each name is torch's own object, unless its line says otherwise."""
    listed = {(row.module, row.name) for row in module_rows()}
    assert {(module, name) for module, names in public_names().items() for name in names} - listed == set()
    own = {row: resolved_in_module(row) for row in module_rows() if has_module(row)}
    assert len(own) > 450

    def body() -> list[tuple[str, str]]:
        return [row[:2] for row, value in own.items() if resolved_in_module(row) is not value]

    assert ranks(body, 1).results == [[row[:2] for row in own if row.simulated == "yes"]]


def test_names_of_submodules_are_shown() -> None:
    """A body of the file that is named uses it."""
    rows = [row for row in module_rows() if row.shown != "-"]
    assert len(rows) > 70
    assert [row[:2] for row in rows if row.name not in used_in(row.shown) | imported_in(row.shown)] == []


def test_the_page_is_up_to_date() -> None:
    """`python -m tests.conformance.api_names` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()
