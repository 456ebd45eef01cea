"""The guard by hooks on groups (torch 2.14): the same verdicts as by patches, and a group stays torch's own."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import Case, Zygote, distsim_run, ring_directory
from test_faults import CASES, held_against_its_head
from test_healthy import CASES as HEALTHY

from distsim.debug.settings import Attach, Level, Settings
from distsim.realexec import install
from distsim.realexec.guard.hooked import call_of
from distsim.torch_compat import groups
from distsim.torch_compat.names import TorchName
from tests.kin import one_in

BY_HOOKS = {"DISTSIM_GUARD_ATTACH": "hooks"}
has_hooks = pytest.mark.skipif(not groups.PRE_HOOK.exists(), reason="this torch has no hooks on groups (2.14 has)")
ALWAYS = {"missing_rank", "shape_mismatch", "p2p_cycle", "monitored_barrier", "future_callback"}

BEGIN = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
dist.init_process_group("gloo")
rank, world, t = dist.get_rank(), dist.group.WORLD, torch.ones(4)
"""
MADE_BY_CPP = {
    "functional hang": (
        "missing_rank",
        (1,),
        "for _ in range(3):\n    functional.all_reduce(t, 'sum', world) + 1\n"
        "if rank != 1:\n    functional.all_reduce(t, 'sum', world) + 1\n",
    ),
    "functional reduce operation": (
        "reduce_op_mismatch",
        (2,),
        "functional.all_reduce(t, 'max' if rank == 2 else 'sum', world) + 1\n",
    ),
    "functional splits": (
        "splits_mismatch",
        (1,),
        "splits = [1, 1, 1]\n"
        "functional.all_to_all_single(t[:3], [1, 1, 1], [2, 1, 0] if rank == 1 else splits, world) + 1\n",
    ),
    "DDP": (
        "uneven_iterations",
        (1,),
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))\n"
        "for step in range(4):\n    if step == 2 and rank == 1:\n        break\n    model(t).sum().backward()\n",
    ),
}
"""Programs whose fault is in a call that C++ makes: the kind, the culprits, the text."""


@has_hooks
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.path.stem, marks=[] if c.path.stem in ALWAYS else pytest.mark.soak) for c in CASES],
)
def test_a_fault_is_named_by_hooks(case: Case, zygote: Zygote, folder: Path) -> None:
    """The first diagnosis of a faulty program is the one that the guard by patches gives."""
    head = case.head
    result = zygote.run(
        case.path,
        case.ranks,
        directory=folder,
        environ=BY_HOOKS,
        hang_after_s=float(head.get("hang_after", "60")),
        straggler_after_s=float(head.get("straggler_after", "10")),
        nan=bool(head.get("nan")) or None,
        checksum=bool(head.get("checksum")) or None,
    )
    assert result.diagnoses, result.outputs
    held_against_its_head(case, result.diagnoses[0], result.exit_code, result.report)


@has_hooks
@pytest.mark.slow
@pytest.mark.parametrize("name", MADE_BY_CPP)
def test_a_fault_in_a_call_of_cpp_is_named(name: str, zygote: Zygote, folder: Path) -> None:
    """DDP's buckets and functional collectives, which no method of Python's is asked for."""
    kind, culprits, text = MADE_BY_CPP[name]
    program = folder / "program.py"
    program.write_text(BEGIN + text)
    result = zygote.run(program, 3, directory=folder, environ=BY_HOOKS)
    first = result.diagnoses[0]
    assert (first.kind.value, first.culprits) == (kind, culprits), result.report


@has_hooks
@pytest.mark.slow
@pytest.mark.parametrize("case", one_in(15, HEALTHY, first=5), ids=lambda case: case.path.stem)
def test_no_alarm_by_hooks(case: Case, zygote: Zygote, folder: Path) -> None:
    """A legal program ends well."""
    result = zygote.run(case.path, case.ranks, directory=folder, environ=BY_HOOKS)
    assert result.codes == dict.fromkeys(range(case.ranks), 0), result.outputs
    assert result.diagnoses == [], result.report


STAYS = """
import distsim.debug
import torch, torch.distributed as dist
dist.init_process_group("gloo")
world, half = dist.group.WORLD, dist.new_group([0, 1])
assert type(world) is type(half) is dist.ProcessGroup
for group in (world, half):
    dist.all_reduce(torch.ones(2), group=group)
own = dist.ProcessGroup.allreduce
assert own.__wrapped__ is not None and own.__doc__
distsim.debug.remove()
assert dist.ProcessGroup.allreduce is own.__wrapped__
for group in (world, half):
    dist.all_reduce(torch.ones(2), group=group)
distsim.debug.install()
assert dist.group.WORLD is world
for group in (world, half):
    dist.all_reduce(torch.ones(2), group=group)
"""


