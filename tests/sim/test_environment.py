"""Environment variables, working directory and programs that a rank starts."""

from __future__ import annotations

import os
import subprocess

import pytest
from sim.running import HEAD, Scripts, ranks

import distsim


def test_environ_is_the_ranks_own(script: Scripts) -> None:
    """Set, delete, iterate, getenv, environb: each rank sees only what it did itself."""
    ran = script(
        HEAD
        + """
os.environ["MINE"] = str(rank)
os.environ.setdefault("ALSO", str(rank))
dist.barrier()
assert os.environ["MINE"] == os.getenv("MINE") == os.environb[b"MINE"].decode() == str(rank)
assert "MINE" in list(os.environ) and dict(os.environ)["ALSO"] == str(rank)
if rank == 0:
    del os.environ["HOME"]
dist.barrier()
print("HOME" in os.environ, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"])
"""
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert ran.of(0) == ["False 0 2 0"]
    assert ran.of(1) == ["True 1 2 0"]
    assert "MINE" not in os.environ
    assert "HOME" in os.environ


def test_nothing_leaks_into_the_process(script: Scripts) -> None:
    """After the run neither Python's nor C's environment holds what ranks set or removed."""
    script(HEAD + "os.environ['LEAK'] = '1'\nos.putenv('LEAK2', '1')\nos.environ.pop('PATH')\nraise SystemExit(1)\n")
    shown = subprocess.run(["/usr/bin/env"], capture_output=True, text=True, check=True).stdout
    assert "LEAK" not in shown
    assert "\nPATH=" in "\n" + shown
    assert "LEAK" not in os.environ


def test_programs_see_the_ranks_environment(script: Scripts) -> None:
    """subprocess, os.system and os.popen pass on RANK and what the rank set."""
    ran = script(
        HEAD
        + """
import subprocess
os.environ["MINE"] = f"m{rank}"
dist.barrier()
print(subprocess.run("echo $MINE $RANK", shell=True, capture_output=True, text=True).stdout.strip())
with os.popen("echo $MINE $RANK") as pipe:
    print(pipe.read().strip(), os.system("test $RANK = " + str(rank)))
"""
    )
    for rank in range(2):
        assert ran.of(rank) == [f"m{rank} {rank}", f"m{rank} {rank} 0"]


def test_working_directory_per_rank(script: Scripts) -> None:
    """os.chdir in one rank moves only that rank."""
    before = os.getcwd()
    ran = script(
        HEAD
        + """
here = os.getcwd()
if rank == 1:
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
dist.barrier()
print(os.getcwd() == here, os.path.exists("program.py"))
"""
    )
    assert ran.of(0) == ["True False"]
    assert ran.of(1) == ["False True"]
    assert os.getcwd() == before


def test_replacing_the_process_is_refused() -> None:
    """os.execv would end all ranks: refused by name."""

    def body() -> None:
        os.execv("/bin/true", ["true"])

    with pytest.raises(distsim.RankFailure, match=r"os\.execv is not simulated"):
        ranks(body)


def test_torchrun_variables_of_two_nodes() -> None:
    """What torchrun would set on two nodes with two processes each."""

    def body() -> tuple[str, ...]:
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
        return tuple(os.environ[name] for name in names)

    found = distsim.simulate(body, on="ethernet-cpu:2", nproc_per_node=2).results
    assert found == [(str(r), str(r % 2), str(r // 2), "4", "2", "2") for r in range(4)]
