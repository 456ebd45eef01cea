"""The search for silent faults on gloo: what it leaves behind, and its exit codes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from jobs import Zygote, distsim_run

from distsim.debug.diagnosis.silent.facts_file import read_facts
from distsim.debug.settings import Settings, Silent
from distsim.realexec import launch
from tests.cases.corpus import Case

SHARDED = """\
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
{shard}
optimizer = torch.optim.Adam(model.parameters())
torch.manual_seed(dist.get_rank())
for _ in range(5):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
FSDP1 = """\
from torch.distributed.fsdp import FullyShardedDataParallel
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
"""
FSDP2 = """\
from torch.distributed.fsdp import fully_shard
for part in (*model, model):
    fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("shard", [pytest.param(FSDP1, marks=pytest.mark.soak), FSDP2], ids=["FSDP", "fully_shard"])
def test_storages_that_torch_resizes_stay_resizable(shard: str, zygote: Zygote, folder: Path, tmp_path: Path) -> None:
    """Sharded parameters are read without a trace, and all steps are recorded."""
    script = tmp_path / "train.py"
    script.write_text(SHARDED.format(shard=shard))
    result = zygote.run(script, 2, directory=folder, silent="watch")
    assert (result.codes, result.silent) == ({0: 0, 1: 0}, []), result.outputs
    records = [read_facts(path).facts for path in folder.glob("*.silent")]
    assert [len(record.steps) for record in records] == [5, 5]
    assert all(step.before and step.after for record in records for step in record.steps)


@pytest.mark.parametrize(
    ("silent", "level", "code", "expected"),
    [
        (Silent.STRICT, "error", 0, 5),
        (Silent.STRICT, "warning", 0, 0),
        (Silent.WATCH, "error", 0, 0),
        (Silent.STRICT, "error", 1, 1),
    ],
)
def test_strict_alone_makes_an_error_alone_an_exit_code(
    silent: Silent, level: str, code: int, expected: int, tmp_path: Path
) -> None:
    """Ranks that ended well and a silent error make it 5; not a warning, nor `watch`, nor where a rank has failed."""
    kept = launch._Folder(tmp_path, None, Settings(silent=silent))
    args = argparse.Namespace(no_python=False, training_script="train.py")
    verdict = {"world_size": 2, "silent": [{"kind": "replicas_diverge", "level": level}]}
    assert launch._exit_code(args, kept, False, code, verdict, []) == expected


@pytest.mark.soak
@pytest.mark.slow
def test_strict_makes_an_error_an_exit_code_of_the_launcher(tmp_path: Path) -> None:
    """Exit code 5, the section behind the ranks' output, and `silent` in the report."""
    path, report = str(Case.named("silent/skip_load").path), tmp_path / "report.json"
    strict = distsim_run("--silent", "strict", "--report", str(report), path, cwd=tmp_path)
    assert strict.returncode == 5, strict.stderr
    assert "SILENT  error  replicas differ at start" in strict.stderr
    document = json.loads(report.read_text())
    assert ([one["kind"] for one in document["silent"]], document["diagnoses"]) == (["replicas_differ_at_start"], [])


@pytest.mark.soak
@pytest.mark.slow
def test_watch_leaves_the_launchers_exit_code_alone(tmp_path: Path) -> None:
    """The same fault, searched for without `strict`: the job ends with 0."""
    path = str(Case.named("silent/skip_load").path)
    assert distsim_run(path, cwd=tmp_path, DISTSIM_SILENT="watch").returncode == 0
