"""torchft's own Python, simulated and on gloo with its lighthouse: one of two replicas dies, and the other goes on."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.jobs import ENVIRON, distsim_run, free_port

pytestmark = pytest.mark.slow
pytest.importorskip("torchft", reason="pip install torchft (.ci/frameworks.txt)")
HERE = Path(__file__).parent
PROGRAM = str(HERE / "replicas.py")


def simulated(*flags: str, **environ: str) -> str:
    """What `distsim run` prints of two replicas."""
    place = ("--on", "ethernet-cpu:2", "--nproc-per-node", "1")
    done = distsim_run(*place, *flags, PROGRAM, cwd=HERE, **environ)
    return " ".join((done.stdout + done.stderr).split())


def steps(text: str) -> list[str]:
    """The lines of replica 0, in order."""
    return re.findall(r"replica 0: (?:step \d+ of \d|-?\d+\.\d+)", text)


def test_a_replica_dies_and_the_other_goes_on() -> None:
    """The job is healthy; notes have the quorum without it, 5 s after it ended: the lighthouse's heartbeat timeout."""
    text = simulated(KILL_AT="5")
    assert "finished after" in text, text
    assert "ERROR" not in text
    assert "note: torchft: quorum 1 at" in text
    assert re.search(r"note: torchft: quorum 2 at [\d.]+ s: replica_0, 5 s after replica_1 ended", text)
    assert "rank 0 went on without rank 1 by reconfigure" in text
    assert steps(text)[4:7] == ["replica 0: step 5 of 2", "replica 0: step 6 of 2", "replica 0: step 7 of 1"]


def test_a_replica_returns_and_heals() -> None:
    """Killed in an all_reduce: the step is lost and repeated; then it heals from the other and both end alike."""
    text = simulated("--fault", "crash 1 call='all_reduce #7' restart_after_s=5.2", STEPS="70")
    assert "finished after" in text, text
    assert "note: torchft: replica_0 lost its work of step 3" in text
    assert re.search(r"note: torchft: rank 1 healed to step \d+ at [\d.]+ s, in [\d.]+ .s", text)
    assert re.search(r"rank 1 was back [\d.]+ ms later", text)
    (first, second) = (re.search(rf"replica {r}: (-\d+\.\d+)", text) for r in range(2))
    assert first is not None
    assert second is not None
    assert first[1] == second[1]
    assert "SILENT" not in text


def test_the_hook_of_torchfts_ddp_raises_where_the_other_dies_in_a_call() -> None:
    """As on gloo (torchft 0.2.0, `assert fut._fut` in ddp.py): the other raises, too, and the death is the fault."""
    text = simulated("--fault", "crash 1 call='all_reduce #4'", BY_DDP="1")
    assert "ERROR rank killed rank 1" in text, text
    assert "Every other rank has raised" in text


@contextmanager
def lighthouse() -> Iterator[str]:
    """The real lighthouse; yields its address."""
    binary = Path(sys.executable).with_name("torchft_lighthouse")
    if not (binary.exists() or shutil.which("torchft_lighthouse")):
        pytest.skip("torchft_lighthouse is not installed")
    port = free_port()
    words = [str(binary), "--min_replicas", "1", "--join_timeout_ms", "10000", "--bind", f"[::]:{port}"]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def on_gloo(**environ: str) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of two replicas on gloo, each guarded under a launcher of its own."""
    with lighthouse() as address:
        job = {**ENVIRON, "TORCHFT_LIGHTHOUSE": address, "HOST": "127.0.0.1", "WORLD_SIZE": "1", **environ}
        replicas = [
            subprocess.Popen(
                [sys.executable, "-m", "distsim.debug", PROGRAM],
                env={**job, "RANK": str(rank), "LOCAL_RANK": "0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [replica.communicate(timeout=180)[0] for replica in replicas]
    return [replica.returncode for replica in replicas], outputs


@pytest.mark.soak
def test_the_same_on_gloo_under_the_guard(tmp_path: Path) -> None:
    """Two replicas, one killed: the steps and the weights of the other are those of the simulation, and the guard says
    nothing of a fault."""
    codes, outputs = on_gloo(KILL_AT="5", DISTSIM_DIR=str(tmp_path))
    assert codes == [0, -9], outputs
    assert not re.search(r"^(HANG|ERROR)", "".join(outputs), re.MULTILINE), outputs
    assert "rank 0 went on without rank 1 by reconfigure at torchft/manager.py" in "".join(outputs)
    assert steps(outputs[0]) == steps(simulated(KILL_AT="5"))


def test_a_call_that_one_replica_skips_is_reported_on_gloo(tmp_path: Path) -> None:
    """Within the 60 s that torchft waits itself: who, in which quorum's group, and at which line."""
    codes, outputs = on_gloo(
        SKIP_AT="5", TIMEOUT="60", DISTSIM_DIR=str(tmp_path), DISTSIM_HANG_AFTER="5", DISTSIM_ON_HANG="abort"
    )
    assert codes == [-15, -15], outputs
    text = " ".join("".join(outputs).split())
    assert "HANG host stuck rank 1 all_reduce #12 " in text, text
    assert (
        "Rank 0 waits in all_reduce #12 float32[2] SUM on group torchft (reconfigured, 1) (ranks 0,1), at rec" in text
    )
