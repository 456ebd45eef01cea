"""Same seed, same bytes; and whatever happened inside, the process around is as it was."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sim.running import HEAD, Scripts, ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distsim
from distsim.report.document import report_document

TRAIN = (
    HEAD
    + """
import random, threading
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), time.perf_counter(), random.random())
handle = dist.all_reduce(torch.ones(1000), async_op=True)
while not handle.is_completed():
    pass
{end}
"""
)
HANG = TRAIN.replace("{end}", "if rank:\n    dist.barrier()")
HEALTHY = TRAIN.replace("{end}", "dist.barrier()")


def document(outcome: Any) -> str:
    return json.dumps(report_document(outcome), sort_keys=True)


@pytest.mark.parametrize("text", [HEALTHY, HANG], ids=["healthy", "hang"])
def test_two_runs_are_equal(script: Scripts, text: str) -> None:
    """Reports and output of two runs in one process are the same bytes; another seed's are not."""
    first, second, other = script(text, 4, seed=3), script(text, 4, seed=3), script(text, 4, seed=4)
    assert document(first.outcome) == document(second.outcome)
    assert first.out == second.out
    assert first.out != other.out


@pytest.mark.soak
@pytest.mark.slow
def test_equal_on_a_busy_machine_and_with_other_hashes(script: Scripts, tmp_path: Path) -> None:
    """A loaded machine and another PYTHONHASHSEED change nothing in the report."""
    program = script.write(HEALTHY)
    reports = []
    for number in range(3):
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 if number == 2 else 0)]
        try:
            report = tmp_path / f"report{number}.json"
            command = [sys.executable, "-m", "distsim", "run", "--on", "ethernet-cpu:4", "--nproc-per-node", "1"]
            command += ["--quiet", "--report", str(report), str(program)]
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": str(number)})
            reports.append(report.read_bytes())
        finally:
            for process in busy:
                process.kill()
                process.wait()
    assert reports[0] == reports[1] == reports[2]


CALLS = """\
import os
import torch
import torch.distributed.rpc as rpc
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=4)
if rank == 0:
    for answer in [rpc.rpc_async(f"worker{to}", torch.add, (torch.ones(2), to)) for to in (1, 2, 3)]:
        answer.wait()
rpc.shutdown()
"""


@pytest.mark.slow
def test_remote_calls_are_equal_with_other_hashes(tmp_path: Path) -> None:
    """torch asks all workers in the order of a set of their names."""
    program, reports = tmp_path / "calls.py", []
    program.write_text(CALLS)
    for seed in ("1", "2", "3"):
        command = [sys.executable, "-m", "distsim", "run", "--on", "dgx-h100:1", "--nproc-per-node", "4", "--quiet"]
        command += ["--report", str(tmp_path / "report.json"), str(program)]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed})
        reports.append((tmp_path / "report.json").read_bytes())
    assert len(set(reports)) == 1


def surroundings() -> dict[str, Any]:
    """All that a simulation leads elsewhere."""
    numpy_state = np.random.get_state(legacy=False)["state"]["key"].tolist()
    return {
        "time": (time.time, time.sleep, time.perf_counter, threading._time),  # type: ignore[attr-defined]
        "threading": (
            threading.Lock,
            threading.RLock,
            threading.Thread.start,
            threading.current_thread,
            threading.excepthook,
        ),
        "modules": set(sys.modules),
        "path": (list(sys.path), list(sys.meta_path), sys.argv, os.getcwd()),
        "environ": dict(os.environ),
        "streams": (sys.stdout, sys.stderr, sys.excepthook, print),
        "random": (
            random.random,
            random.getstate(),
            np.random.rand,
            numpy_state,
            os.urandom,
        ),
        "torch": (
            torch.get_rng_state().tolist(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
        ),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "functions": (os._exit, os.kill, signal.signal, dist.TCPStore, torch.utils.data.DataLoader.__init__),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "modes": torch.utils._python_dispatch._is_in_torch_dispatch_mode,
        "distributed": (dist.is_initialized(), torch.distributed.distributed_c10d._world),
    }


def fine() -> None:
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    os.environ["X"] = "1"
    os.chdir("/")
    random.seed(1)
    warnings.simplefilter("ignore")
    dist.barrier()


def broken() -> None:
    fine()
    raise ValueError


def hung() -> None:
    fine()
    if dist.get_rank():
        dist.barrier()


def killed() -> None:
    fine()
    os.kill(os.getpid(), signal.SIGKILL)


def gone() -> None:
    fine()
    raise SystemExit(3)


@pytest.mark.parametrize("body", [fine, broken, hung, killed, gone])
def test_everything_is_put_back(body: Any) -> None:
    """Whatever way it ends, the surrounding process finds itself as it was."""
    ranks(body, check=False)  # the first simulation imports what it needs, and its diagnosis
    before = surroundings()
    ranks(body, check=False)
    assert surroundings() == before


def test_put_back_after_a_usage_error() -> None:
    """Also when a rank's mistake ends the simulation from inside: a rank cannot simulate."""

    def nested() -> None:
        fine()
        ranks(fine)

    before = surroundings()
    with pytest.raises(distsim.UsageError, match="a simulation already runs in this process"):
        ranks(nested)
    assert surroundings() == before
    assert ranks(fine).exit_code == 0


def test_simulations_in_a_row_are_independent() -> None:
    """A counter, a store and a group of one run are not there in the next."""
    results = []
    for _ in range(2):

        def body() -> Any:
            dist.init_process_group("gloo")
            store = dist.TCPStore(os.environ["MASTER_ADDR"], 29_900, 2, dist.get_rank() == 0)
            return store.add("count", 1), time.perf_counter(), len(dist.distributed_c10d._world.pg_map)

        results.append(ranks(body).results)
    assert results[0] == results[1]


def test_real_groups_beside_simulations() -> None:
    """The process around keeps its own real group through a simulation."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert ranks(lambda: (dist.init_process_group("gloo"), dist.get_world_size())[1]).results == [2, 2]
        assert dist.get_world_size() == 1
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


@pytest.mark.soak
@pytest.mark.slow
def test_memory_is_bounded() -> None:
    """Fifty runs with models and hangs: no rank's tensors stay."""

    def body() -> None:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(nn.Linear(64, 64))
        model(torch.ones(2, 64)).sum().backward()
        if dist.get_rank() == 0:
            dist.barrier()

    def live() -> int:
        gc.collect()
        return sum(type(thing) in (torch.Tensor, nn.Parameter) for thing in gc.get_objects())

    for _ in range(3):
        ranks(body, 4, check=False)
    before = live()
    for _ in range(50):
        ranks(body, 4, check=False)
    assert live() <= before + 20
