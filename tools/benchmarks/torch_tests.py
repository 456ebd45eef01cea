"""PyTorch's own distributed tests that come with its wheel, as one program: `python torch_tests.py CLASS.test_name`.

The same classes as pytorch's test/distributed/test_distributed_spawn.py and rpc/test_tensorpipe_agent.py make. Each
test starts its own ranks with torch.multiprocessing. Without an argument the names are listed. Exit code: 0 passed,
1 failed, 77 skipped. Environment: TORCH_TESTS_WORLD (2) ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import types
import unittest
from pathlib import Path

# A launcher's WORLD_SIZE is that of its own one process. torch's tests read these when they are imported.
os.environ["BACKEND"] = "gloo"
os.environ["WORLD_SIZE"] = os.environ.get("TORCH_TESTS_WORLD", "2")
os.environ.pop("INIT_METHOD", None)
if not os.path.isdir(os.path.join(os.environ.get("TEMP_DIR", ""), "barrier")):
    os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="torch-tests-")
    for name in ("barrier", "test_dir", "init_dir"):
        Path(os.environ["TEMP_DIR"], name).mkdir()

# torch's tests want it; none of those here uses more than its name.
if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in

from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed.ddp_under_dist_autograd_test import DdpComparisonTest, DdpUnderDistAutogradTest
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend
from torch.testing._internal.distributed.nn.api.remote_module_test import RemoteModuleTest, ThreeWorkersRemoteModuleTest
from torch.testing._internal.distributed.rpc.dist_optimizer_test import DistOptimizerTest
from torch.testing._internal.distributed.rpc.examples.parameter_server_test import ParameterServerTest
from torch.testing._internal.distributed.rpc.examples.reinforcement_learning_rpc_test import (
    ReinforcementLearningRpcTest,
)
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

SKIPPED = 77


class Spawned(MultiProcessTestCase):
    """Starts the ranks of a test before it runs."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class TestDistBackendWithSpawn(TestDistBackend, DistributedTest._DistTestBase):
    """Collectives, messages, DDP, Join, profiling."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class TensorPipeDdpUnderDistAutogradTest(DdpUnderDistAutogradTest, TensorPipeRpcAgentTestFixture, Spawned): ...


class TensorPipeDdpComparisonTest(DdpComparisonTest, TensorPipeRpcAgentTestFixture, Spawned): ...


class TensorPipeRemoteModuleTest(RemoteModuleTest, TensorPipeRpcAgentTestFixture, Spawned): ...


class TensorPipeThreeWorkersRemoteModuleTest(ThreeWorkersRemoteModuleTest, TensorPipeRpcAgentTestFixture, Spawned): ...


class TensorPipeDistOptimizerTest(DistOptimizerTest, TensorPipeRpcAgentTestFixture, Spawned): ...


class TensorPipeParameterServerTest(ParameterServerTest, TensorPipeRpcAgentTestFixture, Spawned): ...


class TensorPipeReinforcementLearningRpcTest(ReinforcementLearningRpcTest, TensorPipeRpcAgentTestFixture, Spawned): ...


CASES = (
    TestDistBackendWithSpawn,
    TensorPipeDdpUnderDistAutogradTest,
    TensorPipeDdpComparisonTest,
    TensorPipeRemoteModuleTest,
    TensorPipeThreeWorkersRemoteModuleTest,
    TensorPipeDistOptimizerTest,
    TensorPipeParameterServerTest,
    TensorPipeReinforcementLearningRpcTest,
)


def names() -> list[str]:
    """`CLASS.test_name` of every test, in the order of the classes above."""
    return [f"{case.__name__}.{name}" for case in CASES for name in unittest.TestLoader().getTestCaseNames(case)]


def main() -> int:
    """Run one test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("test", nargs="?", metavar="CLASS.test_name")
    test = parser.parse_args().test
    if test is None:
        print("\n".join(names()))
        return 0
    if test not in names():
        # Alone in its process, this program knows no other file of the benchmarks.
        print(f"torch_tests.py: error: expected one of the tests that it lists, got {test!r}", file=sys.stderr)
        return 2
    case, _, name = test.partition(".")
    suite = unittest.TestSuite([globals()[case](name)])
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    if result.skipped:
        return SKIPPED
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
