"""How equal ranks end, of which few were traced."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.debug.records.kinds import Kind
from distsim.sim import RunRequest, run_program
from tests.sim.test_equal_ranks import TRAIN, ran

pytestmark = pytest.mark.filterwarnings("ignore")  # fully_shard warns of views

PREFETCHES = """
import os, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
with torch.device("cuda"):
    layers = [torch.nn.Embedding(512, 1024), *(torch.nn.Linear(1024, 1024) for _ in range(4))]
model = torch.nn.Sequential(*(fully_shard(layer) for layer in layers))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    words = torch.randint(0, 512, (1, 1 << (10 if step < 2 else 23)), device="cuda")
    loss = model(words).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss)
"""


@pytest.mark.parametrize(("budget_s", "ranks"), [(None, tuple(range(16))), (0.0, (0, 8, 15))], ids=["all", "sample"])
def test_all_ranks_run_out_of_memory_and_none_waits_for_them(
    budget_s: float | None, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    """Their next gather is under way, and nobody is missing in it; of ranks that did not run nothing is said."""
    (tmp_path / "program.py").write_text(PREFETCHES)
    ran = run_program(RunRequest(program=str(tmp_path / "program.py"), on="dgx-h100:2", budget_s=budget_s))
    (told,) = ran.diagnoses
    assert told.kind is Kind.RANK_RAISED
    assert told.culprits == ranks
    assert told.victims == ()
    assert ran.training is not None
    (short,) = ran.training.out_of_memory
    assert short.ranks == ranks
    assert short.one_sequence


@pytest.mark.parametrize(
    "meeting",
    [
        "if store.add('here', 1) == size:\n    store.set('all', '1')\nstore.wait(['all'])\n",
        "store.add('here', 1)\nwhile int(store.add('here', 0)) < size:\n    time.sleep(1)\n",
    ],
    ids=["wait", "poll"],
)
def test_ranks_that_meet_in_a_store_are_all_traced(meeting: str, tmp_path: Path) -> None:
    """What a rank of a sample waits for on its host may come from a rank that is not traced: no hang is told of it."""
    text = f"import time\nstore = dist.distributed_c10d._get_default_store()\ntorch.ones(4).cuda()\n{meeting}"
    outcome, _ = ran(tmp_path, text, "sample")
    assert (outcome.diagnoses, len(outcome.ranks)) == ([], 16)
    assert any("the simulation restarted" in note for note in outcome.notes)


def test_a_store_barrier_of_torch_is_met_by_the_ranks_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of TORCH_DIST_INIT_BARRIER=1, which OLMo-core sets, each rank is known to arrive: a sample stays one."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    text = "dist.new_group(list(range(8)))\n" + TRAIN.format(extra="")
    outcome, _ = ran(tmp_path, text, "sample")
    assert (outcome.diagnoses, [summary.rank for summary in outcome.ranks]) == ([], [0, 8, 15])
