"""Ranks that a program starts as commands: Lightning's way, and launchers written by hand."""

from __future__ import annotations

import pytest
from sim.running import Scripts

from distsim.errors import UsageError

AGAIN = """
import os, subprocess, sys
import torch, torch.distributed as dist
size = 3
children = []
if "LOCAL_RANK" not in os.environ:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", LOCAL_RANK="0", WORLD_SIZE=str(size))
    for rank in range(1, size):
        command = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
        children.append(subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(rank)}, cwd=sys.argv[1]))
rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo", rank=rank, world_size=size)
total = torch.ones(1) * rank
dist.all_reduce(total)
print(total.item(), sys.argv[1:], os.getcwd() == os.path.realpath(sys.argv[1]), flush=True)
"""


def test_a_program_starts_itself_again(script: Scripts) -> None:
    """Its commands are the ranks beside it, with their variables, arguments and folders, and end with their codes."""
    ran = script(
        AGAIN
        + """
if children:
    print(children[0].wait(), children[1].wait(timeout=60), children[1].poll())
elif rank == 2:
    sys.exit(4)
""",
        3,
        args=(str(script.folder),),
        launcher="python",
    )
    assert ran.of(1) == [f"3.0 {[str(script.folder)]} True"]
    assert ran.of(2) == ran.of(1)
    assert ran.of(0)[-1] == "0 4 4"
    assert ran.outcome.world_size == 3


def test_a_wait_for_a_rank_ends_by_its_timeout(script: Scripts) -> None:
    """`wait(timeout)` raises, `terminate` ends the rank, and the code is the signal's."""
    ran = script(
        AGAIN
        + """
if children:
    children[0].wait()
    try:
        children[1].wait(timeout=5)
    except subprocess.TimeoutExpired as error:
        print("expired", error.timeout)
    children[1].terminate()
    print(children[1].wait())
elif rank == 2:
    import time
    time.sleep(1000)
""",
        3,
        args=(str(script.folder),),
        launcher="python",
    )
    assert ran.of(0)[-2:] == ["expired 5", "-15"]


def test_a_launcher_written_by_hand(script: Scripts) -> None:
    """A script that runs another one for each rank is no rank itself."""
    files = {
        "train.py": """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        print(os.environ["LOCAL_RANK"], dist.get_rank(), dist.get_world_size(), __name__)
        """
    }
    ran = script(
        """
import os, subprocess, sys
path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")
place = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", WORLD_SIZE="2")
places = [{**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
ranks = [subprocess.Popen([sys.executable, "-u", path], env=place) for place in places]
print([one.wait() for one in ranks])
""",
        files=files,
        launcher="python",
    )
    assert [ran.of(rank) for rank in range(2)] == [[f"{rank} {rank} 2 __main__"] for rank in range(2)]
    assert "[0, 0]" in ran.out
    assert ran.outcome.exit_code == 0


@pytest.mark.parametrize("form", ["['--rank', str(i)]", "[f'--local_rank={i}']"])
def test_a_launcher_that_numbers_its_ranks_by_an_argument(script: Scripts, form: str) -> None:
    """Its commands are ranks, in the order of their numbers; a number out of order (of LoRA, say) is not a rank."""
    files = {
        "train.py": """
        import argparse, torch, torch.distributed as dist
        parser = argparse.ArgumentParser()
        parser.add_argument("--rank", "--local_rank", type=int)
        rank = parser.parse_args().rank
        dist.init_process_group("gloo", init_method="tcp://localhost:54321", world_size=2, rank=rank)
        print(rank, dist.get_world_size())
        """,
        "lora.py": "",
    }
    ran = script(
        f"""
import os, subprocess, sys
folder = os.path.dirname(os.path.abspath(__file__))
subprocess.run([sys.executable, os.path.join(folder, "lora.py"), "--rank", "8"], check=True)
ranks = [subprocess.Popen([sys.executable, os.path.join(folder, "train.py"), *{form}]) for i in range(2)]
print([one.wait() for one in ranks])
""",
        files=files,
        launcher="python",
    )
    assert [ran.of(rank) for rank in range(2)] == [[f"{rank} 2"] for rank in range(2)]
    assert "[0, 0]" in ran.out


@pytest.mark.filterwarnings("ignore:subprocess .* is still running")
def test_more_commands_than_the_cluster_has_room_for(script: Scripts) -> None:
    """The refusal has the numbers and the remedy."""
    with pytest.raises(UsageError, match=r"the program makes a group of 3 ranks, but the cluster .* has room for 2"):
        script(AGAIN, 2, args=(str(script.folder),), launcher="python")


@pytest.mark.parametrize("command", ['sys.executable, "-u", "-m", "torch.distributed.run"', '"torchrun"'])
def test_a_program_starts_a_launcher(script: Scripts, command: str) -> None:
    """A command `python -m torch.distributed.run` is simulated with its ranks, and has its exit code, and so is
    `torchrun`."""
    train = script.folder / "train.py"
    train.write_text(
        """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(total.item(), sys.argv[1:], flush=True)
"""
    )
    ran = script(
        f"""
import subprocess, sys
import torch
launcher = [{command}, "--nproc-per-node", "2", {str(train)!r}, "-x"]
print(subprocess.run(launcher).returncode)
""",
        2,
        launcher="python",
    )
    assert [ran.of(rank)[-1] for rank in range(2)] == ["2.0 ['-x']"] * 2
    assert ran.of("main")[-1] == "0"
    assert ran.outcome.world_size == 2
