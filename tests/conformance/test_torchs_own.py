"""torch's own tests of collectives, messages, groups, DDP and RPC, which its wheel has, pass in the simulator."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.api_modules import RELEASE
from sim.running import ranks

from tests.kin import one_in

FOLDER = "torch.testing._internal"
RPC = f"{FOLDER}.distributed.rpc"
COLLECTIVES = f"{FOLDER}.distributed.distributed_test"
AGENT = [f"{RPC}.tensorpipe_rpc_agent_test_fixture.TensorPipeRpcAgentTestFixture"]
AGENT += [f"{FOLDER}.common_distributed.MultiProcessTestCase"]
SUITES: dict[str, list[str]] = {
    "collectives": [f"{COLLECTIVES}.TestDistBackend", f"{COLLECTIVES}.DistributedTest._DistTestBase"],
    "rpc": [f"{RPC}.rpc_test.RpcTest", *AGENT],
    "autograd": [f"{RPC}.dist_autograd_test.DistAutogradTest", *AGENT],
    "modules": [f"{FOLDER}.distributed.nn.api.remote_module_test.RemoteModuleTest", *AGENT],
    "optimizer": [f"{RPC}.dist_optimizer_test.DistOptimizerTest", *AGENT],
}
"""The classes of which torch makes each of its programs."""
PARTS = [("collectives", 4, 0, 1, 95), *(("rpc", 4, part, 4, 45) for part in range(4))]
PARTS += [("autograd", 4, 0, 2, 25), ("autograd", 4, 1, 2, 25), ("optimizer", 4, 0, 1, 3), ("modules", 2, 0, 1, 8)]
"""Suite, ranks, which of how many of its parts, and how many tests pass at least; torch skips some without a GPU."""
NOT_HERE = {
    "SyncBatchNorm_process_group": "needs torchvision",
    "all_to_all": "of four ranks; gloo refuses it as well",
    "all_to_all_complex": "of four ranks; gloo refuses it as well",
    "all_to_all_full_group": "of four ranks; gloo refuses it as well",
    "barrier_timeout_full_group": "rank 0 waits alone, and the others are in the group of the next test",
    "barrier_timeout_global": "makes its group by an address of its own launcher",
    "barrier_timeout_group": "rank 0 waits alone, and the others are in the group of the next test",
    "batch_isend_irecv_op_err": "a rank leaves it early",
    "ddp_logging_data_cpu": "expects the environment of its own launcher",
    "get_rank": "expects a folder of its own",
    "monitored_barrier_gloo": "a rank leaves it early",
    "clean_context_during_backward": "leaves RPC initialized",
    "context_cleanup_nested_rpc": "leaves RPC initialized",
    "grad_copy_sparse_indices_extra_ref": "looks at the memory of gradients that nobody else holds",
    "init_pg_then_rpc": "makes the default group, whose file is another test's",
    "init_rpc_then_pg": "makes the default group, whose file is another test's",
    "init_rpc_twice": "leaves RPC initialized",
    "forward_async_script": "scripts a module of another process",
    "forward_sync_script": "scripts a module of another process",
    "remote_module_py_pickle_not_supported_script": "scripts a module of another process",
    "function_not_on_callee": "sets a result that a process has once",
    "no_grad_copy_sparse": "looks at the memory of gradients that nobody else holds",
    "my_parameter_server": "sends its own class, which pickle finds by its module",
    "monitored_barrier_gloo_rank_0_timeout": "rank 0 waits alone, and the others are in the group of the next test",
    "no_grad_copy": "looks at the memory of gradients that nobody else holds",
    "server_process_global_profiler": "a rank leaves it early",
    "trainer_ps": "finds the context of its parameter server, of which another test has made one",
    "trainer_ps_torchscript_functions": "scripts functions at the first import of a process",
}
"""Tests that need a process of their own, or what a simulation has not."""


def resolved(path: str) -> Any:
    """The class with a dotted name, which may be in a class."""
    module, _, name = path.partition("_test.") if "_test." in path else path.rpartition(".")
    value: Any = importlib.import_module(f"{module}_test" if "_test." in path else module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def stand_in_for_expecttest() -> None:
    """Of which torch's tests use no more than the name."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        sys.modules["expecttest"] = stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]


def own_tests(suite: str, part: int, parts: int, folder: str) -> dict[str, str]:
    """Run the tests one after the other, as torch's runner does in each of its processes; how each ended."""
    stand_in_for_expecttest()
    case = type("Case", tuple(resolved(path) for path in SUITES[suite]), {})
    set_seed = importlib.import_module(f"{FOLDER}.common_utils").set_rng_seed
    ended = {}
    names = unittest.TestLoader().getTestCaseNames(case)
    for name in names[part * len(names) // parts : (part + 1) * len(names) // parts]:
        if "cuda" in name or "nccl" in name or name.removeprefix("test_") in NOT_HERE:
            continue
        if suite == "collectives":
            dist.init_process_group("gloo")
        test = case(name)
        test.rank, test.file_name = int(os.environ["RANK"]), f"{folder}/{name}"
        set_seed()
        try:
            getattr(test, name)()
            ended[name] = "passed"
        except (unittest.SkipTest, SystemExit) as skipped:
            ended[name] = f"skipped: {skipped}"
        except Exception as error:
            ended[name] = f"{type(error).__name__}: {error}"
        if dist.is_initialized():
            dist.destroy_process_group()
    return ended


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith(RELEASE), reason="another release has other tests")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("suite", "num_ranks", "part", "parts", "num_passed"), one_in(3, [pytest.param(*row) for row in PARTS])
)
def test_torchs_own_tests_pass(
    suite: str, num_ranks: int, part: int, parts: int, num_passed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a group, or RPC, of its own."""
    for name in ("barrier", "test_dir", "init_dir"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TEMP_DIR", str(tmp_path))
    monkeypatch.setenv("BACKEND", "gloo")
    # torch's test utilities forbid all later assignments to torch.backends in this process, when they are imported
    monkeypatch.setattr(torch.backends, "disable_global_flags", lambda: None)
    outcome = ranks(own_tests, num_ranks, suite, part, parts, str(tmp_path))
    assert outcome.exit_code == 0, outcome.diagnoses
    for ended in outcome.results:
        assert [f"{name}: {how}" for name, how in ended.items() if not how.startswith(("passed", "skipped"))] == []
        assert list(ended.values()).count("passed") >= num_passed
