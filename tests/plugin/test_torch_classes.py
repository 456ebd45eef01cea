"""torch's test classes from `distsim.test`: suites move by an import line."""

from __future__ import annotations

from tests.plugin.conftest import Run


def test_a_suite_of_threads_runs_on_simulated_ranks(run: Run) -> None:
    """World size by a property, preparation on each rank, comparisons of tensors and on one rank."""
    result = run(
        """
from distsim.test import MultiThreadedTestCase

class TestSum(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def perThreadSetUp(self):
        self.mine = self.rank

    def test_sum(self):
        t = torch.ones(3) * self.rank
        dist.all_reduce(t)
        self.assertEqual([t], [torch.full((3,), 6.0)])
        self.assertEqual(self.mine, self.rank)
        self.assertEqualOnRank(self.rank, 2, rank=2)
        assert dist.get_world_size(self.pg) == 4

    def test_wrong(self):
        self.assertEqual(torch.ones(1) * self.rank, torch.zeros(1))
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["rank 1: AssertionError: Tensor-likes are not close! (2 more ranks failed, too)"])


def test_a_suite_of_processes_is_explored(run: Run) -> None:
    """`explore` is a class attribute; each class of a family has its own world size and backend."""
    result = run(
        """
from distsim.test import MultiProcContinuousTest

class TestRace(MultiProcContinuousTest):
    world_size = 3
    explore = "all"

    def test_race(self):
        if self.rank == 0:
            came = []
            for _ in range(2):
                t = torch.zeros(1)
                dist.recv(t)
                came.append(int(t))
            self.assertEqual(came, [1, 2])
        else:
            dist.send(torch.ones(1) * self.rank, 0)

class TestTwo(TestRace):
    world_size = 2
    test_race = None

    @classmethod
    def backend_str(cls):
        return "nccl"

    def test_gpu(self):
        t = torch.ones(2, device=f"cuda:{self.rank}")
        dist.all_reduce(t)
        assert dist.get_backend() == "nccl" and dist.get_world_size() == 2
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "  receive 1 of rank 0 (line 16) takes the message of rank 2 (usually rank 1)",
            "1 of 2 classes fails",
            "test_gpu: one class: no order of calls makes a difference *",
        ]
    )