@has_hooks
@pytest.mark.slow
def test_a_group_stays_torchs_own(zygote: Zygote, tmp_path: Path) -> None:
    """Also where the guard is taken off and comes back; a program need not destroy its groups before it ends."""
    program = tmp_path / "stays.py"
    program.write_text(STAYS)
    with ring_directory() as folder:
        result = zygote.run(program, 2, directory=folder, environ=BY_HOOKS)
    assert result.codes == {0: 0, 1: 0}, result.outputs
    assert result.diagnoses == []


ENDS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
dist.all_reduce(torch.ones(2))
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@has_hooks
@pytest.mark.slow
def test_a_group_that_outlives_the_program_does_no_harm(tmp_path: Path) -> None:
    """A hook of Python's that is still there when the interpreter has ended would be a SIGSEGV, in a child, too."""
    (tmp_path / "ends.py").write_text(ENDS)
    ended = distsim_run("ends.py", cwd=tmp_path, **BY_HOOKS)
    assert ended.returncode == 0, ended.stderr
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize(
    ("has", "given", "why"),
    [
        (False, {}, "has no hooks on groups (2.14 has)"),
        (True, {"level": Level.STRICT}, "a hook cannot hold an asynchronous call"),
        (True, {"checksum": True}, "a hook cannot give a call the copy"),
    ],
    ids=["below torch 2.14", "strict", "checksums"],
)
def test_what_hooks_cannot_do_is_refused_by_name(
    has: bool, given: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says why, and patches do it."""
    monkeypatch.setattr(groups, "PRE_HOOK", TorchName("torch.Tensor" if has else "torch.distributed.no_hook", "hooks"))
    monkeypatch.delenv("DISTSIM_LAUNCHED", raising=False)
    assert not install.comes_by_hooks(Settings(guard_attach=Attach.HOOKS, **given))
    assert why in capsys.readouterr().err


def test_hooks_say_what_they_do_not_see(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, where a program asks for them."""
    monkeypatch.setattr(groups, "PRE_HOOK", TorchName("torch.Tensor", "hooks"))
    monkeypatch.delenv("DISTSIM_LAUNCHED", raising=False)
    assert install.comes_by_hooks(Settings(guard_attach=Attach.HOOKS))
    assert "does not see who waits" in capsys.readouterr().err
    assert not install.comes_by_hooks(Settings())
    assert capsys.readouterr().err == ""


Op = Enum(  # as torch._C._distributed_c10d.HookOpName
    "Op",
    "SEND RECV BROADCAST ALLREDUCE REDUCE ALLGATHER REDUCE_SCATTER ALLTOALL BARRIER SCATTER GATHER SPLIT NEW_WINDOW "
    "UNKNOWN",
)
RANKS = (4, 6, 9)


def told(name: str, num_in: int, num_out: int, root: int = -1) -> Any:
    tensors = [torch.ones(3, dtype=torch.int64) for _ in range(max(num_in, num_out))]
    said = SimpleNamespace(name=Op[name], input_tensors=tensors[:num_in], output_tensors=tensors[:num_out], root=root)
    return call_of(said, RANKS, None)


@pytest.mark.parametrize(
    ("name", "num_in", "num_out", "op"),
    [
        ("ALLREDUCE", 1, 0, "all_reduce"),
        ("ALLREDUCE", 2, 0, "all_reduce_coalesced"),
        ("BROADCAST", 1, 0, "broadcast"),
        ("REDUCE", 1, 0, "reduce"),
        ("ALLGATHER", 1, 1, "all_gather_into_tensor"),
        ("ALLGATHER", 2, 2, "all_gather_into_tensor_coalesced"),
        ("ALLGATHER", 1, 3, "all_gather"),
        ("ALLGATHER", 2, 6, "all_gather_coalesced"),
        ("REDUCE_SCATTER", 1, 1, "reduce_scatter_tensor"),
        ("REDUCE_SCATTER", 2, 2, "reduce_scatter_tensor_coalesced"),
        ("REDUCE_SCATTER", 3, 1, "reduce_scatter"),
        ("ALLTOALL", 1, 1, "all_to_all_single"),
        ("ALLTOALL", 3, 3, "all_to_all"),
        ("BARRIER", 0, 0, "barrier"),
        ("GATHER", 1, 3, "gather"),
        ("SCATTER", 3, 1, "scatter"),
    ],
)
def test_what_a_hook_is_told_is_one_operation(name: str, num_in: int, num_out: int, op: str) -> None:
    """By the number of its tensors; all of them are torch.distributed's own names."""
    call = told(name, num_in, num_out)
    assert call.key[0] == op
    assert call.is_async


def test_what_a_hook_is_not_told_is_left_open() -> None:
    """Not guessed: neither the reduce operation nor shares of an all_to_all, which would contradict another rank's."""
    assert told("ALLREDUCE", 1, 0).key[4] is None
    assert told("ALLTOALL", 1, 1).key[1:3] == ((), ())
    assert told("BROADCAST", 1, 0, root=1).key[5] == 6
    assert told("BROADCAST", 1, 0, root=7).key[5] is None
    assert [told(name, 1, 0) for name in ("SEND", "RECV", "SPLIT", "NEW_WINDOW", "UNKNOWN")] == [None] * 5
