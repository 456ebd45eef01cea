"""Hooks that a program registers on its groups (torch 2.14) work under the guard as they do without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Zygote, ring_directory

from distsim.torch_compat import groups

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not groups.NAN_CHECK.exists(), reason="this torch has no hooks on groups (they came with 2.14)"),
]

FIRED = """
import torch, torch.distributed as dist
from datetime import timedelta
from torch._C._distributed_c10d import NanCheckHook
dist.init_process_group("gloo")
group, fired, t = dist.group.WORLD, [], torch.ones(3)
for _ in range(4):  # as the short path knows them
    dist.all_reduce(t)
group.register_pre_hook(7, lambda call: fired.append(("pre", call.name.name, call.op_id)))
group.register_post_hook(7, lambda call: fired.append(("post", call.name.name, call.op_id)))
for _ in range(4):
    dist.all_reduce(t)
assert [kind for kind, *_ in fired] == ["pre", "post"] * 4, fired
assert {name for _, name, _ in fired} == {"ALLREDUCE"}, fired
fired.clear()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
fired.clear()
model(torch.ones(1, 2)).sum().backward()
assert [name for _, name, _ in fired] == ["ALLREDUCE"] * 2, fired
fired.clear()
group.unregister_pre_hook(7)
group.unregister_post_hook(7)
dist.all_reduce(t)
assert fired == []
dist.distributed_c10d.set_timeout(timedelta(seconds=25))
work = dist.all_reduce(t, async_op=True)
assert work.timeout == timedelta(seconds=25), work.timeout
work.wait()
"""

REFUSED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
group = dist.new_group([0, 1])
{register}
try:
    dist.all_reduce(torch.full((2,), float("nan")), group=group)
    raise SystemExit("the hook did not refuse the call")
except RuntimeError:
    pass
"""
REFUSING = {
    "NanCheckHook": "torch._C._distributed_c10d.NanCheckHook.attach(group)",
    "a hook of the program": "def refuse(call):\n    raise RuntimeError('no')\ngroup.register_pre_hook(1, refuse)",
}


def run(zygote: Zygote, program: Path, text: str, **environ: str) -> None:
    program.write_text(text)
    with ring_directory() as folder:
        result = zygote.run(program, 2, directory=folder, environ=environ)
    assert result.codes == {0: 0, 1: 0}, result.outputs
    assert result.diagnoses == []


def test_hooks_fire(zygote: Zygote, tmp_path: Path) -> None:
    """On calls that the guard would lead past the group, on DDP's buckets, and not any more once taken back."""
    run(zygote, tmp_path / "fired.py", FIRED)


@pytest.mark.parametrize("register", REFUSING.values(), ids=REFUSING)
def test_a_hook_may_refuse_a_call(zygote: Zygote, tmp_path: Path, register: str) -> None:
    """Its exception reaches the caller, and the refused call is no fault."""
    run(zygote, tmp_path / "refused.py", REFUSED.format(register=register))


def test_torchs_own_nan_check_by_environment(zygote: Zygote, tmp_path: Path) -> None:
    """TORCH_DIST_NAN_CHECK attaches a hook before the guard sees the group."""
    run(zygote, tmp_path / "nan.py", REFUSED.format(register=""), TORCH_DIST_NAN_CHECK="1")
